"""Failures in a row, and pauses between trials that went wrong."""

from random import Random

from engines.types import EngineId
from failover.machine import CALM_S
from failover.trust import Trust

A, B = EngineId("http://a"), EngineId("http://b")


def test_the_third_failure_in_a_row_is_one_too_many() -> None:
    trust = Trust(Random(1))
    assert [trust.failed(A, now_s, progress_s=0.0) for now_s in (1.0, 2.0, 3.0, 4.0)] == [False, False, True, False]
    assert not trust.failed(B, 5.0, 0.0), "each server has its own count"


def test_what_goes_well_in_between_begins_the_count_anew() -> None:
    trust = Trust(Random(1))
    for now_s in range(1, 50):
        assert not trust.failed(A, float(now_s), progress_s=now_s - 0.5)


def pause_after(trust: Trust, now_s: float) -> float:
    trust.trial_failed(A, now_s)
    return next(step / 10 for step in range(1000) if not trust.pauses(A, now_s + step / 10))


def test_pauses_grow_with_every_failed_trial_and_are_forgotten_after_a_calm_minute() -> None:
    trust = Trust(Random(1))
    assert not trust.pauses(A, 0.0)
    pauses = [pause_after(trust, 10.0 * number) for number in range(5)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.7
    assert 5.9 <= pauses[4] <= 10.1
    assert pause_after(trust, 40.0 + CALM_S + 0.1) <= 0.7
    assert not trust.pauses(B, 40.0)


def test_another_process_has_a_clean_record() -> None:
    trust = Trust(Random(1))
    trust.failed(A, 1.0, 0.0)
    trust.failed(A, 1.0, 0.0)
    trust.trial_failed(A, 1.0)
    trust.forget(A)
    trust.forget(A)
    assert not trust.pauses(A, 1.0)
    assert not trust.failed(A, 1.0, 0.0)


def test_gateways_do_not_pause_alike() -> None:
    ends = set()
    for seed in range(20):
        trust = Trust(Random(seed))
        trust.trial_failed(A, 0.0)
        ends.add(trust._records[A].pauses_until_s)
    assert len(ends) == 20
    assert all(0.375 <= end <= 0.625 for end in ends)
