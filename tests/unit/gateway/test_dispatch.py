"""What leaves for the servers, and when: nothing too early, nothing to one side alone, nothing twice under one name."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from engines import tasks
from engines.types import EngineId, Health
from failover.phase import LOSS_GRACE_S
from tests.fakes import Answer, FakeExchange, now_s
from tests.gateway_world import World, dying, failed, story

_ABORT_S = 0.05


async def asked_at_once(world: World, count: int, **body: Any) -> list[asyncio.Task[None]]:
    """So many requests, and the moment that it takes to send what may be sent."""
    asked = [tasks.spawn(world.ask(**body), f"client {number}") for number in range(count)]
    await asyncio.sleep(0.1)
    return asked


async def leave(asked: list[asyncio.Task[None]]) -> None:
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


@story
async def test_no_prefill_begins_what_no_decode_has_room_for(world: World) -> None:
    """Its KV would wait on the prefill, and its room run into the decode's time limit."""
    world.servers.behave = lambda host, body: FakeExchange()
    asked = await asked_at_once(world, 60, max_tokens=1000)
    sent = len(world.servers.hosts("p"))
    assert len(world.gw.decider.queue) == 60 - sent > 0
    assert sent == len(world.servers.hosts("d")) == world.gw.decider.bookings.live()
    for name in ("d0", "d1"):
        view = world.gw.fleet.view(EngineId(f"http://{name}"))
        assert view is not None
        assert view.facts is not None
        assert 0 < world.gw.decider.bookings.decode_kv_tokens(view.engine_id) <= view.facts.max_total_tokens
    await leave(asked)


@pytest.mark.parametrize("down", ["p", "d"])
def test_where_one_side_is_down_the_other_hears_nothing(down: str) -> None:
    async def refused(world: World) -> None:
        for number in (0, 1):
            world.gw.fleet.set_health(EngineId(f"http://{down}{number}"), Health.SUSPECTED, "gone")
        error = await world.error()
        assert (error.status, error.code) == (503, "no_pair_available")
        assert world.servers.calls == []

    story(refused)()


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize("how", ["status", "lost"])
def test_another_attempt_has_other_names_and_the_old_one_was_told_to_stop_before(role: str, how: str) -> None:
    """The sibling of the leg that failed is still at work, and would go on under the names that it has."""

    async def retried(world: World) -> None:
        first_s, told_s, told_before = now_s(), list[float](), list[bool]()
        stop = world.servers.aborted

        def aborted(url: str, rid: str) -> None:
            if not url.split("/")[2].startswith(role):
                assert rid == world.servers.calls[0][1]["rid"]
                told_s.append(now_s())
            stop(url, rid)

        def behave(host: str, body: dict[str, Any]) -> Answer | None:
            if len(world.servers.calls) <= 2:
                bad = failed(503) if how == "status" else dying()
                return bad if host.startswith(role) else FakeExchange(200)
            told_before.append(bool(told_s))
            return None

        world.servers.aborted, world.servers.behave = aborted, behave
        await world.ask()
        assert world.text == "hello"
        assert told_before == [True, True]
        grace_s = LOSS_GRACE_S if (role, how) == ("p", "lost") else 0.0
        assert told_s[0] - first_s <= grace_s + _ABORT_S
        old, new = world.servers.calls[0][1], world.servers.calls[2][1]
        for name in ("rid", "bootstrap_room"):
            assert old[name] != new[name]

    story(retried)()


@story
async def test_a_client_hears_of_a_failed_prefill_at_once_though_its_decode_goes_on_waiting(world: World) -> None:
    world.servers.behave = lambda host, body: failed() if host.startswith("p") else FakeExchange(200)
    begun_s = now_s()
    error = await world.error()
    assert (error.status, error.code) == (502, "engine_failed")
    assert now_s() - begun_s < 1.0
    stopped = {orjson.loads(body or b"{}")["rid"] for _, url, body, _ in world.servers.fetched if "abort" in url}
    assert stopped == {body["rid"] for host, body in world.servers.calls if host.startswith("d")}


@story
async def test_another_attempt_leaves_the_server_that_failed_though_it_has_the_prefix(world: World) -> None:
    await world.ask()
    (holder,) = world.servers.hosts("p")
    world.servers.calls.clear()
    await world.ask()
    assert world.servers.hosts("p") == [holder], "it is the best of all"
    world.servers.calls.clear()
    world.servers.behave = lambda host, body: failed() if host == holder else None
    await world.ask()
    assert world.text == "hello"
    assert world.servers.hosts("p")[0] == holder
    assert holder not in world.servers.hosts("p")[1:]
