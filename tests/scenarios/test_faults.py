"""Servers that answer wrongly, break off, fall silent or refuse: retried before commit, else one clear error."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.types import Leg, Role
from tests.machine import Stopwatch
from tests.scenarios.client import Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import CLOSED_S, Cluster
from tests.scenarios.phases import (
    BOOTSTRAP,
    PREFILL_CHUNK,
    RESERVED,
    TOKEN,
    Asked,
    Phase,
    hold_at,
    noticed,
    pair_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

each_leg = pytest.mark.parametrize("leg", tuple(Leg), ids=str)
each_mode = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

STALL_S, FIRST_OUTPUT_S = 1.5, 2.5
FREED_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_impatient() -> AsyncIterator[Cluster]:
    deadlines = ("--stall-timeout-secs", str(STALL_S), "--first-token-timeout-secs", str(FIRST_OUTPUT_S))
    async with Cluster(2, 2, gateway=deadlines) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def impatient(shared_impatient: Cluster) -> AsyncIterator[Cluster]:
    """A gateway that waits a second or two where others wait a minute or two."""
    yield shared_impatient
    await shared_impatient.heal()


async def meet(
    cluster: Cluster, leg: Leg, fault: str, *, stream: bool, tokens: int = 40, **fields: int
) -> tuple[Asked, Answer, EmulatedServer]:
    """Chats until one meets a fault of one server: that one, its answer, the server. Those before it were whole.

    The server that served the last one is made faulty: it was the best a moment ago, so it will soon be met.
    """
    asked = Asked(cluster, stream=False)
    (await asked.finish()).check_whole(asked.truth, attempts=1)
    for _ in range(30):
        faulty = (await pair_of(cluster))[leg]
        await cluster.fault(faulty, fault, **fields)
        asked = Asked(cluster, stream=stream, tokens=tokens)
        answer = await asked.finish()
        if (await cluster.explain())["attempts"][0][leg.value] == faulty.url:
            return asked, answer, faulty
        answer.check_whole(asked.truth, attempts=1)
        await cluster.clear_faults()
    raise AssertionError("no server was met twice in a row")


BEFORE_OUTPUT = [
    *((leg, "status", status) for leg in Leg for status in (500, 503, 429)),
    *((leg, "drop_connection", 0) for leg in Leg),
    (Leg.PREFILL, "abort_in_200", 0),
]


@pytest.mark.parametrize(("leg", "fault", "status"), BEFORE_OUTPUT, ids=lambda value: str(value or ""))
@each_mode
async def test_a_fault_before_output_is_retried(
    two_pairs: Cluster, leg: Leg, fault: str, status: int, stream: bool
) -> None:
    fields = {"status": status} if status else {}
    asked, answer, faulty = await meet(two_pairs, leg, fault, stream=stream, **fields)
    answer.check_whole(asked.truth, attempts=2)
    assert answer.headers[f"x-pdgate-{leg}"] != faulty.url
    first = (await two_pairs.explain(answer.request_id))["attempts"][0]
    assert [each["leg"] for each in first["outcomes"]] == [leg.value]
    await two_pairs.settled(FREED_S)


@each_leg
@each_mode
async def test_a_callers_fault_goes_to_the_client(two_pairs: Cluster, leg: Leg, stream: bool) -> None:
    _, answer, _ = await meet(two_pairs, leg, "status", stream=stream, status=400)
    answer.check_refused(400)
    assert answer.headers["x-should-retry"] == "false"
    assert answer.attempts == 1
    await two_pairs.settled(FREED_S)


@pytest.mark.parametrize("fault", ["truncate_stream", "error_event"])
async def test_a_stream_that_breaks_off_ends_with_one_error(two_pairs: Cluster, fault: str) -> None:
    asked, answer, _ = await meet(two_pairs, Leg.DECODE, fault, stream=True, after_tokens=8)
    answer.check_broken(asked.truth)
    assert answer.attempts == 1
    await two_pairs.settled(FREED_S)


async def test_a_stream_is_whole_at_its_terminator(watched: Cluster) -> None:
    """What becomes of the decode's connection after `[DONE]` is no news to the client."""
    watched.recorder(watched.decodes[0]).unended = 1
    asked = Asked(watched, stream=True)
    (await asked.finish()).check_whole(asked.truth, attempts=1)


async def test_a_stall_ends_with_one_error(impatient: Cluster) -> None:
    asked, answer, _ = await meet(impatient, Leg.DECODE, "stall", stream=True, after_tokens=8)
    answer.check_broken(asked.truth)
    assert "in time" in answer.errors[0]["message"]
    await impatient.settled(CLOSED_S)


@pytest.mark.parametrize("phase", [BOOTSTRAP, RESERVED, PREFILL_CHUNK], ids=str)
@each_mode
async def test_silence_before_output_is_retried(impatient: Cluster, phase: Phase, stream: bool) -> None:
    held = await hold_at(impatient, phase, stream)
    answer = await held.asked[0].finish()
    answer.check_whole(held.asked[0].truth, attempts=2)
    await impatient.settled(FREED_S)


async def test_a_frozen_decode_ends_its_streams_with_an_error(impatient: Cluster) -> None:
    held = await hold_at(impatient, TOKEN, True)
    frozen = held.pair[Leg.DECODE]
    frozen.send_signal(signal.SIGSTOP)
    answer = await held.asked[0].finish()
    answer.check_broken(held.asked[0].truth)
    frozen.send_signal(signal.SIGCONT)
    await impatient.settled(CLOSED_S)


async def test_a_frozen_prefill_is_passed_over(impatient: Cluster) -> None:
    held = await hold_at(impatient, PREFILL_CHUNK, True)
    frozen = held.pair[Leg.PREFILL]
    frozen.send_signal(signal.SIGSTOP)
    answer = await held.asked[0].finish()
    answer.check_whole(held.asked[0].truth, attempts=2)
    retry = (await impatient.explain(answer.request_id))["attempts"][1]
    failed_before = [each["engine"] for each in retry["dropped"] if "this request has failed on" in each["reason"]]
    assert frozen.url in failed_before, "also where its decode was the one to say so"
    assert retry["prefill"] != frozen.url
    frozen.send_signal(signal.SIGCONT)
    await impatient.settled(CLOSED_S)


@each_leg
@each_mode
async def test_no_pair_is_told_at_once(one_pair: Cluster, leg: Leg, stream: bool) -> None:
    dead = (one_pair.prefills if leg is Leg.PREFILL else one_pair.decodes)[0]
    await one_pair.kill(dead)
    await noticed(one_pair, dead)
    begun = Stopwatch()
    answer = await ask(one_pair.http, one_pair.url, chat(new_prompt(), stream=stream))
    assert begun.took_s() < 1.0
    answer.check_refused(503)
    assert answer.body["error"]["code"] == "no_pair_available"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["x-should-retry"] == "true"


async def test_a_request_that_ends_two_servers_is_refused(two_pairs: Cluster) -> None:
    holds = await two_pairs.hold_any(Role.DECODE, RESERVED.stage)
    asked = Asked(two_pairs, stream=True)
    for _ in range(2):
        (caught,) = await two_pairs.held_once(holds)
        holds.remove(caught)
        await two_pairs.kill(caught.server)
    refused = await asked.finish()
    refused.check_refused(502)
    assert refused.body["error"]["code"] == "poison_suspected"
    assert (refused.attempts, refused.headers["x-should-retry"]) == (2, "false")
    await asyncio.gather(*(two_pairs.restart(server) for server in two_pairs.decodes))
    await two_pairs.ready()
    again = await ask(two_pairs.http, two_pairs.url, chat(asked.prompt))
    again.check_refused(502)
    assert again.body["error"]["code"] == "poison_suspected"
    other = new_prompt()
    (await ask(two_pairs.http, two_pairs.url, chat(other))).check_whole(expected_text(other, 40), attempts=1)


async def test_one_rid_for_two_requests_is_no_clash(two_pairs: Cluster) -> None:
    asked = [Asked(two_pairs, stream=False, rid="the same for both") for _ in range(2)]
    for each in asked:
        (await each.finish()).check_whole(each.truth, attempts=1)
    assert (await two_pairs.explain("the same for both"))["attempts"]
