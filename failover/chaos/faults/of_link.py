"""What the faults of links have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from failover.chaos.scenario import Value
from failover.chaos.world import PLAIN, LinkRule, Unable, World

DIRECTIONS = ("both", "forth", "back")


class LinkFault:
    """A fault of the proxy in one link."""

    targets: ClassVar[frozenset[str]] = frozenset({"link"})
    params: ClassVar[Mapping[str, Value]] = {}
    real: ClassVar[bool] = True

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        self._world, self._target, self._params = world, target, params
        self._lift: Callable[[], None] = lambda: None

    def _impose(self, rule: LinkRule) -> None:
        """Put `rule` on the direction that the parameters name."""
        direction = self._params["direction"]
        if direction not in DIRECTIONS:
            raise Unable(f"direction is one of {', '.join(DIRECTIONS)}, not {direction!r}")
        forth, back = (rule if direction in ("both", way) else PLAIN for way in ("forth", "back"))
        self._lift = self._world.link(self._target).impose(forth, back)

    async def lift(self) -> None:
        self._lift()
