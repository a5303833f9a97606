"""The default policy: the pair of the least cost. Pure."""

from __future__ import annotations

from random import Random

from routing.cost import DEFAULT_COST, CostConfig
from routing.pairing import best_pair
from routing.types import Choice, RequestView, RoutingSnapshot


class CostBased:
    """Chooses prefill and decode together; equal pairs by the seeded rng."""

    def __init__(self, config: CostConfig = DEFAULT_COST) -> None:
        self._config = config

    def choose(self, request: RequestView, snapshot: RoutingSnapshot, rng: Random) -> Choice | None:
        return best_pair(request, snapshot, self._config, rng)
