"""Prefix ownership in a real Redis: memory, snapshot, CPU a prompt, delay. `python -m benchmarks.ownership_redis`.

Starts a private server of its own. Prompts are 12 K tokens in 188 blocks, all new. CPU is process time of this process
(one replica: claims, confirmations, its writer, following the log) and of the server. Left out: making
the prompts, and what both take while there are none. Other replicas' reading is no part of recording.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from random import Random

import uvloop

from engines.tasks import spawn
from engines.types import EngineId
from routing.ownership import ClaimId, Keys, OwnershipConfig, Run, Tier
from routing.ownership_redis import RedisOwnership
from routing.redis_link import Link
from tests.redis_servers import RedisServer

RUN_BLOCKS = 188
MILLION = 1_000_000
ENGINES = [EngineId(f"http://10.0.0.{index}:30000") for index in range(16)]
RATE, LOAD_S, ROUNDS = 700, 2.0, 5
ROOMY = OwnershipConfig(max_blocks_per_engine=1_000_000)
DEFAULT = OwnershipConfig()


class Silent:
    """A listener that does nothing."""

    def held(self, engine_id: EngineId, run: Run, tier: Tier) -> None: ...
    def lost(self, engine_id: EngineId, blocks: object, tier: Tier) -> None: ...
    def promised(self, engine_id: EngineId, blocks: object) -> None: ...
    def unpromised(self, engine_id: EngineId, blocks: object) -> None: ...
    def cleared(self, engine_id: EngineId) -> None: ...
    def restart_seen(self, engine_id: EngineId) -> None: ...


class Replica:
    """One store with a link of its own."""

    def __init__(self, url: str, name: str, config: OwnershipConfig = ROOMY) -> None:
        self.link = Link(url, spawn, lambda _: None)
        clock = asyncio.get_running_loop().time
        self.store = RedisOwnership(self.link, Keys("bench", "b"), spawn, clock, name, lambda _: True, config)
        self.store.listen(Silent())

    async def start(self) -> Replica:
        await self.link.start()
        await self.store.start()
        assert await self.store.wait_current(60)
        return self

    async def stop(self) -> None:
        await self.store.stop()
        await self.link.stop()


def chains(rng: Random, count: int) -> Iterator[list[bytes]]:
    for _ in range(count):
        packed = rng.randbytes(16 * RUN_BLOCKS)
        yield [packed[at : at + 16] for at in range(0, len(packed), 16)]


@contextlib.asynccontextmanager
async def stalls() -> AsyncIterator[list[tuple[float, float]]]:
    """How long the event loop was kept at a time while the block runs: in wall time, and in CPU of its thread."""
    found = [(0.0, 0.0)]

    async def tick() -> None:
        while True:
            began, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            found.append((time.perf_counter() - began - 0.001, time.thread_time() - used))

    task = spawn(tick(), "tick")
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def server_cpu_s(server: RedisServer) -> float:
    info = server.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def settled(store: RedisOwnership) -> None:
    while store.status().queued_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def fill(server: RedisServer) -> None:
    """A million blocks: memory in Redis, then a fresh mirror of them."""
    empty = int(server.info("memory")["used_memory"])
    writer = await Replica(server.url, "filler").start()
    loop = asyncio.get_running_loop()
    for engine_id in ENGINES:
        writer.store.begin(engine_id, 1, "boot")
    for index, chain in enumerate(chains(Random(1), MILLION // RUN_BLOCKS)):
        writer.store.hold(ENGINES[index % len(ENGINES)], 1, chain, loop.time())
        while writer.store.status().queued_bytes > 2 << 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await settled(writer.store)
    blocks = writer.store.status().blocks
    full = int(server.info("memory")["used_memory"])
    await asyncio.sleep(10.5)
    for engine_id in ENGINES:  # any write trims the log of its shard
        writer.store.evict(engine_id, 1, [b"x" * 16])
        writer.store.hold(engine_id, 1, [engine_id.encode()[-16:].rjust(16)], loop.time())
    await settled(writer.store)
    trimmed = int(server.info("memory")["used_memory"])
    await writer.stop()
    print(f"memory in Redis: {(trimmed - empty) / blocks:.1f} bytes a block of {blocks} after the log's trim (<= 30)")
    print(f"                 {(full - empty) / blocks:.1f} with 10 s of everything in the log")
    async with stalls() as stalled:
        used = time.process_time()
        began = time.perf_counter()
        reader = await Replica(server.url, "reader").start()
        used, took = time.process_time() - used, time.perf_counter() - began
    assert reader.store.status().blocks >= blocks
    print(f"snapshot into a fresh mirror: {used:.2f} s of CPU (<= 1), {took:.2f} s")
    wall, cpu = (max(each) * 1e3 for each in zip(*stalled, strict=True))
    print(f"longest stall of the event loop: {wall:.1f} ms (<= 10); {cpu:.1f} ms of its own CPU")
    await reader.stop()


async def load(server: RedisServer) -> None:
    """New prompts at a steady rate over 8 engines, with one replica: CPU; then with two: delay."""
    replica = await Replica(server.url, "loaded").start()
    await record(server, replica, 0.05, "recording a new 12 K-token prompt, claimed and confirmed 50 ms later", 10)
    await record(server, replica, 0.25, "the same, confirmed 250 ms later: others were told of the claim", 20)
    await delay(server, replica, 20)
    await replica.stop()
    full = await Replica(server.url, "full", DEFAULT).start()
    await record(
        server, full, 0.05, "the same as the first, on engines that are full: each prompt ends another's run", 30
    )
    await full.stop()


async def record(server: RedisServer, replica: Replica, after_s: float, what: str, seed: int) -> None:
    for engine_id in ENGINES[:8]:
        replica.store.begin(engine_id, seed, f"boot {seed}")
    await settled(replica.store)
    rounds = []
    for number in range(ROUNDS):
        idle = await cpu_of(server, 0, replica, seed, Random(seed + number), after_s)
        used = await cpu_of(server, int(RATE * LOAD_S), replica, seed, Random(seed + number), after_s)
        rounds.append([(busy - rest) / int(RATE * LOAD_S) * 1e6 for busy, rest in zip(used, idle, strict=True)])
    for here, calls, there in rounds:
        print(
            f"  a prompt: client {here:.0f} us ({calls:.0f} of them claim and confirm themselves), Redis {there:.0f} us"
        )
    median = statistics.median(here + there for here, _, there in rounds)
    print(f"{what}: {median:.0f} us of CPU (<= 200; median of {ROUNDS}, {RATE} prompts/s)")


async def cpu_of(
    server: RedisServer, prompts: int, replica: Replica, epoch: int, rng: Random, after_s: float
) -> tuple[float, float, float]:
    """CPU while prompts are claimed, as they are made, and confirmed `after_s` later.

    Of this process without making them, of the calls alone, and of the server.
    """
    loop = asyncio.get_running_loop()
    here, there = time.process_time(), server_cpu_s(server)
    made_s = calls_s = 0.0
    open_claims: deque[ClaimId] = deque()
    done = 0
    began = loop.time()
    while (passed := loop.time() - began) < LOAD_S + after_s + 0.2:
        for _ in range(min(prompts, int(passed * RATE)) - done):
            started = time.thread_time()
            [chain] = chains(rng, 1)
            ready = time.thread_time()
            open_claims.append(replica.store.claim_pending(ENGINES[done % 8], epoch, chain, loop.time()))
            made_s, calls_s = made_s + ready - started, calls_s + time.thread_time() - ready
            done += 1
        started = time.thread_time()
        while open_claims and (len(open_claims) > RATE * after_s or done == prompts):
            replica.store.confirm(open_claims.popleft(), loop.time())
        calls_s += time.thread_time() - started
        await asyncio.sleep(0.01)
    return time.process_time() - here - made_s, calls_s, server_cpu_s(server) - there


async def delay(server: RedisServer, writer: Replica, epoch: int) -> None:
    other = await Replica(server.url, "other").start()
    loop = asyncio.get_running_loop()
    delays = []
    for chain in chains(Random(7), 300):
        began = loop.time()
        writer.store.hold(ENGINES[0], epoch, chain, began)
        while not other.store.owners(chain, loop.time()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        delays.append(loop.time() - began)
    cuts = statistics.quantiles(delays, n=100)
    print(f"seen by another replica after {cuts[49] * 1e3:.0f} ms (p50), {cuts[98] * 1e3:.0f} ms (p99, <= 100)")
    await other.stop()


async def main() -> None:
    with RedisServer(options={"save": ""}) as server:
        await fill(server)
    with RedisServer(options={"save": ""}) as server:
        await load(server)


if __name__ == "__main__":
    uvloop.run(main())
