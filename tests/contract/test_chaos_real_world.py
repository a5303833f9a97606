"""Real fleets on loopback: when one is ready, what it is asked, and a run on a gateway that is none of pdgate's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from engines import tasks
from engines.server_process import free_ports
from failover.chaos import real_run
from failover.chaos.fleet_file import of_urls
from failover.chaos.invariants import judge
from failover.chaos.real_fleet import RealFleet
from failover.chaos.real_world import RealWorld
from failover.chaos.record import Record
from failover.chaos.scenario import FaultPlan, LoadPlan, Scenario
from failover.chaos.world import Unable

MODELS = {"data": [{"id": "tiny"}]}
READY = {"pairs": 1, "engines": []}
LINK = "gateway0>decode0"


@dataclass
class Gateway:
    """Answers GETs by `gets`, as (status, JSON or text); POSTs with `text` of the prompt. `seen`: what it was asked."""

    gets: dict[str, tuple[int, Any]] = field(
        default_factory=lambda: {"/health": (200, ""), "/v1/models": (200, MODELS)}
    )
    text: Callable[[int, str], str] = lambda number, prompt: f"you said {prompt[:6]}"
    seen: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    url: str = ""

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.path)
        self.headers.append(request.headers)
        status, body = self.gets.get(request.path, (404, "no such page"))
        if status in (301, 307):
            raise web.HTTPTemporaryRedirect(body)
        return (
            web.json_response(body, status=status) if isinstance(body, dict) else web.Response(text=body, status=status)
        )

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        text, most = self.text(len(self.bodies), prompt), body["max_tokens"]
        usage = {"prompt_tokens": 9, "completion_tokens": most, "total_tokens": 9 + most}
        if not body["stream"]:
            said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
            choice = {"index": 0, "finish_reason": "length", **said}
            return web.json_response({"id": "x", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta, finish in (({"role": "assistant", "content": ""}, None), ({"content": text}, None), ({}, "length")):
            said = {"delta": delta} if "messages" in body else {"text": delta.get("content", "")}
            choice = {"index": 0, "finish_reason": finish, **said}
            await response.write(b"data: " + orjson.dumps({"id": "x", "choices": [choice]}) + b"\n\n")
            await asyncio.sleep(0.05)
        if body.get("stream_options"):
            await response.write(b"data: " + orjson.dumps({"id": "x", "choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def served(gateway: Gateway) -> AsyncIterator[RealFleet]:
    """The gateway as a fleet that is to be ready soon."""
    app = web.Application()
    app.router.add_get("/{any:.*}", gateway.get)
    app.router.add_post("/{any:.*}", gateway.post)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield replace(of_urls([gateway.url], []), ready_s=0.3)
    finally:
        await runner.cleanup()


def world(fleet: RealFleet, *befallen: str, stop: asyncio.Event | None = None) -> RealWorld:
    return RealWorld(fleet, befallen, Random(1), stop or asyncio.Event())


def with_decode(fleet: RealFleet) -> RealFleet:
    """With a decode behind a proxy, which is the gateway itself."""
    return replace(fleet, decodes=fleet.gateways, proxies={LINK: f"127.0.0.1:{free_ports(1)[0]}"})


async def reason(fleet: RealFleet, *befallen: str, stop: asyncio.Event | None = None) -> str:
    """Why the fleet is not ready."""
    with pytest.raises(Unable) as refused:
        async with world(fleet, *befallen, stop=stop):
            raise AssertionError("it is ready")
    assert tasks.running() == ()
    return str(refused.value)


# -- when it is ready -------------------------------------------------------------------------------------------------


async def test_a_gateway_of_any_kind_is_ready_by_its_health() -> None:
    async with served(Gateway()) as fleet, world(fleet) as made:
        assert made.pdgates == frozenset()
        assert made.model == "tiny"
        assert list(made.names("gateway")) == ["gateway0"]
        assert (made.names("decode"), made.instances[0].url) == ([], fleet.gateways[0])


async def test_pdgate_is_known_by_its_page() -> None:
    async with served(Gateway({"/readyz": (200, READY), "/v1/models": (200, MODELS)})) as fleet, world(fleet) as made:
        assert made.pdgates == {"gateway0"}


@pytest.mark.parametrize(
    ("gets", "words"),
    [
        ({"/readyz": (503, READY)}, "after 0.3 s: gateway0 is not ready: it answers 503 to /readyz"),
        ({"/health": (500, "")}, "after 0.3 s: gateway0 is not ready: it answers 500 to /health"),
        ({}, "after 0.3 s: gateway0 is not ready: it answers 404 to /health"),
        (
            {"/readyz": (401, "no"), "/health": (401, "no")},
            "gateway0 answers 401: it wants a token: name it by api_key_env",
        ),
        ({"/readyz": (307, "http://127.0.0.1:9/")}, "after 0.3 s: gateway0 is not ready: it answers 404 to /health"),
    ],
)
async def test_one_that_is_not_ready(gets: dict[str, Any], words: str) -> None:
    async with served(Gateway(gets)) as fleet:
        assert await reason(fleet) == words


async def test_an_engine_that_is_not_ready_behind_its_proxy() -> None:
    async with served(gateway := Gateway()) as fleet:
        fleet = with_decode(fleet)
        engines = [{"id": f"http://{fleet.proxies[LINK]}", "health": "broken"}]
        gateway.gets["/readyz"] = (200, {"pairs": 1, "engines": engines})
        assert await reason(fleet) == "after 0.3 s: decode0 is broken for gateway0"


@pytest.mark.parametrize("health", ["ready", "probation"])
async def test_an_engine_that_only_lacks_a_request_is_not_waited_for(health: str) -> None:
    """A gateway that nobody asks leaves one on probation for long: it is the load that proves it."""
    async with served(gateway := Gateway({"/v1/models": (200, MODELS)})) as fleet:
        fleet = with_decode(fleet)
        engines = [{"id": f"http://{fleet.proxies[LINK]}", "health": health}]
        gateway.gets["/readyz"] = (200, {"pairs": 1, "engines": engines})
        async with world(fleet) as made:
            assert made.pdgates == {"gateway0"}


async def test_nobody_answers() -> None:
    fleet = replace(of_urls([f"http://127.0.0.1:{free_ports(1)[0]}"], []), ready_s=0.3)
    assert "after 0.3 s: gateway0 does not answer at http://127.0.0.1:" in await reason(fleet)


async def test_a_proxy_that_is_to_be_broken_must_be_used() -> None:
    async with served(Gateway()) as fleet:
        fleet = with_decode(fleet)
        at = fleet.proxies[LINK]
        assert await reason(fleet, LINK) == (
            f"after 0.3 s: nobody has come by {LINK}: tell gateway0 that decode0 is at {at}"
        )
        async with world(fleet):
            pass  # no fault befalls it
        opening = asyncio.ensure_future(_used(at))
        async with world(replace(fleet, ready_s=5.0), LINK) as made:
            assert not made.links.unused(LINK)
        await opening


async def _used(at: str) -> None:
    """Somebody asks for a page by that proxy, as soon as it is there."""
    async with ClientSession() as http:
        while True:
            await asyncio.sleep(0.05)
            with contextlib.suppress(OSError):
                async with http.get(f"http://{at}/health") as reply:
                    assert reply.status == 200
                    return


async def test_an_address_that_somebody_has_is_not_shared() -> None:
    async with served(Gateway()) as fleet:
        fleet = with_decode(fleet)
        async with world(fleet):
            assert f"proxies.{LINK}: nobody can listen on {fleet.proxies[LINK]}" in await reason(fleet)


async def test_the_wait_ends_when_it_is_stopped() -> None:
    stop = asyncio.Event()
    stop.set()
    async with served(Gateway({})) as fleet:
        assert await reason(replace(fleet, ready_s=60.0), stop=stop) == "it was stopped before its load began"


# -- what may be done -------------------------------------------------------------------------------------------------


async def test_nothing_is_done_to_a_fleet_but_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_KEY", "secret")
    async with served(gateway := Gateway()) as fleet, world(replace(fleet, api_key_env="LAB_KEY")) as made:
        for refused in (made.admin("gateway0", "POST", "/admin/drain"), made.redis("FLUSHALL")):
            with pytest.raises(Unable, match="only looked at"):
                await refused
        for name in ("gateway0", "decode0"):
            with pytest.raises(Unable, match="only looked at"):
                made.process(name)
        with pytest.raises(Unable, match="no proxy in the link"):
            made.link(LINK)
        assert gateway.bodies == []
        assert {each["authorization"] for each in gateway.headers} == {"Bearer secret"}
        assert "secret" not in repr(made.fleet)


async def test_a_redirect_is_not_followed() -> None:
    async with served(other := Gateway()), served(moved := Gateway()) as fleet:
        moved.gets["/v1/models"] = (307, other.url + "/v1/models")
        words = "after 0.3 s: gateway0 names no model at /v1/models (307): name it by --model"
        assert await reason(fleet) == words
        async with world(replace(fleet, model="mine")) as made:
            assert made.model == "mine"
        assert other.seen == []


async def test_engines_are_known_by_their_own_address_or_that_of_a_proxy() -> None:
    fleet = RealFleet(
        "lab",
        ("http://10.0.0.1:1",),
        decodes=("http://10.0.0.2:30000", "http://10.0.0.3:30000"),
        proxies={LINK: "0.0.0.0:9101"},
    )
    made = world(fleet)
    assert made.name_of("http://10.0.0.3:30000/") == "decode1"
    assert made.name_of("http://chaos-host:9101") == "decode0"
    assert made.name_of("http://elsewhere:1") == "http://elsewhere:1"
    assert made.name_of("nonsense") == "nonsense"


# -- a run ------------------------------------------------------------------------------------------------------------

SCENARIO = Scenario(
    "s",
    "a",
    "p",
    load=LoadPlan((1.0, 1.0), 20.0, {"stream": 2, "whole": 1, "completion": 1}, (20, 30), (5, 9)),
    faults=(FaultPlan("delay", "client>gateway0", at_s=0.2, for_s=(0.3, 0.3)),),
)


async def ran(fleet: RealFleet) -> Record:
    told: list[str] = []
    fleet = replace(fleet, max_rate_per_s=20.0)
    record = await real_run.run(SCENARIO, fleet, 1, long=False, tell=told.append, stop=asyncio.Event())
    assert told
    assert tasks.running() == ()
    return record


async def test_a_gateway_that_is_none_of_pdgates_is_judged_by_its_answers() -> None:
    async with served(gateway := Gateway(text=lambda number, prompt: "so")) as fleet:
        record = await ran(fleet)
    assert len(record.history.requests) > 10
    assert all(body.keys().isdisjoint({"rid", "return_token_ids"}) for body in gateway.bodies), (
        "only pdgate knows these"
    )
    assert {each["host"] for each in gateway.headers} == {gateway.url.removeprefix("http://")}, "by a proxy too"
    assert record.fleet is not None
    assert record.fleet.gateways == (gateway.url,)
    judged = judge(record)
    unseen = {each.invariant for each in judged.verdicts if each.unseen}
    assert unseen >= {"attempts", "settled", "nothing_left_in_gateways", "nothing_left_on_engines", "true_answers"}
    assert record.faults[0].applied_s is not None
    assert record.faults[0].lifted_s is not None
    assert judged.passed


async def test_answers_are_compared_with_those_before_the_faults() -> None:
    async with served(Gateway()) as fleet:
        record = await ran(replace(fleet, reference=True))
    names = {each.name for each in record.history.requests}
    assert record.references.keys() == names
    assert "true_answers" not in record.unseen
    assert judge(record).passed

    async with served(Gateway(text=lambda number, prompt: f"answer {number}")) as fleet:
        spoiled = judge(await ran(replace(fleet, reference=True)))
    [verdict] = [each for each in spoiled.verdicts if not each.held]
    assert verdict.invariant == "whole_or_one_error"
    assert "is not what was answered before the faults" in verdict.broken[0].what
