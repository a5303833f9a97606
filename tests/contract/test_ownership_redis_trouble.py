"""While Redis is in trouble nobody waits, nothing fails and nothing grows; when it is back all replicas are alike."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest

from routing.ownership import StoreState, Tier
from tests.contract.ownership_replicas import P0, P1, Replica, a_fleet, alike, chain, replica, until
from tests.redis_servers import RedisCluster, RedisServer, SlowProxy, frozen, single

quick = functools.partial(replica, timeout_s=0.5)
"""A replica that soon takes Redis for slow."""
TROUBLE_S = 1.2
SYNC_S = 0.005
"""CPU of one call of any method that a request makes."""
QUEUE_BYTES = 4 << 20


def collecting() -> Callable[[], float]:
    """CPU that collections of garbage have taken since now, in this thread."""
    taken = began = 0.0

    def on_phase(phase: str, _: dict[str, int]) -> None:
        nonlocal taken, began
        if phase == "start":
            began = time.thread_time()
        else:
            taken += time.thread_time() - began

    gc.callbacks.append(on_phase)
    return lambda: taken


collecting_s = collecting()


class Load:
    """What requests do to two replicas, one step every few milliseconds; remembers what they cost."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas
        self.rng = Random(7)
        self.took_s: dict[str, list[float]] = {}
        self.queued_bytes = 0
        self.held: set[int] = set()

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """The CPU of each kind of call; what collections take in it is of the heap of all tests, and left out."""
        before, began = collecting_s(), time.thread_time()
        result = call(*args)
        took_s = time.thread_time() - began - (collecting_s() - before)
        self.took_s.setdefault(call.__name__, []).append(took_s)
        return result

    def dearest_s(self) -> float:
        """Of the dearest kind of call, the third dearest: neighbours on the machine may slow down one or two."""
        return max(sorted(each)[-3] for each in self.took_s.values())

    def step(self, seed: int) -> None:
        for offset, each in enumerate(self.replicas):
            store, now_s = each.store, each.now_s()
            number = 1000 * seed + offset
            engine_id = self.rng.choice((P0, P1))
            kept = self.timed(store.claim_pending, engine_id, 1, chain(number, 20), now_s)
            dropped = self.timed(store.claim_pending, engine_id, 1, chain(number + 10, 20), now_s)
            self.timed(store.confirm, kept, now_s)
            self.timed(store.drop, dropped)
            self.timed(store.hold, engine_id, 1, chain(number + 20, 20), now_s, Tier.HOST)
            self.timed(store.evict, engine_id, 1, chain(number, 20)[10:])
            self.timed(store.refresh, engine_id, 1, chain(number, 10), now_s + 400.0)
            assert self.timed(store.owners, chain(number, 20), now_s) == {engine_id: 10}
            self.queued_bytes = max(self.queued_bytes, self.timed(store.status).queued_bytes)

    async def run(self, seconds: float, first: int) -> None:
        until_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until_s:
            self.step(first)
            first += 1
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def read_only(server: RedisServer) -> AsyncIterator[None]:
    server.ask("REPLICAOF", "127.0.0.1", 1)
    yield
    server.ask("REPLICAOF", "NO", "ONE")


@contextlib.asynccontextmanager
async def out_of_memory(server: RedisServer) -> AsyncIterator[None]:
    server.ask("CONFIG", "SET", "maxmemory", 1)
    yield
    server.ask("CONFIG", "SET", "maxmemory", 0)


@contextlib.asynccontextmanager
async def locked_out(server: RedisServer) -> AsyncIterator[None]:
    server.ask("ACL", "DELUSER", "gate")
    yield
    let_in(server)


@contextlib.asynccontextmanager
async def killed(server: RedisServer) -> AsyncIterator[None]:
    server.kill()
    yield
    server.start()


def let_in(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "gate", "on", ">secret", "~*", "&*", "+@all")


async def judge(
    url: str, replicas: tuple[Replica, Replica], fault: contextlib.AbstractAsyncContextManager[None]
) -> None:
    """Load before, during and after the fault; then all are alike."""
    load = Load(*replicas)
    await load.run(0.2, 1)
    keys = replicas[0].keys
    async with fault:
        await load.run(TROUBLE_S, 1000)
        for each in replicas:
            status = each.store.status()
            assert status.state is StoreState.CUT_OFF
            assert status.trouble
            assert status.where
    await load.run(0.2, 2000)
    assert load.dearest_s() <= SYNC_S
    assert load.queued_bytes <= QUEUE_BYTES
    await until(lambda: all(each.store.status().state is StoreState.SHARED for each in replicas), 10.0, "shared")
    held = await alike(url, keys, *replicas, within_s=10.0)
    assert held


@pytest.mark.parametrize(
    "fault", [frozen, read_only, out_of_memory, locked_out, killed], ids=lambda fault: fault.__name__
)
async def test_nobody_waits_and_all_converge(fault: Callable[..., Any]) -> None:
    keys = a_fleet()
    with single() as server:
        url = server.url
        if fault is locked_out:
            let_in(server)
            url = f"redis://gate:secret@127.0.0.1:{server.port}"
        async with quick(url, keys) as one, quick(url, keys) as other:
            await judge(url, (one, other), fault(server))


async def test_slow_replies() -> None:
    keys = a_fleet()
    with single() as server:
        async with SlowProxy(server) as proxy, quick(proxy.url, keys) as one, quick(proxy.url, keys) as other:

            @contextlib.asynccontextmanager
            async def slow() -> AsyncIterator[None]:
                proxy.delay_s = 2.0
                yield
                proxy.delay_s = 0.0

            await judge(server.url, (one, other), slow())


async def test_one_node_of_a_cluster_is_gone_for_a_while() -> None:
    keys = a_fleet()
    with RedisCluster() as cluster:
        async with quick(cluster.url, keys) as one, quick(cluster.url, keys) as other:
            node = next(each for each in cluster.nodes if each.ask("DBSIZE"))
            await judge(cluster.url, (one, other), frozen(node))


async def test_what_is_queued_is_bounded_and_written_again() -> None:
    """Cut off for so long that operations have to be given up: rows are written from the mirror, evictions are kept."""
    keys = a_fleet()
    with single() as server:
        async with quick(server.url, keys) as one, quick(server.url, keys) as other:
            one.hold(0)
            await until(lambda: other.owned(0) == 4)
            async with frozen(server):
                for seed in range(1, 400):
                    one.hold(seed, 1000, engine_id=(P0, P1)[seed % 2])
                    if seed % 50 == 0:
                        await asyncio.sleep(0.05)
                one.store.evict(P0, 1, chain(0)[2:])
                status = one.store.status()
                assert status.queued_bytes <= QUEUE_BYTES
                assert status.dropped > 0
            await alike(server.url, keys, one, other, within_s=15.0)
            assert other.owned(0) == 2 or one.owned(0) == other.owned(0) == 0
            newest = [seed for seed in range(340, 400) if other.owned(seed, 1000, engine_id=(P0, P1)[seed % 2]) == 1000]
            assert len(newest) == 60


async def test_starting_while_redis_is_gone() -> None:
    keys = a_fleet()
    with single() as server:
        server.kill()
        async with quick(server.url, keys) as one, quick(server.url, keys) as other:
            assert not await one.store.wait_current(0.1)
            one.hold(1)
            other.hold(2)
            assert one.owned(1) == 4
            assert one.store.status().state is StoreState.CUT_OFF
            server.start()
            held = await alike(server.url, keys, one, other, within_s=10.0)
            assert {row[3] for row in held} == {chain(1), chain(2)}
