"""Two gateways under load while their Redis is killed, frozen, flushed, full or read-only: no request may notice.

Afterwards both believe the same of every engine again.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import pytest_asyncio

from engines.tasks import spawn
from tests.redis_servers import RedisServer
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.test_replicas import agreed, owners

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.first]

CLIENTS = 6
TOKENS = 10
CONVERGED_S = 5.0


@dataclass(frozen=True)
class Trouble:
    """What is done to the server, and how it is undone."""

    name: str
    begin: Callable[[RedisServer], object]
    end: Callable[[RedisServer], object]
    cuts_off: bool = True


TROUBLES = (
    Trouble("killed", lambda redis: redis.kill(), lambda redis: redis.restart(empty=True)),
    Trouble("frozen", lambda redis: redis.freeze(), lambda redis: redis.thaw()),
    Trouble("flushed", lambda redis: redis.ask("FLUSHALL"), lambda redis: None, cuts_off=False),
    Trouble(
        "out of memory",
        lambda redis: redis.ask("CONFIG", "SET", "maxmemory", "1"),
        lambda redis: redis.ask("CONFIG", "SET", "maxmemory", "0"),
    ),
    Trouble(
        "read-only",
        lambda redis: redis.ask("REPLICAOF", "127.0.0.1", "1"),
        lambda redis: redis.ask("REPLICAOF", "NO", "ONE"),
    ),
)


@dataclass
class Load:
    """Clients that ask one gateway after the other, half of them about what was asked before."""

    cluster: Cluster
    rng: Random
    took_s: list[float] = field(default_factory=list)
    _asked: list[str] = field(default_factory=list)
    _over: bool = False

    async def run(self, seconds: float, during: Callable[[], object] | None = None) -> None:
        """Load for so long; `during` is awaited meanwhile."""
        clients = [spawn(self._client(), f"client {number}") for number in range(CLIENTS)]
        try:
            await asyncio.gather(asyncio.sleep(seconds), *([during()] if during else []))  # type: ignore[list-item]
        finally:
            self._over = True
            await asyncio.gather(*clients)

    async def _client(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            gateway = self.rng.choice(self.cluster.gateways)
            prompt = self.rng.choice(self._asked) if self._asked and self.rng.random() < 0.5 else new_prompt(1500)
            self._asked = [*self._asked[-20:], prompt]
            began_s = loop.time()
            answer = await ask(self.cluster.http, gateway.url, chat(prompt, TOKENS, stream=self.rng.random() < 0.5))
            self.took_s.append(loop.time() - began_s)
            answer.check_whole(expected_text(prompt, TOKENS), attempts=1)

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.took_s, n=100)[98]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replicas(redis: RedisServer) -> AsyncIterator[Cluster]:
    async with Cluster(2, 2, replicas=2, gateway=("--redis-url", redis.url)) as up:
        yield up


async def in_state(cluster: Cluster, *states: str, within_s: float = CONVERGED_S) -> None:
    """Wait until every gateway says that its store is in one of these states."""

    async def missing() -> str:
        found = [(await cluster.get("/readyz", gateway))["ownership"] for gateway in cluster.gateways]
        return "" if all(each["state"] in states for each in found) else f"not all are {states}: {found}"

    await eventually(missing, within_s)


async def suffer(cluster: Cluster, redis: RedisServer, trouble: Trouble, before_s: float, for_s: float) -> None:
    """Trouble after `before_s`, for `for_s`, seen on /readyz meanwhile."""
    await asyncio.sleep(before_s)
    await asyncio.to_thread(trouble.begin, redis)
    try:
        if trouble.cuts_off:
            await in_state(cluster, "cut_off", within_s=3.0)
        await asyncio.sleep(for_s)
    finally:
        await asyncio.to_thread(trouble.end, redis)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
async def test_no_request_notices(replicas: Cluster, redis: RedisServer, trouble: Trouble) -> None:
    load = Load(replicas, Random(3))
    await load.run(3.5, lambda: suffer(replicas, redis, trouble, 0.7, 1.0))
    assert len(load.took_s) > 3 * CLIENTS
    await in_state(replicas, "shared")
    await agreed(replicas, CONVERGED_S)
    assert sum(blocks for blocks, _ in (await owners(replicas, replicas.gateway)).values()) > 0
    await replicas.settled()


@pytest.mark.long
async def test_a_killed_redis_slows_nothing(replicas: Cluster, redis: RedisServer) -> None:
    """60 s of load with Redis killed at second 20 and back, empty, at 40: three times, each beside a run without."""
    ratios = []
    killed = TROUBLES[0]
    for round_number in range(3):
        calm, troubled = Load(replicas, Random(round_number)), Load(replicas, Random(round_number))
        await calm.run(60.0)
        await troubled.run(60.0, lambda: suffer(replicas, redis, killed, 20.0, 20.0))
        await in_state(replicas, "shared")
        await agreed(replicas, CONVERGED_S)
        ratios.append(troubled.p99_s / calm.p99_s)
        print(
            f"round {round_number}: p99 {calm.p99_s * 1e3:.1f} ms calm, {troubled.p99_s * 1e3:.1f} ms with Redis "
            f"killed, ratio {ratios[-1]:.3f}; {len(calm.took_s)} and {len(troubled.took_s)} requests, no error"
        )
    assert statistics.median(ratios) <= 1.2, ratios
