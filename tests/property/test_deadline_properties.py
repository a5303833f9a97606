"""Deadlines and the budget of retries over all inputs: within bounds, and never shorter for more reason to wait."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.types import Leg
from failover.budget import BudgetConfig, RetryBudget, jittered_s
from failover.deadlines import Bounds, first_output_quiet_s, limit_s, silent_leg, stall_quiet_s

seconds = st.floats(0.0, 1e6)
ratios = st.none() | st.floats(0.0, 10.0)
bounds = st.builds(Bounds, st.floats(0.001, 100.0), st.floats(0.001, 1000.0))


@given(bounds, seconds, seconds, ratios)
def test_a_first_output_limit_is_bounded_and_grows_with_what_was_predicted(
    bounds: Bounds, predicted_s: float, more_s: float, error_ratio: float | None
) -> None:
    quiet_s = first_output_quiet_s(bounds, predicted_s, error_ratio)
    assert min(bounds.floor_s, bounds.bound_s) <= quiet_s <= bounds.bound_s
    assert first_output_quiet_s(bounds, predicted_s + more_s, error_ratio) >= quiet_s
    assert first_output_quiet_s(bounds, predicted_s, None) >= quiet_s
    assert quiet_s >= min(bounds.bound_s, predicted_s), "what was predicted is never blamed"


@given(bounds, st.none() | seconds, seconds, st.integers(0, 1000), seconds)
def test_a_stall_limit_is_bounded_and_grows_with_the_pace(
    bounds: Bounds, step_s: float | None, gap_s: float, gaps: int, more_s: float
) -> None:
    quiet_s = stall_quiet_s(bounds, step_s, gap_s, gaps)
    assert min(bounds.floor_s, bounds.bound_s) <= quiet_s <= bounds.bound_s
    assert stall_quiet_s(bounds, step_s, gap_s + more_s, gaps) >= quiet_s
    if step_s is not None:
        assert stall_quiet_s(bounds, step_s + more_s, gap_s, gaps) >= quiet_s
        assert quiet_s >= min(bounds.bound_s, step_s)


@given(st.floats(0.001, 100.0), seconds, seconds, seconds, st.floats(0.001, 1000.0))
def test_a_limit_ends_within_its_bound_and_not_before_the_server_was_silent_so_long(
    quiet_s: float, since_s: float, heard_s: float, later_s: float, bound_s: float
) -> None:
    found_s = limit_s(quiet_s, since_s, heard_s, bound_s)
    assert found_s <= bound_s
    assert found_s >= min(quiet_s, bound_s)
    assert limit_s(quiet_s, since_s, heard_s + later_s, bound_s) >= found_s
    assert since_s + found_s == pytest.approx(min(since_s + bound_s, max(since_s, heard_s) + quiet_s))


@given(st.sampled_from(Leg), seconds, seconds, seconds)
def test_blame_is_total_and_a_decode_never_passes_it_on(leg: Leg, since_s: float, p_s: float, d_s: float) -> None:
    blamed = silent_leg(leg, since_s, p_s, d_s)
    assert blamed in Leg
    if leg is Leg.DECODE or d_s > since_s:
        assert blamed is leg


# ---- the budget ------------------------------------------------------------------------------------------------------

calls = st.lists(
    st.tuples(st.sampled_from(("fresh", "retry")), st.integers(0, 300), st.floats(0.0, 20.0)), max_size=200
)
configs = st.builds(BudgetConfig, st.floats(0.0, 2.0), st.floats(1.0, 50.0), st.floats(1.0, 100.0), st.floats(1.0, 100))


@given(configs, calls)
def test_never_more_attempts_than_the_budget(config: BudgetConfig, calls: list[tuple[str, int, float]]) -> None:
    budget = RetryBudget(config, 0.0)
    now_s, fresh, allowed, most = 0.0, 0, 0, 0
    for what, streams, pause_s in calls:
        now_s += pause_s
        most = max(most, streams)
        if what == "fresh":
            budget.fresh(streams, now_s)
            fresh += 1
        else:
            left = budget.may_retry(streams, now_s)
            allowed += left
            if not left:
                assert budget.left < 1.0
                after_s = budget.retry_after_s()
                assert 1.0 <= after_s < math.inf
        burst = config.floor_attempts + most
        assert config.floor_attempts <= budget.burst <= burst
        assert 0.0 <= budget.left <= budget.burst
        assert allowed <= burst * (1.0 + now_s / config.refill_s) + config.ratio * fresh + 1e-6


@given(configs, st.integers(0, 500))
def test_the_streams_of_one_lost_server_may_all_go_on(config: BudgetConfig, streams: int) -> None:
    budget = RetryBudget(config, 0.0)
    for number in range(streams):
        budget.fresh(number + 1, 0.0)
    budget_left = [budget.may_retry(streams - 1 - number, 0.5) for number in range(streams)]
    assert all(budget_left)


@given(configs, st.integers(1, 300), st.floats(0.0, 100.0))
def test_who_was_refused_may_come_back_when_it_was_told(config: BudgetConfig, streams: int, at_s: float) -> None:
    budget = RetryBudget(config, 0.0)
    while budget.may_retry(streams, at_s):
        pass
    assert not budget.may_retry(streams, at_s)
    assert budget.may_retry(streams, at_s + budget.retry_after_s() + 1e-6)


@given(seconds, st.integers())
def test_a_jittered_pause_is_near_what_was_wanted(delay_s: float, seed: int) -> None:
    assert 0.5 * delay_s <= jittered_s(delay_s, Random(seed)) <= 1.5 * delay_s
