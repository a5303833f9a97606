"""A doubted server is looked at until a fresh look settles it, ever more slowly where gateways contradict others."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from engines.types import EngineId, EngineView
from gateway.owners import Owners
from gateway.second_look import SecondLook
from routing.index import PrefixIndex
from tests.fakes import FACTS, now_s, timeless
from tests.unit.gateway.test_owners import P0, Store, view


class World:
    """Owners over a prober that is told what each look finds: "read", "late" (no facts), or "gone"."""

    def __init__(self, *finds: str) -> None:
        self.store = Store()
        self.owners = Owners(PrefixIndex(), self.store, lambda model: 64, now_s)
        self.owners.note(view(), 0.0)
        self.store.told.clear()
        self.finds = list(finds)
        self.looked_s: list[float] = []
        self.read_s = 0.0
        self.look = SecondLook(self, self.owners, self.view)
        self.owners.on_restart_seen = self.look

    def view(self, engine_id: EngineId) -> EngineView:
        return view()

    async def probe_now(self, engine_id: EngineId) -> bool:
        began_s = now_s()
        self.looked_s.append(began_s)
        await asyncio.sleep(0.1)
        found = self.finds.pop(0) if self.finds else "read"
        if found == "read":
            self.read_s = began_s
        elif found == "restarted":
            self.owners.note(view(2, replace(FACTS, boot_fingerprint="b2")), 0.0)
        return found != "gone"

    def has_read_since(self, engine_id: EngineId, since_s: float) -> bool:
        return self.read_s >= since_s

    async def doubt(self) -> None:
        self.owners.restart_seen(P0)
        await asyncio.sleep(0)

    async def settled(self) -> None:
        await asyncio.gather(*self.look._tasks.values())


@timeless
async def test_the_boot_that_we_know_is_told_again_when_it_was_read_afresh() -> None:
    world = World("read")
    await world.doubt()
    await world.settled()
    assert world.store.told == [("begin", P0, 1, "boot")]
    assert not world.owners.is_doubted(P0)


@timeless
async def test_a_look_that_read_nothing_settles_nothing() -> None:
    world = World("late", "gone", "late", "read")
    await world.doubt()
    await world.settled()
    assert len(world.looked_s) == 4
    assert world.store.told == [("begin", P0, 1, "boot")]


@timeless
async def test_a_look_from_before_the_doubt_settles_nothing() -> None:
    world = World("late", "read")
    world.read_s = now_s()
    await asyncio.sleep(1.0)
    await world.doubt()
    await asyncio.sleep(0.2)
    assert world.store.told == []
    await world.settled()
    assert len(world.looked_s) == 2


@timeless
async def test_a_restart_that_is_noticed_ends_it() -> None:
    world = World("late", "restarted")
    await world.doubt()
    await world.settled()
    assert world.store.told == [("begin", P0, 2, "b2")]


@timeless
async def test_many_doubts_are_one_look() -> None:
    world = World("read")
    for _ in range(5):
        await world.doubt()
    await world.settled()
    assert len(world.looked_s) == 1


@timeless
async def test_gateways_that_contradict_each_other_slow_down_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    until_s = now_s() + 60.0
    with caplog.at_level(logging.WARNING, logger="pdgate.owners"):
        while now_s() < until_s:
            await world.doubt()
            await world.settled()
    assert len(world.looked_s) < 12
    assert caplog.text.count("another server under this name") == 1
    await asyncio.sleep(120.0)
    await world.doubt()
    before = len(world.looked_s)
    await asyncio.sleep(0.01)
    assert len(world.looked_s) == before + 1 or world.looked_s[-1] >= now_s() - 0.02, "calm again: at once"
    await world.settled()


@timeless
async def test_stopping_ends_a_look() -> None:
    world = World("late")
    await world.doubt()
    await world.look.stop()
    assert world.look._tasks == {}
