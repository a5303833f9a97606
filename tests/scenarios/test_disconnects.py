"""Clients that hang up, and how soon servers hear of it: both sides are free within a second, aborts leave at once."""

from __future__ import annotations

import asyncio
from statistics import median

import orjson
import pytest

from engines.emulator.process import EmulatedServer
from engines.types import Leg
from tests.machine import Stopwatch
from tests.scenarios.client import CHAT
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import BOOTSTRAP, PHASES, Asked, Phase, hold_at
from tests.scenarios.recorder import Call

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

each_phase = pytest.mark.parametrize("phase", PHASES, ids=str)

FREED_S = 1.0
ABORT_S = 0.05
GRACE_S = 0.35
"""A prefill's lost connection is judged after 0.3 s, and the abort follows within 50 ms."""
ROUNDS = 7
NOISE_S = 0.15
"""What a busy machine may add to a single measurement; medians get no such allowance."""


@each_phase
async def test_hanging_up_frees_both_sides(two_pairs: Cluster, phase: Phase) -> None:
    held = await hold_at(two_pairs, phase, False, True)
    assert await two_pairs.metric("pdgate_live_bookings") == 2
    await asyncio.gather(*(asked.leave() for asked in held.asked))
    await two_pairs.settled(FREED_S)


async def test_hanging_up_on_many_streams_at_once(one_pair: Cluster) -> None:
    asked = [Asked(one_pair, stream=True, tokens=20_000) for _ in range(30)]
    await asyncio.gather(*(each.streaming() for each in asked))
    await asyncio.gather(*(each.leave() for each in asked))
    await one_pair.settled(2 * FREED_S)


async def test_aborts_leave_at_once_when_the_client_has_gone(watched: Cluster) -> None:
    """To the decode first, as it tells its prefill."""
    prefill, decode = watched.prefills[0], watched.decodes[0]
    delays_s = []
    for _ in range(ROUNDS):
        held = await hold_at(watched, BOOTSTRAP, False)
        rid = (await watched.last_attempt())["rid"]
        left, left_s = Stopwatch(), asyncio.get_running_loop().time()
        await held.asked[0].leave()
        to_decode, to_prefill = await abort_of(watched, decode, rid), await abort_of(watched, prefill, rid)
        assert to_decode.came_s <= to_prefill.came_s
        delays_s.append(left.of(to_decode.came_s - left_s))
        await watched.settled(FREED_S)
    assert median(delays_s) <= ABORT_S, delays_s


async def test_aborts_leave_at_once_when_the_other_leg_has_failed(watched: Cluster) -> None:
    prefill, decode = watched.prefills[0], watched.decodes[0]
    delays_s = []
    for _ in range(ROUNDS):
        await watched.fault(decode, "status", status=500)
        watch = Stopwatch()
        asked = Asked(watched, stream=True)
        (await asked.finish()).check_refused(502, 503)
        rid = (await watched.last_attempt())["rid"]
        aborted = await abort_of(watched, prefill, rid)
        failed = next(call for call in watched.recorder(decode).of("/v1/chat/completions") if rid.encode() in call.body)
        delays_s.append(watch.of(aborted.came_s - failed.ended_s))
        good = Asked(watched, stream=True)  # else so many failures in a row speak against the server
        (await good.finish()).check_whole(good.truth)
        await watched.settled(FREED_S)
    assert median(delays_s) <= ABORT_S, delays_s


async def test_aborts_leave_after_the_grace_when_a_prefill_was_lost(watched: Cluster) -> None:
    held = await hold_at(watched, BOOTSTRAP, True)
    rid = (await watched.last_attempt())["rid"]
    killed, killed_s = Stopwatch(), asyncio.get_running_loop().time()
    await watched.kill(held.pair[Leg.PREFILL])
    heard_s = await told_s(watched, held.pair[Leg.DECODE], rid)
    assert killed.of(heard_s - killed_s) <= GRACE_S + NOISE_S
    (await held.asked[0].finish()).check_refused(502, 503)


async def told_s(cluster: Cluster, server: EmulatedServer, rid: str) -> float:
    """When a decode got its abort, or had noticed by itself that its prefill was gone."""
    came_s: list[float] = []

    async def missing() -> str:
        calls = cluster.recorder(server).calls
        aborts = [each.came_s for each in calls if each.path == "/abort_request" and rid.encode() in each.body]
        ends = [each.ended_s for each in calls if each.path == CHAT and rid.encode() in each.body and each.ended_s]
        came_s[:] = [*aborts, *ends]
        return "" if came_s else f"{server.role} neither got an abort of {rid} nor ended it"

    await eventually(missing, 2.0)
    return min(came_s)


async def abort_of(cluster: Cluster, server: EmulatedServer, rid: str) -> Call:
    """The first abort of an attempt that a server got."""
    found: list[Call] = []

    async def missing() -> str:
        calls = cluster.recorder(server).of("/abort_request")
        found[:] = [call for call in calls if orjson.loads(call.body) == {"rid": rid}]
        return "" if found else f"{server.role} got no abort of {rid}"

    await eventually(missing, 2.0)
    return found[0]
