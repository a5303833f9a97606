"""One attempt, from dispatch to its end: both legs' events go through the attempt table, outputs go to the sink.

A shell around `failover/phase.py`: it keeps the timers and does what the table says.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from engines.pair import Frames, LegAnswer, LegEvent, LegFailed, LegOutput, PairRun
from engines.sse_frames import EventKind
from engines.types import FailureKind, Leg, Outcome, Stage
from failover import phase as table
from failover.hold import FIRST_HOLD_S
from failover.machine import breaks
from failover.phase import Action, Event, Phase
from failover.retry import blamed
from gateway.config import DeadlineConfig

CLIENT_PATIENCE_S = 60.0
"""How long one write to a client may wait for it: its unread answer holds KV on a decode."""
_KEPT_LIMIT_BYTES = 64 * 1024 * 1024
"""Output of a decode that may wait for what its prefill has to say; more than this means that the prefill is silent."""


class Sink(Protocol):
    """Where the outputs of one attempt go."""

    async def frames(self, rid: str, frames: Frames) -> None:
        """Events of a stream, in order."""

    async def answer(self, rid: str, body: bytes) -> None:
        """A whole answer."""


class Observer(Protocol):
    """Who is told how an attempt goes on."""

    def handed_over(self, prefill_answer: bytes | None) -> None:
        """The prefill's part is over and well; its answer is None where the decode was first."""

    def first_output(self) -> None:
        """The first output goes to the sink now."""

    def progress(self, leg: Leg, now_s: float) -> None:
        """Something good came from a leg."""

    def prefill_lagged(self, lag_s: float) -> None:
        """The prefill of a stream answered so long after its decode's first output; 0 where it was first."""

    def noted(self, outcome: Outcome) -> None:
        """A leg failed; `outcome` has its stage."""


class AttemptFailed(Exception):
    """The attempt is over and its answer is not whole. `outcome` is of the leg at fault."""

    def __init__(self, outcome: Outcome, outcomes: tuple[Outcome, ...]) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.outcomes = outcomes


_STAGES = {
    Phase.DISPATCHED: Stage.DISPATCHED,
    Phase.PREFILL_LOST: Stage.DISPATCHED,
    Phase.HELD: Stage.DISPATCHED,
    Phase.HELD_WHOLE: Stage.DISPATCHED,
    Phase.HANDED_OVER: Stage.HANDED_OVER,
    Phase.STREAMING: Stage.STREAMING,
    Phase.DONE: Stage.DONE,
    Phase.FAILED: Stage.DONE,
}
_WAITING_FOR_PREFILL = (Phase.DISPATCHED, Phase.HELD, Phase.HELD_WHOLE)


@dataclass(slots=True)
class _Progress:
    """Where the attempt stands, and when something must have happened."""

    phase: Phase
    silent_since_s: float
    hold_s: float
    first_output_s: float | None = None
    timer_s: float | None = None
    timer_event: Event = Event.HOLD_PASSED
    kept: list[tuple[EventKind, bytes]] = field(default_factory=list)
    kept_bytes: int = 0
    whole: bytes = b""
    outcomes: list[Outcome] = field(default_factory=list)


async def follow(
    run: PairRun,
    sink: Sink,
    observer: Observer,
    limits: DeadlineConfig,
    deadline_s: float,
    hold_s: float = FIRST_HOLD_S,
) -> None:
    """See an attempt through; returns when its whole answer is in the sink.

    `hold_s`: how long the first output may wait for the prefill's answer.
    Raises AttemptFailed. Leaves open legs open: the caller lets go of them, also when this is cancelled.
    """
    clock = asyncio.get_running_loop().time
    progress = _Progress(Phase.DISPATCHED, clock(), hold_s)
    while progress.phase is not Phase.DONE:
        due_s, due_event = _next_due(progress, run.attempt.stream, limits, deadline_s)
        try:
            async with asyncio.timeout_at(due_s):
                happened: LegEvent | None = await run.next_event()
        except TimeoutError:
            happened = None
        event = due_event if happened is None else _event_of(happened, progress)
        before = progress.phase
        progress.phase, action = table.step(before, event, needs_prefill=run.needs_prefill_answer)
        await _act(action, before, happened, run, sink, observer, progress, clock())
        if progress.phase is Phase.FAILED:
            raise _failed(action, before, run, observer, progress)


def _next_due(progress: _Progress, stream: bool, limits: DeadlineConfig, deadline_s: float) -> tuple[float, Event]:
    """The next moment at which silence means something, and what."""
    if progress.phase is Phase.STREAMING:
        due_s = progress.silent_since_s + limits.stall_s
    elif progress.phase is Phase.HANDED_OVER and not stream:
        due_s = deadline_s  # a whole answer has no first output to wait for
    else:
        due_s = progress.silent_since_s + limits.first_output_s
    due_s = min(due_s, deadline_s)
    if progress.timer_s is not None and progress.timer_s < due_s:
        return progress.timer_s, progress.timer_event
    return due_s, Event.DEADLINE_PASSED


def _event_of(happened: LegEvent, progress: _Progress) -> Event:
    match happened:
        case LegOutput():
            return Event.DECODE_OUTPUT if progress.kept_bytes <= _KEPT_LIMIT_BYTES else Event.DEADLINE_PASSED
        case LegAnswer(leg=Leg.PREFILL):
            return Event.PREFILL_ANSWERED
        case LegAnswer():
            progress.whole = happened.body
            return Event.DECODE_ENDED
        case LegFailed(outcome=outcome):
            if outcome.leg is Leg.DECODE:
                return Event.DECODE_FAILED
            return Event.PREFILL_BROKE if breaks(outcome) else Event.PREFILL_FAILED


async def _act(
    action: Action,
    before: Phase,
    happened: LegEvent | None,
    run: PairRun,
    sink: Sink,
    observer: Observer,
    progress: _Progress,
    now_s: float,
) -> None:
    if isinstance(happened, LegFailed):
        outcome = replace(happened.outcome, stage=_STAGES[before])
        progress.outcomes.append(outcome)
        observer.noted(outcome)
    if isinstance(happened, LegAnswer):
        observer.progress(happened.leg, now_s)
        if happened.leg is Leg.PREFILL and run.attempt.stream:
            observer.prefill_lagged(0.0 if progress.first_output_s is None else now_s - progress.first_output_s)
    if isinstance(happened, LegOutput):
        if progress.first_output_s is None:
            progress.first_output_s = now_s
        observer.progress(Leg.DECODE, now_s)
        progress.kept.extend(happened.frames)
        progress.kept_bytes += sum(len(frame) for _, frame in happened.frames)
    match action:
        case Action.HOLD:
            progress.timer_s, progress.timer_event = now_s + progress.hold_s, Event.HOLD_PASSED
        case Action.WAIT_GRACE:
            progress.timer_s, progress.timer_event = now_s + table.LOSS_GRACE_S, Event.GRACE_PASSED
        case Action.HAND_OVER:
            if before is not Phase.STREAMING:  # a late answer of the prefill says nothing of a silent decode
                progress.silent_since_s = now_s
            observer.handed_over(_prefill_answer(happened))
        case Action.RELAY | Action.FINISH:
            progress.timer_s = None
            if before is not Phase.STREAMING:
                observer.handed_over(_prefill_answer(happened))
                observer.first_output()
            await _pass_on(run, sink, progress)
            progress.silent_since_s = asyncio.get_running_loop().time()
        case _:
            pass


def _prefill_answer(happened: LegEvent | None) -> bytes | None:
    return happened.body if isinstance(happened, LegAnswer) and happened.leg is Leg.PREFILL else None


async def _pass_on(run: PairRun, sink: Sink, progress: _Progress) -> None:
    """Give the client what there is; one that takes nothing for CLIENT_PATIENCE_S has gone."""
    try:
        async with asyncio.timeout(CLIENT_PATIENCE_S):
            if progress.kept:
                frames, progress.kept, progress.kept_bytes = progress.kept, [], 0
                await sink.frames(run.attempt.rid, run.merged_frames(frames))
            if progress.phase is Phase.DONE and not run.attempt.stream:
                await sink.answer(run.attempt.rid, run.merged_answer(progress.whole))
    except TimeoutError:
        raise ConnectionAbortedError(f"the client has read nothing for {CLIENT_PATIENCE_S:g} s") from None


def _failed(action: Action, before: Phase, run: PairRun, observer: Observer, progress: _Progress) -> AttemptFailed:
    if action is Action.BLAME_SILENT:
        waiting_for_prefill = before in _WAITING_FOR_PREFILL and Leg.PREFILL in run.open_legs
        leg = Leg.PREFILL if waiting_for_prefill else Leg.DECODE
        view = run.attempt.view(leg)
        message = f"no sign of {leg} {view.engine_id} in time (phase {before.value})"
        silent = Outcome(view.engine_id, leg, FailureKind.TIMEOUT, _STAGES[before], message)
        observer.noted(silent)
        return AttemptFailed(silent, (*progress.outcomes, silent))
    leg = Leg.PREFILL if action is Action.BLAME_PREFILL else Leg.DECODE
    return AttemptFailed(blamed(progress.outcomes, leg), tuple(progress.outcomes))
