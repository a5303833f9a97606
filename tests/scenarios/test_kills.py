"""kill -9 of either leg's server at every phase of a request: whole answers or one clear error, and nothing is left.

A phase is reached by a hold on the server that goes through it; every case asserts that it was.
"""

from __future__ import annotations

import asyncio

import pytest

from engines.emulator.process import EmulatedServer
from engines.types import Leg
from tests.scenarios.cluster import DEFERRED_RELEASE_S, Cluster, eventually
from tests.scenarios.phases import (
    HANDED_OVER,
    PHASES,
    PREFILL_CHUNK,
    TOKEN,
    TRANSFER,
    Asked,
    Held,
    Phase,
    hold_at,
    noticed,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

each_phase = pytest.mark.parametrize("phase", PHASES, ids=str)
each_victim = pytest.mark.parametrize("victim", tuple(Leg), ids=str)
each_mode = pytest.mark.parametrize("stream", [False, True], ids=("whole", "stream"))


async def kill_at(cluster: Cluster, phase: Phase, victim: Leg, *streams: bool) -> tuple[Held, EmulatedServer]:
    """Requests held at a phase together, then one of their servers killed; what can go on is let go."""
    held = await hold_at(cluster, phase, *streams)
    dead = held.pair[victim]
    await cluster.kill(dead)
    if phase.handed_over and victim is Leg.PREFILL:
        await noticed(cluster, dead)
        for hold in held.holds:
            await cluster.release(hold)
    return held, dead


async def survivors_are_free(cluster: Cluster, dead: EmulatedServer) -> None:
    await cluster.settled(DEFERRED_RELEASE_S, [server for server in cluster.servers if server is not dead])


@each_phase
@each_victim
@each_mode
async def test_a_killed_server_costs_no_answer(two_pairs: Cluster, phase: Phase, victim: Leg, stream: bool) -> None:
    held, dead = await kill_at(two_pairs, phase, victim, stream)
    asked = held.asked[0]
    answer = await asked.finish()
    if phase.handed_over and victim is Leg.PREFILL:
        answer.check_whole(asked.truth, attempts=1)
    elif phase is TOKEN and stream:
        answer.check_broken(asked.truth)
        assert answer.attempts == 1
    else:
        answer.check_whole(asked.truth, attempts=2)
        assert dead.url not in (answer.headers["x-pdgate-prefill"], answer.headers["x-pdgate-decode"])
    await survivors_are_free(two_pairs, dead)


@each_phase
@each_victim
async def test_without_another_pair_there_is_one_clear_error(one_pair: Cluster, phase: Phase, victim: Leg) -> None:
    held, dead = await kill_at(one_pair, phase, victim, False, True)
    whole, stream = held.asked
    answers = [await whole.finish(), await stream.finish()]
    if phase.handed_over and victim is Leg.PREFILL:
        answers[0].check_whole(whole.truth, attempts=1)
        answers[1].check_whole(stream.truth, attempts=1)
    else:
        answers[0].check_refused(502, 503)
        if phase is TOKEN:
            answers[1].check_broken(stream.truth)
        else:
            answers[1].check_refused(502, 503)
    await survivors_are_free(one_pair, dead)


@each_mode
async def test_both_servers_of_a_pair_are_killed_at_once(two_pairs: Cluster, stream: bool) -> None:
    held = await hold_at(two_pairs, PREFILL_CHUNK, stream)
    await asyncio.gather(*(two_pairs.kill(server) for server in held.pair.values()))
    answer = await held.asked[0].finish()
    answer.check_whole(held.asked[0].truth)
    assert answer.attempts in (2, 3), "the second may be sent before the other server's death is seen"
    await two_pairs.settled(servers=[server for server in two_pairs.servers if server.returncode is None])


@each_mode
@each_victim
async def test_one_of_several_choices_is_retried_alone(two_pairs: Cluster, victim: Leg, stream: bool) -> None:
    """The choices that did not run on the dead server, or had their KV, are not touched."""
    held = await hold_at(two_pairs, TRANSFER, stream, samples=2)
    dead = held.pair[victim]
    await two_pairs.kill(dead)
    for hold in held.holds:
        await two_pairs.release(hold)
    answer = await held.asked[0].finish()
    assert (answer.status, answer.errors, answer.done) == (200, [], int(stream))
    assert [answer.text(index) for index in (0, 1)] == [held.asked[0].truth] * 2
    await survivors_are_free(two_pairs, dead)


async def test_the_gauge_agrees_with_the_ledger_while_pages_wait(two_pairs: Cluster) -> None:
    """A decode keeps the pages of a dead prefill's request for a while; pdgate sees just these tokens unaccounted."""
    held, dead = await kill_at(two_pairs, TRANSFER, Leg.PREFILL, False)
    decode = held.pair[Leg.DECODE]
    (await held.asked[0].finish()).check_whole(held.asked[0].truth, attempts=2)

    async def missing() -> str:
        kept = sum((await two_pairs.ledger(decode))["by_room"].values())
        assert kept > 0, "the pages were free before the gauge had shown them"
        gauge = await two_pairs.metric("pdgate_kv_unaccounted_tokens", engine=decode.url)
        return "" if gauge == kept else f"the gauge says {gauge:g}, the ledger {kept}"

    await eventually(missing, DEFERRED_RELEASE_S)
    await survivors_are_free(two_pairs, dead)


async def test_a_lost_prefill_may_have_handed_over(watched: Cluster) -> None:
    """Its answer never came and its connection broke, yet the decode has everything and speaks within the grace."""
    (prefill,), (decode,) = watched.prefills, watched.decodes
    watched.recorder(prefill).owed = 1
    hold = await watched.hold(decode, HANDED_OVER.stage)
    asked = Asked(watched, stream=True)
    await watched.held([hold])
    assert (await watched.last_attempt())["handed_over_s"] is None
    await watched.kill(prefill)
    watched.recorder(prefill).reset()
    await noticed(watched, prefill)
    await watched.release(hold)
    (await asked.finish()).check_whole(asked.truth, attempts=1)
    assert [each["kind"] for each in (await watched.last_attempt())["outcomes"]] == ["reset"]
    await survivors_are_free(watched, prefill)


async def test_a_lost_prefill_is_not_waited_for_longer_than_the_grace(watched: Cluster) -> None:
    (prefill,), (decode,) = watched.prefills, watched.decodes
    watched.recorder(prefill).owed = 1
    hold = await watched.hold(decode, HANDED_OVER.stage)
    asked = Asked(watched, stream=True)
    await watched.held([hold])
    await watched.kill(prefill)
    watched.recorder(prefill).reset()
    (await asked.finish()).check_refused(502, 503)
    await survivors_are_free(watched, prefill)


STREAMS = 50


async def test_prefill_death_spares_streams(watched: Cluster) -> None:
    """50 streams are decoding, half of them with a prefill that still owes its answer, when the prefill is killed."""
    (prefill,), (decode,) = watched.prefills, watched.decodes
    watched.recorder(prefill).owed = STREAMS // 2
    holds = [await watched.hold(decode, "token", 20) for _ in range(STREAMS)]
    asked = [Asked(watched, stream=True, tokens=120) for _ in range(STREAMS)]
    await watched.held(holds, STREAMS, within_s=20.0)
    await asyncio.gather(*(each.streaming() for each in asked))
    await watched.kill(prefill)
    watched.recorder(prefill).reset()
    await noticed(watched, prefill)
    for hold in holds:
        await watched.release(hold)
    answers = await asyncio.gather(*(each.finish() for each in asked))
    attempts = [(await watched.explain(answer.request_id))["attempts"] for answer in answers]
    for each, answer in zip(asked, answers, strict=True):
        answer.check_whole(each.truth, attempts=1)
    assert [len(each) for each in attempts] == [1] * STREAMS
    assert sum(len(each[0]["outcomes"]) for each in attempts) == STREAMS // 2, "as many legs broke as were open"
    await survivors_are_free(watched, prefill)
