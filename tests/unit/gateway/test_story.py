"""What one attempt teaches the health of its servers: trials that pass or fail, and legs that blame their peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from engines.errors import UpstreamError
from engines.types import EngineId, FailureKind, Health
from failover.machine import HealthEvent
from gateway import lifecycle
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.lifecycle import Arrival
from gateway.openai_api import Api
from tests.fakes import (
    DONE,
    Answer,
    FakeClient,
    FakeExchange,
    FakeUpstream,
    chat_event,
    gateway,
    now_s,
    probed,
    timeless,
)
from tests.fakes import usage_event as usage

P0, D0 = EngineId("http://p0"), EngineId("http://d0")
API = "/v1/chat/completions"
BODY = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True})


def good(url: str, rid: str) -> FakeExchange:
    if url.startswith("http://p"):
        return FakeExchange(200, chat_event("", rid, finish="length") + DONE, whole=True)
    return FakeExchange(200, chat_event(None, rid), chat_event("hello", rid))


def servers(answer: Callable[[str, str], Answer]) -> FakeUpstream:
    def generated(url: str, raw: bytes) -> Answer:
        return answer(url, orjson.loads(raw)["rid"])

    return FakeUpstream(generated)


def half_open(gw: Gateway, *engines: EngineId) -> None:
    for engine in engines:
        gw.fleet.set_health(engine, Health.PROBATION, "half-open")


async def ask(gw: Gateway) -> asyncio.Task[Any]:
    work = lifecycle.handle(gw, Arrival(Api.CHAT, BODY, {}, now_s()), FakeClient())
    task = asyncio.ensure_future(work)
    for _ in range(50):
        await asyncio.sleep(0)
    return task


@timeless
async def test_the_first_success_on_each_side_ends_its_probation() -> None:
    streams: dict[str, tuple[str, FakeExchange]] = {}

    def answer(url: str, rid: str) -> FakeExchange:
        streams[url.removesuffix(API)] = rid, good(url, rid)
        return streams[url.removesuffix(API)][1]

    gw = await probed(gateway(servers(answer), "p0", "d0"))
    half_open(gw, P0, D0)
    task = await ask(gw)
    assert [gw.fleet.view(each).health for each in (P0, D0)] == [Health.READY, Health.READY]
    assert not task.done(), "the stream has not ended yet"
    assert not gw.decider.trials._rids
    rid, decode = streams[D0]
    decode.send(chat_event("", rid, finish="stop"), usage(5, 5, rid), DONE)
    decode.end()
    await task


@timeless
async def test_a_trial_that_breaks_is_charged_to_its_own_server() -> None:
    def answer(url: str, rid: str) -> Answer:
        return good(url, rid) if url.startswith("http://p") else UpstreamError(FailureKind.RESET, "lost")

    gw = await probed(gateway(servers(answer), "p0", "d0"))
    half_open(gw, P0, D0)
    with pytest.raises(GatewayError):
        await (await ask(gw))
    steps = gw.monitor.transitions
    assert steps[D0, Health.PROBATION, Health.BROKEN, HealthEvent.LEG_BROKE] == 1
    assert not [step for step in steps if step[0] == P0 and step[2] is Health.BROKEN]
    assert not gw.decider.trials._rids


@timeless
async def test_a_request_that_nobody_can_serve_now_waits_for_the_trial() -> None:
    streams: list[FakeExchange] = []

    def answer(url: str, rid: str) -> FakeExchange:
        streams.append(FakeExchange(200))
        return streams[-1]

    gw = await probed(gateway(servers(answer), "p0", "d0"))
    half_open(gw, P0, D0)
    tasks = [await ask(gw) for _ in range(6)]
    assert (len(streams), len(gw.decider.queue)) == (4, 4), "two requests, two legs each"
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not gw.decider.trials._rids
