"""Redis comes again without its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value


class RedisFailover(ProcessFault):
    """Redis dies, and a replica that had got nothing yet has its place: another server, an empty data set."""

    targets: ClassVar[frozenset[str]] = frozenset({"redis"})
    params: ClassVar[Mapping[str, Value]] = {}

    async def apply(self) -> str:
        await self._kill()
        await self._process.start(("--dbfilename", f"empty-{self._pid}.rdb"))
        self._pid = None
        return "it answers again"

    async def lift(self) -> None:
        await self._revive()
