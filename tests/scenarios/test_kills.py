"""kill -9 of either leg's server at every phase of a request: whole answers or one clear error, and nothing is left.

A phase is reached by a hold on the server that goes through it; every case asserts that it was.
"""

from __future__ import annotations

import asyncio

import pytest

from engines.emulator.process import EmulatedServer
from engines.types import Leg
from tests.scenarios.cluster import DEFERRED_RELEASE_S, Cluster, eventually
from tests.scenarios.phases import HANDED_OVER, PHASES, TOKEN, TRANSFER, Asked, Held, Phase, hold_at, noticed, pair_of

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


async def test_a_lost_prefill_may_have_handed_over(two_pairs: Cluster) -> None:
    """Its answer never came and its connection broke, yet the decode has everything and speaks within the grace."""
    for prefill in two_pairs.prefills:
        await two_pairs.fault(prefill, "stall")
    held_at = [await two_pairs.hold(decode, HANDED_OVER.stage) for decode in two_pairs.decodes]
    asked = Asked(two_pairs, stream=True)
    caught = await two_pairs.held(held_at)
    dead = (await pair_of(two_pairs))[Leg.PREFILL]
    await two_pairs.kill(dead)
    await two_pairs.release(caught[0])
    (await asked.finish()).check_whole(asked.truth, attempts=1)
    await survivors_are_free(two_pairs, dead)


STREAMS = 50


async def test_prefill_death_spares_streams(one_pair: Cluster) -> None:
    """50 streams are decoding, half of them with a prefill that still owes its answer, when the prefill is killed."""
    (prefill,), (decode,) = one_pair.prefills, one_pair.decodes
    await one_pair.fault(prefill, "stall", count=STREAMS // 2)
    holds = [await one_pair.hold(decode, "token", 20) for _ in range(STREAMS)]
    asked = [Asked(one_pair, stream=True, tokens=120) for _ in range(STREAMS)]
    await one_pair.held(holds, STREAMS, within_s=20.0)
    await asyncio.gather(*(each.streaming() for each in asked))
    open_on_prefill = len((await one_pair.requests(prefill))["live"])
    await one_pair.kill(prefill)
    await noticed(one_pair, prefill)
    for hold in holds:
        await one_pair.release(hold)
    answers = await asyncio.gather(*(each.finish() for each in asked))
    for each, answer in zip(asked, answers, strict=True):
        answer.check_whole(each.truth, attempts=1)
        assert len((await one_pair.explain(answer.request_id))["attempts"]) == 1
    assert open_on_prefill == 0, "the prefill was still computing"
    await survivors_are_free(one_pair, prefill)
