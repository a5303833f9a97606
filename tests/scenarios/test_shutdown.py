"""SIGTERM: what runs may end, and nothing new begins where something ends."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import pytest

from engines.types import Leg
from tests.machine import time_limit
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import RESERVED, TOKEN, hold_at, noticed

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 0.7


async def test_a_gateway_lets_running_answers_finish(one_pair: Cluster) -> None:
    held = await hold_at(one_pair, TOKEN, False, True)
    one_pair.gateway.send_signal(signal.SIGTERM)
    await eventually(lambda: _listens(one_pair), 5.0)
    await asyncio.sleep(PATIENCE_S)  # it is to wait for what runs, so it is made to wait
    assert one_pair.gateway.returncode is None
    for hold in held.holds:
        await one_pair.release(hold)
    for asked in held.asked:
        (await asked.finish()).check_whole(asked.truth, attempts=1)
    assert await one_pair.gateway.wait(5.0) == 0


@pytest.mark.parametrize("hurry", [False, True], ids=["grace over", "second signal"])
async def test_what_does_not_end_in_time_is_told_so(hurry: bool) -> None:
    grace = ("--shutdown-grace-period-secs", "60" if hurry else "0.3")
    async with Cluster(1, 1, gateway=grace) as cluster:
        held = await hold_at(cluster, TOKEN, False, True)
        cluster.gateway.send_signal(signal.SIGTERM)
        if hurry:
            await eventually(lambda: _listens(cluster), 5.0)
            cluster.gateway.send_signal(signal.SIGTERM)
        for asked in held.asked:
            answer = await asked.finish()
            (error,) = answer.errors
            assert error["code"] == "shutting_down"
            assert answer.status == (200 if answer.text() else 503)
            assert answer.ended
            assert not answer.done
        assert await cluster.gateway.wait(10.0) == 0
        await eventually(lambda: _kept(cluster), 5.0)


async def _listens(cluster: Cluster) -> str:
    async with aiohttp.ClientSession() as fresh:  # a pooled connection might still be served
        try:
            async with fresh.get(cluster.url + "/health") as reply:
                return f"new connections are still answered: {reply.status}"
        except aiohttp.ClientConnectorError:
            return ""


async def test_a_killed_gateway_leaves_nothing_on_the_servers(one_pair: Cluster) -> None:
    held = await hold_at(one_pair, RESERVED, False, True)
    one_pair.gateway.send_signal(signal.SIGKILL)
    await one_pair.gateway.wait(5.0)
    for asked in held.asked:
        with pytest.raises(aiohttp.ClientError):
            await asked.finish()
    await eventually(lambda: _kept(one_pair), 5.0)


async def _kept(cluster: Cluster) -> str:
    ledgers = [await cluster.ledger(server) for server in cluster.servers]
    return str([ledger for ledger in ledgers if ledger["by_room"]] or "")


async def test_a_decode_that_drains_gets_nothing_new_and_finishes(two_pairs: Cluster) -> None:
    held = await hold_at(two_pairs, TOKEN, True)
    leaving = held.pair[Leg.DECODE]
    leaving.send_signal(signal.SIGTERM)
    await noticed(two_pairs, leaving)
    for stream in (False, True, False, True):
        prompt = new_prompt()
        answer = await ask(two_pairs.http, two_pairs.url, chat(prompt, stream=stream))
        answer.check_whole(expected_text(prompt, 40), attempts=1)
        assert answer.headers["x-pdgate-decode"] != leaving.url
    await two_pairs.release(held.holds[0])
    (await held.asked[0].finish()).check_whole(held.asked[0].truth, attempts=1)
    async with time_limit(10.0):
        assert await leaving.wait() == 0
