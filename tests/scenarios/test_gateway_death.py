"""Of two gateways, A and B, A dies in a way that closes no socket, and B releases what A ran; or A stops in order."""

from __future__ import annotations

import asyncio
import signal

import pytest

from engines.tasks import spawn
from failover.journal import FailoverKeys
from failover.reaper import LEASE_S, WATCHED_S
from tests.machine import time_limit
from tests.scenarios.client import Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import GatewayProcess, eventually
from tests.scenarios.phases import TOKEN
from tests.scenarios.two_gateways import Replicated, hold, hold_all, rooms

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.first]

RELEASED_S = 10.0 + LEASE_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_what_a_dead_gateway_ran_is_released(replicated: Replicated, number: signal.Signals) -> None:
    loop = asyncio.get_running_loop()
    old_name = (await replicated.get("/pdgate/replica", replicated.a))["replica"]
    of_b = await hold(replicated, replicated.b, TOKEN, True)
    rooms_of_b = await rooms(replicated)
    of_a = await hold_all(replicated, replicated.a)
    before = await rooms(replicated)
    assert len(before["decode"]) == 5
    assert len(before["prefill"]) == 2, "in the middle of their prefill, and before it"
    replicated.cut_off_from_engines()
    began_s = loop.time()
    replicated.a.send_signal(number)
    await asyncio.sleep(WATCHED_S)
    assert await rooms(replicated) == before, "nobody else lets go of it so soon"

    async def left() -> str:
        now = await rooms(replicated)
        return "" if now == rooms_of_b else f"{now} hold KV"

    await eventually(left, RELEASED_S - WATCHED_S)
    print(f"released {loop.time() - began_s:.2f} s after the death")
    await eventually(lambda: _is(replicated, replicated.b, "pdgate_replicas_reaped"), 2.0)
    assert await replicated.of(replicated.b, "pdgate_attempts_reaped") >= len(of_a)
    replicated.lift()
    await replicated.release(of_b.hold)
    await of_b.whole()
    if number is signal.SIGSTOP:
        early = [Early(replicated) for _ in range(5)]
        await asyncio.sleep(0.2)
        replicated.a.send_signal(signal.SIGCONT)
        for one in early:
            async with time_limit(5.0):
                (await one.task).check_whole(one.truth, attempts=1)
        for each in of_a:
            async with time_limit(5.0):
                await check_ended(await each.task, each.truth)
        await eventually(lambda: _is(replicated, replicated.a, "pdgate_fencings"), 3.0)
        await eventually(lambda: _not_ready(replicated), 3.0)
        name = (await replicated.get("/pdgate/replica", replicated.a))["replica"]
        assert name != old_name
        assert name.startswith(old_name)
        prompt = new_prompt()
        (await ask(replicated.http, replicated.a.url, chat(prompt, 5))).check_whole(
            expected_text(prompt, 5), attempts=1
        )
    else:
        for proxy in replicated.to_engines.values():
            proxy.reset()
        await asyncio.gather(*(each.task for each in of_a), return_exceptions=True)


class Early:
    """A request that A is sent while it is frozen."""

    def __init__(self, replicated: Replicated) -> None:
        prompt = new_prompt()
        self.truth = expected_text(prompt, 5)
        self.task = spawn(ask(replicated.http, replicated.a.url, chat(prompt, 5)), "early")


async def check_ended(answer: Answer, truth: str) -> None:
    """One clear error; or whole, where it could begin anew before the gateway had looked at its mark."""
    if not answer.errors:
        answer.check_whole(truth)
        return
    (error,) = answer.errors
    assert error["code"] in ("gateway_fenced", "engine_failed"), "an engine's word of the abort may be read first"
    assert (answer.status, answer.done, answer.ended) == (200 if answer.text() else 503, 0, True)
    assert truth.startswith(answer.text())


async def _not_ready(replicated: Replicated) -> str:
    told = await replicated.get("/readyz", replicated.a)
    return "" if told["ready"] else f"it takes nothing new: {told['replicas']}"


async def _is(replicated: Replicated, gateway: GatewayProcess, name: str) -> str:
    return "" if await replicated.of(gateway, name) else f"{name} is 0"


async def test_a_gateway_that_is_told_to_stop_leaves_nothing(replicated: Replicated) -> None:
    name = (await replicated.get("/pdgate/replica", replicated.a))["replica"]
    keys = FailoverKeys("pdgate", "default")
    held = await hold(replicated, replicated.a, TOKEN, True)
    await asyncio.sleep(0.3)
    replicated.a.send_signal(signal.SIGTERM)
    await asyncio.sleep(1.5)
    assert replicated.redis.ask("HLEN", keys.attempts(name)) == 1, "it waits for what runs"
    assert replicated.redis.ask("HGET", keys.addresses(), name) == b"", "it cannot be asked any more"
    await replicated.release(held.hold)
    await held.whole()
    assert await replicated.a.wait(10.0) == 0
    assert replicated.redis.ask("EXISTS", keys.attempts(name)) == 0
    assert replicated.redis.ask("ZSCORE", keys.lives(), name) is None
    assert replicated.redis.ask("HEXISTS", keys.addresses(), name) == 0
    await asyncio.sleep(1.5)
    assert await replicated.of(replicated.b, "pdgate_replicas_absent") == 0
