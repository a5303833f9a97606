"""How long a further attempt waits for servers that were lost, and for which."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.types import EngineId, FleetSnapshot, Health
from gateway.comeback import COMEBACK_S, first_look, submit_again
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.errors import GatewayError, no_pair, overloaded
from tests.fakes import now_s, request, timeless, view

CHOSEN = cast("Decision", object())


class World:
    """A fleet with one decode; the decider answers with `error` until `until_s`."""

    def __init__(self, error: GatewayError, health: Health = Health.SUSPECTED, until_s: float = 1e9) -> None:
        self.error, self.until_s = error, until_s
        self.asked = 0
        decode = replace(view("d0"), health=health)
        fleet = SimpleNamespace(snapshot=lambda: FleetSnapshot(1, (decode,)))
        self.gw = cast("Gateway", SimpleNamespace(decider=self, fleet=fleet))

    async def submit(self, *asked: Any) -> Decision:
        self.asked += 1
        if now_s() < self.until_s:
            raise self.error
        return CHOSEN


async def refused_after_s(world: World, *excluded: EngineId, within_s: float = 10.0) -> float:
    began_s = now_s()
    asked = request(excluded_engines=frozenset(excluded), deadline_s=began_s + within_s)
    with pytest.raises(GatewayError) as caught:
        await submit_again(world.gw, asked)
    assert caught.value is world.error
    return now_s() - began_s


@timeless
async def test_who_comes_back_in_time_is_waited_for() -> None:
    for health in (Health.SUSPECTED, Health.BROKEN):
        world = World(no_pair("none"), health, until_s=now_s() + COMEBACK_S / 2)
        assert await submit_again(world.gw, request()) is CHOSEN
        assert now_s() == pytest.approx(world.until_s, abs=0.06)


@timeless
async def test_not_for_ever() -> None:
    assert await refused_after_s(World(no_pair("none"))) == pytest.approx(COMEBACK_S, abs=0.06)
    short_s = COMEBACK_S / 2
    assert await refused_after_s(World(no_pair("none")), within_s=short_s) == pytest.approx(short_s, abs=0.06)


@timeless
async def test_nobody_waits_for_what_does_not_come_back() -> None:
    assert await refused_after_s(World(no_pair("none"), Health.NOT_READY)) == 0.0
    decode = view("d0")
    assert await refused_after_s(World(no_pair("none")), decode.engine_id) == 0.0, "it has failed this request"
    assert await refused_after_s(World(overloaded("full", retry_after_s=1.0))) == 0.0, "there are pairs"


@timeless
@pytest.mark.parametrize(
    ("health", "known_after_s", "waits_s"),
    [
        (Health.UNKNOWN, 0.5, 0.5),
        (Health.UNKNOWN, 1e9, COMEBACK_S),
        (Health.BROKEN, 1e9, 0.0),
        (Health.READY, 0.0, 0.0),
    ],
    ids=["looked at soon", "never looked at", "looked at, and none is there", "known"],
)
async def test_a_model_is_waited_for_while_servers_were_not_looked_at(
    health: Health, known_after_s: float, waits_s: float
) -> None:
    began_s = now_s()
    engines = (replace(view("d0"), health=health),)
    fleet = SimpleNamespace(
        models=lambda: ("m",) if now_s() >= began_s + known_after_s else (), snapshot=lambda: FleetSnapshot(1, engines)
    )
    await first_look(cast("Gateway", SimpleNamespace(fleet=fleet)))
    assert now_s() - began_s == pytest.approx(waits_s, abs=0.06)
