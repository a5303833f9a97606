"""Connections that break."""

from __future__ import annotations

from failover.chaos.faults.of_link import LinkFault


class Reset(LinkFault):
    """All open connections over a link break (RST)."""

    async def apply(self) -> str:
        return f"{self._world.link(self._target).reset()} connections"
