"""KV that is never given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value


class Leak(EngineFault):
    """An engine loses so many `tokens` of KV to nobody; lifted, it finds them again."""

    params: ClassVar[Mapping[str, Value]] = {"tokens": 1000}

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "leak", **self._params}
