"""A slow link: narrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_link import LinkFault
from failover.chaos.scenario import Value
from failover.chaos.world import LinkRule


class Bandwidth(LinkFault):
    """So many bytes a second pass a link at most, over all its connections."""

    params: ClassVar[Mapping[str, Value]] = {"bytes_per_s": 100_000.0, "direction": "both"}

    async def apply(self) -> str:
        self._impose(LinkRule(bytes_per_s=float(self._params["bytes_per_s"])))
        return ""
