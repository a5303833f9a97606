"""Health that is not true."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value
from failover.chaos.world import Unable

_SAYS = {"well": "stuck", "ill": "ill"}


class LyingHealth(EngineFault):
    """An engine says that it is well and does nothing; or, with `says` = ill, that it is ill, and works."""

    params: ClassVar[Mapping[str, Value]] = {"says": "well"}

    def _fault(self) -> Mapping[str, Any]:
        says = self._params["says"]
        if says not in _SAYS:
            raise Unable(f"says is one of {', '.join(_SAYS)}, not {says!r}")
        return {"fault": _SAYS[str(says)]}
