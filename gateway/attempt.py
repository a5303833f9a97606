"""One attempt, from dispatch to its end: both legs' events go through the attempt table, outputs go to the sink.

A shell around `failover/phase.py`: it keeps the timers and does what the table says. How long silence may last says a
Patience; it is asked when a silence begins and when it has lasted so long, never for an output.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from engines.pair import Frames, LegAnswer, LegEvent, LegFailed, LegOutput, PairRun
from engines.sse_frames import EventKind
from engines.types import FailureKind, Leg, Outcome, Stage
from failover import phase as table
from failover.deadlines import KNOWN_GAPS, Deadline, silence_text
from failover.machine import breaks
from failover.phase import Action, Event, Phase
from failover.retry import blamed
from gateway.config import DeadlineConfig
from gateway.patience import FixedPatience, Patience

CLIENT_PATIENCE_S = 60.0
"""How long one write to a client may wait for it: its unread answer holds KV on a decode."""
STOOD_STILL_S = 0.005
"""A timer that fires so much too late says that this process stood still: what came meanwhile may be unread yet."""
READING_S = 1.0
"""Reading that is given as long as the standstill was, up to this."""
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

    def noted(self, outcome: Outcome) -> None:
        """A leg failed; `outcome` has its stage."""


class AttemptFailed(Exception):
    """The attempt is over and its answer is not whole. `outcome` is of the leg at fault.

    `deadline`: the one that passed, where that is why. Of Deadline.TOTAL no server is at fault: `outcome` is of the leg
    that was waited for.
    """

    def __init__(self, outcome: Outcome, outcomes: tuple[Outcome, ...], deadline: Deadline | None = None) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome
        self.outcomes = outcomes
        self.deadline = deadline


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
    """Where the attempt stands, and when something must have happened.

    `limit_s`: how long its silence may last, as was said last; None when a silence of another kind has begun.
    `late_s`: the moment that came too late, as this process stood still; it counts only at `read_until_s`.
    """

    phase: Phase
    silent_since_s: float
    limit_s: float | None = None
    largest_gap_s: float = 0.0
    gaps: int = 0
    timer_s: float | None = None
    timer_event: Event = Event.HOLD_PASSED
    late_s: float | None = None
    read_until_s: float = 0.0
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
    patience: Patience | None = None,
) -> None:
    """See an attempt through; returns when its whole answer is in the sink.

    The first output waits for the prefill's answer, at most `limits.hold_s`. Without `patience` silence may last as
    long as `limits` says, else as long as that says.
    Raises AttemptFailed. Leaves open legs open: the caller lets go of them, also when this is cancelled.
    """
    clock = asyncio.get_running_loop().time
    patience = patience or FixedPatience(limits)
    progress = _Progress(Phase.DISPATCHED, clock())
    while progress.phase is not Phase.DONE:
        due_s, due_event = _next_due(progress, run.attempt.stream, patience, deadline_s)
        try:
            async with asyncio.timeout_at(progress.read_until_s if due_s == progress.late_s else due_s):
                happened: LegEvent | None = await run.next_event()
        except TimeoutError:
            happened = None
            if due_event is Event.DEADLINE_PASSED and _may_go_on(progress, run.attempt.stream, patience, deadline_s):
                continue
            if _stood_still(progress, due_s, clock()):
                continue
        event = due_event if happened is None else _event_of(happened, progress)
        before = progress.phase
        progress.phase, action = table.step(before, event, needs_prefill=run.needs_prefill_answer)
        await _act(action, before, happened, run, sink, observer, progress, limits.hold_s, clock())
        if progress.phase is Phase.FAILED:
            raise _failed(action, before, run, observer, progress, patience, clock() >= deadline_s)


def _next_due(progress: _Progress, stream: bool, patience: Patience, deadline_s: float) -> tuple[float, Event]:
    """The next moment at which silence means something, and what."""
    if progress.limit_s is None:
        progress.limit_s = _limit_s(progress, stream, patience)
    due_s = min(progress.silent_since_s + progress.limit_s, deadline_s)
    if progress.timer_s is not None and progress.timer_s < due_s:
        return progress.timer_s, progress.timer_event
    return due_s, Event.DEADLINE_PASSED


def _may_go_on(progress: _Progress, stream: bool, patience: Patience, deadline_s: float) -> bool:
    """Whether a silence that has lasted as long as it might may now last longer."""
    progress.limit_s = _limit_s(progress, stream, patience)
    return asyncio.get_running_loop().time() < min(progress.silent_since_s + progress.limit_s, deadline_s)


def _stood_still(progress: _Progress, due_s: float, now_s: float) -> bool:
    """Whether the moment has come too late to mean silence: once for each, so that a slow process judges too."""
    if due_s == progress.late_s or now_s - due_s < STOOD_STILL_S:
        return False
    progress.late_s, progress.read_until_s = due_s, now_s + min(now_s - due_s, READING_S)
    return True


def _limit_s(progress: _Progress, stream: bool, patience: Patience) -> float:
    since_s = progress.silent_since_s
    if progress.phase is Phase.STREAMING:
        return patience.next_output_s(since_s, progress.largest_gap_s, progress.gaps)
    if progress.phase is Phase.HANDED_OVER and not stream:
        return patience.whole_answer_s(since_s)  # it has no first output to wait for
    return patience.first_output_s(since_s)


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
    hold_s: float,
    now_s: float,
) -> None:
    if isinstance(happened, LegFailed):
        outcome = replace(happened.outcome, stage=_STAGES[before])
        progress.outcomes.append(outcome)
        observer.noted(outcome)
    if isinstance(happened, LegAnswer):
        observer.progress(happened.leg, now_s)
    if isinstance(happened, LegOutput):
        if before is Phase.STREAMING:
            progress.gaps += 1
            progress.largest_gap_s = max(progress.largest_gap_s, now_s - progress.silent_since_s)
            if progress.gaps == KNOWN_GAPS:
                progress.limit_s = None  # the stream shows its own pace from now on
        observer.progress(Leg.DECODE, now_s)
        progress.kept.extend(happened.frames)
        progress.kept_bytes += sum(len(frame) for _, frame in happened.frames)
    match action:
        case Action.HOLD:
            progress.timer_s, progress.timer_event = now_s + hold_s, Event.HOLD_PASSED
        case Action.WAIT_GRACE:
            progress.timer_s, progress.timer_event = now_s + table.LOSS_GRACE_S, Event.GRACE_PASSED
        case Action.HAND_OVER:
            if before is not Phase.STREAMING:  # a late answer of the prefill says nothing of a silent decode
                progress.silent_since_s, progress.limit_s = now_s, None
            observer.handed_over(_prefill_answer(happened))
        case Action.RELAY | Action.FINISH:
            progress.timer_s = None
            if before is not Phase.STREAMING:
                observer.handed_over(_prefill_answer(happened))
                observer.first_output()
                progress.limit_s = None
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


def _failed(
    action: Action,
    before: Phase,
    run: PairRun,
    observer: Observer,
    progress: _Progress,
    patience: Patience,
    is_over_time: bool,
) -> AttemptFailed:
    if action is Action.BLAME_SILENT:
        deadline = Deadline.TOTAL if is_over_time else _deadline(before, run.attempt.stream)
        waits_for_prefill = before in _WAITING_FOR_PREFILL and Leg.PREFILL in run.open_legs
        leg = patience.silent_leg(Leg.PREFILL if waits_for_prefill else Leg.DECODE, progress.silent_since_s)
        engine_id = run.attempt.view(leg).engine_id
        silent_s = asyncio.get_running_loop().time() - progress.silent_since_s
        message = silence_text(deadline, leg, engine_id, silent_s)
        silent = Outcome(engine_id, leg, FailureKind.TIMEOUT, _STAGES[before], message)
        observer.noted(silent)
        return AttemptFailed(silent, (*progress.outcomes, silent), deadline)
    leg = Leg.PREFILL if action is Action.BLAME_PREFILL else Leg.DECODE
    return AttemptFailed(blamed(progress.outcomes, leg), tuple(progress.outcomes))


def _deadline(phase: Phase, stream: bool) -> Deadline:
    """Which deadline it is that passes in a phase."""
    streams = phase is Phase.STREAMING or (phase is Phase.HANDED_OVER and not stream)
    return Deadline.STALL if streams else Deadline.FIRST_TOKEN
