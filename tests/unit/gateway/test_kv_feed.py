"""The feed: whom it follows, what it tells the decider, and when it calls an engine's cache known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engines.kv_events import KvBatch
from engines.kv_subscriber import ConditionKind, Handler, KvCondition
from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored
from engines.types import EngineId, EngineSpec, EngineView, FleetSnapshot, Health, KvEventSource, Role
from gateway import kv_engine_feed, kv_feed
from gateway.kv_engine_feed import FeedMode, Hashing
from gateway.kv_feed import KvFeed
from routing.ownership import Tier
from routing.prefix import id_blocks
from tests.fakes import FACTS

P = EngineId("http://p:1")
IDS = list(range(16))
LEASE = f"kv-events:{P}"
CHAIN = id_blocks(b"tiny", IDS, 4)
SOURCE = KvEventSource("tcp://*:5557", 1)


def stored(start: int, stop: int, medium: Medium = Medium.GPU) -> PagesStored:
    return PagesStored(IDS[start:stop], start - 1 if start else None, IDS[start:stop], 1, medium)


@dataclass
class FakeSubscriber:
    """A subscriber that hands on what a test says."""

    source: KvEventSource
    url: str
    handle: Handler
    running: bool = False

    def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def batch(self, *events: KvEvent, rank: int = 0) -> None:
        await self.handle(rank, KvBatch(0, 1.0, events))

    async def say(self, kind: ConditionKind, first: int = -1, last: int = -1, detail: str = "", rank: int = 0) -> None:
        await self.handle(rank, KvCondition(kind, first, last, detail))


@dataclass
class Told:
    """A decider that notes what it is told."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    elsewhere: bool | None = None

    def engine_held(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.calls.append(("held", epoch, blocks, tier))

    def engine_lost(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.calls.append(("lost", epoch, blocks, tier))

    def engine_cleared(self, engine_id: EngineId, epoch: int) -> None:
        self.calls.append(("cleared", epoch))

    def events_live(self, engine_id: EngineId, live: bool) -> None:
        self.calls.append(("live", live))

    def events_elsewhere(self, engine_id: EngineId, elsewhere: bool) -> None:
        self.elsewhere = elsewhere

    def take(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def view_of(source: KvEventSource | None = SOURCE, epoch: int = 1, **facts: Any) -> EngineView:
    spec = EngineSpec(P, "http://p:1", Role.PREFILL)
    return EngineView(spec, Health.READY, epoch, replace(FACTS, kv_events=source, **facts))


@dataclass
class At:
    """One feed over one prefill."""

    view: EngineView
    told: Told = field(default_factory=Told)
    subscribers: list[FakeSubscriber] = field(default_factory=list)
    restarts: list[EngineId] = field(default_factory=list)
    is_ids: bool = True
    leased: bool = True
    alone: bool = False
    let_gone: list[str] = field(default_factory=list)
    feed: KvFeed = field(init=False)

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(1, (self.view,))

    def hold(self, name: str) -> bool:
        assert name == f"kv-events:{P}"
        return self.leased

    def let_go(self, name: str) -> None:
        self.let_gone.append(name)

    @property
    def now(self) -> FakeSubscriber:
        (running,) = [each for each in self.subscribers if each.running]
        return running

    async def looked(self) -> None:
        await asyncio.sleep(0.03)


@pytest.fixture
def feeding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def run(view: EngineView, max_pages: int = 1000) -> AsyncIterator[At]:
        at = At(view)

        def subscriber(context: Any, source: KvEventSource, url: str, handle: Handler, name: str) -> FakeSubscriber:
            if source.endpoint == "bad":
                raise ValueError("a bad endpoint")
            at.subscribers.append(FakeSubscriber(source, url, handle))
            return at.subscribers[-1]

        monkeypatch.setattr(kv_feed, "KvSubscriber", subscriber)
        hashing = Hashing(lambda model: at.is_ids, lambda model, salt, lora: model.encode(), lambda model: 4)
        at.feed = KvFeed(
            at, at.told, hashing, at, restart_seen=at.restarts.append, look_every_s=0.005, max_pages=max_pages
        )
        at.feed.start()
        await at.looked()
        try:
            yield at
        finally:
            await at.feed.stop()
            assert not any(each.running for each in at.subscribers)

    return run


async def test_events_become_blocks_of_the_epoch(feeding: Any) -> None:
    async with feeding(view_of(epoch=7)) as at:
        await at.now.say(ConditionKind.WHOLE)
        await at.now.batch(stored(0, 9), PagesRemoved([7]), PagesCleared())
        assert at.told.take() == [
            ("live", True),
            ("held", 7, CHAIN[:2], Tier.DEVICE),
            ("lost", 7, CHAIN[1:2], Tier.DEVICE),
            ("cleared", 7),
        ]
        await at.now.batch(stored(0, 4, Medium.CPU_PINNED))
        stats = at.feed.stats()[P]
        assert (stats.mode, stats.batches, stats.pages) == (FeedMode.EVENTS, 2, 4)
        assert stats.pages_bytes == 4 * (105 + 4 + 360 // 4)
        assert stats.last_event_age_s is not None
        at.told.take()
    assert at.told.take() == [("live", False)]


async def test_holes_make_it_approximate_until_the_cache_is_cleared(
    feeding: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(view_of()) as at:
        assert at.feed.stats()[P].mode is FeedMode.APPROXIMATE
        await at.now.say(ConditionKind.WHOLE)
        await at.now.say(ConditionKind.FILLED, 3, 4)
        await at.now.say(ConditionKind.QUIET)
        assert at.told.take() == [("live", True)]
        with caplog.at_level(logging.WARNING):
            await at.now.say(ConditionKind.LOST, 5, 8)
        assert "batches 5 to 8 are lost" in caplog.text
        await at.now.batch(stored(0, 4))
        assert at.told.take() == [("live", False), ("held", 1, CHAIN[:1], Tier.DEVICE)]
        stats = at.feed.stats()[P]
        assert (stats.mode, stats.gaps, stats.lost, stats.trouble) == (
            *(FeedMode.APPROXIMATE, 2, 4),
            "batches 5 to 8 are lost",
        )
        await at.now.batch(PagesCleared())
        assert at.told.take() == [("cleared", 1), ("live", True)]
        await at.now.say(ConditionKind.MALFORMED, 9, 9, "bad bytes")
        assert at.told.take() == [("live", False)]
        assert (at.feed.stats()[P].malformed, at.feed.stats()[P].trouble) == (1, "bad bytes")
        await at.now.batch(stored(0, 4))
        assert at.told.take() == [("held", 1, CHAIN[:1], Tier.DEVICE)]
        await at.now.say(ConditionKind.RESTARTED)
        await at.now.say(ConditionKind.WHOLE)
        assert at.told.take() == [("cleared", 1), ("live", True)]
        assert at.restarts == [P]
        await at.now.batch(stored(4, 8))  # its parent went with the old process
        assert at.told.take() == []
        await at.now.say(ConditionKind.NOT_LISTENING, detail="port taken")
        assert at.feed.stats()[P].trouble == "port taken"


async def test_too_many_pages_and_pages_of_another_size_make_it_approximate(feeding: Any) -> None:
    async with feeding(view_of(), max_pages=8) as at:
        await at.now.say(ConditionKind.WHOLE)
        await at.now.batch(stored(0, 9))
        assert at.told.take() == [("live", True), ("live", False)]
        await at.now.say(ConditionKind.WHOLE)
        assert at.feed.stats()[P].mode is FeedMode.APPROXIMATE
        await at.now.batch(PagesCleared(), PagesStored([1], None, [1, 2], 2))
        assert at.told.take() == [("cleared", 1), ("live", True), ("live", False)]


async def test_a_block_is_the_engines_while_any_rank_has_it(feeding: Any) -> None:
    async with feeding(view_of(replace(SOURCE, dp_size=2))) as at:
        await at.now.say(ConditionKind.WHOLE, rank=1)
        assert at.told.take() == [("live", False)]
        await at.now.say(ConditionKind.WHOLE, rank=0)
        assert at.told.take() == [("live", True)]
        for rank in (0, 1):
            await at.now.batch(stored(0, 4 + 4 * rank), rank=rank)
        at.told.take()
        await at.now.batch(PagesRemoved(IDS[:8]), rank=0)
        assert at.told.take() == []
        await at.now.batch(stored(0, 4), rank=0)
        at.told.take()
        await at.now.batch(PagesCleared(), rank=1)
        assert at.told.take() == [("lost", 1, CHAIN[1:2], Tier.DEVICE)]
        await at.now.batch(PagesCleared(), rank=0)
        assert at.told.take() == [("cleared", 1)]


@pytest.mark.parametrize("why", ["text", "lease", "no events", "no cache"])
async def test_who_is_not_followed(feeding: Any, why: str) -> None:
    async with feeding(view_of()) as at:
        await at.now.say(ConditionKind.WHOLE)
        at.told.take()
        at.is_ids, at.leased = why != "text", why != "lease"
        at.view = view_of(None if why == "no events" else SOURCE, radix_cache=why != "no cache")
        await at.looked()
        assert not at.subscribers[0].running
        assert at.told.take() == [("live", False)]
        assert at.feed.stats()[P].mode is FeedMode.OFF
        assert at.let_gone == ([] if why == "lease" else [LEASE])
        assert at.told.elsewhere is (why == "lease")
        at.is_ids = at.leased = True
        at.view = view_of()
        await at.looked()
        assert at.now is at.subscribers[1]
        assert at.told.elsewhere is False


@pytest.mark.parametrize("replay", ["", "tcp://*:6000"])
async def test_a_new_epoch_begins_anew_and_cuts_no_subscription_that_cannot_catch_up(feeding: Any, replay: str) -> None:
    source = replace(SOURCE, replay_endpoint=replay)
    async with feeding(view_of(source)) as at:
        await at.now.say(ConditionKind.WHOLE)
        await at.now.batch(stored(0, 4))
        at.told.take()
        at.view = view_of(source, epoch=2)
        await at.looked()
        assert len(at.subscribers) == (2 if replay else 1)
        assert at.told.take() == [("live", False)]
        assert at.feed.stats()[P].pages == 0
        await at.now.say(ConditionKind.WHOLE)
        await at.now.batch(stored(0, 4))
        assert at.told.take() == [("live", True), ("held", 2, CHAIN[:1], Tier.DEVICE)]


async def test_a_source_without_an_address_is_said_and_left_alone(feeding: Any) -> None:
    async with feeding(view_of(replace(SOURCE, endpoint="bad"))) as at:
        assert at.subscribers == []
        assert at.feed.stats()[P].trouble == "a bad endpoint"


async def test_large_events_leave_the_loop_to_others(feeding: Any) -> None:
    async with feeding(view_of(), max_pages=100_000) as at:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        many = list(range(20_000))
        await at.now.batch(PagesStored(many, None, many, 1), PagesRemoved(many))
        task.cancel()
        assert turns >= 2 * 20_000 // kv_engine_feed.SLICE_PAGES
        held = [call for call in at.told.take() if call[0] == "held"]
        assert held[-1][2] == id_blocks(b"tiny", many, 4)


async def test_many_small_events_are_few_steps_and_none_is_long(feeding: Any) -> None:
    """As engines publish that write an event a page: of one prompt, of two in turn, and removals."""
    async with feeding(view_of(), max_pages=100_000) as at:
        loop = asyncio.get_running_loop()
        turns: list[float] = []

        async def other() -> None:
            while True:
                turns.append(loop.time())
                await asyncio.sleep(0)

        one, two = list(range(4096)), list(range(10_000, 14_096))
        pages = [[page] for page in one]
        task = asyncio.ensure_future(other())
        began_s = time.process_time()
        await at.now.batch(*(PagesStored(page, page[0] - 1 if page[0] else None, page, 1) for page in pages))
        assert len([call for call in at.told.take() if call[0] == "held"]) == 4096 // kv_engine_feed.SLICE_PAGES
        await at.now.batch(
            *(
                PagesStored([page], None if page == ids[0] else page - 1, [page], 1, Medium.DISK)
                for both in zip(two, [20_000 + page for page in one], strict=True)
                for page, ids in zip(both, (two, [20_000]), strict=True)
            )
        )
        assert len([call for call in at.told.take() if call[0] == "held"]) <= 2 * 8192 // kv_engine_feed.SLICE_PAGES
        await at.now.batch(*(PagesRemoved(page) for page in pages))
        lost = [block for call in at.told.take() for block in call[2] if call[0] == "lost"]
        assert len(set(lost)) == len(one) // 4
        task.cancel()
        assert len(turns) >= 4 * 4096 // kv_engine_feed.SLICE_PAGES
        assert time.process_time() - began_s < 1.5


async def test_a_slow_step_ends_early(feeding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of many chains cannot be joined: the clock counts, too. And batches that are there already wait."""
    async with feeding(view_of()) as at:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        monkeypatch.setattr(kv_engine_feed, "STEP_S", 0.0)
        await at.now.batch(*(PagesStored([page], None, [page], 1) for page in range(20)))
        assert turns >= 20
        before = turns
        for _ in range(10):
            await at.now.batch()
        assert turns >= before + 10
        task.cancel()


@pytest.mark.parametrize("bad", ["address", "port"])
async def test_what_cannot_be_followed_is_left_to_others_for_a_while(
    feeding: Any, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setattr(kv_feed, "UNABLE_S", 0.1)
    monkeypatch.setattr(kv_feed, "LEFT_TO_OTHERS_S", 0.2)
    source = replace(SOURCE, dp_size=2)
    async with feeding(view_of(replace(source, endpoint="bad") if bad == "address" else source)) as at:
        if bad == "port":
            await at.now.say(ConditionKind.NOT_LISTENING, detail="port taken", rank=1)
            await at.now.say(ConditionKind.LISTENING, rank=1)
            await asyncio.sleep(0.15)
            assert at.let_gone == []  # it listens by now
            await at.now.say(ConditionKind.NOT_LISTENING, detail="port taken", rank=1)
            await asyncio.sleep(0.06)
            await at.now.say(ConditionKind.NOT_LISTENING, detail="port taken", rank=1)
        await asyncio.sleep(0.06)
        trouble = "port taken" if bad == "port" else "a bad endpoint"
        await until(lambda: at.let_gone == [LEASE])
        assert (at.feed.stats()[P].mode, at.feed.stats()[P].trouble) == (FeedMode.OFF, trouble)
        at.view = view_of()
        began_s = asyncio.get_running_loop().time()
        await until(lambda: at.feed.stats()[P].mode is not FeedMode.OFF)
        assert asyncio.get_running_loop().time() - began_s > 0.1
        assert at.now.running


async def test_who_is_alone_goes_on_trying(feeding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "UNABLE_S", 0.02)
    async with feeding(view_of()) as at:
        at.alone = True
        await at.now.say(ConditionKind.NOT_LISTENING, detail="port taken")
        await asyncio.sleep(0.08)
        assert at.let_gone == []
        assert at.now is at.subscribers[0]


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 3
    while not condition():
        assert loop.time() < end_s
        await asyncio.sleep(0.002)
