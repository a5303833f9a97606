"""KV that comes in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault


class PartialKv(EngineFault):
    """A prefill sends half of a request's KV and fails, for `count` requests; the decode goes on waiting."""

    targets: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "partial_kv", "count": self._params["count"]}
