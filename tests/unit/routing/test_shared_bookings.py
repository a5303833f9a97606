"""The shell that tells and hears bookings: how often, how late, and what it does while Redis is in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from engines.tasks import running, spawn
from engines.types import EngineId
from routing.bookings_log import AGAIN_S, APART_S, Totals
from routing.shared_bookings import SharedBookings
from tests.fakes import now_s, timeless
from tests.stream_link import StreamLink, Streams

P = EngineId("http://p0")
STREAM = b"bookings"


class One:
    """One gateway with a number of tokens booked on one engine."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.shared = SharedBookings(StreamLink(streams), STREAM, name, spawn, self._totals, self._heard)
        self.tokens = 0
        self.heard: list[tuple[float, int]] = []

    def _totals(self) -> Mapping[EngineId, Totals]:
        return {P: Totals(uncached_tokens=self.tokens)} if self.tokens else {}

    def _heard(self, totals: Mapping[EngineId, Totals]) -> None:
        self.heard.append((now_s(), totals[P].uncached_tokens if totals else 0))

    @property
    def others_tokens(self) -> int:
        return self.heard[-1][1] if self.heard else 0

    def book(self, tokens: int) -> None:
        self.tokens = tokens
        self.shared.changed()


@asynccontextmanager
async def two(streams: Streams) -> AsyncIterator[tuple[One, One]]:
    a, b = One(streams, "a"), One(streams, "b")
    for each in (a, b):
        await each.shared.start()
    await asyncio.sleep(0.01)
    yield a, b
    for each in (a, b):
        await each.shared.stop()
    assert not [name for name in running() if name.endswith("bookings")]


@timeless
async def test_the_first_change_is_told_at_once_and_others_20_ms_apart() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        began_s = now_s()
        a.book(1)
        await asyncio.sleep(0)
        for tokens in range(2, 102):
            await asyncio.sleep(0.001)
            a.book(tokens)
        await asyncio.sleep(APART_S)
        assert b.heard[0] == (pytest.approx(began_s), 1)
        assert b.others_tokens == 101
        apart = [after - before for before, after in zip(streams.added, streams.added[1:], strict=False)]
        assert min(apart) >= APART_S - 1e-6
        assert len(apart) >= 5
        assert a.heard == []


@timeless
async def test_what_is_booked_is_said_again_and_nothing_is_not() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(10.1)
        assert 40 <= len(streams.added) <= 42
        assert b.heard == [(b.heard[0][0], 7)], "what does not change is not news"
        assert b.shared.others == 1
        a.book(0)
        await asyncio.sleep(AGAIN_S)
        said = len(streams.added)
        await asyncio.sleep(5.0)
        assert len(streams.added) == said
        assert (b.others_tokens, b.shared.others) == (0, 0)


@timeless
async def test_a_lost_entry_is_made_good() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(0.1)
        streams.lose = True
        a.book(8)
        await asyncio.sleep(0.1)
        assert b.others_tokens == 7
        await asyncio.sleep(AGAIN_S)
        assert b.others_tokens == 8


@timeless
async def test_trouble_queues_nothing_and_forgets_others() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(0.1)
        streams.down = True
        down_s = now_s()
        for tokens in range(100, 1100):
            a.book(tokens)
            await asyncio.sleep(0.01)
        assert (b.others_tokens, b.shared.others) == (0, 0)
        assert b.heard[-1][0] - down_s <= 1.0
        assert streams.failed <= 3 * 10 / 0.25, "tried again now and then, not at every change"
        said = len(streams.added)
        streams.down = False
        await asyncio.sleep(0.6)
        assert b.others_tokens == 1099
        assert len(streams.added) - said <= 4, "the newest only"


@timeless
async def test_an_end_that_could_not_be_told_is_told_later() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(0.3)
        streams.down = True
        a.book(0)
        await asyncio.sleep(0.05)
        assert b.others_tokens == 7
        streams.down = False
        await asyncio.sleep(0.51)
        assert b.others_tokens == 0


@timeless
async def test_others_are_forgotten_though_redis_does_not_even_fail() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(0.1)
        streams.down, streams.fails_in_s = True, 60.0
        await asyncio.sleep(1.1)
        assert b.others_tokens == 0


@pytest.mark.parametrize("clock_ms", [None, 5])
def test_a_flushed_stream_is_followed_also_when_the_clock_goes_back(clock_ms: int | None) -> None:
    @timeless
    async def follows() -> None:
        streams = Streams()
        async with two(streams) as (a, b):
            a.book(7)
            await asyncio.sleep(0.1)
            streams.flush(clock_ms)
            a.book(8)
            await asyncio.sleep(2.5)
            assert b.others_tokens == 8

    follows()


@timeless
async def test_stopping_takes_the_bookings_along_also_while_redis_is_down() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        a.book(7)
        await asyncio.sleep(0.1)
        await a.shared.stop()
        await asyncio.sleep(0.01)
        assert b.others_tokens == 0
        streams.down = True
        b.book(1)
        await b.shared.stop()


@timeless
async def test_strangers_entries_are_skipped() -> None:
    streams = Streams()
    async with two(streams) as (a, b):
        streams.add(STREAM, {b"x": b"y"})
        a.book(7)
        await asyncio.sleep(0.1)
        assert b.others_tokens == 7
