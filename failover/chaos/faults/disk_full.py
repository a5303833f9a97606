"""A log that cannot be written."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value
from failover.chaos.world import Unable, World


class DiskFull(ProcessFault):
    """No file takes one byte more from a gateway, its log above all, as if the disk were full.

    By the limit on the size of files, which can be set for a process that runs: writing to them fails with EFBIG where
    a full disk would say ENOSPC. Sockets and pipes go on.
    """

    targets: ClassVar[frozenset[str]] = frozenset({"gateway"})

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        super().__init__(world, target, params)
        self._before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    async def apply(self) -> str:
        if not self._process.running:
            raise Unable(f"{self._target} does not run")
        self._pid = self._process.pid
        self._before = self._limit(self._pid, 0)
        return ""

    async def lift(self) -> None:
        if self._still_runs and self._pid is not None:
            self._limit(self._pid, self._before[0])
        self._pid = None

    def _limit(self, pid: int, limit_bytes: int) -> tuple[int, int]:
        """Set the limit, and keep what it may be raised to; what it was. A process that has ended has none."""
        try:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        except (ProcessLookupError, PermissionError) as error:
            raise Unable(f"{self._target}: {error}") from error
        return before
