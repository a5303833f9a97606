"""The plain policies, one side at a time: what `cost` is compared with. Pure; round robin alone has a memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from engines.types import EngineId
from routing.cost import CostConfig
from routing.pairing import SideLoad, SidePolicy, separate_choice
from routing.types import Choice, RequestView, RoutingSnapshot


class Separate:
    """Chooses a prefill by one policy, then a decode that may pair with it by another."""

    def __init__(self, config: CostConfig, prefill_policy: SidePolicy, decode_policy: SidePolicy) -> None:
        self._config = config
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy

    def choose(self, request: RequestView, snapshot: RoutingSnapshot, rng: Random) -> Choice | None:
        return separate_choice(request, snapshot, self._config, rng, self._prefill_policy, self._decode_policy)


class LeastCost:
    """The engine whose own terms are least: the cost without what only a pair can tell."""

    def pick(self, loads: Sequence[SideLoad], rng: Random) -> int:
        least_s = min(load.own_cost_s for load in loads)
        return rng.choice([index for index, load in enumerate(loads) if load.own_cost_s == least_s])


class RoundRobin:
    """The engine chosen longest ago; one never chosen comes first, so a changing fleet still takes fair turns."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._last_turn: dict[EngineId, int] = {}

    def pick(self, loads: Sequence[SideLoad], rng: Random) -> int:
        last_turn = self._last_turn
        index = min(range(len(loads)), key=lambda index: (last_turn.get(loads[index].engine_id, 0), index))
        last_turn.pop(loads[index].engine_id, None)
        last_turn[loads[index].engine_id] = next(self._turns)
        self._forget_gone(len(loads))
        return index

    def _forget_gone(self, fleet: int) -> None:
        """Bound the memory of engines that have left: those chosen longest ago go first."""
        while len(self._last_turn) > max(64, 4 * fleet):
            del self._last_turn[next(iter(self._last_turn))]


class RandomPick:
    """Any engine, with equal chance."""

    def pick(self, loads: Sequence[SideLoad], rng: Random) -> int:
        return rng.randrange(len(loads))


class PowerOfTwo:
    """Two engines at random, of which the one with fewer booked tokens (then requests) is taken."""

    def pick(self, loads: Sequence[SideLoad], rng: Random) -> int:
        if len(loads) == 1:
            return 0
        one, other = rng.sample(range(len(loads)), 2)
        return one if _booked(loads[one]) <= _booked(loads[other]) else other


def _booked(load: SideLoad) -> tuple[int, int]:
    return load.booked_tokens, load.booked_requests
