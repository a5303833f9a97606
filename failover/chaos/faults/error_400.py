"""Engines that answer 400."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from failover.chaos.faults.of_engine import EngineFault


class Error400(EngineFault):
    """An engine answers 400 to its next `count` requests."""

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "status", "status": 400, "count": self._params["count"]}
