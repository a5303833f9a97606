"""An attempt under any order and timing of its legs' events: what is delivered, what is not, and who is at fault."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from engines.pair import Frames, LegAnswer, LegEvent, LegFailed, LegOutput
from engines.sse_frames import EventKind
from engines.types import FailureKind, Leg, Outcome, Stage
from failover.deadlines import Deadline
from failover.phase import LOSS_GRACE_S
from gateway.attempt import AttemptFailed, follow
from gateway.config import DeadlineConfig
from gateway.patience import FixedPatience, Patience
from tests.fakes import attempt, now_s, timeless

HOLD_S = 0.02
LIMITS = DeadlineConfig(first_output_s=1.0, hold_s=HOLD_S, stall_s=0.5)
PATIENT = DeadlineConfig(first_output_s=10.0, stall_s=10.0)
DEADLINE_S = 3.0
ENDS = ("answered", "failed", "broke", "nothing")
GAPS = st.sampled_from([0.0, 0.001, 0.01, 0.019, 0.021, 0.1, 0.29, 0.31, 0.6, 1.1])


@dataclass(frozen=True)
class Plan:
    """When the prefill ends and how; when the decode's outputs come, and how and when it ends."""

    prefill_s: float
    prefill_end: str
    outputs_s: tuple[float, ...]
    decode_s: float
    decode_end: str
    stream: bool
    needs_prefill: bool = False


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    stream = draw(st.booleans())
    times: list[float] = []
    for gap in draw(st.lists(GAPS, max_size=4)) if stream else ():
        times.append((times[-1] if times else 0.0) + gap)
    decode_s = (times[-1] if times else 0.0) + draw(GAPS)
    ends = [draw(st.sampled_from(ENDS)) for _ in range(2)]
    return Plan(draw(GAPS), ends[0], tuple(times), decode_s, ends[1], stream, draw(st.booleans()))


@dataclass
class Seen:
    """What happened, in order: it is run, sink and observer in one."""

    plan: Plan
    delivered: list[bytes] = field(default_factory=list)
    whole: bytes | None = None
    handed_over: int = 0
    first_outputs: int = 0
    noted: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.attempt = attempt(stream=plan.stream)
        self.needs_prefill_answer = plan.needs_prefill
        self.open_legs: tuple[Leg, ...] = (Leg.DECODE, Leg.PREFILL)
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self.begun_s = now_s()
        self._planned = 0
        for number, at_s in enumerate(plan.outputs_s):
            self._at(at_s, LegOutput([(EventKind.CONTENT, b"%d" % number)]))
        for leg, end_s, end in (
            (Leg.PREFILL, plan.prefill_s, plan.prefill_end),
            (Leg.DECODE, plan.decode_s, plan.decode_end),
        ):
            if end == "answered":
                self._at(end_s, LegAnswer(leg, b"whole"))
            elif end != "nothing":
                kind = FailureKind.STATUS if end == "failed" else FailureKind.RESET
                view = self.attempt.view(leg)
                self._at(end_s, LegFailed(Outcome(view.engine_id, leg, kind, Stage.DISPATCHED, end, 500)))

    def _at(self, at_s: float, event: LegEvent) -> None:
        self._planned += 1  # a loop does not keep the order of timers of the same moment
        asyncio.get_running_loop().call_at(self.begun_s + at_s + 1e-7 * self._planned, self._events.put_nowait, event)

    async def next_event(self) -> LegEvent:
        return await self._events.get()

    def merged_frames(self, frames: Frames) -> Frames:
        self._merges()
        return frames

    def merged_answer(self, body: bytes) -> bytes:
        self._merges()
        return body

    def _merges(self) -> None:
        if self.plan.needs_prefill:
            assert self.plan.prefill_end == "answered", "nothing is delivered without an answer that it needs"
            assert now_s() - self.begun_s >= self.plan.prefill_s

    async def frames(self, rid: str, frames: Frames) -> None:
        assert self.handed_over, "nothing is delivered before the KV is known to be whole"
        assert self.first_outputs == 1
        self.delivered.extend(frame for _, frame in frames)

    async def answer(self, rid: str, body: bytes) -> None:
        assert self.whole is None
        self.whole = body

    def handed_over_(self, prefill_answer: bytes | None) -> None:
        self.handed_over += 1

    def first_output(self) -> None:
        self.first_outputs += 1

    def progress(self, leg: Leg, now_s: float) -> None: ...

    def noted_(self, outcome: Outcome) -> None:
        self.noted.append(outcome)


class Observer:
    """The observer's half of `Seen`, whose names are those of its counters."""

    def __init__(self, seen: Seen) -> None:
        self.handed_over = seen.handed_over_
        self.first_output = seen.first_output
        self.progress = seen.progress
        self.noted = seen.noted_


async def run(
    plan: Plan, limits: DeadlineConfig = LIMITS, patience: Patience | None = None
) -> tuple[Seen, AttemptFailed | None, float]:
    seen = Seen(plan)
    try:
        await follow(
            seen,  # type: ignore[arg-type]
            seen,
            Observer(seen),
            limits,
            seen.begun_s + DEADLINE_S,
            patience=patience,
        )
    except AttemptFailed as error:
        return seen, error, now_s() - seen.begun_s
    return seen, None, now_s() - seen.begun_s


@given(plans())
def test_an_attempt_ends_one_way_and_in_time(plan: Plan) -> None:
    @timeless
    async def ends() -> None:
        seen, error, took_s = await run(plan)
        outputs = [b"%d" % number for number in range(len(plan.outputs_s))]
        assert took_s <= DEADLINE_S + 1e-6
        assert seen.delivered == outputs[: len(seen.delivered)]
        assert seen.first_outputs <= 1
        if error is None:
            assert plan.decode_end == "answered"
            assert seen.delivered == outputs
            assert seen.whole == (None if plan.stream else b"whole")
        else:
            assert seen.whole is None
            assert error.outcome in error.outcomes
            assert list(error.outcomes) == seen.noted
        if plan.decode_end in ("failed", "broke"):
            assert error is not None

    ends()


class Moody(FixedPatience):
    """Says another limit each time it is asked."""

    def __init__(self, limits_s: list[float]) -> None:
        super().__init__(LIMITS)
        self._limits_s = cycle(limits_s)

    def first_output_s(self, since_s: float) -> float:
        assert since_s <= now_s()
        return next(self._limits_s)

    def next_output_s(self, since_s: float, largest_gap_s: float, gaps: int) -> float:
        assert since_s <= now_s()
        assert largest_gap_s == 0.0 or gaps > 0
        return next(self._limits_s)

    def whole_answer_s(self, since_s: float) -> float:
        return next(self._limits_s)


@given(plans(), st.lists(GAPS, min_size=1, max_size=6), st.floats(0.0, 5.0))
def test_no_patience_outlasts_the_request_or_changes_what_is_delivered(
    plan: Plan, limits_s: list[float], last_s: float
) -> None:
    @timeless
    async def ends() -> None:
        seen, error, took_s = await run(plan, patience=Moody([*limits_s, last_s]))
        assert took_s <= DEADLINE_S + 1e-6
        assert seen.delivered == [b"%d" % number for number in range(len(seen.delivered))]
        if error is None:
            assert len(seen.delivered) == len(plan.outputs_s)
        elif error.deadline is not None:
            assert error.outcome.kind is FailureKind.TIMEOUT
            assert (error.deadline is Deadline.TOTAL) == (took_s >= DEADLINE_S)
            assert error.deadline is not Deadline.QUEUE
            assert (error.deadline is Deadline.FIRST_TOKEN) <= (error.outcome.stage is not Stage.STREAMING)

    ends()


@given(plans())
def test_a_prefill_that_fails_before_hand_over_lets_nothing_through(plan: Plan) -> None:
    @timeless
    async def ends() -> None:
        seen, error, _ = await run(plan)
        first_s = min([*plan.outputs_s[:1], plan.decode_s if plan.decode_end == "answered" else 99.0])
        in_time = plan.prefill_s < first_s + HOLD_S and plan.prefill_s < LIMITS.first_output_s
        if plan.prefill_end == "failed" and in_time and plan.prefill_s != first_s:
            assert error is not None
            assert seen.delivered == []
            assert not seen.handed_over
        if plan.needs_prefill and plan.prefill_end != "answered":
            assert error is not None
            assert seen.delivered == []
        if plan.prefill_end == "broke" and plan.prefill_s + LOSS_GRACE_S < min(first_s, plan.decode_s, 1.0):
            assert error is not None
            assert error.outcome.leg is Leg.PREFILL

    ends()


@given(plans())
def test_after_hand_over_only_the_decode_counts(plan: Plan) -> None:
    """The prefill's end then changes nothing: the same plan with a prefill that answers at once goes the same way."""

    @timeless
    async def ends() -> None:
        seen, error, _ = await run(plan, PATIENT)
        if not seen.handed_over or plan.prefill_end == "nothing":
            return
        well, well_error, _ = await run(replace(plan, prefill_s=0.0, prefill_end="answered"), PATIENT)
        assert seen.delivered == well.delivered
        assert (error is None) == (well_error is None)
        if error is not None:
            assert error.outcome.leg is Leg.DECODE

    ends()
