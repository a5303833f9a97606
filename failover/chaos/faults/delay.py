"""A slow link: later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_link import LinkFault
from failover.chaos.scenario import Value
from failover.chaos.world import LinkRule


class Delay(LinkFault):
    """What passes a link comes `delay_s` later, and by chance up to `jitter_s` more, in its order."""

    params: ClassVar[Mapping[str, Value]] = {"delay_s": 0.05, "jitter_s": 0.0, "direction": "both"}

    async def apply(self) -> str:
        self._impose(LinkRule(delay_s=float(self._params["delay_s"]), jitter_s=float(self._params["jitter_s"])))
        return ""
