"""Whatever befalls the Redis of two gateways, or A's way to it, or A for a moment: nothing that lives is aborted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from engines.tasks import spawn
from failover.reaper import LEASE_S, WATCHED_S
from tests.redis_servers import RedisServer
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import GatewayProcess, eventually
from tests.scenarios.phases import TOKEN
from tests.scenarios.two_gateways import SILENT, Replicated, hold, hold_all, let_go, verdicts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240), pytest.mark.first]

RELEASED_S = 10.0 + LEASE_S
CLIENTS = 4


@dataclass
class Load:
    """Clients of both gateways: every answer is whole, at the first attempt."""

    cluster: Replicated
    gateways: list[GatewayProcess]
    answers: int = 0
    _over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._tasks = [spawn(self._client(Random(number)), f"client {number}") for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def felt(self) -> str:
        return "" if self.answers > 20 else f"only {self.answers} answers have come"

    async def _client(self, rng: Random) -> None:
        while not self._over:
            gateway, prompt = rng.choice(self.gateways), new_prompt()
            answer = await ask(self.cluster.http, gateway.url, chat(prompt, 10, stream=rng.random() < 0.5))
            answer.check_whole(expected_text(prompt, 10), attempts=1)
            self.answers += 1
            await asyncio.sleep(0.1)


Trouble = Callable[[Replicated, bool], Awaitable[None]]
"""Something that must abort nothing; the flag: at its full size."""


async def flushed(cluster: Replicated, full: bool) -> None:
    for _ in range(5 if full else 2):
        cluster.redis.ask("FLUSHALL")
        await asyncio.sleep(1.0)


async def restarted(cluster: Replicated, full: bool) -> None:
    await asyncio.to_thread(cluster.redis.kill)
    await asyncio.sleep(10.0 if full else 0.5)
    await asyncio.to_thread(cluster.redis.restart, empty=True)


async def restarted_with_its_data(cluster: Replicated, full: bool) -> None:
    """Leases that had ended long ago come back."""
    await asyncio.to_thread(cluster.redis.ask, "SAVE")
    await asyncio.to_thread(cluster.redis.kill)
    await asyncio.sleep(10.0 if full else LEASE_S)
    await asyncio.to_thread(cluster.redis.start)


async def frozen(cluster: Replicated, full: bool) -> None:
    cluster.redis.freeze()
    try:
        await asyncio.sleep(30.0 if full else 6.0)
    finally:
        cluster.redis.thaw()


async def failed_over(cluster: Replicated, full: bool) -> None:
    """One after the other comes to a server that knows nothing."""
    with RedisServer() as empty:
        for proxy in reversed(cluster.to_redis):
            proxy.lead_to(empty)
            await asyncio.sleep(5.0 if full else 1.0)
        await asyncio.sleep(10.0 if full else 1.0)
        for proxy in cluster.to_redis:
            proxy.lead_to(cluster.redis)


async def a_cut_off_from_redis(cluster: Replicated, full: bool) -> None:
    """Its lease is gone for as long as a dead one's, but it answers."""
    lift = cluster.to_redis[0].impose(SILENT, SILENT)
    try:
        await asyncio.sleep(60.0 if full else RELEASED_S - 1.0)
        assert await cluster.of(cluster.b, "pdgate_replicas_absent") == 1
    finally:
        lift()


async def a_frozen_for_less_than_its_lease(cluster: Replicated, full: bool) -> None:
    for _ in range(5 if full else 1):
        cluster.a.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S - 1.25)
        cluster.a.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.5)


async def a_frozen_for_longer_than_its_lease(cluster: Replicated, full: bool) -> None:
    """No lease and no answer, but not for long enough."""
    for _ in range(3 if full else 1):
        cluster.a.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + WATCHED_S - 1.5)
        cluster.a.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.5)


OF_REDIS: tuple[Trouble, ...] = (flushed, restarted, restarted_with_its_data, frozen, failed_over, a_cut_off_from_redis)
"""A's clients are served without a pause meanwhile."""
OF_A: tuple[Trouble, ...] = (a_frozen_for_less_than_its_lease, a_frozen_for_longer_than_its_lease)


async def _aborts_nothing(cluster: Replicated, troubles: Sequence[Trouble], full: bool = False) -> None:
    """One after the other; the same requests are held all the while."""
    before = await verdicts(cluster, *cluster.gateways)
    held = [*await hold_all(cluster, cluster.a), await hold(cluster, cluster.b, TOKEN, True)]
    for trouble in troubles:
        async with Load(cluster, [cluster.b] if trouble in OF_A else cluster.gateways) as load:
            await asyncio.sleep(0.5)
            await trouble(cluster, full)
            await asyncio.sleep(RELEASED_S if full else 2.5)
            await eventually(load.felt, 10.0)
        assert await verdicts(cluster, *cluster.gateways) == before, trouble.__name__
        await cluster.all_live()
    await let_go(cluster, held)
    for each in held:
        await each.whole()
    assert await verdicts(cluster, *cluster.gateways) == before


@pytest.mark.parametrize("troubles", [OF_REDIS[:-1], (*OF_REDIS[-1:], *OF_A)], ids=["redis", "a"])
async def test_nothing_that_lives_is_aborted(replicated: Replicated, troubles: Sequence[Trouble]) -> None:
    await _aborts_nothing(replicated, troubles)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trouble", OF_REDIS + OF_A, ids=lambda each: each.__name__)
async def test_nothing_that_lives_is_aborted_at_full_size(replicated: Replicated, trouble: Trouble) -> None:
    await _aborts_nothing(replicated, [trouble], full=True)
