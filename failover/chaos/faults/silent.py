"""Half-open connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_link import LinkFault
from failover.chaos.scenario import Value
from failover.chaos.world import LinkRule


class Silent(LinkFault):
    """Nothing passes a link, not even the end of a connection, and nobody is told; lifted, it all comes."""

    params: ClassVar[Mapping[str, Value]] = {"direction": "both"}

    async def apply(self) -> str:
        self._impose(LinkRule(silent=True))
        return ""
