from __future__ import annotations

from random import Random

import pytest

from engines.timing import H100_70B
from routing.estimator import (
    BYTES_PER_TOKEN,
    Quantile,
    Ratio,
    bandwidth,
    corrected_decode,
    corrected_link,
    corrected_prefill,
    expected_output_tokens,
    observe_output,
    observe_prompt,
    observe_ratio,
    observe_time,
    observe_transfer,
    prompt_tokens,
    ratio_of,
)


def seen(factor: float, times: int = 20, state: Ratio | None = None) -> Ratio:
    state = state or Ratio()
    for _ in range(times):
        state = observe_time(state, 1.0, factor)
    return state


def test_the_prior_holds_until_enough_was_seen() -> None:
    assert ratio_of(seen(2.0, times=4)) == 1.0
    assert ratio_of(seen(2.0, times=5)) == pytest.approx(2.0)


def test_a_correction_converges_and_follows_change() -> None:
    assert ratio_of(seen(1.3)) == pytest.approx(1.3)
    assert ratio_of(seen(0.7, times=200, state=seen(1.3, times=200))) == pytest.approx(0.7, rel=0.01)


def test_one_stall_bends_it_little() -> None:
    assert ratio_of(observe_time(seen(1.0, times=50), 1.0, 1000.0)) < 1.1


def test_it_stays_within_its_bounds() -> None:
    assert ratio_of(seen(1000.0, times=300)) == 10.0
    assert ratio_of(seen(0.0001, times=300)) == 0.1


@pytest.mark.parametrize(
    ("top", "bottom"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_nothing_is_learned_of_nonsense(top: float, bottom: float) -> None:
    assert observe_ratio(Ratio(), top, bottom) == Ratio()


def test_the_error_falls_once_the_factor_is_learned() -> None:
    assert seen(1.5, times=4).error_ratio == pytest.approx(0.5)
    assert seen(1.5, times=200).error_ratio < 0.01


def test_timings_are_scaled() -> None:
    prefill = corrected_prefill(H100_70B.prefill, seen(2.0))
    assert prefill.per_token_s == pytest.approx(2 * H100_70B.prefill.per_token_s)
    assert prefill.chunk_tokens == H100_70B.prefill.chunk_tokens
    assert corrected_decode(H100_70B.decode, seen(2.0)).base_s == pytest.approx(2 * H100_70B.decode.base_s)


def test_bandwidth_is_learned_from_what_is_beyond_the_fixed_time() -> None:
    state = bandwidth(H100_70B.link)
    for _ in range(200):
        state = observe_transfer(state, H100_70B.link, 2e9, 0.205)
    assert corrected_link(H100_70B.link, state).bytes_per_s == pytest.approx(10e9, rel=0.01)
    assert observe_transfer(state, H100_70B.link, 100, 0.009) is state


def test_bytes_per_token_are_learned_from_usage() -> None:
    state = BYTES_PER_TOKEN
    assert prompt_tokens(state, 4000) == 1000
    for _ in range(100):
        state = observe_prompt(state, 3000, 1000)
    assert prompt_tokens(state, 3000) == pytest.approx(1000, abs=1)
    assert prompt_tokens(state, 0) == 1


def test_the_output_quantile_converges() -> None:
    rng = Random(4)
    lengths = [round(rng.lognormvariate(5.0, 1.0)) for _ in range(3000)]
    state = Quantile()
    for tokens in lengths:
        state = observe_output(state, tokens)
    true_tokens = sorted(lengths)[round(0.7 * len(lengths))]
    assert expected_output_tokens(state, 100_000) == pytest.approx(true_tokens, rel=0.3)


def test_the_expected_output_is_capped_and_positive() -> None:
    assert expected_output_tokens(Quantile(), 10_000) == 350
    assert expected_output_tokens(Quantile(), 16) == 16
    assert expected_output_tokens(Quantile(), 0) == 1
    assert observe_output(Quantile(), 0).log_tokens is not None
