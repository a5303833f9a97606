"""A full decode: requests wait in the gateway, leave in order of arrival, and are refused when it takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.machine import Stopwatch
from tests.scenarios.client import Answer, ask, chat, new_prompt
from tests.scenarios.cluster import Cluster, Hold, eventually
from tests.scenarios.phases import Asked

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUEUE_S = 4.0
POOL_TOKENS = 4_000
TOKENS = 700
"""Prompt and answer take a quarter of the pool: three requests fill it."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_small() -> AsyncIterator[Cluster]:
    waiting = ("--queue-timeout-secs", str(QUEUE_S), "--queue-max-requests", "8")
    pool = ("--max-total-tokens", str(POOL_TOKENS))
    async with Cluster(1, 1, gateway=waiting, decode=pool) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def small(shared_small: Cluster) -> AsyncIterator[Cluster]:
    """One pair whose decode holds little, and a gateway that lets requests wait for four seconds."""
    yield shared_small
    await shared_small.heal()


async def waiting(cluster: Cluster, count: int) -> None:
    """Wait until so many requests wait in the gateway."""

    async def missing() -> str:
        queued = await cluster.metric("pdgate_queue_requests")
        return "" if queued == count else f"{queued:g} of {count} requests wait"

    await eventually(missing, 5.0)


async def fill(cluster: Cluster) -> tuple[list[Asked], list[Hold]]:
    """Requests that hold the decode, as many as it takes, and one that already waits behind them."""
    holds = [await cluster.hold(cluster.decodes[0], "token", 3) for _ in range(10)]
    asked: list[Asked] = []
    while not await cluster.metric("pdgate_queue_requests"):
        assert len(asked) < 10, "the decode is never full"
        asked.append(Asked(cluster, stream=True, tokens=TOKENS))
        await eventually(lambda: _arrived(cluster, len(asked)), 5.0)
    return asked, holds


async def _arrived(cluster: Cluster, count: int) -> str:
    there = await cluster.metric("pdgate_live_bookings") + await cluster.metric("pdgate_queue_requests")
    return "" if there == count else f"{there:g} of {count} requests have arrived"


async def test_a_full_decode_is_waited_for_in_order(small: Cluster) -> None:
    asked, holds = await fill(small)
    for count in (2, 3, 4):
        asked.append(Asked(small, stream=True, tokens=TOKENS))
        await waiting(small, count)
    for hold in holds:
        await small.release(hold)
    answers = await asyncio.gather(*(each.finish() for each in asked))
    for each, answer in zip(asked, answers, strict=True):
        answer.check_whole(each.truth, attempts=1)
    assert await order_at_prefill(small, answers) == list(range(len(answers)))
    await small.settled()


async def order_at_prefill(cluster: Cluster, answers: list[Answer]) -> list[int]:
    """The order in which these requests came to the prefill, as indices of `answers`."""
    records = [await cluster.explain(answer.request_id) for answer in answers]
    rids = [record["attempts"][0]["rid"] for record in records]
    seen = [request["rid"] for request in (await cluster.requests(cluster.prefills[0]))["recent"]]
    return [rids.index(rid) for rid in seen if rid in rids]


async def test_who_waits_too_long_is_refused(small: Cluster) -> None:
    asked, holds = await fill(small)
    begun, begun_s = Stopwatch(), asyncio.get_running_loop().time()
    late = await ask(small.http, small.url, chat(new_prompt(), TOKENS))
    took_s, waited_s = begun.took_s(), asyncio.get_running_loop().time() - begun_s
    late.check_refused(429)
    assert waited_s >= QUEUE_S - 0.1
    assert took_s <= QUEUE_S + 0.5
    assert int(late.headers["retry-after"]) > 0
    assert late.headers["x-should-retry"] == "true"
    assert late.body["error"]["type"] == "rate_limit_error"
    for hold in holds:
        await small.release(hold)
    answers = await asyncio.gather(*(each.finish() for each in asked))
    assert sorted(answer.status for answer in answers) == [200] * (len(asked) - 1) + [429]


async def test_a_full_queue_refuses_at_once(small: Cluster) -> None:
    await fill(small)
    queued = [Asked(small, stream=False) for _ in range(7)]
    await waiting(small, 8)
    begun = Stopwatch()
    refused = await ask(small.http, small.url, chat(new_prompt(), stream=True))
    refused.check_refused(429)
    assert begun.took_s() < 0.5
    await asyncio.gather(*(each.leave() for each in queued))
    await waiting(small, 1)


async def test_who_hangs_up_waits_no_more(small: Cluster) -> None:
    asked, _ = await fill(small)
    await asked[-1].leave()
    await waiting(small, 0)
    for each in asked:
        await each.leave()
    await small.settled(1.0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_no_decode_can_ever_hold_is_refused_at_once(small: Cluster, stream: bool) -> None:
    refused = await ask(small.http, small.url, chat(new_prompt(2 * POOL_TOKENS), TOKENS, stream=stream))
    refused.check_refused(400)
    assert refused.body["error"]["code"] == "context_length_exceeded"
    await small.settled(1.0)
