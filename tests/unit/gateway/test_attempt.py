"""One attempt: the table's timers, what reaches the sink and when, and which leg is blamed for silence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.pair import Frames, LegAnswer, LegEvent, LegFailed, LegOutput
from engines.sse_frames import EventKind
from engines.types import FailureKind, Leg, Outcome, Stage
from failover.deadlines import KNOWN_GAPS, Deadline
from failover.phase import LOSS_GRACE_S
from gateway.attempt import CLIENT_PATIENCE_S, READING_S, AttemptFailed, follow
from gateway.config import DeadlineConfig
from gateway.patience import FixedPatience, Patience
from tests.fakes import attempt, now_s, timeless

HOLD_S = 0.02
LIMITS = DeadlineConfig(request_s=100.0, first_output_s=5.0, hold_s=HOLD_S, stall_s=2.0)
P_DONE = LegAnswer(Leg.PREFILL, b"kv")
D_DONE = LegAnswer(Leg.DECODE, b"whole")


def out(text: str) -> LegOutput:
    return LegOutput([(EventKind.CONTENT, text.encode())])


def failed(
    leg: Leg, kind: FailureKind = FailureKind.STATUS, status: int | None = 500, message: str = "boom"
) -> LegFailed:
    return LegFailed(Outcome(attempt().view(leg).engine_id, leg, kind, Stage.DISPATCHED, message, status))


P_FAILED, D_FAILED = failed(Leg.PREFILL), failed(Leg.DECODE)
P_BROKE = failed(Leg.PREFILL, FailureKind.RESET, None)


class Scripted:
    """A run whose events come at given times after its start."""

    def __init__(self, *script: tuple[float, LegEvent], stream: bool = True, needs_prefill: bool = False) -> None:
        self.attempt = attempt(stream=stream)
        self.needs_prefill_answer = needs_prefill
        self.open_legs: Sequence[Leg] = (Leg.DECODE, Leg.PREFILL)
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self.begun_s = now_s()
        for after_s, event in script:
            asyncio.get_running_loop().call_later(after_s, self._happen, event)

    def _happen(self, event: LegEvent) -> None:
        leg = event.leg if isinstance(event, LegAnswer) else event.outcome.leg if isinstance(event, LegFailed) else None
        self.open_legs = tuple(other for other in self.open_legs if other is not leg)
        self._events.put_nowait(event)

    async def next_event(self) -> LegEvent:
        return await self._events.get()

    def merged_frames(self, frames: Frames) -> Frames:
        return [(kind, b"+" + frame) for kind, frame in frames] if self.needs_prefill_answer else frames

    def merged_answer(self, body: bytes) -> bytes:
        return b"+" + body if self.needs_prefill_answer else body


class Told:
    """Sink and observer in one: everything in order, with its time."""

    def __init__(self, run: Scripted, slow_s: float = 0.0) -> None:
        self._run = run
        self._slow_s = slow_s
        self.log: list[tuple[float, str]] = []
        self.text = b""
        self.whole: bytes | None = None
        self.outcomes: list[Outcome] = []
        self.prefill_answers: list[bytes | None] = []
        self.signs: list[Leg] = []

    def _say(self, what: str) -> None:
        self.log.append((round(now_s() - self._run.begun_s, 6), what))

    async def frames(self, rid: str, frames: Frames) -> None:
        assert rid == self._run.attempt.rid
        self._say("frames")
        self.text += b"".join(frame for _, frame in frames)
        if self._slow_s:
            await asyncio.sleep(self._slow_s)

    async def answer(self, rid: str, body: bytes) -> None:
        self._say("answer")
        self.whole = body

    def handed_over(self, prefill_answer: bytes | None) -> None:
        self._say("handed over")
        self.prefill_answers.append(prefill_answer)

    def first_output(self) -> None:
        self._say("first output")

    def progress(self, leg: Leg, now_s: float) -> None:
        self.signs.append(leg)

    def noted(self, outcome: Outcome) -> None:
        self._say(f"{outcome.leg} {outcome.kind} {outcome.stage}")
        self.outcomes.append(outcome)


async def see(
    *script: tuple[float, LegEvent],
    stream: bool = True,
    limits: DeadlineConfig = LIMITS,
    within_s: float = 100.0,
    slow_s: float = 0.0,
    needs_prefill: bool = False,
    patience: Patience | None = None,
) -> tuple[Told, AttemptFailed | None, float]:
    """What was told, how it failed, and after how long."""
    run = Scripted(*script, stream=stream, needs_prefill=needs_prefill)
    told = Told(run, slow_s)
    error = None
    try:
        await follow(run, told, told, limits, run.begun_s + within_s, patience)  # type: ignore[arg-type]
    except AttemptFailed as caught:
        error = caught
    return told, error, round(now_s() - run.begun_s, 6)


def blame(error: AttemptFailed | None) -> tuple[Leg, FailureKind, Stage]:
    assert error is not None
    assert error.outcome in error.outcomes
    return error.outcome.leg, error.outcome.kind, error.outcome.stage


# ---- the good way ----------------------------------------------------------------------------------------------------


@timeless
async def test_the_usual_stream() -> None:
    told, error, took_s = await see((0.1, P_DONE), (0.2, out("a")), (0.3, out("b")), (0.4, D_DONE))
    assert error is None
    assert told.text == b"ab"
    assert told.whole is None
    assert took_s == 0.4
    assert told.log[0] == (0.1, "handed over")
    assert [what for _, what in told.log].count("first output") == 1


@timeless
async def test_a_whole_answer_is_given_at_its_end() -> None:
    told, error, _ = await see((0.1, P_DONE), (9.0, D_DONE), stream=False)
    assert error is None
    assert told.whole == b"whole"
    assert [what for _, what in told.log][-1] == "answer"


@timeless
async def test_first_output_waits_for_the_prefills_answer() -> None:
    told, error, _ = await see((0.1, out("a")), (0.105, out("b")), (0.11, P_DONE), (0.2, D_DONE))
    assert error is None
    assert told.text == b"ab"
    assert told.log[0][0] == 0.11


@timeless
async def test_first_output_waits_no_longer_than_the_hold() -> None:
    told, error, _ = await see((0.1, out("a")), (0.115, out("b")), (0.5, P_DONE), (0.6, D_DONE))
    assert error is None
    assert told.log[:3] == [(round(0.1 + HOLD_S, 6), what) for what in ("handed over", "first output", "frames")]


@timeless
async def test_the_hold_is_as_long_as_it_is_said_to_be() -> None:
    told, _, _ = await see((0.1, out("a")), (0.13, P_DONE), (0.6, D_DONE), limits=replace(LIMITS, hold_s=0.05))
    assert told.log[0][0] == 0.13
    told, _, _ = await see((0.1, out("a")), (0.13, P_DONE), (0.6, D_DONE), limits=replace(LIMITS, hold_s=0.01))
    assert told.log[0][0] == 0.11


@timeless
async def test_a_whole_answer_waits_no_longer_than_the_hold() -> None:
    told, error, took_s = await see((0.1, D_DONE), stream=False)
    assert error is None
    assert (told.whole, took_s) == (b"whole", round(0.1 + HOLD_S, 6))


@timeless
async def test_a_stream_that_ends_within_the_hold_keeps_the_first_timer() -> None:
    told, error, took_s = await see((0.1, out("a")), (0.115, D_DONE))
    assert error is None
    assert (told.text, took_s) == (b"a", round(0.1 + HOLD_S, 6))


@timeless
async def test_after_hand_over_a_failing_prefill_is_noted_only() -> None:
    told, error, _ = await see((0.1, out("a")), (0.2, P_BROKE), (0.3, out("b")), (0.4, D_DONE))
    assert error is None
    assert told.text == b"ab"
    assert [outcome.stage for outcome in told.outcomes] == [Stage.STREAMING]


@timeless
async def test_the_prefills_answer_is_told_where_it_came_first() -> None:
    told, _, _ = await see((0.1, P_DONE), (0.2, out("a")), (0.3, D_DONE))
    assert told.prefill_answers == [b"kv", None]
    told, _, _ = await see((0.1, out("a")), (0.11, P_DONE), (0.3, D_DONE))
    assert told.prefill_answers == [b"kv"]
    told, _, _ = await see((0.1, out("a")), (0.3, D_DONE))
    assert told.prefill_answers == [None]


@timeless
async def test_every_good_sign_of_a_leg_is_told() -> None:
    told, _, _ = await see((0.1, P_DONE), (0.2, out("a")), (0.3, D_FAILED))
    assert told.signs == [Leg.PREFILL, Leg.DECODE]


# ---- a prefill that is lost ------------------------------------------------------------------------------------------


@timeless
async def test_a_lost_prefill_gives_the_decode_a_grace() -> None:
    told, error, _ = await see((0.1, P_BROKE), (0.39, out("a")), (0.8, out("b")), (0.9, D_DONE))
    assert error is None
    assert told.text == b"ab"
    assert (0.39, "handed over") in told.log


@timeless
async def test_a_lost_prefill_ends_the_attempt_after_its_grace() -> None:
    told, error, took_s = await see((0.1, P_BROKE), (0.5, out("late")))
    assert blame(error) == (Leg.PREFILL, FailureKind.RESET, Stage.DISPATCHED)
    assert took_s == round(0.1 + LOSS_GRACE_S, 6)
    assert told.text == b""


@timeless
async def test_a_decode_that_fails_within_the_grace_leaves_the_blame_on_the_prefill() -> None:
    _, error, _ = await see((0.1, P_BROKE), (0.2, D_FAILED))
    assert blame(error)[0] is Leg.PREFILL


# ---- an answer that needs the prefill's ------------------------------------------------------------------------------


@timeless
async def test_output_waits_for_a_prefills_answer_that_it_needs() -> None:
    script = [(0.1, out("a")), (0.2, out("b")), (1.5, P_DONE), (1.6, out("c")), (1.7, D_DONE)]
    told, error, _ = await see(*script, needs_prefill=True)
    assert error is None
    assert told.text == b"+a+b+c"
    assert [what for at_s, what in told.log if at_s < 1.5] == []
    assert told.prefill_answers == [b"kv"]


@timeless
async def test_a_whole_answer_waits_for_a_prefills_answer_that_it_needs() -> None:
    for script in ([(0.1, D_DONE), (3.0, P_DONE)], [(0.1, P_DONE), (3.0, D_DONE)]):
        told, error, took_s = await see(*script, stream=False, needs_prefill=True)
        assert (error, told.whole, took_s) == (None, b"+whole", 3.0)


@pytest.mark.parametrize("lost", [P_BROKE, P_FAILED], ids=["broke", "failed"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", [[], [(0.1, out("a"))], [(0.1, D_DONE)], [(0.1, out("a")), (0.15, D_DONE)]])
def test_a_prefill_whose_answer_is_needed_and_lost_ends_the_attempt_at_once(
    before: list[tuple[float, LegEvent]], stream: bool, lost: LegFailed
) -> None:
    @timeless
    async def ends() -> None:
        told, error, took_s = await see(*before, (0.2, lost), (0.3, D_DONE), stream=stream, needs_prefill=True)
        assert blame(error)[0] is Leg.PREFILL
        assert (told.text, told.whole, took_s) == (b"", None, 0.2)

    ends()


@timeless
async def test_a_prefill_whose_answer_is_needed_and_never_comes_is_blamed_in_time() -> None:
    """However long its decode goes on."""
    outputs = [(0.1 * number, out("x")) for number in range(1, 200)]
    for script, stream in (([(0.1, D_DONE)], False), (outputs, True), ([*outputs[:3], (0.4, D_DONE)], True)):
        told, error, took_s = await see(*script, stream=stream, needs_prefill=True)
        assert blame(error)[:2] == (Leg.PREFILL, FailureKind.TIMEOUT)
        assert (told.text, told.whole, took_s) == (b"", None, LIMITS.first_output_s)
    _, error, took_s = await see((0.1, D_DONE), stream=False, needs_prefill=True, within_s=2.0)
    assert blame(error)[:2] == (Leg.PREFILL, FailureKind.TIMEOUT)
    assert took_s == 2.0


@timeless
async def test_what_waits_for_a_prefill_is_bounded() -> None:
    huge = LegOutput([(EventKind.CONTENT, b"x" * (48 * 1024 * 1024))])
    script = [(0.1, huge), (0.2, huge), (0.3, out("a")), (0.4, P_DONE)]
    told, error, took_s = await see(*script, needs_prefill=True)
    assert blame(error)[:2] == (Leg.PREFILL, FailureKind.TIMEOUT)
    assert (told.text, took_s) == (b"", 0.3)
    _, error, _ = await see((0.1, P_DONE), *script[:3], (0.5, D_DONE), needs_prefill=True)
    assert error is None, "what was passed on waits no more"


@timeless
async def test_after_its_answer_a_prefill_matters_no_more_to_what_needed_it() -> None:
    told, error, _ = await see((0.1, P_DONE), (0.2, out("a")), (0.3, P_BROKE), (0.4, D_DONE), needs_prefill=True)
    assert (error, told.text) == (None, b"+a")


# ---- failures --------------------------------------------------------------------------------------------------------


@timeless
async def test_held_output_of_a_failed_attempt_is_never_delivered() -> None:
    for script in (
        [(0.1, out("bad")), (0.11, P_FAILED)],
        [(0.1, out("bad")), (0.105, out("worse")), (0.11, D_FAILED)],
        [(0.1, out("bad")), (0.105, D_DONE), (0.11, P_FAILED)],
        [(0.1, P_FAILED), (0.1, out("bad"))],
    ):
        told, error, _ = await see(*script)
        assert error is not None
        assert (told.text, told.whole) == (b"", None)
        assert "first output" not in [what for _, what in told.log]


@timeless
async def test_a_whole_answer_of_a_failed_attempt_is_never_delivered() -> None:
    told, error, _ = await see((0.1, D_DONE), (0.11, P_FAILED), stream=False)
    assert blame(error)[0] is Leg.PREFILL
    assert told.whole is None


@timeless
async def test_a_failed_decode_ends_a_stream_with_what_was_sent() -> None:
    told, error, _ = await see((0.1, P_DONE), (0.2, out("a")), (0.3, D_FAILED))
    assert blame(error) == (Leg.DECODE, FailureKind.STATUS, Stage.STREAMING)
    assert told.text == b"a"


@timeless
async def test_outcomes_carry_the_stage_they_happened_in() -> None:
    told, _, _ = await see((0.1, P_DONE), (0.2, D_FAILED))
    assert [outcome.stage for outcome in told.outcomes] == [Stage.HANDED_OVER]


@timeless
async def test_a_callers_fault_on_one_leg_is_what_the_attempt_is_judged_by() -> None:
    refused = failed(Leg.DECODE, status=400, message="bad field")
    _, error, _ = await see((0.1, P_BROKE), (0.2, refused))
    assert error is not None
    assert error.outcome.status == 400


# ---- silence ---------------------------------------------------------------------------------------------------------


@timeless
async def test_no_first_output_blames_the_prefill_while_it_has_not_answered() -> None:
    told, error, took_s = await see()
    assert blame(error) == (Leg.PREFILL, FailureKind.TIMEOUT, Stage.DISPATCHED)
    assert took_s == LIMITS.first_output_s
    assert [outcome.kind for outcome in told.outcomes] == [FailureKind.TIMEOUT], "told like any other failure"


@timeless
async def test_no_first_output_after_hand_over_blames_the_decode() -> None:
    _, error, took_s = await see((3.0, P_DONE))
    assert blame(error) == (Leg.DECODE, FailureKind.TIMEOUT, Stage.HANDED_OVER)
    assert took_s == 3.0 + LIMITS.first_output_s


@timeless
async def test_a_stall_blames_the_decode() -> None:
    told, error, took_s = await see((0.1, P_DONE), (0.2, out("a")), (1.9, out("b")))
    assert blame(error) == (Leg.DECODE, FailureKind.TIMEOUT, Stage.STREAMING)
    assert took_s == 1.9 + LIMITS.stall_s
    assert told.text == b"ab"


@timeless
async def test_a_slow_client_is_no_stall() -> None:
    told, error, _ = await see((0.1, P_DONE), (0.2, out("a")), (5.0, out("b")), (5.1, D_DONE), slow_s=4.0)
    assert error is None
    assert told.text == b"ab"


@timeless
async def test_a_client_that_reads_nothing_does_not_hold_a_decode_for_ever() -> None:
    with pytest.raises(ConnectionError, match="read nothing"):
        await see((0.1, P_DONE), (0.2, out("a")), (0.3, D_DONE), slow_s=CLIENT_PATIENCE_S + 1, within_s=1000.0)


@timeless
async def test_a_whole_answer_may_take_as_long_as_the_request() -> None:
    _, error, took_s = await see((1.0, P_DONE), (90.0, D_DONE), stream=False)
    assert (error, took_s) == (None, 90.0)
    _, error, took_s = await see((1.0, P_DONE), stream=False, within_s=30.0)
    assert blame(error)[0] is Leg.DECODE
    assert took_s == 30.0


@pytest.mark.parametrize("within_s", [0.5, 1.0])
def test_the_requests_deadline_ends_everything(within_s: float) -> None:
    @timeless
    async def ends() -> None:
        outputs = [(0.1 * number, out("x")) for number in range(1, 50)]
        _, error, took_s = await see((0.05, P_DONE), *outputs, within_s=within_s)
        assert blame(error)[:2] == (Leg.DECODE, FailureKind.TIMEOUT)
        assert took_s == within_s

    ends()


@timeless
async def test_a_deadline_within_the_grace_blames_the_lost_prefill() -> None:
    _, error, took_s = await see((0.1, P_BROKE), within_s=0.2)
    assert blame(error) == (Leg.PREFILL, FailureKind.RESET, Stage.DISPATCHED)
    assert took_s == 0.2


@timeless
async def test_a_deadline_within_the_hold_blames_the_prefill_that_is_waited_for() -> None:
    told, error, _ = await see((0.1, out("a")), within_s=0.11)
    assert blame(error)[:2] == (Leg.PREFILL, FailureKind.TIMEOUT)
    assert told.text == b""


# ---- how long silence may last ---------------------------------------------------------------------------------------


class Asked(FixedPatience):
    """What was asked, on the run's clock; `answers` are given in turn, the last one for ever."""

    def __init__(self, *answers: float, blames: Leg | None = None) -> None:
        super().__init__(LIMITS)
        self.begun_s = now_s()
        self.asked: list[tuple[float, str, float]] = []
        self.gaps: list[tuple[float, int]] = []
        self._answers = list(answers)
        self._blames = blames

    def first_output_s(self, since_s: float) -> float:
        return self._answer("first", since_s)

    def next_output_s(self, since_s: float, largest_gap_s: float, gaps: int) -> float:
        self.gaps.append((round(largest_gap_s, 6), gaps))
        return self._answer("next", since_s)

    def whole_answer_s(self, since_s: float) -> float:
        return self._answer("whole", since_s)

    def silent_leg(self, waited_for: Leg, since_s: float) -> Leg:
        return self._blames or waited_for

    def _answer(self, what: str, since_s: float) -> float:
        self.asked.append((round(now_s() - self.begun_s, 6), what, round(since_s - self.begun_s, 6)))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def passed(error: AttemptFailed | None) -> Deadline:
    assert error is not None
    assert error.deadline is not None
    return error.deadline


@timeless
async def test_the_limits_are_asked_for_when_a_silence_begins_and_not_for_every_output() -> None:
    patience = Asked(5.0)
    outputs = [(0.2 + 0.1 * number, out("x")) for number in range(20)]
    _, error, took_s = await see((0.1, P_DONE), *outputs, (3.0, D_DONE), patience=patience)
    assert (error, took_s) == (None, 3.0)
    begun = [(0.0, "first", 0.0), (0.1, "first", 0.1), (0.2, "next", 0.2)]
    ((at_s, what, _),) = patience.asked[3:]
    assert patience.asked[:3] == begun
    assert (round(at_s, 6), what) == (1.0, "next"), "once more, when the stream has shown its own pace"
    assert [gaps for _, gaps in patience.gaps] == [0, KNOWN_GAPS]


@timeless
async def test_a_limit_that_has_passed_is_asked_for_again() -> None:
    patience = Asked(1.0, 2.5, 4.0, 4.0)
    told, error, took_s = await see(patience=patience)
    assert blame(error) == (Leg.PREFILL, FailureKind.TIMEOUT, Stage.DISPATCHED)
    assert (passed(error), took_s, len(told.outcomes)) == (Deadline.FIRST_TOKEN, 4.0, 1)
    assert [at_s for at_s, _, _ in patience.asked] == [0.0, 1.0, 2.5, 4.0]


@timeless
async def test_what_comes_after_a_longer_limit_is_passed_on() -> None:
    patience = Asked(1.0, 9.0)
    told, error, _ = await see((2.0, P_DONE), (2.1, out("a")), (2.2, D_DONE), patience=patience)
    assert (error, told.text) == (None, b"a")


@timeless
async def test_a_limit_that_shrinks_ends_it_when_it_is_next_looked_at() -> None:
    _, error, took_s = await see(patience=Asked(3.0, 1.0))
    assert (passed(error), took_s) == (Deadline.FIRST_TOKEN, 3.0)


@timeless
async def test_no_patience_outlasts_the_request() -> None:
    for script, stream in (([], True), ([(0.1, P_DONE), (0.2, out("a"))], True), ([(0.1, P_DONE)], False)):
        _, error, took_s = await see(*script, stream=stream, within_s=7.0, patience=Asked(1.0, 1e9))
        assert (passed(error), took_s) == (Deadline.TOTAL, 7.0)


@timeless
async def test_a_streams_own_pauses_are_told_when_it_falls_silent() -> None:
    patience = Asked(2.0, 2.0, 2.0, 2.5)
    script = [(0.1, P_DONE), *((at_s, out("x")) for at_s in (0.2, 0.3, 1.2, 1.3))]
    _, error, took_s = await see(*script, patience=patience)
    assert (passed(error), took_s) == (Deadline.STALL, 3.8)
    assert patience.gaps == [(0.0, 0), (0.9, 3), (0.9, 3)]


@timeless
async def test_what_waits_for_the_prefill_shows_no_pace() -> None:
    patience = Asked(9.0, 2.0)
    await see((1.0, out("a")), (3.0, out("b")), (4.0, P_DONE), needs_prefill=True, patience=patience)
    assert patience.gaps == [(0.0, 0), (0.0, 0)]


@timeless
async def test_a_clients_slowness_is_no_pause_of_the_stream() -> None:
    patience = Asked(9.0, 9.0, 0.5)
    await see((0.1, P_DONE), (0.2, out("a")), (0.3, out("b")), (4.3, D_DONE), slow_s=2.0, patience=patience)
    assert patience.gaps == [(0.0, 0)]
    patience = Asked(9.0, 9.0, 0.5)
    await see((0.1, P_DONE), (0.2, out("a")), (0.3, out("b")), slow_s=2.0, patience=patience)
    assert patience.gaps[-1] == (0.0, 1)


@timeless
async def test_a_whole_answer_stalls_where_its_decode_does() -> None:
    patience = Asked(5.0, 6.0, 6.0)
    _, error, took_s = await see((1.0, P_DONE), stream=False, patience=patience)
    assert blame(error) == (Leg.DECODE, FailureKind.TIMEOUT, Stage.HANDED_OVER)
    assert (passed(error), took_s) == (Deadline.STALL, 7.0)
    assert [what for _, what, _ in patience.asked] == ["first", "whole", "whole"]


@timeless
async def test_the_silent_leg_is_who_the_patience_says() -> None:
    told, error, _ = await see(patience=Asked(5.0, blames=Leg.DECODE))
    assert blame(error) == (Leg.DECODE, FailureKind.TIMEOUT, Stage.DISPATCHED)
    assert [outcome.leg for outcome in told.outcomes] == [Leg.DECODE]


@timeless
async def test_each_deadline_says_what_happened_where_and_for_how_long() -> None:
    cases = (
        ([], 100.0, Deadline.FIRST_TOKEN, "no first token in time: no sign of the prefill server http://p0 for 5.0 s"),
        (
            [(1.0, P_DONE)],
            100.0,
            Deadline.FIRST_TOKEN,
            "no first token in time: no sign of the decode server http://d0",
        ),
        (
            [(1.0, P_DONE), (1.5, out("a"))],
            100.0,
            Deadline.STALL,
            "stalled: the decode server http://d0 gave no further output in time (2.0 s)",
        ),
        ([(1.0, P_DONE)], 3.5, Deadline.TOTAL, "out of time: the last 2.5 s were spent waiting for the decode server"),
    )
    for script, within_s, deadline, text in cases:
        _, error, _ = await see(*script, within_s=within_s)
        assert passed(error) is deadline
        assert error is not None
        assert text in error.outcome.message
    _, error, _ = await see((0.1, D_FAILED))
    assert error is not None
    assert error.deadline is None


@timeless
async def test_a_cancelled_attempt_leaves_its_legs_to_the_caller() -> None:
    run = Scripted()
    told = Told(run)
    task = asyncio.ensure_future(follow(run, told, told, LIMITS, run.begun_s + 9.0))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert run.open_legs == (Leg.DECODE, Leg.PREFILL)


# ---- a gateway that stands still itself ------------------------------------------------------------------------------


async def stand_still(from_s: float, for_s: float, *unread: LegEvent, **how: Any) -> tuple[Told, AttemptFailed | None]:
    """What becomes of `script` when the process is frozen; `unread` is read some turns of the loop after it thaws."""
    loop = asyncio.get_running_loop()
    run = Scripted(*how.pop("script"))
    told, error = Told(run), None

    def freeze() -> None:
        loop._now_s += for_s  # type: ignore[attr-defined]
        loop.call_soon(read, 3)

    def read(turns: int) -> None:
        if turns:
            loop.call_soon(read, turns - 1)
        else:
            for event in unread:
                run._happen(event)

    loop.call_later(from_s, freeze)
    try:
        await follow(run, told, told, LIMITS, run.begun_s + 100.0)  # type: ignore[arg-type]
    except AttemptFailed as caught:
        error = caught
    return told, error


@timeless
async def test_what_came_while_the_gateway_stood_still_is_no_silence() -> None:
    script = [(0.1, P_DONE), (0.2, out("a"))]
    told, error = await stand_still(0.3, LIMITS.stall_s + 1.0, out("b"), D_DONE, script=script)
    assert error is None
    assert told.text == b"ab"


@timeless
async def test_an_abort_that_was_unread_when_the_hold_passed_is_seen() -> None:
    told, error = await stand_still(0.101, 1.0, P_FAILED, script=[(0.1, out("a"))])
    assert blame(error)[0] is Leg.PREFILL
    assert told.text == b""


@timeless
async def test_a_server_that_is_silent_after_a_standstill_too_is_blamed() -> None:
    told, error = await stand_still(0.3, 30.0, script=[(0.1, P_DONE), (0.2, out("a"))])
    assert blame(error)[0] is Leg.DECODE
    assert told.text == b"a"
    assert now_s() - told._run.begun_s == pytest.approx(0.3 + 30.0 + READING_S)


@timeless
async def test_outputs_do_not_hold_a_hold_for_ever_after_a_standstill() -> None:
    script: list[tuple[float, LegEvent]] = [(0.1, out("a")), *((3.2 + 0.05 * each, out("b")) for each in range(40))]
    told, error = await stand_still(0.101, 3.0, script=[*script, (6.0, P_DONE), (6.1, D_DONE)])
    assert error is None
    assert told.log[0][0] == pytest.approx(3.101 + READING_S)
