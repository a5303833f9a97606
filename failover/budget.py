"""How many further attempts all requests of one gateway may have together, so that a failure feeds no storm. Pure.

A token bucket kept as a debt: each further attempt adds one, fresh requests and time pay it off, and what may be owed
is what one lost server costs. So a server may always die under all of its streams, and a fleet that keeps failing is
asked hardly more often than its clients ask. Replicas need not agree: each counts its own requests and streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """`ratio`: further attempts per fresh request, for good. The rest is what one lost server may cost at once."""

    ratio: float = 0.2
    """Of the peers' budgets (Envoy 0.2, Linkerd 0.2): at most a fifth more load, whatever happens."""
    floor_attempts: float = 16.0
    """Granted at any time, so that a gateway with little to do can retry at all."""
    refill_s: float = 30.0
    """In this time a whole burst is paid off without any fresh request: a server needs as long to come back."""
    half_life_s: float = 60.0
    """How fast it is forgotten how many streams one server had: those it lost are no longer counted when they retry."""


class RetryBudget:
    """The budget of one gateway. `now_s` never falls from call to call."""

    def __init__(self, config: BudgetConfig, now_s: float) -> None:
        self._config = config
        self._debt = 0.0
        self._most_streams = 0.0
        self._at_s = now_s

    def fresh(self, streams: int, now_s: float) -> None:
        """A request came. `streams`: attempts that the fullest server has of this gateway now."""
        self._pass(streams, now_s)
        self._debt = max(0.0, self._debt - self._config.ratio)

    def may_retry(self, streams: int, now_s: float) -> bool:
        """Whether one more attempt may be made now; it is counted if so."""
        self._pass(streams, now_s)
        if self._debt + 1.0 > self.burst:
            return False
        self._debt += 1.0
        return True

    @property
    def burst(self) -> float:
        """Attempts that may be owed: what the fullest server of late had."""
        return self._config.floor_attempts + self._most_streams

    @property
    def left(self) -> float:
        """Attempts that may be made at once."""
        return max(0.0, self.burst - self._debt)

    def retry_after_s(self) -> float:
        """When the next attempt may be made, at the latest; at least a second."""
        return max(1.0, (self._debt + 1.0 - self.burst) * self._config.refill_s / self.burst)

    def _pass(self, streams: int, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._debt = max(0.0, self._debt - self.burst * passed_s / self._config.refill_s)
        forgotten = self._most_streams * 0.5 ** (passed_s / self._config.half_life_s)
        self._most_streams = max(float(streams), forgotten)


def jittered_s(delay_s: float, rng: Random) -> float:
    """A delay between half of it and one and a half, so that those who failed together do not come back together."""
    return delay_s * (0.5 + rng.random())
