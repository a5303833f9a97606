"""Deadlines: how long each stage may last in cases of every kind, whose fault silence is, what is told."""

from __future__ import annotations

import pytest

from engines.types import EngineId, Leg
from failover.deadlines import (
    BUSY_FACTOR,
    FIRST_OUTPUT_FACTOR,
    KNOWN_GAPS,
    RULES,
    STALL_GAPS,
    STALL_STEPS,
    WHOLE_FLOORS,
    Bounds,
    Deadline,
    Then,
    advice,
    first_output_quiet_s,
    limit_s,
    queue_text,
    silence_text,
    silent_leg,
    stall_quiet_s,
)

FIRST, STALL = Bounds(5.0, 120.0), Bounds(3.0, 60.0)


@pytest.mark.parametrize(
    ("predicted_s", "error_ratio", "quiet_s"),
    [
        (0.0, 0.0, 5.0),
        (0.1, 0.0, 5.5),
        (1.0, 0.0, 10.0),
        (1.0, 0.5, 12.5),
        (10.0, 0.0, 55.0),
        (23.0, 0.0, 120.0),
        (1e9, 0.0, 120.0),
        (0.1, None, 120.0),
    ],
)
def test_a_first_output_may_take_a_multiple_of_what_was_predicted(
    predicted_s: float, error_ratio: float | None, quiet_s: float
) -> None:
    assert FIRST_OUTPUT_FACTOR == 5.0
    assert first_output_quiet_s(FIRST, predicted_s, error_ratio) == quiet_s


@pytest.mark.parametrize(
    ("step_s", "largest_gap_s", "gaps", "quiet_s"),
    [
        (0.01, 0.0, 0, 3.0),
        (0.1, 0.0, 0, 3.0),
        (0.2, 0.0, 0, 6.0),
        (10.0, 0.0, 0, 60.0),
        (0.02, 2.0, 1, 8.0),
        (0.02, 90.0, 1, 60.0),
        (0.5, 1.0, 99, 15.0),
        (None, 0.0, 0, 60.0),
        (None, 0.1, 7, 60.0),
        (None, 0.1, 8, 3.0),
        (None, 2.0, 8, 8.0),
    ],
)
def test_a_stream_may_pause_for_a_multiple_of_its_decodes_steps_or_of_its_own_pauses(
    step_s: float | None, largest_gap_s: float, gaps: int, quiet_s: float
) -> None:
    assert (STALL_STEPS, STALL_GAPS, KNOWN_GAPS) == (30.0, 4.0, 8)
    assert stall_quiet_s(STALL, step_s, largest_gap_s, gaps) == quiet_s


def test_a_bound_below_the_floor_is_what_counts() -> None:
    low = Bounds(floor_s=5.0, bound_s=1.5)
    assert first_output_quiet_s(low, 1.0, 0.0) == 1.5
    assert stall_quiet_s(low, 1.0, 0.0, 0) == 1.5


@pytest.mark.parametrize(
    ("heard_s", "limit"),
    [(0.0, 3.0), (100.0, 3.0), (101.0, 4.0), (110.0, 13.0), (156.0, 59.0), (158.0, 60.0), (900.0, 60.0)],
)
def test_silence_is_counted_from_the_servers_last_sign_up_to_the_bound(heard_s: float, limit: float) -> None:
    assert limit_s(3.0, 100.0, heard_s, 60.0) == limit


@pytest.mark.parametrize(
    ("waited_for", "prefill_heard_s", "decode_heard_s", "blamed"),
    [
        (Leg.PREFILL, 101.0, 99.0, Leg.DECODE),
        (Leg.PREFILL, 101.0, 100.0, Leg.DECODE),
        (Leg.PREFILL, 101.0, 100.5, Leg.PREFILL),
        (Leg.PREFILL, 99.0, 99.0, Leg.PREFILL),
        (Leg.PREFILL, 99.0, 101.0, Leg.PREFILL),
        (Leg.PREFILL, 100.0, 99.0, Leg.PREFILL),
        (Leg.DECODE, 101.0, 99.0, Leg.DECODE),
        (Leg.DECODE, 99.0, 101.0, Leg.DECODE),
    ],
)
def test_a_prefill_that_waits_for_a_silent_decode_is_not_to_blame(
    waited_for: Leg, prefill_heard_s: float, decode_heard_s: float, blamed: Leg
) -> None:
    assert silent_leg(waited_for, 100.0, prefill_heard_s, decode_heard_s) is blamed


def test_every_stage_has_its_rule() -> None:
    assert set(RULES) == set(Deadline)
    assert len({rule.code for rule in RULES.values()}) == len(RULES)
    assert {deadline: (rule.then, rule.status, rule.blames) for deadline, rule in RULES.items()} == {
        Deadline.QUEUE: (Then.ASK_LATER, 429, False),
        Deadline.FIRST_TOKEN: (Then.ANOTHER_PAIR, 504, True),
        Deadline.STALL: (Then.GO_ON_ELSEWHERE, 504, True),
        Deadline.TOTAL: (Then.NOTHING, 504, False),
    }
    assert [deadline for deadline, rule in RULES.items() if not rule.safe_to_retry] == [Deadline.TOTAL]


def test_every_stage_has_its_own_words() -> None:
    texts = {
        deadline: silence_text(deadline, Leg.DECODE, EngineId("http://d0"), 3.25)
        for deadline in Deadline
        if deadline is not Deadline.QUEUE
    }
    assert len(set(texts.values())) == len(texts)
    for text in texts.values():
        assert "decode server http://d0" in text
        assert "3.2 s" in text
    assert queue_text(60.0, 1234).startswith("no pair had room for 1234 tokens within 60.0 s; ")
    advices = [advice(deadline, begun=begun) for deadline in Deadline for begun in (False, True)]
    assert all("asking again is safe" in text for text in advices)
    assert "as long" in advice(Deadline.TOTAL, begun=False)
    assert "anew" in advice(Deadline.STALL, begun=True)
    assert "nothing of the answer was sent" in advice(Deadline.FIRST_TOKEN, begun=False)


def test_all_of_it_is_far_below_what_sglang_waits() -> None:
    assert BUSY_FACTOR * first_output_quiet_s(FIRST, 0.5, 0.3) < 60.0
    assert FIRST.bound_s * 2 < 300.0, "once until hand-over, and once from there"
    assert WHOLE_FLOORS * STALL.floor_s <= 15.0
