"""What observation says of the predictions: correction factors, bandwidths, output lengths. Pure: state in, state out.

All but the output length are one thing: a ratio of sums that forgets, each observation clipped around the present
estimate, so that one stalled request cannot bend it. The mean error of the predictions comes with every estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engines.timing import DecodeTiming, LinkTiming, PrefillTiming


@dataclass(frozen=True, slots=True)
class RatioConfig:
    """How a ratio is learned; the forgetting is the simulation study's, which undid ±30 % wrong constants with it."""

    forgetting_ratio: float = 0.97
    """What is kept of the past at each observation."""
    outlier_factor: float = 3.0
    """An observation counts as at most this many times the estimate, or as at least its inverse."""
    bound_factor: float = 10.0
    """The estimate stays within this factor of its prior."""
    min_observations: int = 5
    """Before that the prior is used."""


DEFAULT_RATIO = RatioConfig()


@dataclass(frozen=True, slots=True)
class Ratio:
    """A learned ratio of two measured quantities. `error_ratio`: mean of |observed − predicted| ÷ predicted."""

    prior: float = 1.0
    numerator: float = 0.0
    denominator: float = 0.0
    observations: int = 0
    error_ratio: float = 0.0


def ratio_of(state: Ratio, config: RatioConfig = DEFAULT_RATIO) -> float:
    """The present estimate: the prior until enough was observed, always within its bounds."""
    if state.observations < config.min_observations:
        return state.prior
    low, high = state.prior / config.bound_factor, state.prior * config.bound_factor
    return min(high, max(low, state.numerator / state.denominator))


def observe_ratio(state: Ratio, numerator: float, denominator: float, config: RatioConfig = DEFAULT_RATIO) -> Ratio:
    """`state` with one more observation of `numerator ÷ denominator`; nothing is learned of values that are not > 0."""
    if not (0.0 < numerator < math.inf and 0.0 < denominator < math.inf):
        return state
    predicted = ratio_of(state, config)
    observed = numerator / denominator
    error_ratio = min(config.bound_factor, abs(observed - predicted) / predicted)
    clipped = min(predicted * config.outlier_factor, max(predicted / config.outlier_factor, observed))
    keep = config.forgetting_ratio
    share = max(1.0 - keep, 1.0 / (state.observations + 1))
    return replace(
        state,
        numerator=keep * state.numerator + clipped * denominator,
        denominator=keep * state.denominator + denominator,
        observations=state.observations + 1,
        error_ratio=state.error_ratio + share * (error_ratio - state.error_ratio),
    )


def observe_time(state: Ratio, predicted_s: float, observed_s: float, config: RatioConfig = DEFAULT_RATIO) -> Ratio:
    """A correction factor after a prefill or a decode step; `predicted_s` by the *uncorrected* timing."""
    return observe_ratio(state, observed_s, predicted_s, config)


def corrected_prefill(timing: PrefillTiming, state: Ratio) -> PrefillTiming:
    """The prior timing of a prefill, scaled by what was observed of it."""
    factor = ratio_of(state)
    return replace(
        timing,
        base_s=timing.base_s * factor,
        per_token_s=timing.per_token_s * factor,
        per_token2_s=timing.per_token2_s * factor,
    )


def corrected_decode(timing: DecodeTiming, state: Ratio) -> DecodeTiming:
    """The prior timing of a decode, scaled by what was observed of it."""
    factor = ratio_of(state)
    return DecodeTiming(timing.base_s * factor, timing.per_request_s * factor, timing.per_kv_token_s * factor)


def bandwidth(prior: LinkTiming) -> Ratio:
    """The start of a link's learned bandwidth, in bytes per second."""
    return Ratio(prior=prior.bytes_per_s)


def observe_transfer(state: Ratio, link: LinkTiming, size_bytes: float, elapsed_s: float) -> Ratio:
    """A link's bandwidth after one transfer; what is within twice the fixed time says nothing of bandwidth."""
    if elapsed_s <= 2.0 * link.fixed_s:
        return state
    return observe_ratio(state, size_bytes, elapsed_s - link.fixed_s)


def corrected_link(link: LinkTiming, state: Ratio) -> LinkTiming:
    """The prior timing of a link with the bandwidth that was observed."""
    return LinkTiming(bytes_per_s=ratio_of(state), fixed_s=link.fixed_s)


BYTES_PER_TOKEN = Ratio(prior=4.0)
"""Bytes of prompt text per token before any usage was seen: English under common tokenizers."""


_TOKENIZER = RatioConfig(outlier_factor=10.0, min_observations=1)
"""A tokenizer is no noisy server: one answer already says more than the prior."""


def observe_prompt(state: Ratio, prompt_bytes: int, prompt_tokens: int) -> Ratio:
    """Bytes per token after an answer told `usage.prompt_tokens`."""
    return observe_ratio(state, prompt_bytes, prompt_tokens, _TOKENIZER)


def bytes_per_token(state: Ratio) -> float:
    """The present estimate of bytes per token."""
    return ratio_of(state, _TOKENIZER)


def prompt_tokens(state: Ratio, prompt_bytes: int) -> int:
    """The tokens `prompt_bytes` of text stand for, at least 1."""
    return max(1, round(prompt_bytes / bytes_per_token(state)))


@dataclass(frozen=True, slots=True)
class QuantileConfig:
    """How an output length is learned: Robbins–Monro steps on its logarithm, with a floor that keeps forgetting."""

    quantile_ratio: float = 0.7
    prior_tokens: float = 350.0
    """The study's assumed mean output."""
    first_step: float = 2.0
    """The step in log units is `first_step / observations`, but at least `last_step`."""
    last_step: float = 0.05


DEFAULT_QUANTILE = QuantileConfig()


@dataclass(frozen=True, slots=True)
class Quantile:
    """A learned quantile of output lengths, kept per model and tenant by the caller. None: nothing seen yet."""

    log_tokens: float | None = None
    observations: int = 0
    error_ratio: float = 0.0


def observe_output(state: Quantile, output_tokens: int, config: QuantileConfig = DEFAULT_QUANTILE) -> Quantile:
    """`state` after one answer of `output_tokens`; only whole answers should be told, not failed ones."""
    log_tokens = _log_tokens(state, config)
    observed = max(1, output_tokens)
    predicted = math.exp(log_tokens)
    observations = state.observations + 1
    step = max(config.last_step, config.first_step / observations)
    above = math.log(observed) > log_tokens
    error_ratio = min(10.0, abs(observed - predicted) / predicted)
    share = max(0.03, 1.0 / observations)
    return Quantile(
        log_tokens=max(0.0, log_tokens + step * (config.quantile_ratio - (0.0 if above else 1.0))),
        observations=observations,
        error_ratio=state.error_ratio + share * (error_ratio - state.error_ratio),
    )


def expected_output_tokens(state: Quantile, max_output_tokens: int, config: QuantileConfig = DEFAULT_QUANTILE) -> int:
    """The learned quantile, at least 1 and at most what the request allows."""
    return max(1, min(max_output_tokens, round(math.exp(_log_tokens(state, config)))))


def _log_tokens(state: Quantile, config: QuantileConfig) -> float:
    return math.log(config.prior_tokens) if state.log_tokens is None else state.log_tokens
