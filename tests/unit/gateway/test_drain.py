"""Draining by the admin API: who may, what it says, and when a server is drained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engines.types import EngineId, Health
from gateway.admin_api import ready_pairs
from gateway.config import ServerConfig
from gateway.context import Gateway
from gateway.gauges import gauges
from gateway.http_server import make_app
from routing.bookings_log import Totals
from tests.fakes import FakeUpstream, gateway, probed, request

Client = TestClient[web.Request, web.Application]
P0, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "d0", "d1"))
KEY = {"authorization": "Bearer secret"}


@pytest.fixture
async def gw() -> Gateway:
    return await probed(gateway(FakeUpstream(), "p0", "d0", "d1", server=ServerConfig(api_key="secret")))


@pytest.fixture
async def client(gw: Gateway) -> AsyncIterator[Client]:
    async with TestClient(TestServer(make_app(gw))) as client:
        yield client


async def ask(client: Client, path: str, body: Any, status: int = 200, headers: Any = KEY) -> Any:
    async with client.post(path, json=body, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def shown(client: Client, engine: EngineId) -> dict[str, Any]:
    async with client.get("/readyz") as answer:
        (found,) = [each for each in (await answer.json())["engines"] if each["id"] == engine]
        return dict(found)


async def test_a_prefill_is_drained_when_all_its_work_is_handed_over(gw: Gateway, client: Client) -> None:
    decision = await gw.decider.submit(request())
    told = await ask(client, "/admin/drain", {"engine": P0})
    assert told == {"engine": P0, "drain": "draining", "attempts": 1}
    assert (await shown(client, P0))["drain"] == "draining"
    gw.decider.handed_over(decision)
    assert await ask(client, "/admin/drain", {"engine": P0}) == {"engine": P0, "drain": "drained", "attempts": 0}
    assert (await shown(client, P0))["drain"] == "drained"
    gw.decider.finished(decision)


async def test_a_decode_is_drained_when_its_last_attempt_is_over(gw: Gateway, client: Client) -> None:
    decision = await gw.decider.submit(request())
    decode = decision.decode.engine_id
    gw.decider.handed_over(decision)
    assert (await ask(client, "/admin/drain", {"engine": decode}))["drain"] == "draining"
    gw.decider.finished(decision)
    assert (await ask(client, "/admin/drain", {"engine": decode}))["drain"] == "drained"


async def test_what_others_have_booked_and_what_is_being_released_counts_too(gw: Gateway, client: Client) -> None:
    gw.decider.bookings.set_others({P0: Totals(prefill_requests=2)})
    gw.releaser._on_engine[P0] += 1
    told = await ask(client, "/admin/drain", {"engine": P0})
    assert (told["drain"], told["attempts"]) == ("draining", 3)


async def test_a_drained_server_stays_so_until_it_is_taken_back(gw: Gateway, client: Client) -> None:
    assert ready_pairs(gw) == {"tiny": 2}
    await ask(client, "/admin/drain", {"engine": D0})
    assert ready_pairs(gw) == {"tiny": 1}
    for health in (Health.SUSPECTED, Health.READY):  # it restarts
        gw.fleet.set_health(D0, health)
    assert {(await gw.decider.submit(request())).decode.engine_id for _ in range(4)} == {D1}
    back = await ask(client, "/admin/undrain", {"engine": D0})
    assert (back["drain"], (await shown(client, D0))["drain"]) == (None, None)
    assert ready_pairs(gw) == {"tiny": 2}


async def test_metrics_say_how_far_it_has_come(gw: Gateway, client: Client) -> None:
    decision = await gw.decider.submit(request())
    await ask(client, "/admin/drain", {"engine": P0})

    def values() -> tuple[float, ...]:
        found = {(name, labels.get("engine")): value for name, _, labels, value in gauges(gw)}
        return tuple(
            found[name, P0] for name in ("pdgate_engine_ready", "pdgate_engine_draining", "pdgate_engine_drained")
        )

    assert values() == (0.0, 1.0, 0.0)
    gw.decider.finished(decision)
    assert values() == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("path", ["/admin/drain", "/admin/undrain"])
async def test_it_asks_for_the_key(client: Client, gw: Gateway, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        await ask(client, path, {"engine": P0}, 401, headers)
    assert not gw.fleet.view(P0).draining


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"engine": "http://x"}, 404, "http://p0"),
        ({"engine": 1}, 404, "there is no server 1"),
        ({}, 400, "engine"),
        ([], 400, "engine"),
        ("x", 400, "engine"),
    ],
)
async def test_what_it_does_not_know_is_refused_with_a_hint(client: Client, body: Any, status: int, said: str) -> None:
    error = await ask(client, "/admin/drain", body, status)
    assert said in error["error"]["message"]
