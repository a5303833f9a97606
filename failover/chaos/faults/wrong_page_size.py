"""A server with other flags than the fleet's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ENGINES, ProcessFault
from failover.chaos.scenario import Value


class WrongPageSize(ProcessFault):
    """An engine is killed and comes again with another page size, which fits none of the others."""

    targets: ClassVar[frozenset[str]] = ENGINES
    params: ClassVar[Mapping[str, Value]] = {"page_size": 32}

    async def apply(self) -> str:
        await self._kill()
        await self._replace(("--page-size", str(self._params["page_size"])))
        return "it answers again"

    async def lift(self) -> None:
        await self._revive()
