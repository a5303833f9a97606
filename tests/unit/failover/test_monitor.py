"""The monitor: looks again and again, tells what changed, and is not driven by a storm of failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engines.base import Probe
from engines.fleet import Fleet
from engines.tasks import running, spawn
from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, FailureKind, Health, Leg, Outcome, Stage
from failover.machine import HealthEvent as E
from failover.monitor import STALE_PROBE_S, Monitor
from failover.wedge import Owed
from tests.fakes import FACTS, now_s, spec, timeless

P0, P1, D0 = EngineId("http://p0"), EngineId("http://p1"), EngineId("http://d0")
LOAD = EngineLoad(1.0, 1, 0, 0, 5, 5, 100)


class Server:
    """What is found at every server; probes and loads are counted."""

    def __init__(self) -> None:
        self.facts: EngineFacts | None = FACTS
        self.reachable = self.ready = True
        self.reason = ""
        self.timed_out = False
        self.takes_s = 0.0
        self.probes: list[tuple[float, EngineId]] = []
        self.loads = self.roused = 0
        self.rouse_takes_s = 1.0
        self.load_seen: EngineLoad | None = LOAD

    def down(self, reason: str = "refused") -> None:
        self.reachable = self.ready = False
        self.reason, self.facts = reason, None

    def back(self, fingerprint: str = "boot") -> None:
        self.reachable = self.ready = True
        self.reason, self.facts = "", replace(FACTS, boot_fingerprint=fingerprint)

    async def probe(self, spec: EngineSpec, timeout_s: float) -> Probe:
        self.probes.append((now_s(), spec.engine_id))
        await asyncio.sleep(self.takes_s)
        return Probe(spec.engine_id, self.reachable, self.ready, self.reason, self.timed_out, self.facts)

    async def load(self, spec: EngineSpec, timeout_s: float) -> EngineLoad | None:
        self.loads += 1
        return self.load_seen

    async def rouse(self, spec: EngineSpec) -> None:
        self.roused += 1
        await asyncio.sleep(self.rouse_takes_s)


class Told:
    """Listener that remembers."""

    def __init__(self) -> None:
        self.changes: list[EngineId] = []
        self.restarts: list[EngineId] = []

    def fleet_changed(self, engine_id: EngineId) -> None:
        self.changes.append(engine_id)

    def restarted(self, engine_id: EngineId) -> None:
        self.restarts.append(engine_id)


class World:
    def __init__(self, *names: str) -> None:
        self.fleet = Fleet([spec(name) for name in names])
        self.server, self.told = Server(), Told()
        self.monitor = Monitor(self.fleet, self.server, self.told, spawn, probe_interval_s=2.0, load_interval_s=0.5)

    def health(self, engine_id: EngineId = P0) -> Health:
        return self.fleet.view(engine_id).health

    def probes_of(self, engine_id: EngineId) -> int:
        return sum(1 for _, each in self.server.probes if each == engine_id)


@asynccontextmanager
async def watched(*names: str) -> AsyncIterator[World]:
    world = World(*(names or ("p0",)))
    world.monitor.start()
    await asyncio.sleep(0.01)
    yield world
    await world.monitor.stop()


def broke(kind: FailureKind = FailureKind.RESET, engine_id: EngineId = P0) -> Outcome:
    return Outcome(engine_id, Leg.PREFILL, kind, Stage.DISPATCHED, "lost")


# ---- health ----------------------------------------------------------------------------------------------------------


@timeless
async def test_every_server_is_looked_at_at_once_and_then_again_and_again() -> None:
    async with watched("p0", "d0") as world:
        assert world.health(P0) is world.health(D0) is Health.READY
        assert world.fleet.view(P0).facts == FACTS
        await asyncio.sleep(9.0)
        assert world.probes_of(P0) == world.probes_of(D0) == 5
        assert {P0, D0} <= set(world.told.changes)


@timeless
async def test_an_outage_is_seen_by_the_next_probe_and_its_end_soon() -> None:
    async with watched() as world:
        world.server.down()
        await asyncio.sleep(2.1)
        view = world.fleet.view(P0)
        assert (view.health, view.reason, view.facts) == (Health.SUSPECTED, "refused", FACTS)
        world.server.back()
        await asyncio.sleep(0.6)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.READY, "")
        assert not world.told.restarts


@timeless
async def test_a_server_that_takes_no_rooms_is_not_ready() -> None:
    async with watched() as world:
        world.server.ready, world.server.reason = False, "/ready answers 503"
        await asyncio.sleep(2.1)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.NOT_READY, "/ready answers 503")


@timeless
async def test_a_server_that_stays_not_ready_is_roused_rarely() -> None:
    async with watched() as world:
        world.server.ready = False
        await asyncio.sleep(29.0)
        assert world.server.roused == 0
        await asyncio.sleep(4.0)
        assert world.server.roused == 1
        await asyncio.sleep(28.0)
        assert world.server.roused == 1
        world.server.ready = True
        await asyncio.sleep(5.0)
        world.server.ready = False
        await asyncio.sleep(25.0)
        assert world.server.roused == 1, "it had been ready"
        world.server.rouse_takes_s = 1000.0
        await asyncio.sleep(10.0)
        assert world.server.roused == 2
    assert not [name for name in running() if name.startswith("rouse")]


@timeless
async def test_others_are_never_roused() -> None:
    async with watched() as world:
        await asyncio.sleep(100.0)
        world.server.down()
        await asyncio.sleep(100.0)
        assert world.server.roused == 0


def late(world: World) -> None:
    world.server.reachable = world.server.ready = False
    world.server.timed_out = True


@timeless
async def test_late_answers_make_it_slow_and_ten_silent_seconds_gone() -> None:
    async with watched() as world:
        world.server.load_seen = None
        await asyncio.sleep(1.9)
        late(world)
        await asyncio.sleep(7.0)
        assert world.health() is Health.SLOW
        await asyncio.sleep(4.0)
        assert world.health() is Health.SUSPECTED


@timeless
async def test_a_server_that_is_late_but_tells_its_load_is_not_gone() -> None:
    async with watched() as world:
        late(world)
        await asyncio.sleep(60.0)
        assert world.health() is Health.SLOW
        world.server.reachable = world.server.ready = True
        await asyncio.sleep(0.6)
        assert world.health() is Health.READY


@timeless
async def test_a_server_whose_legs_go_on_is_not_late() -> None:
    async with watched() as world:
        late(world)
        for _ in range(20):
            world.monitor.progress(P0, now_s())
            await asyncio.sleep(0.5)
        assert world.health() is Health.READY
        await asyncio.sleep(5.0)
        assert world.health() is Health.SLOW
        world.monitor.progress(P0, now_s())
        assert world.health() is Health.READY


@timeless
async def test_a_server_that_was_in_doubt_must_say_which_boot_it_is() -> None:
    async with watched() as world:
        world.server.facts = None
        await asyncio.sleep(5.0)
        assert world.health() is Health.READY, "it was not in doubt"
        world.server.down()
        await asyncio.sleep(2.1)
        world.server.back()
        world.server.facts = None
        await asyncio.sleep(5.0)
        assert world.health() is Health.SUSPECTED
        world.server.back("another boot")
        await asyncio.sleep(0.6)
        assert (world.health(), world.told.restarts) == (Health.READY, [P0])


@timeless
async def test_loads_are_taken_once_a_server_is_known() -> None:
    async with watched() as world:
        await asyncio.sleep(1.0)
        assert world.fleet.view(P0).load == LOAD
        assert world.server.loads >= 1


@timeless
async def test_a_server_that_was_never_up_is_not_asked_for_its_load() -> None:
    world = World("p0")
    world.server.down()
    world.monitor.start()
    await asyncio.sleep(3.0)
    await world.monitor.stop()
    assert world.server.loads == 0


# ---- restarts --------------------------------------------------------------------------------------------------------


@timeless
async def test_a_restart_is_told_even_when_no_outage_was_seen() -> None:
    async with watched() as world:
        world.server.back("another boot")
        await asyncio.sleep(2.1)
        assert world.told.restarts == [P0]
        assert (world.fleet.view(P0).epoch, world.health()) == (2, Health.READY)


@timeless
async def test_the_first_look_is_no_restart() -> None:
    async with watched() as world:
        assert (world.told.restarts, world.fleet.view(P0).epoch) == ([], 1)


@timeless
async def test_a_look_tells_whether_the_process_is_the_same() -> None:
    async with watched() as world:
        assert await world.monitor.probe_now(P0)
        world.server.back("another boot")
        assert not await world.monitor.probe_now(P0)
        assert await world.monitor.probe_now(P0)
        world.server.down()
        assert not await world.monitor.probe_now(P0)


@timeless
async def test_a_leak_ends_with_its_process() -> None:
    async with watched() as world:
        world.monitor.leak_found(P0)
        await asyncio.sleep(5.0)
        assert world.health() is Health.LEAKING
        assert "aborted" in world.fleet.view(P0).reason
        world.server.back("another boot")
        await asyncio.sleep(3.0)
        assert world.health() is Health.READY


# ---- staleness -------------------------------------------------------------------------------------------------------


@timeless
async def test_a_good_probe_is_good_for_five_seconds() -> None:
    world = World("p0")
    assert world.monitor.is_stale(P0)
    await world.monitor.probe_now(P0)
    assert not world.monitor.is_stale(P0)
    await asyncio.sleep(STALE_PROBE_S)
    assert not world.monitor.is_stale(P0)
    await asyncio.sleep(0.001)
    assert world.monitor.is_stale(P0)


@timeless
async def test_a_bad_probe_refreshes_nothing() -> None:
    world = World("p0")
    await world.monitor.probe_now(P0)
    await asyncio.sleep(4.0)
    world.server.down()
    await world.monitor.probe_now(P0)
    await asyncio.sleep(1.5)
    assert world.monitor.is_stale(P0)


# ---- broken legs -----------------------------------------------------------------------------------------------------


@timeless
async def test_a_broken_leg_is_suspected_at_once_and_looked_into_at_once() -> None:
    async with watched() as world:
        world.monitor.leg_failed(broke())
        assert (world.health(), world.fleet.view(P0).reason) == (Health.BROKEN, "lost")
        assert world.told.changes[-1] == P0
        await asyncio.sleep(0.1)
        assert world.health() is Health.PROBATION
        assert world.probes_of(P0) == 2


@pytest.mark.parametrize(
    "kind", [FailureKind.STATUS, FailureKind.ABORTED, FailureKind.STREAM_ERROR, FailureKind.GARBLED]
)
def test_an_answer_is_no_sign_of_death(kind: FailureKind) -> None:
    @timeless
    async def stays() -> None:
        async with watched() as world:
            world.monitor.leg_failed(broke(kind))
            await asyncio.sleep(1.0)
            assert world.health() is Health.READY
            assert world.probes_of(P0) == 1

    stays()


@timeless
async def test_a_storm_of_broken_legs_causes_few_probes() -> None:
    async with watched() as world:
        for _ in range(1000):
            world.monitor.leg_failed(broke())
        await asyncio.sleep(0.2)
        assert world.probes_of(P0) <= 3
        for _ in range(100):
            world.monitor.leg_failed(broke())
            await asyncio.sleep(0.005)
        assert world.probes_of(P0) <= 3 + 0.5 / 0.05 + 1


@timeless
async def test_a_leg_that_breaks_during_a_probe_causes_another() -> None:
    async with watched() as world:
        world.server.takes_s = 0.5
        world.monitor.leg_failed(broke())
        await asyncio.sleep(0.1)
        world.monitor.leg_failed(broke())
        await asyncio.sleep(1.5)
        assert world.probes_of(P0) == 3


@timeless
async def test_a_dead_server_is_looked_at_twice_a_second() -> None:
    async with watched() as world:
        world.server.down()
        world.monitor.leg_failed(broke())
        await asyncio.sleep(5.0)
        assert 9 <= world.probes_of(P0) <= 12


# ---- half-open -------------------------------------------------------------------------------------------------------


PAIR = (P0, D0)


@timeless
async def test_a_broken_server_is_ready_when_a_request_succeeded_on_it() -> None:
    async with watched() as world:
        world.monitor.leg_failed(broke())
        await asyncio.sleep(30.0)
        assert world.health() is Health.PROBATION
        assert "half-open" in world.fleet.view(P0).reason
        assert "lost" in world.fleet.view(P0).reason
        world.monitor.progress(P0, now_s())
        assert world.health() is Health.PROBATION, "output of older requests proves nothing"
        world.monitor.proved(P0)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.READY, "")
        world.monitor.leg_failed(broke())
        world.monitor.proved(P0)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.BROKEN, "lost"), "too late to say anything"


async def half_open_after_s(world: World) -> float:
    for looks in range(1000):
        if world.health() is Health.PROBATION:
            return looks * 0.05
        await asyncio.sleep(0.05)
    raise AssertionError("never")


@timeless
async def test_pauses_between_failed_trials_grow_while_others_can_serve() -> None:
    async with watched("p0", "p1") as world:
        pauses = []
        for _ in range(5):
            world.monitor.leg_failed(broke())
            pauses.append(await half_open_after_s(world))
        assert pauses == sorted(pauses)
        assert pauses[0] < 0.2, "the first time a probe is enough"
        assert 3.0 <= pauses[4] <= 6.0
        world.server.back("another boot")
        await asyncio.sleep(1.0)
        world.monitor.leg_failed(broke())
        await asyncio.sleep(0.6)
        assert world.health() is Health.PROBATION, "another process has a clean record"


@timeless
async def test_the_last_of_its_role_is_tried_without_a_pause() -> None:
    async with watched("p0", "p1", "d0") as world:
        for _ in range(6):
            for engine_id in (P0, P1):
                world.monitor.leg_failed(broke(engine_id=engine_id))
            await asyncio.sleep(0.6)
            assert Health.PROBATION in (world.health(P0), world.health(P1))


@timeless
async def test_all_restarted_at_once_are_half_open_as_soon_as_they_are_up() -> None:
    names = ("p0", "p1", "p2", "d0", "d1")
    async with watched(*names) as world:
        world.server.down()
        for name in names:
            world.monitor.leg_failed(broke(engine_id=EngineId(f"http://{name}")))
        await asyncio.sleep(5.0)
        world.server.back("another boot")
        await asyncio.sleep(0.6)
        assert {view.health for view in world.fleet.views()} == {Health.PROBATION}


# ---- who is blamed ---------------------------------------------------------------------------------------------------


def answered(status: int, message: str = "CUDA error", leg: Leg = Leg.PREFILL) -> Outcome:
    return Outcome(PAIR[leg is Leg.DECODE], leg, FailureKind.STATUS, Stage.DISPATCHED, message, status)


@timeless
async def test_no_number_of_client_errors_or_full_queues_changes_anything() -> None:
    async with watched("p0", "d0") as world:
        for status in (400, 413, 422, 429) * 50:
            world.monitor.leg_failed(answered(status), PAIR)
        assert world.health() is Health.READY
        assert (
            not world.monitor.transitions.keys()
            - {(P0, Health.UNKNOWN, Health.READY, E.PROBE_READY)}
            - {(D0, Health.UNKNOWN, Health.READY, E.PROBE_READY)}
        )


@timeless
async def test_a_wrong_key_stops_rooms_until_a_probe_and_then_a_request_say_otherwise() -> None:
    async with watched("p0", "p1", "d0") as world:
        world.monitor.leg_failed(answered(401, "Unauthorized"), PAIR)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.BROKEN, "Unauthorized")
        await asyncio.sleep(2.1)
        assert world.health() is Health.PROBATION
        world.monitor.leg_failed(answered(401, "Unauthorized"), PAIR)
        assert world.health() is Health.BROKEN


@timeless
async def test_the_third_failed_answer_in_a_row_stops_rooms() -> None:
    async with watched("p0", "d0") as world:
        for _ in range(20):
            world.monitor.leg_failed(answered(500), PAIR)
            world.monitor.leg_failed(answered(500), PAIR)
            await asyncio.sleep(0.01)
            world.monitor.progress(P0, now_s())
            await asyncio.sleep(0.01)
        assert world.health() is Health.READY
        for _ in range(3):
            world.monitor.leg_failed(answered(500), PAIR)
        assert world.health() is Health.BROKEN


@timeless
async def test_a_word_against_the_peer_is_looked_into_and_charged_to_nobody() -> None:
    async with watched("p0", "d0") as world:
        lost = "KVTransferError: Lost connection with prefill instance"
        for _ in range(10):
            world.monitor.leg_failed(answered(500, lost, Leg.DECODE), PAIR)
        assert world.health(P0) is world.health(D0) is Health.READY
        await asyncio.sleep(0.1)
        assert (world.probes_of(P0), world.probes_of(D0)) == (2, 1)
        world.server.down("its bootstrap server refuses")
        world.monitor.leg_failed(answered(500, lost, Leg.DECODE), PAIR)
        await asyncio.sleep(0.1)
        assert world.health(P0) is Health.SUSPECTED


@timeless
async def test_a_silent_leg_is_nothing_while_others_go_on_and_else_a_late_answer() -> None:
    async with watched() as world:
        await asyncio.sleep(5.0)
        heard: list[EngineId] = []
        world.monitor.on_suspected = lambda engine_id, reason, fingerprint: heard.append(engine_id)
        world.monitor.progress(P0, now_s())
        for _ in range(10):
            world.monitor.leg_failed(broke(FailureKind.TIMEOUT))
        assert (world.health(), heard) == (Health.READY, [])
        await asyncio.sleep(2.1)
        world.monitor.leg_failed(broke(FailureKind.TIMEOUT))
        assert (world.health(), heard) == (Health.SLOW, [P0])
        await asyncio.sleep(0.1)
        assert world.health() is Health.READY


# ---- stuck -----------------------------------------------------------------------------------------------------------


@timeless
async def test_a_server_with_work_of_ours_that_does_not_move_is_wedged_until_it_does() -> None:
    async with watched("p0", "p1") as world:
        world.monitor.owed = lambda engine_id: Owed(3 if engine_id == P0 else 0)
        await asyncio.sleep(9.0)
        assert world.health() is Health.READY
        await asyncio.sleep(3.0)
        assert world.health() is Health.WEDGED
        assert "3 requests" in world.fleet.view(P0).reason
        assert world.health(P1) is Health.READY
        await asyncio.sleep(30.0)
        assert world.health() is Health.WEDGED, "however good its probes are"
        world.server.load_seen = replace(LOAD, used_tokens=6)
        await asyncio.sleep(0.6)
        assert world.health() is Health.PROBATION


@timeless
async def test_output_frees_a_wedged_server_and_so_does_its_restart() -> None:
    async with watched() as world:
        world.monitor.owed = lambda engine_id: Owed(1)
        await asyncio.sleep(12.0)
        assert world.health() is Health.WEDGED
        world.monitor.progress(P0, now_s())
        assert world.health() is Health.PROBATION
        await asyncio.sleep(12.0)
        assert world.health() is Health.PROBATION, "that long a pause is its pace now"
        await asyncio.sleep(30.0)
        assert world.health() is Health.WEDGED
        world.server.back("another boot")
        await asyncio.sleep(5.0)
        assert world.health() is Health.READY
        await asyncio.sleep(7.0)
        assert world.health() is Health.WEDGED, "by its own pace, not by that of the process before it"


@timeless
async def test_a_busy_server_is_never_wedged() -> None:
    async with watched() as world:
        world.monitor.owed = lambda engine_id: Owed(100)
        for step in range(200):
            world.server.load_seen = replace(LOAD, prefill_busy_us_total=step // 10)
            await asyncio.sleep(0.5)
            assert world.health() is Health.READY


@timeless
async def test_a_server_that_does_not_say_it_is_ready_is_not_wedged() -> None:
    async with watched() as world:
        world.monitor.owed = lambda engine_id: Owed(1)
        late(world)
        await asyncio.sleep(60.0)
        assert world.health() is Health.SLOW


# ---- a counter that fell ---------------------------------------------------------------------------------------------


def counted(uncached_tokens: int, busy_us: int) -> EngineLoad:
    return replace(LOAD, prefill_uncached_tokens_total=uncached_tokens, prefill_busy_us_total=busy_us)


@pytest.mark.parametrize("fallen", [counted(99, 200), counted(100, 0)])
def test_a_counter_that_fell_is_suspected_and_looked_into_at_once(fallen: EngineLoad) -> None:
    @timeless
    async def is_suspected() -> None:
        async with watched() as world:
            world.server.load_seen = counted(100, 200)
            await asyncio.sleep(0.6)
            heard: list[tuple[EngineId, str, str]] = []
            world.monitor.on_suspected = lambda *each: heard.append(each)
            probes = world.probes_of(P0)
            world.server.load_seen = fallen
            world.server.back("another boot")
            await asyncio.sleep(0.41)
            assert world.health() is Health.SUSPECTED
            assert "fell from" in world.fleet.view(P0).reason
            assert [(each[0], each[2]) for each in heard] == [(P0, "boot")]
            assert world.probes_of(P0) == probes
            await asyncio.sleep(0.06)
            assert world.probes_of(P0) == probes + 1
            assert (world.health(), world.told.restarts) == (Health.READY, [P0])

    is_suspected()


@timeless
async def test_counters_that_grow_or_are_missing_or_begin_anew_after_a_restart_are_no_sign() -> None:
    async with watched() as world:
        heard: list[EngineId] = []
        world.monitor.on_suspected = lambda engine_id, reason, fingerprint: heard.append(engine_id)
        for seen in (counted(5, 5), counted(5, 6), None, counted(7, 7), None, counted(1, 1)):
            world.server.load_seen = seen
            await asyncio.sleep(0.5)
        world.server.load_seen = None
        world.server.back("another boot")
        await asyncio.sleep(2.1)
        assert world.told.restarts == [P0]
        world.server.load_seen = counted(0, 0)
        await asyncio.sleep(1.0)
        assert heard == []


# ---- other gateways --------------------------------------------------------------------------------------------------


@timeless
async def test_anothers_suspicion_stops_new_rooms_until_an_own_probe() -> None:
    async with watched() as world:
        heard: list[EngineId] = []
        world.monitor.on_suspected = lambda engine_id, reason, fingerprint: heard.append(engine_id)
        world.monitor.suspect_elsewhere(P0, "lost", "boot", 0.03)
        assert world.health() is Health.SUSPECTED
        assert world.fleet.view(P0).reason == "another gateway says: lost"
        assert world.told.changes[-1] == P0
        await asyncio.sleep(0.02)
        assert (world.health(), world.probes_of(P0)) == (Health.SUSPECTED, 1)
        await asyncio.sleep(0.02)
        assert (world.health(), world.probes_of(P0)) == (Health.READY, 2)
        await asyncio.sleep(0.2)
        assert world.probes_of(P0) == 2
        assert heard == [], "not told on"


@timeless
async def test_a_suspicion_that_is_right_holds() -> None:
    async with watched() as world:
        heard: list[EngineId] = []
        world.monitor.on_suspected = lambda engine_id, reason, fingerprint: heard.append(engine_id)
        world.server.down()
        world.monitor.suspect_elsewhere(P0, "lost", "boot")
        await asyncio.sleep(1.0)
        assert (world.health(), world.fleet.view(P0).reason) == (Health.SUSPECTED, "refused")
        assert heard == []


@timeless
async def test_a_suspicion_of_another_boot_is_only_a_reason_to_look() -> None:
    async with watched() as world:
        world.monitor.suspect_elsewhere(P0, "lost", "another boot")
        assert world.health() is Health.READY
        await asyncio.sleep(0.01)
        assert world.probes_of(P0) == 2


@timeless
async def test_strangers_engines_are_left_alone() -> None:
    async with watched() as world:
        world.monitor.suspect_elsewhere(EngineId("http://x"), "lost", "boot")
        world.monitor.look_now(EngineId("http://x"))
        await asyncio.sleep(0.1)
        assert len(world.server.probes) == 1


@timeless
async def test_all_who_ask_for_a_look_share_one_and_a_later_one_is_another() -> None:
    async with watched() as world:
        world.server.takes_s = 0.3
        for _ in range(100):
            world.monitor.look_now(P0, 0.01)
        await asyncio.sleep(0.1)
        assert world.probes_of(P0) == 2
        for _ in range(100):
            world.monitor.look_now(P0)
        await asyncio.sleep(1.0)
        assert world.probes_of(P0) == 3, "the one that had begun may have seen what was before"


@timeless
async def test_what_we_see_ourselves_is_told_once_until_it_is_ready_again() -> None:
    async with watched() as world:
        heard: list[tuple[EngineId, str, str]] = []
        world.monitor.on_suspected = lambda *each: heard.append(each)
        for _ in range(3):
            world.monitor.leg_failed(broke())
        assert heard == [(P0, "lost", "boot")]
        await asyncio.sleep(0.1)
        world.server.down()
        await asyncio.sleep(5.0)
        assert heard == [(P0, "lost", "boot"), (P0, "refused", "boot")]


@timeless
async def test_a_look_that_was_asked_for_ends_with_the_monitor() -> None:
    async with watched("p0", "d0") as world:
        world.server.takes_s = 10.0
        world.monitor.look_now(P0, 5.0)
        world.monitor.look_now(D0)
        await asyncio.sleep(0.1)
    assert not [name for name in running() if name.startswith("probe")]


# ---- one look for all who ask ----------------------------------------------------------------------------------------


@timeless
async def test_all_who_ask_at_once_share_one_probe() -> None:
    async with watched() as world:
        world.server.takes_s = 0.01
        for _ in range(200):
            world.monitor.leg_failed(broke())
        answers = await asyncio.gather(*(world.monitor.probe_now(P0) for _ in range(200)))
        assert all(answers)
        await asyncio.sleep(0.2)
        assert world.probes_of(P0) == 2, "the first look, and one for all; the loop does not look a third time"


@timeless
async def test_a_loop_that_looks_already_is_shared_too() -> None:
    async with watched() as world:
        world.server.takes_s = 0.5
        await asyncio.sleep(2.2)
        assert world.probes_of(P0) == 2
        assert await world.monitor.probe_now(P0)
        assert world.probes_of(P0) == 2


@timeless
async def test_a_look_that_began_before_the_leg_broke_proves_nothing() -> None:
    async with watched() as world:
        world.server.takes_s = 0.5
        await asyncio.sleep(2.2)
        world.monitor.leg_failed(broke())
        answers = asyncio.gather(*(world.monitor.probe_now(P0) for _ in range(50)))
        await asyncio.sleep(0.4)
        world.server.down()
        assert not any(await answers)
        assert world.probes_of(P0) == 3


@timeless
async def test_one_who_gives_up_does_not_end_the_look_of_the_others() -> None:
    async with watched() as world:
        world.server.takes_s = 0.5
        first, second = (asyncio.ensure_future(world.monitor.probe_now(P0)) for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second
        assert world.probes_of(P0) == 2


# ---- the end ---------------------------------------------------------------------------------------------------------


@timeless
async def test_stopping_leaves_no_task() -> None:
    async with watched("p0", "d0") as world:
        world.server.takes_s = 10.0
        world.monitor.leg_failed(broke())
        await asyncio.sleep(1.0)
    await asyncio.sleep(0)
    assert not [name for name in running() if name.startswith(("probe", "load"))]


@timeless
async def test_what_fails_after_the_end_is_taken_quietly() -> None:
    """Sockets are closed last, which breaks the legs that are left."""
    async with watched() as world:
        pass
    world.monitor.leg_failed(broke())
    assert world.health() is Health.BROKEN
