"""A scheduler short of CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value


class SlowScheduler(EngineFault):
    """An engine's scheduler loses `pause_s` in each of its rounds."""

    params: ClassVar[Mapping[str, Value]] = {"pause_s": 0.05}

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "slow_scheduler", **self._params}
