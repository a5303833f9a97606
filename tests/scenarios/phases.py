"""The phases of a request as tests reach them: by a hold on the server that goes through it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from engines.emulator.process import EmulatedServer
from engines.tasks import spawn
from engines.types import Leg, Role
from tests.machine import time_limit
from tests.scenarios.client import CHAT, Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, Hold, eventually

TOKENS = 40
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Phase:
    """Where a request is held. `handed_over`: the prefill's part is over and well by then."""

    stage: str
    holder: Role
    k: int = 1
    handed_over: bool = False

    def __str__(self) -> str:
        return self.stage


BOOTSTRAP = Phase("bootstrap", Role.PREFILL)
RESERVED = Phase("reserved", Role.DECODE)
PREFILL_CHUNK = Phase("prefill_chunk", Role.PREFILL, k=2)
TRANSFER = Phase("transfer", Role.PREFILL)
HANDED_OVER = Phase("handed_over", Role.DECODE, handed_over=True)
TOKEN = Phase("token", Role.DECODE, k=5, handed_over=True)
PHASES = (BOOTSTRAP, RESERVED, PREFILL_CHUNK, TRANSFER, HANDED_OVER, TOKEN)


class Asked:
    """A chat on its way: its prompt, its answer as it grows."""

    def __init__(
        self, cluster: Cluster, *, stream: bool, prompt: str | None = None, tokens: int = TOKENS, **fields: Any
    ) -> None:
        self.cluster, self.stream = cluster, stream
        self.prompt = prompt or new_prompt()
        self.truth = expected_text(self.prompt, tokens)
        self.answer = Answer()
        body = chat(self.prompt, tokens, stream=stream, **fields)
        self.task = spawn(ask(cluster.http, cluster.url, body, CHAT, self.answer), f"ask {self.prompt[:6]}")

    async def finish(self) -> Answer:
        """Its answer; it is a failure if that takes too long."""
        async with time_limit(_ANSWER_S):
            return await self.task

    async def streaming(self) -> None:
        """Wait until the client has text in its hands."""

        async def missing() -> str:
            return "" if self.answer.text() else "no text has come"

        await eventually(missing, 5.0)

    async def leave(self) -> None:
        """The client hangs up."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Held:
    """Requests that are held at a phase on one pair, and their holds."""

    asked: list[Asked]
    holds: list[Hold]
    pair: dict[Leg, EmulatedServer]


async def hold_at(cluster: Cluster, phase: Phase, *streams: bool, samples: int = 1) -> Held:
    """Ask one chat for each of `streams` and see each held at the phase, known so by the gateway and the clients.

    Of a chat with several `samples` each is held.
    """
    count = len(streams) * samples
    holds = [hold for _ in range(count) for hold in await cluster.hold_any(phase.holder, phase.stage, phase.k)]
    asked = [Asked(cluster, stream=stream, n=samples) for stream in streams]
    caught = await cluster.held(holds, count)
    if phase.handed_over:
        await eventually(lambda: _not_handed_over(cluster, count), 5.0)
    if phase is TOKEN:
        for each in asked:
            if each.stream:
                await each.streaming()
    return Held(asked, caught, await pair_of(cluster))


async def pair_of(cluster: Cluster, request_id: str = "newest") -> dict[Leg, EmulatedServer]:
    """The servers of a request's last attempt."""
    attempt = (await cluster.explain(request_id))["attempts"][-1]
    return {leg: cluster.server(attempt[leg.value]) for leg in Leg}


async def noticed(cluster: Cluster, server: EmulatedServer, within_s: float = 5.0) -> None:
    """Wait until the gateway sends nothing new to a server."""

    async def missing() -> str:
        ready = await cluster.metric("pdgate_engine_ready", engine=cluster.name(server))
        return "" if ready == 0 else f"{server.url} still counts as ready"

    await eventually(missing, within_s)


async def _not_handed_over(cluster: Cluster, count: int) -> str:
    booked = [value for _, value in await cluster.metrics(names=("pdgate_booked_uncached_tokens",))]
    live = await cluster.metric("pdgate_live_bookings")
    return "" if live == count and not any(booked) else f"{live:g} live, {booked} booked on prefills"
