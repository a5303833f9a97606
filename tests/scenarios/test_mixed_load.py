"""A hundred mixed requests while a decode and a prefill are killed and come back; the history is checked afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from engines.emulator.process import EmulatedServer
from engines.tasks import spawn
from tests.scenarios.client import (
    CHAT,
    COMPLETIONS,
    Answer,
    ask,
    chat,
    completion,
    continued,
    expected_text,
    new_prompt,
)
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.history import Told, problems
from tests.scenarios.phases import noticed

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

REQUESTS, AT_ONCE = 100, 16
DEADLINE_S = 60.0


@dataclass
class Request:
    """One client's plan: what it asks, and after how many events it hangs up, if it does."""

    path: str
    body: dict[str, Any]
    truths: list[str]
    leaves_after: int | None
    answer: Answer

    def told(self, name: str) -> Told:
        answer = self.answer
        return Told(
            name,
            self.truths,
            [answer.text(index) for index in range(len(self.truths))],
            answer.status or None,
            self.body["stream"],
            answer.ended,
            answer.done,
            len(answer.errors),
            left=self.leaves_after is not None and not answer.ended,
        )


def plan(rng: Random) -> Request:
    """A random request: both OpenAI routes, short and long, one or two choices, whole or streamed."""
    prompt, tokens, samples = new_prompt(rng.choice((40, 300, 1500))), rng.choice((3, 60, 250)), rng.choice((1, 1, 2))
    stream = rng.random() < 0.6
    if rng.random() < 0.6:
        path, body, truth = CHAT, chat(prompt, tokens, stream=stream), expected_text(prompt, tokens)
    else:
        path, body, truth = COMPLETIONS, completion(prompt, tokens, stream=stream), continued(prompt, tokens)
    if samples > 1:
        body["n"] = samples
    leaves_after = rng.choice((1, 5)) if stream and rng.random() < 0.1 else None
    return Request(path, body, [truth] * samples, leaves_after, Answer())


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
        async with asyncio.timeout(DEADLINE_S):
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


async def mixed_load(cluster: Cluster, seed: int) -> list[Told]:
    """The history of one run; at its end both servers have been killed and are back."""
    rng = Random(seed)
    requests = [plan(rng) for _ in range(REQUESTS)]
    load = Load(cluster, requests)
    playing = spawn(load.run(), "mixed load")
    await kill_and_restart(cluster, load, rng.choice(cluster.decodes), rng.randint(10, 30))
    await kill_and_restart(cluster, load, rng.choice(cluster.prefills), min(load.over + 5, REQUESTS - AT_ONCE))
    await playing
    return [request.told(f"request {number} of seed {seed}") for number, request in enumerate(requests)]


def check(history: list[Told]) -> None:
    """No wrong word to any client; only streams that had begun on the killed decode may have broken."""
    assert problems(history) == []
    assert [told.name for told in history if told.refused] == []
    stayed = [told for told in history if not told.left]
    assert sum(told.whole for told in stayed) >= len(stayed) - AT_ONCE


async def test_mixed_load_survives_kills(two_pairs: Cluster) -> None:
    check(await mixed_load(two_pairs, seed=1))
    await two_pairs.settled()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 30))
async def test_mixed_load_survives_kills_with_many_seeds(two_pairs: Cluster, seed: int) -> None:
    check(await mixed_load(two_pairs, seed))
    await two_pairs.settled()
