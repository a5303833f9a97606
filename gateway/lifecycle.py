"""The story of one request, top to bottom: parse, admit, hash, decide, dispatch, follow, commit, stream, settle.

Each step is one call into the file of that name. Whatever happens, and wherever this is cancelled, an attempt's
booking is released once and its legs are let go of once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from opentelemetry.trace import Span

from engines.base import Attempt
from engines.errors import UpstreamError
from engines.pair import PairRun
from engines.sglang_wire import MAX_DEPTH, new_rid, poison, too_deep
from engines.tasks import spawn
from engines.types import EngineId, FailureKind, Health, Leg, Outcome, Stage
from failover import retry
from failover.retry import Fault, Verdict
from gateway import openai_api
from gateway.attempt import AttemptFailed, follow
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.errors import GatewayError, bad_request, no_pair, upstream_failed
from gateway.explain import AttemptRecord, Record
from gateway.observability import log_request
from gateway.openai_api import Api, ParsedRequest, Unit
from gateway.prompt import request_view
from gateway.reply import Client, MergedSink, Merger, Reply, SingleSink, UnitSink
from gateway.settle import learn
from gateway.tracing import leg_headers


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came in."""

    api: Api
    body: bytes
    headers: Mapping[str, str]
    arrival_s: float


@dataclass(slots=True)
class _Story:
    """What the steps of one request share."""

    request: ParsedRequest
    model: str
    reply: Reply
    record: Record
    span: Span
    arrival_s: float
    deadline_s: float


async def handle(gw: Gateway, arrival: Arrival, client: Client) -> None:
    """Answer one generation request. Raises GatewayError while nothing has been written; cancel when the client goes.

    A committed stream that cannot go on ends with one error event.
    """
    public_id = new_rid(gw.rng)
    span = gw.tracing.begin(arrival.api, arrival.headers)
    record = Record(public_id, arrival.api, "", gw.config.routing.policy, arrival.arrival_s)
    try:
        request = openai_api.parse(arrival.api, arrival.body)
        units = _admit(gw, request)
        reply = Reply(client, request, public_id, int(gw.wall_clock_s()))
        record.model = request.model or next(iter(gw.fleet.models()), "")
        record.aliases = (request.client_rid,) if request.client_rid else ()
        gw.explain.add(record)
        deadline_s = arrival.arrival_s + gw.config.deadlines.request_s
        story = _Story(request, record.model, reply, record, span, arrival.arrival_s, deadline_s)
        try:
            await _answer(gw, story, units)
            record.status = 200
        except GatewayError as error:
            record.error = error.message
            if not reply.committed:
                raise
            record.status = 200
            await reply.fail(error)
    except GatewayError as error:
        record.status, record.error = error.status, error.message
        error.headers.update(_identity(record))
        raise
    except (asyncio.CancelledError, ConnectionError):
        record.status, record.error = 499, "the client has gone"
        raise
    finally:
        _close(gw, record, span)


async def relay(gw: Gateway, path: str, body: bytes) -> tuple[int, bytes]:
    """A call that any one server answers (tokenize, detokenize): status and body of the first that is up."""
    ready = [view for view in gw.fleet.views() if view.health is Health.READY]
    for view in ready:
        try:
            return await gw.engine.post(view, path, body, gw.config.deadlines.first_output_s)
        except UpstreamError as error:
            if not error.definite:
                text = f"{view.engine_id}: {error.message}"
                raise upstream_failed(text, code="engine_failed", stage=Stage.DISPATCHED, definite=False) from error
    raise no_pair(f"no server is up to answer {path}")


def _admit(gw: Gateway, request: ParsedRequest) -> tuple[Unit, ...]:
    """The engine requests of this request; refuses what no engine serves or survives."""
    if too_deep(request.body):
        raise bad_request(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    if models := gw.fleet.models():
        openai_api.served(request.model, models)
    units = openai_api.expand(request)
    for unit in units if request.batched else units[:1]:
        if (found := poison(unit.body)) is not None:
            raise bad_request(f"{found[0]}: {found[1]}", param=found[0], code="unsupported_field")
        if gw.poison.is_refused(_fingerprint(unit), asyncio.get_running_loop().time()):
            raise upstream_failed(
                "two servers ended while they worked on this request; it is refused for some minutes",
                code="poison_suspected",
                stage=Stage.ADMISSION,
                definite=True,
                retry=False,
            )
    return units


async def _answer(gw: Gateway, story: _Story, units: Sequence[Unit]) -> None:
    if len(units) == 1:
        await _run_unit(gw, story, units[0], SingleSink(story.reply))
        if story.request.stream:
            await story.reply.end()
        return
    merger = Merger(story.reply, len(units))
    leads: dict[int, asyncio.Future[EngineId | None]] = {}
    tasks = []
    for unit in units:
        lead = leads.get(unit.prompt_index)
        if lead is None:
            leads[unit.prompt_index] = asyncio.get_running_loop().create_future()
        sink = MergedSink(merger, unit.choice_index)
        work = _run_sample(gw, story, unit, sink, leads[unit.prompt_index], leads=lead is None)
        tasks.append(spawn(_expected_error(work), f"choice {unit.choice_index} of {story.record.request_id}"))
    await _all_or_first_error(tasks)
    await merger.finish()


async def _run_sample(
    gw: Gateway, story: _Story, unit: Unit, sink: MergedSink, lead: asyncio.Future[EngineId | None], *, leads: bool
) -> None:
    """One of several: the first sample of a prompt decides on which prefill the others find its prefix."""
    if not leads:
        await _run_unit(gw, story, unit, sink, pinned=await asyncio.shield(lead))
        return
    try:
        await _run_unit(gw, story, unit, sink, lead=lead)
    finally:
        if not lead.done():
            lead.set_result(None)


async def _expected_error(work: Coroutine[Any, Any, None]) -> Exception | None:
    """How one of several went wrong; that is for its request to report, and no crash of a task."""
    try:
        await work
    except (GatewayError, ConnectionError) as error:
        return error
    return None


async def _all_or_first_error(tasks: Sequence[asyncio.Task[Exception | None]]) -> None:
    """Wait for all; the first error (or our own cancellation) cancels the rest and waits for their end."""
    try:
        for ended in asyncio.as_completed(tasks):
            if (error := await ended) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_unit(
    gw: Gateway,
    story: _Story,
    unit: Unit,
    sink: UnitSink,
    *,
    pinned: EngineId | None = None,
    lead: asyncio.Future[EngineId | None] | None = None,
) -> None:
    """Bring one engine request to its whole answer, over as many attempts as it takes and may have."""
    view = request_view(gw, story.request, unit, story.model, story.arrival_s, story.deadline_s)
    tries = _Tries()
    while True:
        view = replace(view, deadline_s=_queue_deadline_s(gw, story))
        try:
            decision = await gw.decider.submit(view, pinned)
        except GatewayError as error:
            if tries.last is None or error.code != "no_pair_available":
                raise
            last, judged = tries.last  # it says more than what is left
            raise _final_error(gw, story, unit, last, retry.last_word(judged.fault)) from error
        if lead is not None and not lead.done():
            lead.set_result(decision.prefill.engine_id)
        failed = await _attempt(gw, story, unit, sink, decision)
        if failed is None:
            return
        verdict = await _judge(gw, story, sink, decision, failed, tries)
        story.record.judged(decision, verdict.verdict.value)
        if verdict.verdict is not Verdict.RETRY:
            raise _final_error(gw, story, unit, failed, verdict)
        tries.last = (failed, verdict)
        view = view.avoiding(verdict.excluded_engine, verdict.excluded_pair)
        sink.restart()
        await asyncio.sleep(verdict.delay_s)


@dataclass(slots=True)
class _Tries:
    """What one engine request has been through."""

    attempts: int = 0
    deaths: int = 0
    own_faults: int = 0
    last: tuple[AttemptFailed, retry.Decision] | None = None


async def _judge(
    gw: Gateway,
    story: _Story,
    sink: UnitSink,
    decision: Decision,
    failed: AttemptFailed,
    tries: _Tries,
) -> retry.Decision:
    """Whether the request is tried again after this failure."""
    tries.attempts += 1
    tries.deaths += await _died(gw, failed)
    tries.own_faults += retry.classify(failed.outcome) is Fault.OURS
    history = retry.History(
        tries.attempts,
        gw.config.retry.max_attempts,
        sink.sent,
        tries.deaths,
        tries.own_faults,
        story.deadline_s - asyncio.get_running_loop().time(),
    )
    return retry.decide(failed.outcome, decision.pair, history)


def _queue_deadline_s(gw: Gateway, story: _Story) -> float:
    """Each attempt may wait in the queue for the queue's own time, within the time of the request."""
    return min(story.deadline_s, asyncio.get_running_loop().time() + gw.config.queue.timeout_s)


async def _attempt(gw: Gateway, story: _Story, unit: Unit, sink: UnitSink, decision: Decision) -> AttemptFailed | None:
    """Dispatch both legs on the booked pair and see them through; what went wrong, or None for a whole answer."""
    clock = asyncio.get_running_loop().time
    whole = False
    run: PairRun | None = None
    try:
        attempt = _make_attempt(gw, story, unit, decision)
        note = AttemptRecord(decision, attempt.room, unit.choice_index, clock() - story.arrival_s)
        story.record.add(note)
        story.reply.headers.update(_identity(story.record))
        gw.metrics.decided(decision.waited_s)
        observer = _Observer(gw, decision, note, story)
        run = PairRun(attempt, gw.strategy, gw.upstream, gw.monitor.leg_failed)
        run.start()
        try:
            await follow(run, sink, observer, gw.config.deadlines, story.deadline_s)
        except AttemptFailed as failed:
            gw.metrics.attempt("failed")
            return failed
        whole = True
        gw.metrics.attempt("whole")
        learn(gw, story.request, unit, decision, note, sink, clock() - story.arrival_s)
        return None
    finally:
        if run is not None:
            gw.releaser.let_go(run, whole=whole)
            note.ended_s = clock() - story.arrival_s
        gw.decider.finished(decision)


def _make_attempt(gw: Gateway, story: _Story, unit: Unit, decision: Decision) -> Attempt:
    facts = decision.prefill.facts
    room = gw.rooms.next_room(facts.dp_size if facts is not None else 1)
    return Attempt(
        decision.rid,
        room,
        decision.prefill,
        decision.decode,
        story.request.api.value,
        story.request.stream,
        unit.body,
        leg_headers(story.span),
    )


class _Observer:
    """Tells the decider, the metrics and the record how an attempt goes on."""

    def __init__(self, gw: Gateway, decision: Decision, note: AttemptRecord, story: _Story) -> None:
        self._gw, self._decision, self._note, self._story = gw, decision, note, story

    def handed_over(self, prefill_answer: bytes | None) -> None:
        if self._note.handed_over_s is None:
            self._note.handed_over_s = asyncio.get_running_loop().time() - self._story.arrival_s
        cached = None if prefill_answer is None else self._gw.strategy.cached_tokens(prefill_answer)
        self._gw.decider.handed_over(self._decision, cached)

    def first_output(self) -> None:
        self._note.first_output_s = asyncio.get_running_loop().time() - self._story.arrival_s
        self._gw.metrics.first_output(self._note.first_output_s)

    def progress(self, leg: Leg, now_s: float) -> None:
        self._gw.monitor.progress(self._decision.pair[leg is Leg.DECODE], now_s)

    def noted(self, outcome: Outcome) -> None:
        self._note.outcomes.append(outcome)
        self._gw.metrics.leg_failed(outcome)
        silent = outcome.kind is FailureKind.TIMEOUT and asyncio.get_running_loop().time() < self._story.deadline_s
        if silent:  # what else fails on a leg, the run tells the monitor itself
            self._gw.monitor.leg_failed(outcome)


async def _died(gw: Gateway, failed: AttemptFailed) -> bool:
    """Whether a server ended under this attempt: its connection broke, and it is gone or another process now."""
    broken = [outcome for outcome in failed.outcomes if retry.may_be_a_death(outcome)]
    for outcome in broken:
        if not await gw.monitor.probe_now(outcome.engine_id):
            return True
    return False


def _final_error(
    gw: Gateway, story: _Story, unit: Unit, failed: AttemptFailed, verdict: retry.Decision
) -> GatewayError:
    """The answer after the last attempt."""
    outcome = failed.outcome
    if verdict.fault is Fault.OURS:
        gw.metrics.own_fault()
    match verdict.verdict:
        case Verdict.TO_CLIENT:
            error = openai_api.engine_error_to_openai(outcome.status or 400, outcome.message.encode())
            error.stage = outcome.stage
            return error
        case Verdict.POISON_SUSPECTED:
            gw.poison.refuse(_fingerprint(unit), asyncio.get_running_loop().time())
            code, status, text = "poison_suspected", 502, "two servers ended while they worked on this request"
        case Verdict.OUT_OF_TIME:
            code, status, text = "deadline_exceeded", 504, f"out of time: {outcome.message}"
        case _ if verdict.fault is Fault.OPERATOR:
            code, status, text = "engine_misconfigured", 502, f"the {outcome.leg} server refused the gateway's call"
        case _:
            code, status = "engine_failed", 502
            text = f"the {outcome.leg} server failed ({outcome.kind}, {outcome.stage}): {outcome.message}"
    return upstream_failed(
        text,
        code=code,
        stage=outcome.stage,
        definite=outcome.definite,
        status=status,
        retry=verdict.verdict is not Verdict.POISON_SUSPECTED,
    )


def _fingerprint(unit: Unit) -> bytes:
    return blake2b(unit.prompt_bytes, digest_size=16).digest()


def _identity(record: Record) -> dict[str, str]:
    """The headers that tell a client (and its operator) where its answer came from."""
    headers = {"x-pdgate-request-id": record.request_id, "x-pdgate-attempts": str(record.total_attempts)}
    if record.attempts:
        last = record.attempts[-1].decision
        headers["x-pdgate-prefill"] = last.prefill.engine_id
        headers["x-pdgate-decode"] = last.decode.engine_id
    return headers


def _close(gw: Gateway, record: Record, span: Span) -> None:
    seconds = asyncio.get_running_loop().time() - record.arrival_s
    status = record.status or 500
    pair = record.attempts[-1].decision.pair if record.attempts else None
    gw.metrics.request(record.api, status)
    log_request(record.request_id, record.api, status, seconds, record.total_attempts, pair, record.error)
    span.set_attributes({"http.response.status_code": status, "pdgate.attempts": record.total_attempts})
    if pair is not None:
        span.set_attributes({"pdgate.prefill": pair[0], "pdgate.decode": pair[1]})
    span.end()
