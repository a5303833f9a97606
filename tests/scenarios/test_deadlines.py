"""Servers that freeze while their connections stay open: found in seconds at each stage, never for a short pause."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.types import Leg
from failover.deadlines import KNOWN_GAPS
from tests.machine import Stopwatch
from tests.scenarios.client import Answer
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import Asked, pair_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

FLOOR_S = 1.2
"""Of both limits; far above a pause that the machine itself makes."""
FOUND_S = FLOOR_S + 1.0
PROBE_S = 2.0
"""A probe that a server answered by half before it froze is a sign of life until it is given up."""
WHOLE_FOUND_S = 4 * FLOOR_S + PROBE_S
ANSWER_S = 3.0
SPEED = 0.2
"""Slow enough for a stream of 200 tokens to last 2 s."""
TOKENS = 200


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_slow() -> AsyncIterator[Cluster]:
    floors = ("--stall-floor-secs", str(FLOOR_S), "--first-token-floor-secs", str(FLOOR_S))
    async with Cluster(2, 2, speed=SPEED, gateway=floors, engine=("--chunked-prefill-size", "2048")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def slow(shared_slow: Cluster) -> AsyncIterator[Cluster]:
    """A gateway that knows its servers, and waits for them little longer than they need."""
    for _ in range(8):
        warm = [Asked(shared_slow, stream=False, tokens=12) for _ in range(3)]
        for asked in warm:
            (await asked.finish()).check_whole(asked.truth)
    yield shared_slow
    await shared_slow.heal()


async def streaming(cluster: Cluster, count: int) -> list[Asked]:
    """So many streams, each with so many tokens at its client that it has shown its pace."""
    asked = [Asked(cluster, stream=True, tokens=TOKENS) for _ in range(count)]

    async def missing() -> str:
        events = min(len(each.answer.events) for each in asked)
        return "" if events > 2 * KNOWN_GAPS else f"a stream has {events} events"

    await eventually(missing, 5.0)
    return asked


async def decode_at_work(cluster: Cluster) -> EmulatedServer:
    """A decode that is amid an answer."""
    found: list[EmulatedServer] = []

    async def missing() -> str:
        for server in cluster.decodes:
            if any(each["output_tokens"] > 10 for each in (await cluster.requests(server))["live"]):
                found.append(server)
        return "" if found else "no decode is amid an answer"

    await eventually(missing, 5.0)
    return found[0]


def decode_of(cluster: Cluster, answer: Answer) -> EmulatedServer:
    return cluster.server(answer.headers["x-pdgate-decode"])


async def passed(cluster: Cluster, stage: str) -> float:
    """How often a deadline of this stage has passed."""
    found = [
        value
        for sample, value in await cluster.metrics(names=("pdgate_deadlines_passed",))
        if sample.name == "pdgate_deadlines_passed_total" and sample.labels["stage"] == stage
    ]
    return sum(found)


async def test_a_frozen_decode_is_found_by_all_of_its_streams_and_the_others_go_on(slow: Cluster) -> None:
    before = await passed(slow, "stall")
    asked = await streaming(slow, 6)
    frozen = decode_of(slow, asked[0].answer)
    on_it = [each for each in asked if decode_of(slow, each.answer) is frozen]
    assert len(on_it) < len(asked)
    begun = Stopwatch()
    frozen.send_signal(signal.SIGSTOP)
    for each in on_it:
        answer = await each.finish()
        if answer.errors:
            answer.check_broken(each.truth)
            assert answer.errors[0]["code"] == "stall_timeout"
            assert frozen.url in answer.errors[0]["message"]
        else:
            answer.check_whole(each.truth)
    assert begun.took_s() < FOUND_S
    for each in asked:
        if each not in on_it:
            (await each.finish()).check_whole(each.truth, attempts=1)
    assert await passed(slow, "stall") - before == len(on_it)


@pytest.mark.parametrize("leg", tuple(Leg), ids=str)
async def test_a_server_that_pauses_for_less_costs_nothing(slow: Cluster, leg: Leg) -> None:
    asked = await streaming(slow, 4)
    before = await passed(slow, "stall")
    server = (await pair_of(slow))[leg]
    server.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FLOOR_S / 2)
    late = Asked(slow, stream=True)
    server.send_signal(signal.SIGCONT)
    for each in (*asked, late):
        (await each.finish()).check_whole(each.truth, attempts=1)
    assert await passed(slow, "stall") == before


@pytest.mark.parametrize("leg", tuple(Leg), ids=str)
async def test_a_pair_that_is_dead_but_connected_is_found_before_its_first_token(slow: Cluster, leg: Leg) -> None:
    frozen = (slow.prefills if leg is Leg.PREFILL else slow.decodes)[0]
    frozen.send_signal(signal.SIGSTOP)
    begun = Stopwatch()
    asked = [Asked(slow, stream=number % 2 == 0) for number in range(6)]
    attempts = []
    for each in asked:
        answer = await each.finish()
        answer.check_whole(each.truth)
        attempts.append((await slow.explain(answer.request_id))["attempts"])
    assert begun.took_s() < FOUND_S + PROBE_S
    failed = [each[0] for each in attempts if len(each) == 2]
    assert failed, "nobody met it"
    for attempt in failed:
        assert attempt[leg.value] == frozen.url
        assert attempt["outcomes"][-1]["leg"] == leg.value, "the other one waits for it, and is not to blame"


async def test_a_whole_answer_is_not_waited_for_where_its_decode_is_frozen(slow: Cluster) -> None:
    asked = [Asked(slow, stream=False, tokens=TOKENS) for _ in range(4)]
    frozen = await decode_at_work(slow)
    begun = Stopwatch()
    frozen.send_signal(signal.SIGSTOP)
    attempts = []
    for each in asked:
        answer = await each.finish()
        answer.check_whole(each.truth)
        attempts.append(answer.attempts)
    assert 2 in attempts
    assert begun.took_s() < WHOLE_FOUND_S + ANSWER_S
