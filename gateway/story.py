"""What the steps of one request share, and who is told how it goes on: decider, monitor, metrics, record, log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Span

from engines.types import EngineId, FailureKind, Leg, Outcome
from failover.recovery import Mode
from failover.retry import may_be_a_death
from failover.turns import Turn
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.explain import AttemptRecord, Record
from gateway.observability import log_request
from gateway.openai_api import ParsedRequest
from gateway.reply import Reply
from gateway.suspects import Trial, victim


@dataclass(slots=True)
class Story:
    """One request under way. Times are of the loop's clock. `on_failure`: how its stream may go on, the best first."""

    request: ParsedRequest
    model: str
    reply: Reply
    record: Record
    span: Span
    arrival_s: float
    deadline_s: float
    on_failure: tuple[Mode, ...]


class AttemptObserver:
    """Tells the decider, the metrics and the record how one attempt goes on."""

    def __init__(
        self,
        gw: Gateway,
        decision: Decision,
        note: AttemptRecord,
        story: Story,
        turn: Turn | None = None,
        trial: Trial | None = None,
    ) -> None:
        self._gw, self._decision, self._note, self._story = gw, decision, note, story
        self._turn, self._trial = turn, trial

    def handed_over(self, prefill_answer: bytes | None) -> None:
        if self._turn is not None:
            self._turn.over()
        if self._note.handed_over_s is None:
            self._note.handed_over_s = asyncio.get_running_loop().time() - self._story.arrival_s
        cached = None if prefill_answer is None else self._gw.strategy.cached_tokens(prefill_answer)
        self._went_well(self._decision.prefill.engine_id)
        self._gw.decider.handed_over(self._decision, cached)

    def first_output(self) -> None:
        if self._trial is not None:
            self._trial.harmless()
        self._note.first_output_s = asyncio.get_running_loop().time() - self._story.arrival_s
        self._gw.metrics.first_output(self._note.first_output_s)

    def progress(self, leg: Leg, now_s: float) -> None:
        engine_id = self._decision.pair[leg is Leg.DECODE]
        self._gw.monitor.progress(engine_id, now_s)
        self._went_well(engine_id)

    def _went_well(self, engine_id: EngineId) -> None:
        """Its part of the attempt, or the beginning of it, is good: a server on probation has proved itself."""
        if self._gw.decider.trials.passed(engine_id, self._decision.rid):
            self._gw.monitor.proved(engine_id)

    def noted(self, outcome: Outcome) -> None:
        self._note.note(outcome)
        if self._trial is not None and may_be_a_death(outcome):
            self._trial.broke(victim(self._decision, outcome))
        silent = outcome.kind is FailureKind.TIMEOUT and not outcome.definite
        if silent and asyncio.get_running_loop().time() >= self._story.deadline_s:
            return  # the request had no more time: no server is at fault
        self._gw.metrics.leg_failed(outcome)
        if silent:  # what else fails on a leg, the run tells the monitor itself
            self._gw.monitor.leg_failed(outcome, self._decision.pair)


def identity_headers(record: Record) -> dict[str, str]:
    """The headers that tell a client (and its operator) where its answer came from."""
    headers = {"x-pdgate-request-id": record.request_id, "x-pdgate-attempts": str(record.total_attempts)}
    if record.attempts:
        last = record.attempts[-1].decision
        headers["x-pdgate-prefill"] = last.prefill.engine_id
        headers["x-pdgate-decode"] = last.decode.engine_id
    return headers


def close_story(gw: Gateway, record: Record, span: Span) -> None:
    """The request is over: count it, log its line, end its span; of its record keep only what is shown."""
    record.close()
    seconds = asyncio.get_running_loop().time() - record.arrival_s
    status = record.status or 500
    pair = record.attempts[-1].decision.pair if record.attempts else None
    gw.metrics.request(record.api, status)
    log_request(record.request_id, record.api, status, seconds, record.total_attempts, pair, record.error)
    span.set_attributes({"http.response.status_code": status, "pdgate.attempts": record.total_attempts})
    if pair is not None:
        span.set_attributes({"pdgate.prefill": pair[0], "pdgate.decode": pair[1]})
    span.end()
