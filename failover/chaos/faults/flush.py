"""FLUSHALL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.scenario import Value
from failover.chaos.world import World


class Flush:
    """Redis loses all that it holds (FLUSHALL); nothing brings it back."""

    targets: ClassVar[frozenset[str]] = frozenset({"redis"})
    params: ClassVar[Mapping[str, Value]] = {}
    real: ClassVar[bool] = False

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        self._world = world

    async def apply(self) -> str:
        await self._world.redis("FLUSHALL")
        return ""

    async def lift(self) -> None:
        return
