"""The list of refused requests that gateways share: what ends servers of one gateway is not tried through another.

`failover/poison.py` is the local table, which admission asks; this keeps it and the list in Redis alike.
"""

from __future__ import annotations

import asyncio

from failover.journal import MAX_SIGNALS, FailoverKeys
from failover.monitor import Spawn
from failover.poison import MAX_ENTRIES, REFUSED_S, PoisonGuard
from failover.shared import RETRY_S, Link, LinkTrouble

_AGAIN_S = 60.0
"""Everything is compared this often even if nobody says that it changed."""
_CHUNK = 500
"""Entries per call, so that no call keeps Redis busy for long."""


class SharedPoison:
    """Publishes what this gateway refuses and takes in what others do. `start` and `stop` once each."""

    def __init__(self, link: Link, keys: FailoverKeys, replica: str, spawn: Spawn, guard: PoisonGuard) -> None:
        self._link = link
        self._keys = keys
        self._replica = replica
        self._spawn = spawn
        self._guard = guard
        self._unsent: dict[bytes, None] = {}
        self._all = True
        """Everything that is still valid must be sent."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._guard.on_refused = self._refused
        self._task = self._spawn(self._keep(), "share poison")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """The shared list has changed: read it."""
        self._wake.set()

    def publish_all(self) -> None:
        """What was shared may be lost: send everything that is still valid, and read the list."""
        self._all = True
        self._wake.set()

    def _refused(self, fingerprint: bytes) -> None:
        if len(self._unsent) < MAX_ENTRIES:
            self._unsent[fingerprint] = None
        else:
            self._all = True
        self._wake.set()

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._send()
                await self._read()
            except LinkTrouble:
                self._all = True
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(_AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                self._all = True

    async def _send(self) -> None:
        send_all, unsent = self._all, self._unsent
        self._all, self._unsent = False, {}
        now_s = asyncio.get_running_loop().time()
        left = [(name, left_s) for name, left_s in self._guard.refused(now_s) if send_all or name in unsent]
        for start in range(0, len(left), _CHUNK):
            words = [word for name, left_s in left[start : start + _CHUNK] for word in (name, int(left_s * 1000))]
            args = [self._replica, int(REFUSED_S * 1000), MAX_ENTRIES, MAX_SIGNALS, *words]
            await self._link.run("refuse", [self._keys.poison(), self._keys.signals()], args)

    async def _read(self) -> None:
        found = await self._link.run("refused", [self._keys.poison()], [])
        now_s = asyncio.get_running_loop().time()
        for fingerprint, left_ms in zip(found[::2], found[1::2], strict=True):
            self._guard.hear(fingerprint, int(left_ms) / 1000, now_s)
