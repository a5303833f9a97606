"""What the faults of processes have in common: who is befallen, its end, and a new one in its place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import ClassVar

from failover.chaos.scenario import Value
from failover.chaos.world import Process, Unable, World

ENGINES = frozenset({"prefill", "decode"})
PROCESSES = ENGINES | {"gateway", "redis"}


class ProcessFault:
    """Remembers which process it befell, so that the one in its place is left alone."""

    targets: ClassVar[frozenset[str]] = PROCESSES
    params: ClassVar[Mapping[str, Value]] = {}
    real: ClassVar[bool] = False

    def __init__(self, world: World, target: str, params: Mapping[str, Value]) -> None:
        self._world, self._target, self._params = world, target, params
        self._pid: int | None = None
        """The process that was befallen, until that is undone."""
        self._replaced = False

    @property
    def _process(self) -> Process:
        return self._world.process(self._target)

    def _befall(self, number: signal.Signals) -> None:
        """Send the process a signal; Unable if none runs."""
        process = self._process
        if not process.running:
            raise Unable(f"{self._target} does not run")
        self._pid = process.pid
        process.send_signal(number)

    @property
    def _still_runs(self) -> bool:
        return self._pid is not None and self._process.running and self._process.pid == self._pid

    async def _kill(self) -> None:
        self._befall(signal.SIGKILL)
        await self._process.wait()

    async def _end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL if it has not ended `grace_s` later."""
        self._befall(signal.SIGTERM)
        await self._ended(grace_s)

    async def _ended(self, grace_s: float) -> None:
        if self._still_runs and grace_s > 0:
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                pass
        if self._still_runs:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def _replace(self, flags: Sequence[str] = (), before: Sequence[str] = ()) -> None:
        """A process that is started otherwise takes the place of the one that has ended, until `_revive`."""
        self._replaced = True
        await self._process.start(flags, before)
        self._pid = self._process.pid

    async def _revive(self, grace_s: float = 0.0) -> None:
        """See that a new process, started as usual, has the place of the one that was befallen."""
        if self._pid is None:
            return
        if self._replaced and self._process.running:
            await self._end(grace_s)
        await self._ended(grace_s)
        if not self._process.running:
            await self._process.start()
        self._pid, self._replaced = None, False
