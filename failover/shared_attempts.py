"""The journal of one gateway's live attempts: which rid runs on which servers, for whoever has to release them.

It is for deaths that close no socket. Nobody waits for it: what changed is written in batches, `FLUSH_S` after the
first change, so that an attempt of a gateway that dies within that time may be missing. An attempt that is over before
that is never written. What Redis may not have got is made good by writing all of it anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

from failover.journal import FailoverKeys, Server, pack_attempt
from failover.monitor import Spawn
from failover.reaper import ReplicaName
from failover.shared import RETRY_S, Link, LinkTrouble

FLUSH_S = 0.05
KEEP_S = 86_400.0
"""How long a journal is kept in which nothing more is written."""
MAX_ATTEMPTS = 100_000
"""Attempts beyond this are not journaled: at 250 bytes each, 25 MB here and in Redis."""
_BATCH = 1000
"""Attempts that one call writes, and as many that it strikes off."""


def _nobody() -> None:
    """Nobody wants to know."""


class SharedAttempts:
    """The attempts of one gateway. `start` and `stop` once each; the rest is synchronous, quick, and never fails.

    `marked` is called when a write was refused because this replica had been declared dead.
    """

    def __init__(self, link: Link, keys: FailoverKeys, name: ReplicaName, spawn: Spawn) -> None:
        self._link = link
        self._keys = keys
        self._name = name
        self._spawn = spawn
        self._live: dict[str, tuple[Server, Server]] = {}
        self._begun: dict[str, None] = {}
        self._over: dict[str, None] = {}
        """What Redis was not told yet; of those that it was told to have begun."""
        self._whole = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.marked: Callable[[], None] = _nobody
        self.unwritten = 0
        """Attempts that were not journaled, as there were too many."""

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, rid: str, prefill: Server, decode: Server) -> None:
        """An attempt may hold something on these servers from now on."""
        if len(self._live) >= MAX_ATTEMPTS:
            self.unwritten += 1
            return
        self._live[rid] = (prefill, decode)
        self._begun[rid] = None
        self._wake.set()

    def end(self, rid: str) -> None:
        """Neither of its legs holds anything any more. No effect when that was known, or its beginning was not."""
        if self._live.pop(rid, None) is None:
            return
        if rid in self._begun:
            del self._begun[rid]
        else:
            self._over[rid] = None
            self._wake.set()

    def rewrite(self) -> None:
        """Redis may not have what it was told, or the replica has another name: write all of it."""
        self._whole = True
        self._begun, self._over = dict.fromkeys(self._live), {}
        self._wake.set()

    async def start(self) -> None:
        self._task = self._spawn(self._keep_writing(), "journal attempts")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_writing(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            if (self._begun or self._over or self._whole) and not await self._write():
                await asyncio.sleep(RETRY_S)
            if self._begun or self._over or self._whole:
                self._wake.set()

    async def _write(self) -> bool:
        """Write one batch; whether Redis took it."""
        name, whole = self._name.now, self._whole
        begun, over = list(islice(self._begun, _BATCH)), list(islice(self._over, _BATCH))
        rows = [word for rid in begun for word in (rid, pack_attempt(*self._live[rid]))]
        for rid in begun:
            del self._begun[rid]
        for rid in over:
            del self._over[rid]
        self._whole = False
        keys = [self._keys.attempts(name), self._keys.reaped(name)]
        try:
            reply = await self._link.run(
                "write_attempts", keys, [int(whole), int(KEEP_S * 1000), len(over), *over, *rows]
            )
        except LinkTrouble:
            self.rewrite()  # it may have been carried out, or not
            return False
        if not int(reply):
            self.marked()
            if name == self._name.now:
                self.rewrite()
                return False
        return True
