"""Replicas of the ownership store in Redis, as gateways run them, for contract tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.tasks import spawn
from engines.types import EngineId
from routing.ownership import Keys, OwnershipConfig, OwnershipStore, RowState, Run, Tier
from routing.ownership_redis import RedisOwnership
from routing.redis_link import Link
from tests.machine import Stopwatch

P0, P1 = EngineId("http://p0:30000"), EngineId("http://p1:30000")
_numbers = itertools.count()


def a_fleet() -> Keys:
    """Names that nobody else uses."""
    return Keys("pdgate-test", f"f{next(_numbers)}")


def chain(seed: int, blocks: int = 4) -> tuple[bytes, ...]:
    """A chain that no other seed gives."""
    return tuple(b"%08d%08d" % (seed, at) for at in range(blocks))


@dataclass
class Told:
    """A listener that remembers."""

    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def held(self, engine_id: EngineId, run: Run, tier: Tier) -> None:
        self.seen.append(("held", engine_id, run.blocks, tier))

    def lost(self, engine_id: EngineId, blocks: Sequence[bytes], tier: Tier) -> None:
        self.seen.append(("lost", engine_id, tuple(blocks), tier))

    def promised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        self.seen.append(("promised", engine_id, tuple(blocks)))

    def unpromised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        self.seen.append(("unpromised", engine_id, tuple(blocks)))

    def cleared(self, engine_id: EngineId) -> None:
        self.seen.append(("cleared", engine_id))

    def restart_seen(self, engine_id: EngineId) -> None:
        self.seen.append(("restart_seen", engine_id))

    def kinds(self) -> list[str]:
        return [what[0] for what in self.seen]


@dataclass
class Replica:
    """One gateway's part: its link, its store, and what the store told."""

    keys: Keys
    link: Link
    store: RedisOwnership
    told: Told

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def hold(self, seed: int, blocks: int = 4, engine_id: EngineId = P0, epoch: int = 1) -> None:
        self.store.hold(engine_id, epoch, chain(seed, blocks), self.now_s())

    def owned(self, seed: int, blocks: int = 4, engine_id: EngineId = P0) -> int:
        return self.store.owners(chain(seed, blocks), self.now_s()).get(engine_id, 0)

    def rows(self) -> set[tuple[Any, ...]]:
        return rows(self.store, self.now_s())


def rows(store: OwnershipStore, now_s: float) -> set[tuple[Any, ...]]:
    """What is held, without when it ends or how epochs are called."""
    return {
        (row.engine_id, row.tier, row.run.parent, row.run.blocks)
        for row in store.snapshot(now_s)
        if row.state is RowState.HELD
    }


@contextlib.asynccontextmanager
async def replica(
    url: str,
    keys: Keys,
    *,
    config: OwnershipConfig | None = None,
    clock: Callable[[], float] | None = None,
    begin: bool = True,
    timeout_s: float = 2.0,
) -> AsyncIterator[Replica]:
    """A replica that knows all there is, unless its Redis is in trouble; both engines run their first boot."""
    link = Link(url, spawn, lambda _: None, timeout_s=timeout_s)
    clock = clock or asyncio.get_running_loop().time
    store = RedisOwnership(link, keys, spawn, clock, f"r{next(_numbers)}", lambda _: True, config)
    told = Told()
    store.listen(told)
    await link.start()
    await store.start()
    try:
        if link.state.trouble is None:
            assert await store.wait_current(5.0), store.status()
        if begin:
            for engine_id in (P0, P1):
                store.begin(engine_id, 1, f"{engine_id} boot 1")
        yield Replica(keys, link, store, told)
    finally:
        await store.stop()
        await link.stop()


async def until(true: Callable[[], Any], within_s: float = 5.0, what: str = "so") -> float:
    """Wait until something is so; how long that took."""
    watch = Stopwatch()
    while not true():
        assert not watch.passed(within_s), f"not {what} within {within_s} s"
        await asyncio.sleep(0.002)
    return watch.took_s()


async def alike(url: str, keys: Keys, *replicas: Replica, within_s: float = 5.0) -> set[tuple[Any, ...]]:
    """Wait until all replicas, and a fresh one, have the same rows."""
    watch = Stopwatch()
    while True:
        await until(lambda: all(each.store.status().queued_bytes == 0 for each in replicas), within_s, "written")
        async with replica(url, keys, begin=False) as fresh:
            found = [each.rows() for each in (*replicas, fresh)]
        if all(each == found[0] for each in found):
            return found[0]
        assert not watch.passed(within_s), f"unlike: {[len(each) for each in found]}"
        await asyncio.sleep(0.05)
