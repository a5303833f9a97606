"""A hundred mixed requests while a decode and a prefill are killed and come back; the history is checked afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from engines.emulator.process import EmulatedServer
from engines.emulator.tokens import decode
from engines.tasks import spawn
from failover.chaos import checker
from failover.chaos.checker import Outcome
from failover.chaos.history import History
from tests.machine import time_limit
from tests.scenarios.client import (
    CHAT,
    COMPLETIONS,
    Answer,
    ask,
    chat,
    completion,
    new_prompt,
)
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.history import recorded, taken
from tests.scenarios.phases import noticed

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS, AT_ONCE = 100, 16
DEADLINE_S = 60.0


@dataclass
class Request:
    """One client's plan: what it asks, and after how many events it hangs up, if it does."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None
    answer: Answer


def plan(rng: Random) -> Request:
    """A random request: both OpenAI routes, short and long, one or two choices, whole or streamed."""
    prompt, tokens, samples = new_prompt(rng.choice((40, 300, 1500))), rng.choice((3, 60, 250)), rng.choice((1, 1, 2))
    stream = rng.random() < 0.6
    if rng.random() < 0.6:
        path, body = CHAT, chat(prompt, tokens, stream=stream)
    else:
        path, body = COMPLETIONS, completion(prompt, tokens, stream=stream)
    if samples > 1:
        body["n"] = samples
    leaves_after = rng.choice((1, 5)) if stream and rng.random() < 0.1 else None
    if rng.random() < 0.3:
        body["temperature"] = 0.8
    return Request(path, body, leaves_after, Answer())


async def play(cluster: Cluster, request: Request) -> None:
    """One client from beginning to end, or until it hangs up."""
    work = spawn(ask(cluster.http, cluster.url, request.body, request.path, request.answer), "a mixed request")
    while request.leaves_after is not None and not work.done():
        await asyncio.wait([work, spawn(request.answer.grew.wait(), "growth")], return_when=asyncio.FIRST_COMPLETED)
        request.answer.grew.clear()
        if len(request.answer.events) >= request.leaves_after:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
    await work


class Load:
    """Plays all requests, so many at once, and counts those that are over."""

    def __init__(self, cluster: Cluster, requests: list[Request]) -> None:
        self._cluster, self._requests = cluster, requests
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.over = 0

    async def run(self) -> None:
        async with time_limit(DEADLINE_S):
            await asyncio.gather(*(self._play(request) for request in self._requests))

    async def _play(self, request: Request) -> None:
        async with self._slots:
            await play(self._cluster, request)
        self.over += 1

    async def reached(self, count: int) -> None:
        """Wait until so many requests are over."""

        async def missing() -> str:
            return "" if self.over >= count else f"{self.over} of {count} requests are over"

        await eventually(missing, DEADLINE_S)


async def kill_and_restart(cluster: Cluster, load: Load, victim: EmulatedServer, at: int) -> None:
    """Kill a server in the middle of the load, and start its successor a while later."""
    await load.reached(at)
    await cluster.kill(victim)
    await noticed(cluster, victim)
    await cluster.restart(victim)
    await cluster.ready()


async def mixed_load(cluster: Cluster, seed: int) -> History:
    """The history of one run; at its end both servers have been killed and are back, and nothing is left."""
    rng = Random(seed)
    requests = [plan(rng) for _ in range(REQUESTS)]
    load = Load(cluster, requests)
    playing = spawn(load.run(), "mixed load")
    await kill_and_restart(cluster, load, rng.choice(cluster.decodes), rng.randint(10, 30))
    await kill_and_restart(cluster, load, rng.choice(cluster.prefills), min(load.over + 5, REQUESTS - AT_ONCE))
    await playing
    await cluster.settled()
    return await recorded(cluster, taken(cluster), with_ledgers=True)


def check(history: History) -> None:
    """No wrong word to any client; only streams that had begun on the killed decode may have broken."""
    assert [str(each) for each in checker.check(history, decode)] == []
    ends = Counter(map(checker.outcome, history.requests))
    assert ends.total() == REQUESTS
    assert ends[Outcome.REFUSED] == 0
    assert ends[Outcome.WHOLE] >= REQUESTS - ends[Outcome.LEFT] - AT_ONCE


async def test_mixed_load_survives_kills(two_pairs: Cluster) -> None:
    check(await mixed_load(two_pairs, seed=1))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 30))
async def test_mixed_load_survives_kills_with_many_seeds(two_pairs: Cluster, seed: int) -> None:
    check(await mixed_load(two_pairs, seed))
