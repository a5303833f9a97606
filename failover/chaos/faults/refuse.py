"""Refused connections."""

from __future__ import annotations

from failover.chaos.faults.of_link import LinkFault


class Refuse(LinkFault):
    """New connections over a link are refused; those that are open go on."""

    async def apply(self) -> str:
        self._lift = self._world.link(self._target).impose(refuse=True)
        return ""
