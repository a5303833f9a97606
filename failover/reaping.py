"""Releases what one dead gateway had: claims it, aborts each journaled attempt on both of its servers, forgets it.

A shell. An attempt that a live gateway has journaled too is that one's. The claim expires unless it is renewed: when
this gateway dies in the middle, another takes over what is left in the journal. Aborts are harmless twice, as a rid
never comes again. While Redis cannot be reached they go on: who is dead stays dead.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from failover.journal import FailoverKeys, Server, unpack_attempt
from failover.monitor import Spawn
from failover.reaper import LEASE_S
from failover.shared import Link, LinkTrouble

MARK_S = 86_400.0
"""For how long one that was declared dead finds its mark; what it had is over by then in any case."""
GIVE_UP_S = 60.0
"""A server that answers no abort for so long is left to itself."""
AT_ONCE = 32
"""Aborts under way at a time."""
AT_ONCE_ON_ONE = 8
_RENEW_S = 1.0
_AGAIN_S = 0.5
"""Between two tries on a server that did not answer."""
_PAGE = 500

Abort = Callable[[Server, str], Awaitable[bool]]
"""Tells a server to drop a rid; whether that is over: it has answered, has ended, or nobody here knows it.

Bounded in time, raises nothing."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of a dead gateway's attempts: `kept` are those of live ones; `left` no server has answered for."""

    attempts: int
    kept: int
    left: int
    seconds: float


class Reaping:
    """One try to reap one dead gateway; `run` once."""

    def __init__(self, link: Link, keys: FailoverKeys, spawn: Spawn, abort: Abort, dead: str) -> None:
        self._link = link
        self._keys = keys
        self._spawn = spawn
        self._abort = abort
        self._dead = dead
        self._claim = b""
        self._room = asyncio.Semaphore(AT_ONCE)
        self._open: Counter[str] = Counter()
        """Rids → on how many servers they are not known to be released."""
        self._done: list[str] = []

    async def run(self, me: str, data_set: str, live: Iterable[str]) -> Reaped | None:
        """None where it is not ours to reap, or not any more."""
        began_s = asyncio.get_running_loop().time()
        work: set[asyncio.Task[None]] = set()
        try:
            if not await self._take(me, data_set):
                return None
            keeping = self._spawn(self._keep(), f"keep the claim on {self._dead}")
            work.add(keeping)
            attempts = await self._journal(self._dead)
            total = len(attempts)
            kept = await self._journaled_by(live, attempts)
            for rid in kept:
                del attempts[rid]
            self._done.extend(kept)
            for server, rids in self._by_server(attempts).items():
                work.add(self._spawn(self._release(server, rids), f"reap {self._dead} on {server.engine_id}"))
            while len(work) > 1:
                _, work = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                if keeping not in work:
                    return None  # the claim is lost
            await _end(work)
            if not await self._say(over=True):
                return None
            seconds = asyncio.get_running_loop().time() - began_s
            return Reaped(total, len(kept), len(self._open), seconds)
        except LinkTrouble:
            return None
        finally:
            await _end(work)

    # ---- Redis -----------------------------------------------------------------------------------------------------

    async def _take(self, me: str, data_set: str) -> bool:
        keys, dead = self._keys, self._dead
        names = [keys.lives(), keys.addresses(), keys.data_set(), keys.reaped(dead), keys.claim(dead)]
        args: list[bytes | int | str] = [me, dead, data_set, int(LEASE_S * 1000), int(MARK_S * 1000)]
        self._claim = bytes(await self._link.run("claim_dead", names, args))
        return bool(self._claim)

    async def _keep(self) -> None:
        """Renew the claim; ends when it is lost."""
        while True:
            await asyncio.sleep(_RENEW_S)
            with suppress(LinkTrouble):  # who takes over meanwhile does the same
                if not await self._say(over=False):
                    return

    async def _say(self, *, over: bool) -> bool:
        keys, dead = self._keys, self._dead
        names = [keys.claim(dead), keys.attempts(dead), keys.lives(), keys.addresses()]
        told = self._done[:_PAGE]
        args: list[bytes | int | str] = [self._claim, int(LEASE_S * 1000), dead, int(over), *told]
        still_ours = bool(int(await self._link.run("keep_claim", names, args)))
        del self._done[: len(told)]
        return still_ours

    async def _journal(self, replica: str) -> dict[str, Sequence[Server]]:
        """What a replica has journaled; no more than it may have (`shared_attempts.MAX_ATTEMPTS`)."""
        found: dict[str, Sequence[Server]] = {}
        cursor = b"0"
        while True:
            cursor, rows = await self._link.command("HSCAN", self._keys.attempts(replica), cursor, "COUNT", _PAGE)
            for rid, value in zip(rows[::2], rows[1::2], strict=True):
                found[bytes(rid).decode(errors="replace")] = unpack_attempt(value)
            if bytes(cursor) == b"0":
                return found

    async def _journaled_by(self, live: Iterable[str], attempts: Mapping[str, object]) -> list[str]:
        """Those that a live replica has, too."""
        rids, found = list(attempts), set[str]()
        for replica in live:
            for at in range(0, len(rids), _PAGE):
                page = rids[at : at + _PAGE]
                values = await self._link.command("HMGET", self._keys.attempts(replica), *page)
                found.update(rid for rid, value in zip(page, values, strict=True) if value is not None)
        return sorted(found)

    # ---- servers ---------------------------------------------------------------------------------------------------

    def _by_server(self, attempts: Mapping[str, Sequence[Server]]) -> dict[Server, list[str]]:
        """The rids on each server, the decodes' first to be asked for: a decode tells its prefill."""
        rids: dict[Server, list[str]] = {}
        for rid, servers in attempts.items():
            self._open.update([rid] * len(servers))
            for server in reversed(servers):
                rids.setdefault(server, []).append(rid)
            if not servers:
                self._done.append(rid)  # a stranger's entry
        return rids

    async def _release(self, server: Server, rids: list[str]) -> None:
        """Abort all of one server's; again while it does not answer."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + GIVE_UP_S
        left = rids
        while left and clock() < until_s:
            now, later = left[:AT_ONCE_ON_ONE], left[AT_ONCE_ON_ONE:]
            released = await asyncio.gather(*(self._abort_one(server, rid) for rid in now))
            for rid in (rid for rid, done in zip(now, released, strict=True) if done):
                self._open[rid] -= 1
                if not self._open[rid]:
                    del self._open[rid]
                    self._done.append(rid)
            unheard = [rid for rid, done in zip(now, released, strict=True) if not done]
            left = [*unheard, *later]
            if unheard:
                await asyncio.sleep(_AGAIN_S)

    async def _abort_one(self, server: Server, rid: str) -> bool:
        async with self._room:
            return await self._abort(server, rid)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel these, and wait for their end."""
    ends = tuple(tasks)
    for task in ends:
        task.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
