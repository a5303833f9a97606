"""SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value


class Stop(ProcessFault):
    """A process is asked to end (SIGTERM); when that is lifted, it has `grace_s` to end, and a new one comes."""

    params: ClassVar[Mapping[str, Value]] = {"grace_s": 10.0}

    async def apply(self) -> str:
        self._befall(signal.SIGTERM)
        return ""

    async def lift(self) -> None:
        await self._revive(grace_s=float(self._params["grace_s"]))
