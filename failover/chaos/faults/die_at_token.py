"""Death in the middle of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value


class DieAtToken(EngineFault):
    """A decode dies by itself when it has written token `token` of its next stream; lifted, it comes again."""

    targets: ClassVar[frozenset[str]] = frozenset({"decode"})
    params: ClassVar[Mapping[str, Value]] = {"token": 5}

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "die", "after_tokens": self._params["token"]}
