"""Two gateways before one fleet, sharing a real Redis: what one knows, the other knows."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engines.tasks import spawn
from engines.types import Role
from tests.redis_servers import RedisServer
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 3000
"""Bytes of a prompt of many blocks; a token is guessed at four of them."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_replicas() -> AsyncIterator[Cluster]:
    with RedisServer() as redis:
        async with Cluster(2, 2, replicas=2, gateway=("--redis-url", redis.url, "--probe-interval-secs", "4")) as up:
            yield up


@pytest_asyncio.fixture(loop_scope="session")
async def replicas(shared_replicas: Cluster) -> AsyncIterator[Cluster]:
    yield shared_replicas
    await shared_replicas.heal()


async def attempt_of(cluster: Cluster, gateway: GatewayProcess, prompt: str, tokens: int = 5) -> dict[str, Any]:
    """The one attempt that `gateway` made for a new request."""
    answer = await ask(cluster.http, gateway.url, chat(prompt, tokens))
    answer.check_whole(expected_text(prompt, tokens), attempts=1)
    explained = await cluster.get(f"/pdgate/explain/{answer.request_id}", gateway)
    [attempt] = explained["attempts"]
    return dict(attempt)


async def agreed(cluster: Cluster, within_s: float = 5.0) -> None:
    """Wait until all gateways believe the same of every engine."""

    async def missing() -> str:
        beliefs = [await owners(cluster, gateway) for gateway in cluster.gateways]
        return "" if all(belief == beliefs[0] for belief in beliefs) else f"they differ: {beliefs}"

    await eventually(missing, within_s)


async def owners(cluster: Cluster, gateway: GatewayProcess) -> dict[str, tuple[int, str]]:
    """Per engine the blocks held, and their digest."""
    engines = (await cluster.get("/pdgate/owners", gateway))["engines"]
    return {name: (each["held_blocks"], each["digest"]) for name, each in engines.items() if each["held_blocks"]}


async def test_a_prefix_that_one_placed_is_found_by_the_other(replicas: Cluster) -> None:
    first, second = replicas.gateways
    for _ in range(4):
        prompt = new_prompt(LONG)
        placed = await attempt_of(replicas, first, prompt)
        await agreed(replicas)
        found = await attempt_of(replicas, second, prompt)
        assert found["prefill"] == placed["prefill"]
        assert found["hit_tokens"] > LONG / 5


async def test_a_new_replica_starts_warm(replicas: Cluster) -> None:
    first, second = replicas.gateways
    prompt = new_prompt(LONG)
    placed = await attempt_of(replicas, first, prompt)
    await second.stop()
    await second.launch()
    await replicas.ready()
    await agreed(replicas)
    found = await attempt_of(replicas, second, prompt)
    assert found["prefill"] == placed["prefill"]
    assert found["hit_tokens"] > LONG / 5


async def test_what_one_has_promised_counts_for_the_other(replicas: Cluster) -> None:
    _, second = replicas.gateways
    holds = await replicas.hold_any(Role.PREFILL, "prefill_chunk")
    prompt = new_prompt(LONG)
    waiting = spawn(ask(replicas.http, second.url, chat(prompt, 5)), "a held request")
    [held] = await replicas.held(holds)

    async def first_does_not_know() -> str:
        elsewhere = await replicas.metric("pdgate_booked_elsewhere_tokens", engine=replicas.name(held.server))
        return "" if elsewhere > LONG / 5 else f"{elsewhere} tokens are booked elsewhere"

    await eventually(first_does_not_know, 0.5)
    await replicas.release(held)
    (await waiting).check_whole(expected_text(prompt, 5))
    await replicas.settled()


async def test_a_server_that_one_lost_gets_nothing_from_the_other(replicas: Cluster) -> None:
    """Probes are four seconds apart: only word from the other can be this quick."""
    first, second = replicas.gateways
    victim = replicas.prefills[0]
    name = replicas.name(victim)
    await replicas.kill(victim, signal.SIGKILL)

    async def first_knows() -> str:
        await ask(replicas.http, first.url, chat(new_prompt(100), 2))
        return "" if await health(replicas, first, name) != "ready" else "the first has not noticed"

    async def second_knows() -> str:
        return "" if await health(replicas, second, name) != "ready" else "the second has not heard"

    await eventually(first_knows, 3.0)
    await eventually(second_knows, 0.5)


async def health(cluster: Cluster, gateway: GatewayProcess, name: str) -> str:
    engines = (await cluster.get("/readyz", gateway))["engines"]
    return str(next(engine["health"] for engine in engines if engine["id"] == name))
