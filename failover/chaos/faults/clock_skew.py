"""A clock of its own for one gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value


class ClockSkew(ProcessFault):
    """A gateway ends in order and comes again with a clock that is `ahead_s` ahead, as that of another host.

    Its monotonic clock, that is: the one that all its times are measured by, and that differs from host to host (a
    Linux time namespace; `unshare` and `setpriv` of util-linux). Its wall clock only dates answers and the log.
    """

    targets: ClassVar[frozenset[str]] = frozenset({"gateway"})
    params: ClassVar[Mapping[str, Value]] = {"ahead_s": 100_000, "grace_s": 10.0}

    async def apply(self) -> str:
        await self._end(self._grace_s)
        ahead_s = str(self._params["ahead_s"])
        clock = ("unshare", "--user", "--map-current-user", "--time", "--monotonic", ahead_s)
        # The kernel forgets what a child dies with when it enters another namespace.
        await self._replace(before=(*clock, "setpriv", "--pdeathsig", "KILL"))
        return "it answers again"

    async def lift(self) -> None:
        await self._revive(self._grace_s)

    @property
    def _grace_s(self) -> float:
        return float(self._params["grace_s"])
