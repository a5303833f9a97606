"""What every fault is: a small class that does one thing to one target, and undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from failover.chaos.scenario import Value
from failover.chaos.world import World


class Fault(Protocol):
    """One fault on one target. The first line of the docstring is what `pdgate chaos list` shows.

    `targets`: roles that it may befall (`prefill`, `decode`, `gateway`, `redis`), or `link`. `params`: its parameters
    with their defaults, whose types are those that are accepted. `real`: whether it may be used on a real fleet.
    """

    targets: ClassVar[frozenset[str]]
    params: ClassVar[Mapping[str, Value]]
    real: ClassVar[bool]

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        """`params` has every parameter."""

    async def apply(self) -> str:
        """Do it; words for the record, or none. May be cancelled at any moment: `lift` then undoes what was done.

        Raises Unable where it cannot be done.
        """

    async def lift(self) -> None:
        """Undo it, also when `apply` did not come to its end; at once, and no byte is lost. Twice is once."""
