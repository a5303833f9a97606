"""kill -9, and a new process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value


class Restart(ProcessFault):
    """A process is killed, and `after_s` later a new one takes its place."""

    params: ClassVar[Mapping[str, Value]] = {"after_s": 0.0}

    async def apply(self) -> str:
        await self._kill()
        await asyncio.sleep(float(self._params["after_s"]))
        await self._revive()
        return "it answers again"

    async def lift(self) -> None:
        await self._revive()
