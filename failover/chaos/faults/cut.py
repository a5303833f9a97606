"""Connections that end."""

from __future__ import annotations

from failover.chaos.faults.of_link import LinkFault


class Cut(LinkFault):
    """All open connections over a link end in order (FIN), behind what is under way."""

    async def apply(self) -> str:
        return f"{self._world.link(self._target).cut()} connections"
