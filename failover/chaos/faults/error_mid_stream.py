"""An error after the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value


class ErrorMidStream(EngineFault):
    """The next `count` streams of a decode end with an error event behind `after_tokens` tokens."""

    targets: ClassVar[frozenset[str]] = frozenset({"decode"})
    params: ClassVar[Mapping[str, Value]] = {"count": 1, "after_tokens": 5}

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "error_event", **self._params}
