"""The budget of retries, case by case: bursts, what pays a debt off, what is forgotten."""

from __future__ import annotations

from random import Random

import pytest

from failover.budget import BudgetConfig, RetryBudget, jittered_s

CONFIG = BudgetConfig(ratio=0.2, floor_attempts=10.0, refill_s=30.0, half_life_s=60.0)


def allowed(budget: RetryBudget, tries: int, now_s: float, streams: int = 0) -> int:
    return sum(budget.may_retry(streams, now_s) for _ in range(tries))


def test_a_gateway_with_nothing_to_do_may_retry_a_little() -> None:
    assert allowed(RetryBudget(CONFIG, 0.0), 50, 0.0) == 10


def test_the_burst_covers_what_the_fullest_server_had() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    budget.fresh(200, 0.0)
    budget.fresh(50, 1.0)
    assert budget.burst == pytest.approx(10.0 + 200.0 * 0.5 ** (1 / 60))
    assert allowed(budget, 500, 1.0) == 207


def test_fresh_requests_pay_a_fifth_each() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    assert allowed(budget, 50, 0.0) == 10
    for _ in range(24):
        budget.fresh(0, 0.0)
    assert allowed(budget, 50, 0.0) == 4
    assert not budget.may_retry(0, 0.0)


def test_what_is_paid_in_advance_is_not_saved() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    for _ in range(10_000):
        budget.fresh(0, 0.0)
    assert allowed(budget, 50, 0.0) == 10


def test_time_pays_a_whole_burst_in_refill_s() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    assert allowed(budget, 50, 0.0) == 10
    assert allowed(budget, 50, 2.9) == 0
    assert allowed(budget, 50, 6.1) == 2
    assert allowed(budget, 50, 100.0) == 10


def test_how_many_streams_there_were_is_forgotten_by_halves() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    budget.fresh(400, 0.0)
    budget.fresh(0, 60.0)
    assert budget.burst == pytest.approx(210.0)
    budget.fresh(0, 3600.0)
    assert budget.burst == pytest.approx(10.0)


def test_who_is_refused_hears_when_to_come_back() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    allowed(budget, 50, 0.0)
    assert budget.retry_after_s() == 3.0
    assert not budget.may_retry(0, 2.9)
    assert budget.may_retry(0, 3.0)
    assert RetryBudget(CONFIG, 0.0).retry_after_s() == 1.0


def test_pauses_are_spread_and_seeded() -> None:
    rng = Random(3)
    pauses = {jittered_s(0.2, rng) for _ in range(100)}
    assert len(pauses) == 100
    assert 0.1 <= min(pauses) < 0.15
    assert 0.25 < max(pauses) <= 0.3
    assert jittered_s(0.2, Random(3)) == jittered_s(0.2, Random(3))
    assert jittered_s(0.0, rng) == 0.0
