"""An abort that looks like success."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault


class AbortIn200(EngineFault):
    """A prefill sends half of a request's KV and answers 200 with an abort in it, for `count` requests."""

    targets: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "abort_in_200", "count": self._params["count"]}
