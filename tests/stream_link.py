"""A stand-in for the link to Redis, of which only streams work: one data set for all links that are made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from failover.shared import LinkTrouble
from routing.redis_link import LinkState, RedisTrouble, Trouble
from tests.fakes import now_s


class Streams:
    """The data set. `down`: every call fails, after `fails_in_s`."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]] = {}
        self.clock_ms = 1_000_000
        self.added: list[float] = []
        self.down = False
        self.fails_in_s = 0.0
        self.failed = 0
        self.takes_s = 0.0
        """Scripts take so long."""
        self.lose = False
        """The next entry is not kept, though its sender is told that it was."""
        self._grown = asyncio.Event()

    def add(self, stream: bytes, fields: dict[bytes, bytes]) -> bytes:
        self.added.append(now_s())
        self.clock_ms += 1
        entry_id = b"%d-0" % self.clock_ms
        if self.lose:
            self.lose = False
            return entry_id
        self.entries.setdefault(stream, []).append((entry_id, fields))
        self._grown.set()
        return entry_id

    def flush(self, clock_ms: int | None = None) -> None:
        """Everything is lost; the clock may have gone back."""
        self.entries.clear()
        self.clock_ms = self.clock_ms if clock_ms is None else clock_ms

    def after(self, stream: bytes, entry_id: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return [each for each in self.entries.get(stream, ()) if _order(each[0]) > _order(entry_id)]

    async def wait(self, block_s: float) -> None:
        self._grown.clear()
        try:
            async with asyncio.timeout(block_s):
                await self._grown.wait()
        except TimeoutError:
            pass


class StreamLink:
    """A way to it that raises RedisTrouble, as `routing/` wants it."""

    is_cluster = False
    where = "nowhere"
    state = LinkState(None, "", 0.0)

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    async def run(self, call: Any) -> Any:
        raise NotImplementedError

    async def run_all(self, calls: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    async def command(self, *words: bytes | str | int) -> Any:
        await self._check()
        name, stream, *rest = words
        assert isinstance(stream, bytes)
        if name == "XREVRANGE":
            assert rest == ["+", "-", "COUNT", 1]
            return self.streams.entries.get(stream, [])[-1:]
        assert (name, rest[0], rest[1], rest[3]) == ("XADD", "MAXLEN", "~", "*")
        fields = [word if isinstance(word, bytes) else str(word).encode() for word in rest[4:]]
        return self.streams.add(stream, dict(zip(fields[::2], fields[1::2], strict=True)))

    async def read(
        self, after: Mapping[bytes, bytes], block_s: float, count: int = 256
    ) -> Mapping[bytes, list[tuple[bytes, dict[bytes, bytes]]]]:
        await self._check()
        ((stream, entry_id),) = after.items()
        if not (found := self.streams.after(stream, entry_id)):
            await self.streams.wait(block_s)
            await self._check()
            found = self.streams.after(stream, entry_id)
        return {stream: found[:count]} if found else {}

    async def _check(self) -> None:
        await asyncio.sleep(0)
        if self.streams.down:
            await asyncio.sleep(self.streams.fails_in_s)
            self.streams.failed += 1
            raise RedisTrouble(Trouble.DOWN, "it is down")


class FailoverStreamLink:
    """The same as `failover/` wants it; scripts are answered by `script(name, args)`."""

    def __init__(self, streams: Streams) -> None:
        self._link = StreamLink(streams)
        self.ran: list[tuple[str, list[bytes | int | str]]] = []
        self.script: Any = lambda name, args: 0

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[bytes | int | str]) -> Any:
        await self._translated(self._link._check())
        await asyncio.sleep(self._link.streams.takes_s)
        self.ran.append((script, list(args)))
        return self.script(script, list(args))

    async def command(self, *words: bytes | str | int) -> Any:
        return await self._translated(self._link.command(*words))

    async def read(self, after: Mapping[bytes, bytes], block_s: float) -> Any:
        return await self._translated(self._link.read(after, block_s))

    async def _translated(self, work: Any) -> Any:
        try:
            return await work
        except RedisTrouble as error:
            raise LinkTrouble(str(error)) from error


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))
