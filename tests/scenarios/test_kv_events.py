"""What prefills say they hold, by their KV events: one gateway listens to each, and both know it exactly."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from tests.redis_servers import RedisServer, free_port
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, GatewayProcess, eventually
from tests.scenarios.test_replicas import agreed, attempt_of, owners

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = 64
ROOM_TOKENS = 4096
PROMPT = 1500


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replicas() -> AsyncIterator[Cluster]:
    engine = ("--page-size", str(PAGE), "--max-total-tokens", str(ROOM_TOKENS), "--enable-cache-report")
    with RedisServer() as redis:
        gateway = ("--redis-url", redis.url, "--tokenizer-path", "engines/emulator/tokenizer")
        cluster = Cluster(2, 2, replicas=2, gateway=gateway, engine=engine)
        for prefill in cluster.prefills:
            port = free_port(beside=1)
            config = {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{port}",
                "replay_endpoint": f"tcp://*:{port + 1}",
            }
            prefill.arguments = (*prefill.arguments, "--kv-events-config", orjson.dumps(config).decode())
        async with cluster:
            await followed(cluster)
            yield cluster


async def followed(cluster: Cluster, within_s: float = 6.0) -> None:
    """Wait until exactly one running gateway follows each prefill's events."""
    running = [gateway for gateway in cluster.gateways if gateway.returncode is None]

    async def missing() -> str:
        modes = {gateway.url: await modes_of(cluster, gateway) for gateway in running}
        for prefill in cluster.prefills:
            name = cluster.name(prefill)
            if [mode.get(name) for mode in modes.values()].count("events") != 1:
                return f"{name} is not followed by one: {modes}"
        return ""

    await eventually(missing, within_s)


async def modes_of(cluster: Cluster, gateway: GatewayProcess) -> dict[str, str]:
    samples = [sample for sample, value in await cluster.metrics(gateway, ("pdgate_kv_events_mode",)) if value == 1.0]
    return {each.labels["engine"]: each.labels["mode"] for each in samples if each.name == "pdgate_kv_events_mode"}


async def followed_batches(cluster: Cluster, gateway: GatewayProcess, engine: str) -> float:
    samples = await cluster.metrics(gateway, ("pdgate_kv_events_batches",))
    return sum(
        value
        for sample, value in samples
        if sample.name == "pdgate_kv_events_batches" and sample.labels["engine"] == engine
    )


async def flush(cluster: Cluster, server: EmulatedServer) -> None:
    async with cluster.http.post(server.url + "/flush_cache") as reply:
        assert reply.status == 200


async def cached_of(cluster: Cluster, gateway: GatewayProcess, prompt: str) -> tuple[int, int]:
    """What was predicted, and what the engine said."""
    attempt: dict[str, Any] = await attempt_of(cluster, gateway, prompt)
    return attempt["hit_tokens"], attempt["cached_tokens"] or 0  # SGLang does not report a zero


async def nothing_held(cluster: Cluster) -> None:
    async def missing() -> str:
        held = [await owners(cluster, gateway) for gateway in cluster.gateways if gateway.returncode is None]
        return f"still held: {held}" if any(held) else ""

    await eventually(missing, 3.0)


async def heard(cluster: Cluster, within_s: float = 5.0) -> None:
    """Wait until what the prefills have published has been followed, and is known to all gateways."""

    async def missing() -> str:
        for prefill in cluster.prefills:
            published = (await cluster.ledger(prefill))["kv_event_batches"]
            engine = cluster.name(prefill)
            followed = max([await followed_batches(cluster, gateway, engine) for gateway in cluster.gateways])
            if followed < published:
                return f"{engine} has published {published} batches; {followed} were followed"
        return ""

    await eventually(missing, within_s)
    await agreed(cluster)


async def test_predictions_are_exact_while_the_cache_evicts(replicas: Cluster) -> None:
    """More prompts than both caches hold, asked of both gateways in turn: what is predicted is what is found."""
    prompts = [new_prompt(PROMPT) for _ in range(7)]
    hits = 0
    for number in range(28):
        gateway = replicas.gateways[number % 2]
        predicted, cached = await cached_of(replicas, gateway, prompts[(number * 3) % 7])
        assert predicted == cached, f"request {number}"
        hits += cached > 0
        await heard(replicas)
    assert 0 < hits < 28


async def test_a_flushed_cache_is_known_everywhere(replicas: Cluster) -> None:
    prompt = new_prompt(PROMPT)
    await cached_of(replicas, replicas.gateway, prompt)
    for prefill in replicas.prefills:
        await flush(replicas, prefill)
    await nothing_held(replicas)
    assert await cached_of(replicas, replicas.gateways[1], prompt) == (0, 0)


async def test_a_gateway_that_dies_is_replaced_as_listener(replicas: Cluster) -> None:
    first, second = replicas.gateways
    await replicas.settled()
    second.send_signal(signal.SIGKILL)
    await second.wait(5.0)
    prompt = new_prompt(PROMPT)
    await cached_of(replicas, first, prompt)
    await followed(replicas)
    for prefill in replicas.prefills:
        await flush(replicas, prefill)
    await nothing_held(replicas)
    answer = await ask(replicas.http, first.url, chat(prompt, 5))
    answer.check_whole(expected_text(prompt, 5))
