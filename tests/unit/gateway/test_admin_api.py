"""What the gateway says of itself: health, readiness, models, metrics, explanations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engines.types import EngineId, EngineLoad, Health
from gateway.admin_api import ready_pairs
from gateway.config import ServerConfig
from gateway.context import Gateway
from gateway.explain import Record
from gateway.gauges import gauges
from gateway.http_server import make_app
from tests.fakes import FACTS, FakeUpstream, gateway, probed

Client = TestClient[web.Request, web.Application]
P0, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "d0", "d1"))


@pytest.fixture
async def gw() -> Gateway:
    return await probed(gateway(FakeUpstream(), "p0", "d0", "d1", server=ServerConfig(api_key="secret")))


@pytest.fixture
async def client(gw: Gateway) -> AsyncIterator[Client]:
    async with TestClient(TestServer(make_app(gw))) as client:
        yield client


async def json(client: Client, path: str, status: int = 200) -> Any:
    async with client.get(path) as answer:
        assert answer.status == status
        return await answer.json()


async def test_health_is_open_and_plain(client: Client) -> None:
    async with client.get("/health") as answer:
        assert (answer.status, await answer.text()) == (200, "OK")


async def test_who_it_is_and_that_it_is_alone(gw: Gateway, client: Client) -> None:
    assert await json(client, "/pdgate/replica") == {"replica": gw.shared.replica}
    assert (await json(client, "/readyz"))["replicas"] is None


async def test_readiness_counts_the_pairs_that_can_serve(gw: Gateway, client: Client) -> None:
    ready = await json(client, "/readyz")
    assert (ready["ready"], ready["pairs"], ready["models"]) == (True, 2, ["tiny"])
    first = {"id": P0, "role": "prefill", "health": "ready", "reason": None, "drain": None, "attempts": 0}
    assert ready["engines"][0] == first
    assert (ready["pairs_by_model"], ready["panic"]) == ({"tiny": 2}, [])
    gw.fleet.set_health(D0, Health.SUSPECTED, "lost")
    gw.fleet.set_facts(D1, replace(FACTS, weight_version="other"))
    assert ready["apart"] == []
    unready = await json(client, "/readyz", 503)
    assert (unready["ready"], unready["pairs"]) == (False, 0)
    reason = "weight_version differs: default / other (/update_weight_version)"
    assert unready["apart"] == [{"fit": "refused", "reason": reason, "pairs": 1, "prefill": P0, "decode": D1}]
    assert unready["engines"][1]["reason"] == "lost"


async def test_a_prefill_without_a_recent_probe_makes_no_pair(gw: Gateway) -> None:
    assert ready_pairs(gw) == {"tiny": 2}
    gw.monitor._probed_s.clear()
    assert ready_pairs(gw) == {"tiny": 0}


@pytest.mark.parametrize("engine", [P0, (D0, D1)])
async def test_it_is_not_ready_while_one_side_of_every_pair_is_down(
    gw: Gateway, client: Client, engine: EngineId | tuple[EngineId, ...]
) -> None:
    for each in (engine,) if isinstance(engine, str) else engine:
        gw.fleet.set_health(each, Health.SUSPECTED, "gone")
    assert (await json(client, "/readyz", 503))["ready"] is False
    for each in (engine,) if isinstance(engine, str) else engine:
        gw.fleet.set_health(each, Health.PROBATION, "half-open")
    assert (await json(client, "/readyz"))["pairs"] == 2


async def test_each_model_is_ready_by_itself(gw: Gateway, client: Client) -> None:
    gw.fleet.set_facts(D1, replace(FACTS, model="other"))
    assert (await json(client, "/readyz"))["pairs_by_model"] == {"tiny": 1}
    assert (await json(client, "/readyz?model=tiny"))["pairs"] == 1
    assert (await json(client, "/readyz?model=other", 503))["ready"] is False, "it has no prefill"
    await json(client, "/readyz?model=unknown", 503)


async def test_models_have_the_shortest_context_of_their_servers(gw: Gateway, client: Client) -> None:
    facts = gw.fleet.view(D0).facts
    assert facts is not None
    gw.fleet.set_facts(D0, replace(facts, context_tokens=4096))
    (card,) = (await json(client, "/v1/models"))["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 4096)


async def test_metrics_are_prometheus_text(gw: Gateway, client: Client) -> None:
    async with client.get("/metrics") as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await answer.text()
    assert 'pdgate_engine_ready{engine="http://p0",role="prefill"} 1.0' in text
    assert 'pdgate_kv_unaccounted_tokens{engine="http://d0",role="decode"} NaN' in text


async def test_gauges_show_the_fleet_as_it_is(gw: Gateway) -> None:
    gw.monitor.leak_found(D0)
    gw.releaser._on_engine[P0] = 3
    gw.fleet.set_load(P0, EngineLoad(1.0, 1, 0, 0, 70, 70, 100))
    found = {(name, labels.get("engine", "")): value for name, _, labels, value in gauges(gw)}
    health = {
        labels["health"]: value
        for name, _, labels, value in gauges(gw)
        if name == "pdgate_engine_health" and labels["engine"] == D0
    }
    assert health == {str(each): float(each is Health.LEAKING) for each in Health}
    steps = [
        (labels["before"], labels["after"], labels["event"], value)
        for name, _, labels, value in gauges(gw)
        if name == "pdgate_health_transitions" and labels["engine"] == D0
    ]
    assert steps == [("unknown", "ready", "probe_ready", 1.0), ("ready", "leaking", "leak_found", 1.0)]
    assert found["pdgate_pinned_requests", P0] == 3.0
    assert {labels["role"]: value for name, _, labels, value in gauges(gw) if name == "pdgate_panic"} == {
        "prefill": 0.0,
        "decode": 0.0,
    }
    assert found["pdgate_engine_ready", D0] == 0.0
    assert found["pdgate_engine_ready", D1] == 1.0
    assert found["pdgate_kv_unaccounted_tokens", P0] == 70.0
    assert found["pdgate_engine_epoch", P0] == 1.0
    assert {"pdgate_booked_uncached_tokens", "pdgate_owned_blocks"} <= {name for name, engine in found if engine == P0}
    assert ("pdgate_booked_kv_tokens", D0) in found
    for name in ("pdgate_queue_requests", "pdgate_queue_bytes", "pdgate_live_bookings", "pdgate_releases_pending"):
        assert found[name, ""] == 0.0


async def test_requests_are_explained_by_id_alias_or_newest(gw: Gateway, client: Client) -> None:
    gw.explain.add(Record("r1", "/generate", "tiny", "cost", 0.0, ("mine",)))
    gw.explain.add(Record("r2", "/generate", "tiny", "cost", 0.0))
    for asked, found in (("r1", "r1"), ("mine", "r1"), ("newest", "r2")):
        assert (await json(client, f"/pdgate/explain/{asked}"))["request_id"] == found
    refused = await json(client, "/pdgate/explain/r0", 404)
    assert refused["error"]["code"] == "not_found"
    assert "--explain-ring" in refused["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/readyz", "/v1/models", "/metrics"])
async def test_no_key_is_asked_for(client: Client, path: str) -> None:
    async with client.get(path) as answer:
        assert answer.status == 200
    async with client.head(path) as answer:
        assert answer.status == 200
