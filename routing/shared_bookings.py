"""Tells other replicas what this one has booked and hears what they have, through one stream in Redis.

A shell around `routing/bookings_log.py`, where the rules are. No request waits for it. While Redis is in trouble
nothing is queued, since the newest totals are all that anybody wants, and what others had booked is forgotten after a
second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from engines.types import EngineId
from routing.bookings_log import APART_S, MAX_ENTRIES, Others, Publication, Totals, pack, unpack
from routing.redis_link import RedisLink, RedisTrouble, Spawn

_BLOCK_S = 1.0
_RETRY_S = 0.25
_START = b"0-0"

TotalsNow = Callable[[], Mapping[EngineId, Totals]]
"""All that is booked here now; engines without anything are left out."""
Heard = Callable[[Mapping[EngineId, Totals]], None]
"""Takes what all others have booked, whenever that changed."""


class SharedBookings:
    """The bookings that replicas of one fleet share. `start` and `stop` once each."""

    def __init__(
        self, link: RedisLink, stream: bytes, replica: str, spawn: Spawn, totals_now: TotalsNow, heard: Heard
    ) -> None:
        self._link = link
        self._stream = stream
        self._spawn = spawn
        self._totals_now = totals_now
        self._heard = heard
        self._publication = Publication(replica)
        self._others = Others(replica)
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def others(self) -> int:
        """Replicas heard within the last second: those on which anything is booked."""
        return len(self._others)

    def changed(self) -> None:
        """Something was booked or released here: others will be told within 20 ms. Quick, and never fails."""
        self._changed.set()

    async def start(self) -> None:
        self._tasks = [
            self._spawn(self._keep_telling(), "tell bookings"),
            self._spawn(self._keep_hearing(), "hear bookings"),
        ]

    async def stop(self) -> None:
        """Say that nothing is booked here any more, and forget the others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._timer is not None:
            self._timer.cancel()
        await self._tell({})

    # ---- telling -------------------------------------------------------------------------------------------------

    async def _keep_telling(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._publication.again_in_s(loop.time())):
                    await self._changed.wait()
            except TimeoutError:
                pass  # nothing changed: say it again
            self._changed.clear()
            began_s = loop.time()
            told = await self._tell(self._totals_now())
            await asyncio.sleep(began_s + APART_S - loop.time() if told else _RETRY_S)

    async def _tell(self, totals: Mapping[EngineId, Totals]) -> bool:
        """Send what others do not know of `totals`; False when Redis did not take it."""
        entry = self._publication.next(totals, asyncio.get_running_loop().time())
        if entry is None:
            return True
        words = [word for field in pack(entry).items() for word in field]
        try:
            await self._link.command("XADD", self._stream, "MAXLEN", "~", MAX_ENTRIES, "*", *words)
        except RedisTrouble:
            self._publication.lost()
            return False
        return True

    # ---- hearing -------------------------------------------------------------------------------------------------

    async def _keep_hearing(self) -> None:
        after: bytes | None = None
        while True:
            try:
                if after is None:
                    after = await self._end()
                found = (await self._link.read({self._stream: after}, _BLOCK_S)).get(self._stream, [])
                if found:
                    after = found[-1][0]
                    self._hear([fields for _, fields in found])
                else:
                    after = min(after, await self._end(), key=_order)  # it was flushed, or its server's clock went back
            except RedisTrouble:
                await asyncio.sleep(_RETRY_S)

    async def _end(self) -> bytes:
        """The id of the last entry: what is older will be said again."""
        last = await self._link.command("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        return bytes(last[0][0]) if last else _START

    def _hear(self, found: list[dict[bytes, bytes]]) -> None:
        entries = [entry for entry in map(unpack, found) if entry is not None]
        if self._others.hear(entries, asyncio.get_running_loop().time()):
            self._heard(self._others.sums())
        self._forget_later()

    def _forget_later(self) -> None:
        """One timer for the first replica that may fall silent; it does not depend on what Redis does."""
        forget_at_s = self._others.forget_at_s()
        if self._timer is None and forget_at_s is not None:
            self._timer = asyncio.get_running_loop().call_at(forget_at_s, self._forget)

    def _forget(self) -> None:
        self._timer = None
        if self._others.forget(asyncio.get_running_loop().time()):
            self._heard(self._others.sums())
        self._forget_later()


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))
