"""Estimates are bounded, follow what is constant, and take an outlier for one observation."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from routing.estimator import (
    DEFAULT_RATIO,
    Quantile,
    Ratio,
    expected_output_tokens,
    observe_output,
    observe_ratio,
    ratio_of,
)

SIZES = st.floats(1e-6, 1e9)
PRIORS = st.floats(1e-3, 1e12)


@given(PRIORS, st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=40))
def test_no_observation_leads_out_of_bounds(prior: float, pairs: list[tuple[float, float]]) -> None:
    state = Ratio(prior)
    for numerator, denominator in pairs:
        state = observe_ratio(state, numerator, denominator)
        estimate = ratio_of(state)
        assert prior / 10 * (1 - 1e-9) <= estimate <= prior * 10 * (1 + 1e-9)
        assert 0.0 <= state.error_ratio <= 10.0


@given(PRIORS, st.floats(0.2, 5.0), st.lists(SIZES, min_size=5, max_size=10))
def test_a_constant_ratio_is_learned_whatever_the_sizes(prior: float, factor: float, sizes: list[float]) -> None:
    state = Ratio(prior)
    for size in [1.0] * 150 + sizes:
        state = observe_ratio(state, prior * factor * size, size)
    assert math.isclose(ratio_of(state), prior * factor, rel_tol=0.06)


@given(st.floats(0.5, 2.0), st.floats(1e-6, 1e6))
def test_one_outlier_moves_a_settled_estimate_by_little(factor: float, outlier: float) -> None:
    state = Ratio()
    for _ in range(100):
        state = observe_ratio(state, factor, 1.0)
    settled = ratio_of(state)
    moved = ratio_of(observe_ratio(state, outlier, 1.0))
    most = (DEFAULT_RATIO.outlier_factor - 1.0) * (1.0 - DEFAULT_RATIO.forgetting_ratio) * 1.2
    assert abs(moved - settled) <= settled * most


@given(st.lists(st.integers(-5, 10**9), max_size=60), st.integers(1, 10**6))
def test_an_expected_output_is_within_what_is_allowed(outputs: list[int], max_output_tokens: int) -> None:
    state = Quantile()
    for tokens in outputs:
        state = observe_output(state, tokens)
    assert 1 <= expected_output_tokens(state, max_output_tokens) <= max_output_tokens
