"""The story of one request, top to bottom: parse, admit, hash, decide, dispatch, follow, commit, stream, settle.

Where an attempt fails: judge, then begin anew while its client has nothing, else go on where the stream broke.

Each step is one call into the file of that name. Whatever happens, and wherever this is cancelled, an attempt's
booking is released once and its legs are let go of once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.base import Attempt
from engines.pair import PairRun
from engines.sglang_wire import new_rid
from engines.tasks import spawn
from engines.types import EngineId
from failover import retry
from failover.deadlines import RULES, Deadline
from failover.retry import Verdict
from failover.turns import Turn
from gateway import openai_api
from gateway.admission import admit, fingerprint
from gateway.attempt import AttemptFailed, follow
from gateway.comeback import first_look, submit_again
from gateway.context import Gateway
from gateway.continuation import broken_off, closed, go_on
from gateway.course import Course, StreamOver
from gateway.decider import Decision
from gateway.errors import GatewayError
from gateway.explain import AttemptRecord, Record
from gateway.openai_api import Api, Unit
from gateway.patience import MeasuredPatience, Patience
from gateway.prompt import Prompt, identify
from gateway.reply import Client, MergedSink, Merger, Reply, SingleSink, UnitSink
from gateway.routes import wanted_modes
from gateway.settle import learn
from gateway.story import AttemptObserver, Story, close_story, identity_headers
from gateway.suspects import Trial
from gateway.tracing import leg_headers
from gateway.verdict import Tries, final_error, judge
from routing.types import RequestView

_AT_ONCE = 32
"""Engine requests of one batch that are begun before others get their turn on the loop."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came in."""

    api: Api
    body: bytes
    headers: Mapping[str, str]
    arrival_s: float


async def handle(gw: Gateway, arrival: Arrival, client: Client) -> None:
    """Answer one generation request. Raises GatewayError while nothing has been written; cancel when the client goes.

    A committed stream that cannot go on ends with one error event.
    """
    public_id = new_rid(gw.rng)
    span = gw.tracing.begin(arrival.api, arrival.headers)
    record = Record(public_id, arrival.api, "", gw.config.routing.shown, arrival.arrival_s)
    try:
        request = openai_api.parse(arrival.api, arrival.body)
        if gw.replicas is not None:
            await gw.replicas.sure()
        await first_look(gw)
        units = admit(gw, request)
        reply = Reply(client, request, public_id, int(gw.wall_clock_s()))
        record.model = request.model or next(iter(gw.fleet.models()), "")
        record.aliases = (request.client_rid,) if request.client_rid else ()
        gw.explain.add(record)
        deadline_s = arrival.arrival_s + gw.config.deadlines.request_s
        modes = wanted_modes(gw, arrival.headers)
        story = Story(request, record.model, reply, record, span, arrival.arrival_s, deadline_s, modes)
        try:
            await gw.live.run((public_id, *record.aliases), _answer(gw, story, units))
            record.status = 200
        except GatewayError as error:
            record.error = error.message
            if not reply.committed:
                raise
            record.status = 200
            await reply.fail(error)
    except GatewayError as error:
        record.status, record.error = error.status, error.message
        error.headers.update(identity_headers(record))
        raise
    except (asyncio.CancelledError, ConnectionError):
        record.status, record.error = 499, "the client has gone"
        raise
    finally:
        close_story(gw, record, span)


async def _answer(gw: Gateway, story: Story, units: Sequence[Unit]) -> None:
    prompts: dict[int, Prompt] = {}
    if len(units) == 1:
        await _run_unit(gw, story, units[0], SingleSink(story.reply), prompts)
        if story.request.stream:
            await story.reply.end()
        return
    merger = Merger(story.reply, len(units))
    leads: dict[int, asyncio.Future[EngineId | None]] = {}
    tasks: list[asyncio.Task[Exception | None]] = []
    try:
        for unit in units:
            lead = leads.get(unit.prompt_index)
            if lead is None:
                leads[unit.prompt_index] = asyncio.get_running_loop().create_future()
            sink = MergedSink(merger, unit.choice_index)
            work = _run_sample(gw, story, unit, sink, prompts, leads[unit.prompt_index], leads=lead is None)
            tasks.append(spawn(_expected_error(work), f"choice {unit.choice_index} of {story.record.request_id}"))
            if len(tasks) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        await _first_error(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await merger.finish()


async def _run_sample(
    gw: Gateway,
    story: Story,
    unit: Unit,
    sink: MergedSink,
    prompts: dict[int, Prompt],
    lead: asyncio.Future[EngineId | None],
    *,
    leads: bool,
) -> None:
    """One of several: the first sample of a prompt decides on which prefill the others find its prefix."""
    if not leads:
        await _run_unit(gw, story, unit, sink, prompts, pinned=await asyncio.shield(lead))
        return
    try:
        await _run_unit(gw, story, unit, sink, prompts, lead=lead)
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


async def _first_error(tasks: Sequence[asyncio.Task[Exception | None]]) -> None:
    """Wait for all; raises the first error at once."""
    for ended in asyncio.as_completed(tasks):
        if (error := await ended) is not None:
            raise error


async def _run_unit(
    gw: Gateway,
    story: Story,
    unit: Unit,
    sink: UnitSink,
    prompts: dict[int, Prompt],
    *,
    pinned: EngineId | None = None,
    lead: asyncio.Future[EngineId | None] | None = None,
) -> None:
    """Bring one engine request to its whole answer, over as many attempts as it takes and may have.

    `prompts` are those of this request that are known already: the first sample of each tells the others.
    """
    if (prompt := prompts.get(unit.prompt_index)) is None:
        prompt = prompts[unit.prompt_index] = await identify(gw, story.request.api, unit, story.model)
    course = Course(gw, story, unit, sink, prompt)
    view, tries, content = course.view(), Tries(), fingerprint(unit)
    while True:
        async with gw.contents.trial(content, story.deadline_s) as trial:
            async with AsyncExitStack() as turns:
                turn = await _turn(gw, story, unit, view, tries, turns)
                decision = await _submit(gw, story, course, view, tries, pinned)
                if not trial.begins():
                    gw.decider.finished(decision)
                    continue
                if lead is not None and not lead.done():
                    lead.set_result(decision.prefill.engine_id)
                if tries.last is None:
                    gw.retries.fresh(decision.decode.engine_id)
                failed = await _attempt(gw, story, course, decision, turn, trial)
            if failed is None or await closed(gw, story, course, decision):
                return
            progressed = course.progressed()
            verdict = await judge(
                gw,
                tries,
                decision,
                failed,
                trial,
                committed=course.sink.sent,
                progressed=progressed,
                deadline_s=story.deadline_s,
            )
        story.record.judged(decision, verdict.verdict.value)
        match verdict.verdict:
            case Verdict.RETRY:
                course.restart()
            case Verdict.CONTINUE:
                await go_on(gw, story, course, failed)
                view = course.view() if progressed else view
            case Verdict.GIVE_UP if course.sink.sent:
                raise broken_off(gw, course, failed, "it has had all its attempts")
            case _:
                raise final_error(gw, unit, failed, verdict, begun=course.sink.sent)
        tries.last = (failed, verdict)
        view = view.avoiding(verdict.excluded_engine, verdict.excluded_pair)
        await asyncio.sleep(verdict.delay_s)


async def _turn(
    gw: Gateway, story: Story, unit: Unit, view: RequestView, tries: Tries, turns: AsyncExitStack
) -> Turn | None:
    """A further attempt waits until its prompt may be computed again, and has that until hand-over; a first goes on."""
    if tries.last is None:
        return None
    tokens = gw.retries.tokens_to_compute(view, gw.decider.owners.match(view))
    try:
        return await turns.enter_async_context(gw.retries.turn(tokens, _queue_deadline_s(gw, story)))
    except TimeoutError as error:
        failed, verdict = tries.last
        late = replace(verdict, verdict=Verdict.OUT_OF_TIME)
        raise final_error(gw, unit, failed, late, begun=view.goes_on) from error


async def _submit(
    gw: Gateway, story: Story, course: Course, view: RequestView, tries: Tries, pinned: EngineId | None
) -> Decision:
    """A pair for the next attempt; where there is none for it, what the last one failed by says more than that."""
    try:
        submit = gw.decider.submit if tries.last is None else partial(submit_again, gw)
        return await submit(replace(view, deadline_s=_queue_deadline_s(gw, story)), pinned)
    except GatewayError as error:
        if error.code == RULES[Deadline.QUEUE].code:
            gw.metrics.deadline_passed(Deadline.QUEUE)
        if tries.last is None:
            raise
        failed, verdict = tries.last
        if course.sink.sent:
            late = error.code == RULES[Deadline.QUEUE].code
            why = "no pair had room for the rest in time" if late else error.message
            raise broken_off(gw, course, failed, why) from error
        if error.code != "no_pair_available":
            raise
        raise final_error(gw, course.unit, failed, retry.last_word(verdict.fault)) from error


def _queue_deadline_s(gw: Gateway, story: Story) -> float:
    """Each attempt may wait in the queue for the queue's own time, within the time of the request."""
    return min(story.deadline_s, asyncio.get_running_loop().time() + gw.config.queue.timeout_s)


async def _attempt(
    gw: Gateway, story: Story, course: Course, decision: Decision, turn: Turn | None, trial: Trial
) -> AttemptFailed | None:
    """Dispatch both legs on the booked pair and see them through; what went wrong, or None for a whole answer."""
    clock = asyncio.get_running_loop().time
    whole = False
    run: PairRun | None = None
    try:
        attempt = _make_attempt(gw, story, course, decision)
        since_s = clock() - story.arrival_s
        prompt = course.prompt
        note = AttemptRecord(decision, attempt.room, course.unit.choice_index, since_s, prompt.kind, prompt.why_text)
        note.course = course.shown()
        story.record.add(note)
        story.reply.headers.update(identity_headers(story.record))
        gw.metrics.decided(decision.waited_s)
        observer = AttemptObserver(gw, decision, note, story, turn, trial)
        run = PairRun(attempt, gw.strategy, gw.upstream, partial(gw.monitor.leg_failed, pair=decision.pair))
        run.start()
        try:
            patience = _patience(gw, story, decision, run)
            await follow(run, course, observer, gw.config.deadlines, story.deadline_s, patience)
            whole = True
        except StreamOver:  # its engine is told to stop
            pass
        except AttemptFailed as failed:
            gw.metrics.attempt("failed")
            gw.decider.pairs.failed(decision, failed)
            return failed
        gw.metrics.attempt("whole")
        learn(gw, story.request, course.unit, decision, note, course.sink, clock() - story.arrival_s)
        return None
    finally:
        if run is not None:
            gw.releaser.let_go(run, whole=whole)
            note.ended_s = clock() - story.arrival_s
        gw.decider.finished(decision)


def _patience(gw: Gateway, story: Story, decision: Decision, run: PairRun) -> Patience | None:
    """How long this attempt may be silent; as configured where the prefill's answer grows with the prompt."""
    if run.needs_prefill_answer:
        return None
    return MeasuredPatience(
        gw.config.deadlines,
        gw.decider.learned,
        gw.monitor,
        gw.decider.bookings,
        decision.booking,
        decision.choice.best.terms,
        buffers=bool(story.request.body.get("tools")),
    )


def _make_attempt(gw: Gateway, story: Story, course: Course, decision: Decision) -> Attempt:
    facts, booking = decision.prefill.facts, decision.booking
    room = gw.rooms.next_room(facts.dp_size if facts is not None else 1, booking.prefill_rank)
    return Attempt(
        decision.rid,
        room,
        decision.prefill,
        decision.decode,
        course.path,
        story.request.stream,
        course.body(decision),
        leg_headers(story.span),
        booking.prefill_rank,
        booking.decode_rank,
    )
