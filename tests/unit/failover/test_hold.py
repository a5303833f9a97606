"""The hold follows what a prefill needs, within its bounds."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from failover.hold import FIRST_HOLD_S, LEAST_HOLD_S, LONGEST_HOLD_S, Lag, hold_s, observe_lag


def after(lags_s: Iterable[float]) -> Lag:
    state = Lag()
    for lag_s in lags_s:
        state = observe_lag(state, lag_s)
    return state


def test_nothing_is_known_at_first() -> None:
    assert hold_s(Lag()) == pytest.approx(FIRST_HOLD_S)


def test_a_prefill_that_answers_first_is_hardly_waited_for() -> None:
    assert hold_s(after([0.0] * 500)) == LEAST_HOLD_S


def test_one_that_never_comes_in_time_is_waited_for_within_bounds() -> None:
    assert hold_s(after([5.0] * 500)) == LONGEST_HOLD_S


@pytest.mark.parametrize("mean_s", [0.005, 0.02, 0.04])
def test_nearly_all_answers_come_within_it(mean_s: float) -> None:
    """Of lags that scatter around a mean, after some hundreds, 19 of 20 are waited for, and not much longer."""
    rng = Random(1)
    lags_s = [rng.uniform(0.5, 1.5) * mean_s for _ in range(2000)]
    found_s = hold_s(after(lags_s))
    assert sum(lag_s <= found_s for lag_s in lags_s) >= 0.95 * len(lags_s)
    assert found_s <= 3 * mean_s


def test_it_comes_down_again_when_a_prefill_has_recovered() -> None:
    assert hold_s(after([5.0] * 500 + [0.0] * 500)) == LEAST_HOLD_S


def test_few_stragglers_among_many_change_little() -> None:
    often = after([0.0] * 500)
    assert hold_s(observe_lag(often, 1.0)) < 2 * LEAST_HOLD_S


def test_it_grows_within_a_dozen_late_answers() -> None:
    quick = after([0.0] * 500)
    slow = quick
    for _ in range(24):
        slow = observe_lag(slow, 0.03)
    assert hold_s(slow) > 0.015
