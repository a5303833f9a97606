"""Clients of a chaos run against a server that answers as a test wants: what they note, where they go, when they go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from failover.chaos import driver
from failover.chaos.answer import DONE, Answer
from failover.chaos.driver import PLAIN, Driver, Manners
from failover.chaos.history import Ending
from failover.chaos.load import Asked

PATH = "/v1/chat/completions"
STEADY_S, STEADY_EVENTS = 0.1, 12
Plays = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@dataclass
class Gateway:
    """Answers every request by `play`; `bodies` are what it was asked, `left` counts clients that hung up."""

    name: str
    play: Plays
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    left: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await request.read()))
        self.headers.append(request.headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-pdgate-request-id": "r"})
        try:
            await self.play(request, response)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return response


@contextlib.asynccontextmanager
async def served(*gateways: Gateway, port: int = 0) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for gateway in gateways:
            app = web.Application()
            app.router.add_post(PATH, gateway.answer)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


def asked(number: int = 0, at_s: float = 0.0, leaves_after: int | None = None) -> Asked:
    return Asked(number, at_s, "stream", PATH, {"stream": True}, leaves_after=leaves_after)


def event(number: int) -> bytes:
    return b"data: " + orjson.dumps({"number": number}) + b"\n\n"


async def whole(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    await response.write(b": a comment\n\n" + event(1) + event(2)[:7])
    await asyncio.sleep(0.02)
    await response.write(event(2)[7:] + b"data: [DONE]\n\n")


async def endless(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    for number in range(3):
        await response.write(event(number))
    await asyncio.sleep(60)


async def steady(request: web.Request, response: web.StreamResponse) -> None:
    """It takes longer than anybody waits for silence, and is never silent for so long."""
    await response.prepare(request)
    for number in range(STEADY_EVENTS - 1):
        await response.write(event(number))
        await asyncio.sleep(STEADY_S)
    await response.write(b"data: [DONE]\n\n")


async def silent(request: web.Request, response: web.StreamResponse) -> None:
    await asyncio.sleep(60)


async def breaking(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    await response.write(event(1))
    assert request.transport is not None
    request.transport.abort()


async def strange(request: web.Request, response: web.StreamResponse) -> None:
    await response.prepare(request)
    await response.write(b"data: {half\n\nno field\n\n" + event(1) + b"data: rest")


@dataclass
class Run:
    """A driver over gateways; its clock is the loop's, from its beginning."""

    http: aiohttp.ClientSession
    gateways: list[tuple[str, str]]
    broken: bool = False
    manners: Manners = PLAIN
    over: list[Answer] = field(default_factory=list)
    begun: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        zero_s = asyncio.get_running_loop().time()
        self.now_s = lambda: asyncio.get_running_loop().time() - zero_s
        self.driver = Driver(
            *(self.http, self.gateways, self.now_s, self.over.append, self.begun.append),
            *(lambda *_: self.broken, self.manners),
        )

    async def all(self, *load: Asked, within_s: float = 5.0) -> list[Answer]:
        await self.driver.play(load)
        await self.driver.finish(within_s)
        assert self.driver.live == 0
        return sorted(self.over, key=lambda answer: answer.asked.number)


async def test_what_comes_is_noted_with_its_time(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", whole)
    async with served(gateway):
        run = Run(http, [(gateway.name, gateway.url)])
        [answer] = await run.all(asked())
    first, second, done = answer.read
    assert (first[1], second[1], done[1]) == ({"number": 1}, {"number": 2}, DONE)
    assert 0 <= answer.sent_s <= first[0] < second[0] <= done[0] <= answer.over_s
    assert second[0] - first[0] > 0.01
    assert [words for _, words in answer.comments] == ["a comment"]
    assert (answer.status, answer.ending, answer.gateway) == (200, Ending.WHOLE, "gateway0")
    assert run.begun == [answer]
    assert gateway.bodies == [{"stream": True, "rid": answer.rid}]


async def test_requests_come_at_their_times_to_one_gateway_after_another(http: aiohttp.ClientSession) -> None:
    gateways = [Gateway("gateway0", whole), Gateway("gateway1", whole)]
    async with served(*gateways):
        run = Run(http, [(each.name, each.url) for each in gateways])
        answers = await run.all(asked(0), asked(1, 0.1), asked(2, 0.15))
    assert [answer.gateway for answer in answers] == ["gateway0", "gateway1", "gateway0"]
    for answer in answers:
        assert 0 <= answer.sent_s - answer.asked.at_s < 0.08
    assert len({answer.rid for answer in answers}) == 3


async def test_each_gateway_gets_its_own_headers_and_names_only_where_they_are_known(
    http: aiohttp.ClientSession,
) -> None:
    gateways = [Gateway("gateway0", whole), Gateway("gateway1", whole)]
    async with served(*gateways):
        own = {"gateway0": {"host": "a.example", "authorization": "Bearer x"}, "gateway1": {"host": "b.example"}}
        run = Run(http, [(each.name, each.url) for each in gateways], manners=Manners(headers=own, names=False))
        await run.all(asked(0), asked(1))
    assert [each.headers[0]["host"] for each in gateways] == ["a.example", "b.example"]
    assert [each.headers[0].get("authorization") for each in gateways] == ["Bearer x", None]
    assert [each.bodies for each in gateways] == [[{"stream": True}]] * 2


async def test_no_more_clients_at_once_than_allowed(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", endless)
    async with served(gateway):
        run = Run(http, [(gateway.name, gateway.url)], manners=Manners(at_once=2))
        playing = asyncio.ensure_future(run.driver.play([asked(number) for number in range(3)]))
        await _until(lambda: len(gateway.bodies) == 2)
        await asyncio.sleep(0.1)
        assert (run.driver.live, len(gateway.bodies), playing.done()) == (2, 2, False)
        await run.driver.stop()
        await _until(lambda: len(gateway.bodies) == 3)
        await run.driver.stop()
        await playing


async def test_nobody_is_led_to_another_address(http: aiohttp.ClientSession) -> None:
    other = Gateway("other", whole)
    async with served(other):

        async def elsewhere(request: web.Request, response: web.StreamResponse) -> None:
            response.set_status(307)
            response.headers["location"] = other.url + PATH
            await response.prepare(request)

        gateway = Gateway("gateway0", elsewhere)
        async with served(gateway):
            [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked())
    assert (answer.status, other.bodies) == (307, [])


async def test_who_is_refused_asks_the_next_gateway(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway1", whole)
    async with served(gateway):
        run = Run(http, [("gateway0", _nobody()), (gateway.name, gateway.url)])
        [answer] = await run.all(asked())
    assert (answer.gateway, answer.ending) == ("gateway1", Ending.WHOLE)
    assert len(gateway.bodies) == 1


async def test_who_is_refused_by_all_asks_again(http: aiohttp.ClientSession) -> None:
    url = _nobody()
    gateway = Gateway("gateway0", whole)
    run = Run(http, [("gateway0", url)])
    await run.driver.play([asked()])
    await asyncio.sleep(0.2)
    assert run.driver.live == 1
    async with served(gateway, port=int(url.rpartition(":")[2])):
        await run.driver.finish(5.0)
    [answer] = run.over
    assert (answer.ending, answer.status) == (Ending.WHOLE, 200)
    assert answer.sent_s > 0.15, "it counts from when it was taken"


async def test_one_that_nobody_ever_takes_has_no_end(http: aiohttp.ClientSession) -> None:
    run = Run(http, [("gateway0", _nobody())])
    [answer] = await run.all(asked(), within_s=0.2)
    assert (answer.ending, answer.status, answer.hung) == (Ending.CUT, None, True)


async def test_a_client_leaves_after_so_many_events(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", endless)
    async with served(gateway):
        [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked(leaves_after=2))
        await _until(lambda: gateway.left == 1)
    assert [what["number"] for _, what in answer.read] == [0, 1]
    assert answer.ending is Ending.LEFT


async def test_a_client_leaves_before_any_answer(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_HASTY_S", 1.0)  # a busy machine may take that long to read what was asked
    gateway = Gateway("gateway0", silent)
    async with served(gateway):
        [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked(leaves_after=0))
        await _until(lambda: gateway.left == 1)
    assert (answer.ending, answer.status, answer.read) == (Ending.LEFT, None, [])
    assert len(gateway.bodies) == 1, "it was asked"


async def test_an_answer_without_an_end_is_given_up_and_has_none(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", endless)
    async with served(gateway):
        run = Run(http, [(gateway.name, gateway.url)])
        await run.driver.play([asked()])
        assert await run.driver.finish(0.2) == 1
        await _until(lambda: gateway.left == 1)
    [answer] = run.over
    assert (answer.ending, answer.hung, len(answer.read)) == (Ending.CUT, True, 3)


async def test_an_answer_that_still_comes_is_waited_for(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", steady)
    async with served(gateway):
        run = Run(http, [(gateway.name, gateway.url)])
        await run.driver.play([asked()])
        assert await run.driver.finish(STEADY_S * 4) == 0
    [answer] = run.over
    assert (answer.ending, answer.hung, len(answer.read)) == (Ending.WHOLE, False, STEADY_EVENTS)


async def test_a_connection_that_breaks_is_no_end(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", breaking)
    async with served(gateway):
        [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked())
        assert (answer.ending, len(answer.read)) == (Ending.CUT, 1)
        assert answer.error
        assert len(gateway.bodies) == 1, "what has begun is not sent again"
        [answer] = await Run(http, [(gateway.name, gateway.url)], broken=True).all(asked())
    assert answer.ending is Ending.LEFT, "the network broke it, as if its client had hung up"


async def test_what_is_no_event_is_kept(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", strange)
    async with served(gateway):
        [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked())
    assert [what for _, what in answer.read] == [b"{half", b"no field", {"number": 1}, b"data: rest"]
    assert answer.ending is Ending.WHOLE


async def test_a_refusal_is_a_whole_body(http: aiohttp.ClientSession) -> None:
    async def refuses(request: web.Request, response: web.StreamResponse) -> None:
        response.set_status(503)
        response.content_type = "application/json"
        await response.prepare(request)
        await response.write(b'{"error": {}}')

    gateway = Gateway("gateway0", refuses)
    async with served(gateway):
        [answer] = await Run(http, [(gateway.name, gateway.url)]).all(asked())
    assert (answer.status, answer.ending, answer.read[0][1]) == (503, Ending.WHOLE, {"error": {}})
    assert not answer.is_stream


async def test_all_clients_leave_when_it_is_stopped(http: aiohttp.ClientSession) -> None:
    gateway = Gateway("gateway0", endless)
    async with served(gateway):
        run = Run(http, [(gateway.name, gateway.url)])
        await run.driver.play([asked(0), asked(1)])
        await _until(lambda: len(gateway.bodies) == 2)
        await run.driver.stop()
        await _until(lambda: gateway.left == 2)
    assert [answer.ending for answer in run.over] == [Ending.LEFT, Ending.LEFT]


def _nobody() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while True:
            if true():
                return
            await asyncio.sleep(0.01)
