"""How a pair is chosen: the protocol, and the tables a command line chooses from. Pure.

`cost` is the default; the others exist for comparison, and for the flags of other gateways. A new policy is a class
in a file of this folder, and one line in a table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from routing.cost import DEFAULT_COST, CostConfig
from routing.pairing import SidePolicy
from routing.policies.baselines import LeastCost, PowerOfTwo, RandomPick, RoundRobin, Separate
from routing.policies.cost_based import CostBased
from routing.types import Choice, RequestView, RoutingSnapshot


class Policy(Protocol):
    """Chooses the pair for one request; it may keep state of its own, and does no I/O."""

    def choose(self, request: RequestView, snapshot: RoutingSnapshot, rng: Random) -> Choice | None:
        """The chosen pair with its cost, or None when `snapshot` holds no allowed pair."""
        ...


SIDE_POLICIES: Mapping[str, Callable[[], SidePolicy]] = {
    "cost": LeastCost,
    "round_robin": RoundRobin,
    "random": RandomPick,
    "power_of_two": PowerOfTwo,
}
"""What `--prefill-policy` and `--decode-policy` may name."""

POLICIES: Mapping[str, Callable[[CostConfig], Policy]] = {
    "cost": CostBased,
    "round_robin": lambda config: Separate(config, RoundRobin(), RoundRobin()),
    "random": lambda config: Separate(config, RandomPick(), RandomPick()),
    "power_of_two": lambda config: Separate(config, PowerOfTwo(), PowerOfTwo()),
}
"""What `--policy` may name."""


def make_policy(
    name: str = "cost",
    prefill_policy: str | None = None,
    decode_policy: str | None = None,
    config: CostConfig = DEFAULT_COST,
) -> Policy:
    """The policy called `name`; a policy named for one side alone makes both sides choose separately.

    A side not named then follows `name`. ValueError, with the names there are, when a name is unknown.
    """
    _check(name, POLICIES)
    if prefill_policy is None and decode_policy is None:
        return POLICIES[name](config)
    sides = (prefill_policy or name, decode_policy or name)
    for side in sides:
        _check(side, SIDE_POLICIES)
    return Separate(config, SIDE_POLICIES[sides[0]](), SIDE_POLICIES[sides[1]]())


def _check(name: str, table: Mapping[str, object]) -> None:
    if name not in table:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(table)}")
