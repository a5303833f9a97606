"""kill -9."""

from __future__ import annotations

from failover.chaos.faults.of_process import ProcessFault


class Kill(ProcessFault):
    """A process is killed (kill -9); when that is lifted, a new one takes its place."""

    async def apply(self) -> str:
        await self._kill()
        return ""

    async def lift(self) -> None:
        await self._revive()
