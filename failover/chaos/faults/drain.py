"""Draining an engine by the gateways' own means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ENGINES
from failover.chaos.scenario import Value
from failover.chaos.world import World


class Drain:
    """Every gateway that runs is told to drain an engine (`POST /admin/drain`); lifted, to use it again."""

    targets: ClassVar[frozenset[str]] = ENGINES
    params: ClassVar[Mapping[str, Value]] = {}
    real: ClassVar[bool] = False

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        self._world, self._target = world, target
        self._told: list[str] = []

    async def apply(self) -> str:
        for gateway in self._world.names("gateway"):
            self._told.append(gateway)
            await self._tell(gateway, "/admin/drain")
        return ""

    async def lift(self) -> None:
        while self._told:
            await self._tell(self._told[-1], "/admin/undrain")
            self._told.pop()

    async def _tell(self, gateway: str, path: str) -> None:
        if self._world.process(gateway).running:
            await self._world.admin(gateway, "POST", path, {"engine": self._world.seen(gateway, self._target)})
