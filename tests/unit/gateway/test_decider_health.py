"""What the decider makes of health: half-open servers are tried by few, late ones used in a panic."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from engines.types import EngineId, Health, Role
from gateway.decider import Decider, Decision
from gateway.errors import GatewayError
from gateway.trials import AT_ONCE
from tests.fakes import decider, request, timeless, up

P0, P1, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "p1", "d0", "d1"))
ALL = (P0, P1, D0, D1)
PAIRS = ("p0", "p1", "d0", "d1")


async def asked(at: Decider, count: int) -> list[asyncio.Task[Decision]]:
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(at.submit(request(prompt_tokens=10, expected_output_tokens=10))))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def decided(tasks: list[asyncio.Task[Decision]]) -> list[Decision]:
    return [task.result() for task in tasks if task.done()]


async def ended(at: Decider, tasks: list[asyncio.Task[Decision]]) -> None:
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Decision):
            at.finished(found)
    assert at.bookings.live() == 0
    assert not at.trials._rids


# ---- half-open -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [P1, D1])
def test_a_half_open_server_has_few_requests_at_a_time_and_the_others_go_elsewhere(engine: EngineId) -> None:
    @timeless
    async def tried() -> None:
        fleet = up(*PAIRS)
        fleet.set_health(engine, Health.PROBATION, "half-open")
        at = decider(fleet)
        tasks = await asked(at, 30)
        on = Counter(engine_id for each in decided(tasks) for engine_id in each.pair)
        assert len(decided(tasks)) == 30
        assert on[engine] == AT_ONCE
        last = decided(tasks)[-1]
        assert [each.reason for each in last.dropped if each.engine_id == engine] == [
            "health is slow: half-open: 2 requests on it have to prove it"
        ]
        await ended(at, tasks)

    tried()


@timeless
async def test_when_all_are_half_open_requests_wait_and_go_with_the_first_success() -> None:
    fleet = up(*PAIRS)
    for engine in ALL:
        fleet.set_health(engine, Health.PROBATION, "half-open")
    at = decider(fleet)
    tasks = await asked(at, 50)
    first = decided(tasks)
    assert len(first) == 2 * AT_ONCE, "some are served, none is refused"
    assert Counter(each.decode.engine_id for each in first) == {D0: AT_ONCE, D1: AT_ONCE}
    for each in first:
        for engine in each.pair:
            if at.trials.passed(engine, each.rid):
                fleet.set_health(engine, Health.READY)
                at.fleet_changed(engine)
    await asyncio.sleep(0)
    assert len(decided(tasks)) == 50
    await ended(at, tasks)


@timeless
async def test_a_failed_trial_makes_room_for_the_next() -> None:
    fleet = up("p0", "d0")
    fleet.set_health(D0, Health.PROBATION, "half-open")
    at = decider(fleet)
    tasks = await asked(at, 5)
    assert len(decided(tasks)) == AT_ONCE
    for left in (3, 4, 5):
        at.finished(decided(tasks)[left - 3])
        await asyncio.sleep(0)
        assert len(decided(tasks)) == left
    await ended(at, tasks)


@timeless
async def test_who_may_use_only_a_server_on_trial_waits_for_it() -> None:
    fleet = up("p0", "d0", "d1")
    fleet.set_health(D1, Health.PROBATION, "half-open")
    at = decider(fleet)
    tasks = await asked(at, 10)
    retried = request().avoiding(None, (P0, D0))
    waiting = asyncio.ensure_future(at.submit(retried))
    await asyncio.sleep(0)
    assert not waiting.done()
    at.finished(next(each for each in decided(tasks) if each.decode.engine_id == D1))
    assert (await waiting).decode.engine_id == D1
    await ended(at, [*tasks, waiting])


@timeless
async def test_requests_from_before_are_no_trials() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    before = await asked(at, 10)
    fleet.set_health(D0, Health.PROBATION, "half-open")
    assert not any(at.trials.passed(D0, each.rid) for each in decided(before))
    during = await asked(at, 5)
    assert len(decided(during)) == AT_ONCE
    await ended(at, before + during)


@timeless
async def test_what_a_broken_prefill_computed_is_not_owned() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    blocks = tuple(bytes([number]) * 16 for number in range(4))
    decision = await at.submit(request(blocks=blocks))
    fleet.set_health(P0, Health.BROKEN, "reset")
    at.handed_over(decision)
    assert at.owners.index.held_blocks(P0) == 0
    at.finished(decision)


# ---- panic -----------------------------------------------------------------------------------------------------------


@timeless
async def test_when_most_are_late_all_of_them_are_used() -> None:
    fleet = up("p0", "d0", "d1", "d2", "d3")
    for name in ("d1", "d2", "d3"):
        fleet.set_health(EngineId(f"http://{name}"), Health.SLOW, "late")
    at = decider(fleet)
    tasks = await asked(at, 12)
    assert len({each.decode.engine_id for each in decided(tasks)}) == 4
    assert decided(tasks)[0].panic == {Role.DECODE}
    fleet.set_health(EngineId("http://d1"), Health.READY)
    at.fleet_changed(EngineId("http://d1"))
    calm = await asked(at, 6)
    assert {each.decode.engine_id for each in decided(calm)} == {D0, D1}
    assert decided(calm)[0].panic == frozenset()
    await ended(at, tasks + calm)


@pytest.mark.parametrize(
    "health", [Health.SUSPECTED, Health.BROKEN, Health.NOT_READY, Health.WEDGED, Health.LEAKING, Health.UNKNOWN]
)
def test_what_is_known_to_be_bad_gets_nothing_in_a_panic(health: Health) -> None:
    @timeless
    async def spared() -> None:
        fleet = up("p0", "d0", "d1", "d2")
        fleet.set_health(D0, health, "bad")
        fleet.set_health(D1, Health.SLOW, "late")
        fleet.set_health(EngineId("http://d2"), Health.SLOW, "late")
        at = decider(fleet)
        tasks = await asked(at, 8)
        assert {each.decode.engine_id for each in decided(tasks)} == {D1, EngineId("http://d2")}
        await ended(at, tasks)

    spared()


@timeless
async def test_a_panic_gives_no_decode_a_prefill_that_has_not_answered() -> None:
    fleet = up("p0", "p1", "d0")
    for engine in (P0, P1):
        fleet.set_health(engine, Health.SLOW, "late")
    at = decider(fleet, is_stale=lambda engine_id: engine_id == P0)
    tasks = await asked(at, 6)
    assert {each.prefill.engine_id for each in decided(tasks)} == {P1}
    await ended(at, tasks)


@timeless
async def test_a_panic_is_told_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    fleet = up("p0", "d0", "d1")
    at = decider(fleet)
    for health in (Health.SLOW, Health.READY):
        for engine in (D0, D1):
            fleet.set_health(engine, health, "late")
        for _ in range(3):
            at.panic.roles(fleet.snapshot())
    told = [record.message for record in caplog.records if record.name == "pdgate.panic"]
    assert told == ["most decode servers are late with their answers: that is ignored, they get rooms"]


# ---- drain -----------------------------------------------------------------------------------------------------------


@timeless
async def test_a_draining_server_gets_nothing_new_and_is_not_waited_for() -> None:
    fleet = up("p0", "p1", "d0")
    fleet.set_draining(P0, True)
    at = decider(fleet)
    tasks = await asked(at, 6)
    assert {each.prefill.engine_id for each in decided(tasks)} == {P1}
    fleet.set_draining(P1, True)
    fleet.set_health(P1, Health.SLOW, "late")
    with pytest.raises(GatewayError, match="draining") as caught:
        await at.submit(request())
    assert caught.value.status == 503
    fleet.set_draining(P0, False)
    last = await at.submit(request())
    assert last.prefill.engine_id == P0
    at.finished(last)
    await ended(at, tasks)


@timeless
async def test_no_decode_computes_a_prompt_where_no_prefill_is_up() -> None:
    fleet = up("p0", "d0", "d1")
    fleet.set_health(P0, Health.SUSPECTED, "gone")
    with pytest.raises(GatewayError, match="no prefill can serve") as caught:
        await decider(fleet).submit(request())
    assert (caught.value.status, caught.value.code) == (503, "no_pair_available")
