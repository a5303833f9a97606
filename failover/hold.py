"""How long a decode's first output waits for its prefill's answer, learned for each prefill. Pure.

A prefill answers when it has seen its transfer end, which takes it a turn of its scheduler: the decode's first output
may be there before. Waiting costs a stream's first token, not waiting lets output pass of which the prefill may yet say
that its KV is incomplete. So the wait follows what the prefill needs in nearly all cases, within bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_HOLD_S = 0.02
"""While nothing was observed."""
LEAST_HOLD_S, LONGEST_HOLD_S = 0.005, 0.1
_QUANTILE_RATIO = 0.95
_MARGIN_RATIO = 1.5
_STEP_RATIO, _LEAST_STEP_S = 0.2, 0.0005
"""A step is this share of the estimate; one that is late moves it up by nearly a step, one in time down by 1/20."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What 95 % of a prefill's answers come within, after the decode's first output."""

    seconds: float = FIRST_HOLD_S / _MARGIN_RATIO


def observe_lag(state: Lag, lag_s: float) -> Lag:
    """`state` after an answer that came `lag_s` after the first output; 0 where it came before. (Robbins–Monro.)"""
    step_s = max(_LEAST_STEP_S, _STEP_RATIO * state.seconds)
    moved_s = state.seconds + step_s * (_QUANTILE_RATIO - (1.0 if lag_s <= state.seconds else 0.0))
    return Lag(min(max(moved_s, 0.0), LONGEST_HOLD_S))


def hold_s(state: Lag) -> float:
    """How long to wait for the next answer."""
    return min(max(LEAST_HOLD_S, _MARGIN_RATIO * state.seconds), LONGEST_HOLD_S)
