"""Looks again at a server of which other gateways have seen a newer boot: which of us is behind?

Only a look that began after the doubt and read the boot fingerprint settles it: then either the restart is noticed in
the usual way, or the boot we know is there after all and the store is told so. Until then it is looked again. Gateways
that see different servers behind one name would contradict each other for ever: the pauses grow, and it is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from engines.tasks import spawn
from engines.types import EngineId, EngineView
from gateway.owners import Owners

_log = logging.getLogger("pdgate.owners")

_PAUSE_S, _MAX_PAUSE_S = 0.25, 30.0
_CALM_S = 60.0
"""After so long without a doubt about a server its pauses begin anew."""
_CONTRADICTED_S = 4.0
"""Pauses of this length are said: the third contradiction in a row or so."""


class Prober(Protocol):
    """Who looks (`failover.monitor.Monitor`)."""

    async def probe_now(self, engine_id: EngineId) -> bool: ...

    def has_read_since(self, engine_id: EngineId, since_s: float) -> bool: ...


class SecondLook:
    """Called with a server that is doubted; one look at a time for each."""

    def __init__(self, prober: Prober, owners: Owners, view: Callable[[EngineId], EngineView]) -> None:
        self._prober = prober
        self._owners = owners
        self._view = view
        self._tasks: dict[EngineId, asyncio.Task[None]] = {}
        self._pauses: dict[EngineId, tuple[float, float]] = {}
        """The next pause, and since when it counts."""

    def __call__(self, engine_id: EngineId) -> None:
        if engine_id not in self._tasks:
            self._tasks[engine_id] = spawn(self._settle(engine_id), f"second look at {engine_id}")

    async def stop(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, engine_id: EngineId) -> None:
        try:
            while self._owners.is_doubted(engine_id):
                await asyncio.sleep(self._next_pause_s(engine_id))
                doubted_s = asyncio.get_running_loop().time()
                await self._prober.probe_now(engine_id)
                if self._owners.is_doubted(engine_id) and self._prober.has_read_since(engine_id, doubted_s):
                    self._owners.seen_again(self._view(engine_id))
        finally:
            del self._tasks[engine_id]

    def _next_pause_s(self, engine_id: EngineId) -> float:
        now_s = asyncio.get_running_loop().time()
        pause_s, since_s = self._pauses.get(engine_id, (0.0, now_s))
        if now_s - since_s > pause_s + _CALM_S:
            pause_s = 0.0
        if pause_s == _CONTRADICTED_S:
            _log.warning("%s: other gateways see another server under this name, or another bootstrap port", engine_id)
        self._pauses[engine_id] = (min(_MAX_PAUSE_S, 2 * pause_s or _PAUSE_S), now_s)
        return pause_s
