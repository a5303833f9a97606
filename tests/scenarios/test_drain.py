"""Draining under load: no new rooms, what runs ends well, and a drained server may be restarted."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from engines.emulator.process import EmulatedServer
from engines.types import Leg
from tests.machine import time_limit
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import PREFILL_CHUNK, TOKEN, Asked, hold_at, pair_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

DRAINED_S = 5.0


async def drain(cluster: Cluster, server: EmulatedServer, path: str = "/admin/drain") -> dict[str, Any]:
    async with cluster.http.post(cluster.url + path, json={"engine": cluster.name(server)}) as reply:
        assert reply.status == 200, await reply.text()
        return dict(await reply.json())


async def drained(cluster: Cluster, server: EmulatedServer) -> None:
    async def missing() -> str:
        engines = (await cluster.get("/readyz"))["engines"]
        (shown,) = [each for each in engines if each["id"] == cluster.name(server)]
        return "" if shown["drain"] == "drained" else str(shown)

    await eventually(missing, DRAINED_S)


async def served_elsewhere(cluster: Cluster, leg: Leg, server: EmulatedServer, count: int = 6) -> None:
    """So many requests are answered whole at their first attempt, none of them by `server`."""
    for _ in range(count):
        asked = Asked(cluster, stream=True)
        answer = await asked.finish()
        answer.check_whole(asked.truth, attempts=1)
        assert (await pair_of(cluster, answer.request_id))[leg] is not server


async def test_a_drained_prefill_is_restarted_under_running_streams(two_pairs: Cluster) -> None:
    held = await hold_at(two_pairs, PREFILL_CHUNK, True)
    running = [Asked(two_pairs, stream=True, tokens=400) for _ in range(8)]
    prefill = held.pair[Leg.PREFILL]
    told = await drain(two_pairs, prefill)
    assert told["drain"] == "draining"
    assert told["attempts"] >= 1
    await served_elsewhere(two_pairs, Leg.PREFILL, prefill)
    assert (await drain(two_pairs, prefill))["drain"] == "draining", "what it staged is not consumed"
    for hold in held.holds:
        await two_pairs.release(hold)
    await drained(two_pairs, prefill)
    await two_pairs.kill(prefill, signal.SIGTERM)
    for asked in (*held.asked, *running):
        (await asked.finish()).check_whole(asked.truth, attempts=1)
    await two_pairs.restart(prefill)
    await served_elsewhere(two_pairs, Leg.PREFILL, prefill)
    assert (await drain(two_pairs, prefill, "/admin/undrain"))["drain"] is None
    await two_pairs.ready()


async def test_a_drained_decode_ends_its_streams_first(two_pairs: Cluster) -> None:
    held = await hold_at(two_pairs, TOKEN, True)
    decode = held.pair[Leg.DECODE]
    assert (await drain(two_pairs, decode))["drain"] == "draining"
    await served_elsewhere(two_pairs, Leg.DECODE, decode)
    for hold in held.holds:
        await two_pairs.release(hold)
    for asked in held.asked:
        (await asked.finish()).check_whole(asked.truth, attempts=1)
    await drained(two_pairs, decode)
    assert (await two_pairs.ledger(decode))["by_room"] == {}
    assert (await drain(two_pairs, decode, "/admin/undrain"))["drain"] is None
    await two_pairs.ready()


async def test_streams_on_a_server_that_drains_itself_go_on(two_pairs: Cluster) -> None:
    held = await hold_at(two_pairs, TOKEN, True)
    decode = held.pair[Leg.DECODE]
    decode.send_signal(signal.SIGTERM)

    async def missing() -> str:
        engines = (await two_pairs.get("/readyz"))["engines"]
        (shown,) = [each for each in engines if each["id"] == two_pairs.name(decode)]
        return "" if shown["health"] == "not_ready" else str(shown)

    await eventually(missing, 5.0)
    await served_elsewhere(two_pairs, Leg.DECODE, decode, 3)
    for hold in held.holds:
        await two_pairs.release(hold)
    for asked in held.asked:
        (await asked.finish()).check_whole(asked.truth, attempts=1)
    async with time_limit(5.0):
        await decode.wait()
