"""kill -9 of either leg's server at every phase of a request: whole answers or one clear error, and nothing is left.

A phase is reached by a hold on the server that goes through it; every case asserts that it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.tasks import spawn
from engines.types import Leg, Role
from tests.scenarios.client import Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import DEFERRED_RELEASE_S, Cluster, Hold, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 40
ANSWER_S = 10.0


@dataclass(frozen=True)
class Phase:
    """Where a request is held when a server dies. `handed_over`: the prefill's part is over and well by then."""

    stage: str
    holder: Role
    k: int = 1
    handed_over: bool = False

    def __str__(self) -> str:
        return self.stage


PHASES = (
    Phase("bootstrap", Role.PREFILL),
    Phase("reserved", Role.DECODE),
    Phase("prefill_chunk", Role.PREFILL, k=2),
    Phase("transfer", Role.PREFILL),
    Phase("handed_over", Role.DECODE, handed_over=True),
    Phase("token", Role.DECODE, k=5, handed_over=True),
)
ROLES = {Leg.PREFILL: Role.PREFILL, Leg.DECODE: Role.DECODE}

each_phase = pytest.mark.parametrize("phase", PHASES, ids=str)
each_victim = pytest.mark.parametrize("victim", tuple(Leg), ids=str)
each_mode = pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_pairs() -> AsyncIterator[Cluster]:
    async with Cluster(2, 2) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair() -> AsyncIterator[Cluster]:
    async with Cluster(1, 1) as cluster:
        yield cluster


class Asked:
    """A request that is held at a phase: its prompt, its answer as it grows, its servers."""

    def __init__(self, cluster: Cluster, stream: bool) -> None:
        self.cluster, self.stream = cluster, stream
        self.prompt = new_prompt()
        self.answer = Answer()
        body = chat(self.prompt, TOKENS, stream=stream)
        self.task = spawn(ask(cluster.http, cluster.url, body, answer=self.answer), f"ask {self.prompt[:6]}")

    @property
    def truth(self) -> str:
        return expected_text(self.prompt, TOKENS)

    async def finish(self) -> Answer:
        return await asyncio.wait_for(self.task, ANSWER_S)

    async def streaming(self) -> None:
        """Wait until the client has text in its hands."""

        async def missing() -> str:
            return "" if self.answer.text() else "no text has come"

        await eventually(missing, 5.0)


async def reached(cluster: Cluster, phase: Phase, holds: list[Hold], *asked: Asked) -> list[Hold]:
    caught = await cluster.held(holds, len(asked))
    if phase.handed_over:
        await eventually(lambda: _not_handed_over(cluster, len(asked)), 5.0)
    if phase.stage == "token":
        for each in asked:
            if each.stream:
                await each.streaming()
    return caught


async def _not_handed_over(cluster: Cluster, count: int) -> str:
    booked = [value for sample, value in await cluster.metrics() if sample.name == "pdgate_booked_uncached_tokens"]
    live = await cluster.metric("pdgate_live_bookings")
    return "" if live == count and not any(booked) else f"{live:g} live, {booked} booked on prefills"


async def pair_of(cluster: Cluster) -> dict[Leg, EmulatedServer]:
    """The servers of the newest request's last attempt."""
    attempt = await cluster.last_attempt()
    return {leg: cluster.server(attempt[leg.value]) for leg in Leg}


async def noticed(cluster: Cluster, server: EmulatedServer) -> None:
    """Wait until the gateway knows that a server has gone."""

    async def missing() -> str:
        ready = await cluster.metric("pdgate_engine_ready", engine=server.url)
        return "" if ready == 0 else f"{server.url} still counts as ready"

    await eventually(missing, 5.0)


async def kill_at(cluster: Cluster, phase: Phase, victim: Leg, *streams: bool) -> tuple[list[Asked], EmulatedServer]:
    """Requests held at a phase together, then one of their servers killed; what can go on is let go."""
    holds = [hold for _ in streams for hold in await cluster.hold_any(phase.holder, phase.stage, phase.k)]
    asked = [Asked(cluster, stream) for stream in streams]
    caught = await reached(cluster, phase, holds, *asked)
    dead = (await pair_of(cluster))[victim]
    await cluster.kill(dead)
    if phase.handed_over and victim is Leg.PREFILL:
        await noticed(cluster, dead)
        for hold in caught:
            await cluster.release(hold)
    return asked, dead


async def recover(cluster: Cluster, dead: EmulatedServer) -> None:
    """The survivors hold nothing, and the dead server has a successor that the gateway uses."""
    alive = [server for server in cluster.servers if server is not dead]
    await asyncio.gather(cluster.settled(DEFERRED_RELEASE_S + 1.0, alive), cluster.restart(dead))
    await cluster.ready()
    await cluster.settled()


@each_phase
@each_victim
@each_mode
async def test_a_killed_server_costs_no_answer(two_pairs: Cluster, phase: Phase, victim: Leg, stream: bool) -> None:
    (asked,), dead = await kill_at(two_pairs, phase, victim, stream)
    answer = await asked.finish()
    if phase.handed_over and victim is Leg.PREFILL:
        answer.check_whole(asked.truth, attempts=1)
    elif phase.stage == "token" and stream:
        answer.check_broken(asked.truth)
        assert answer.attempts == 1
    else:
        answer.check_whole(asked.truth, attempts=2)
        assert dead.url not in (answer.headers["x-pdgate-prefill"], answer.headers["x-pdgate-decode"])
    await recover(two_pairs, dead)


@each_phase
@each_victim
async def test_without_another_pair_there_is_one_clear_error(one_pair: Cluster, phase: Phase, victim: Leg) -> None:
    (whole, stream), dead = await kill_at(one_pair, phase, victim, False, True)
    answers = [await whole.finish(), await stream.finish()]
    if phase.handed_over and victim is Leg.PREFILL:
        answers[0].check_whole(whole.truth, attempts=1)
        answers[1].check_whole(stream.truth, attempts=1)
    else:
        answers[0].check_refused(502, 503)
        if phase.stage == "token":
            answers[1].check_broken(stream.truth)
        else:
            answers[1].check_refused(502, 503)
    await recover(one_pair, dead)
