"""A gateway over a fleet without sockets: one request at a time, and nothing may be left after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from engines import tasks
from engines.errors import UpstreamError
from engines.sse_frames import FrameDecoder, data_of, is_comment
from engines.types import FailureKind
from gateway import lifecycle
from gateway.app import started
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.lifecycle import Arrival
from gateway.openai_api import Api
from tests.fakes import (
    DONE,
    Answer,
    FakeClient,
    FakeExchange,
    FakeUpstream,
    chat_answer,
    chat_event,
    event,
    gateway,
    now_s,
    timeless,
    usage_event,
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 500}]}
REFUSED = UpstreamError(FailureKind.CONNECT, "refused", definite=True)
Behaviour = Callable[[str, dict[str, Any]], Answer | None]


class Servers(FakeUpstream):
    """Servers that answer well, save where `behave` says otherwise; aborts end what they name."""

    def __init__(self) -> None:
        super().__init__(self._generate)
        self.behave: Behaviour = lambda host, body: None
        self.open_of: dict[tuple[str, str], FakeExchange] = {}
        self.aborted = self._abort
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _generate(self, url: str, raw: bytes) -> Answer:
        host, body = url.split("/")[2], orjson.loads(raw)
        self.calls.append((host, body))
        answer = self.behave(host, body) or good(host, body)
        if isinstance(answer, FakeExchange):
            self.open_of[host, body["rid"]] = answer
        return answer

    def _abort(self, url: str, rid: str) -> None:
        if (exchange := self.open_of.get((url.split("/")[2], rid))) is None:
            return  # an abort that comes before its request is lost
        exchange.send(event({"error": {"message": "Aborted by AbortReq.", "code": 500}}), DONE)
        exchange.end()

    def hosts(self, role: str) -> list[str]:
        return [host for host, _ in self.calls if host.startswith(role)]


def good(host: str, body: dict[str, Any], text: str = "hello") -> FakeExchange:
    rid = body["rid"]
    if not body.get("stream"):
        return FakeExchange(200, chat_answer(text, rid, completion=20), whole=True)
    if host.startswith("p"):
        return FakeExchange(200, chat_event("", rid, finish="length") + DONE, whole=True)
    pieces = [chat_event(None, rid), *(chat_event(letter, rid) for letter in text), chat_event("", rid, finish="stop")]
    return FakeExchange(200, *pieces, usage_event(400, 20, rid), DONE, whole=True)


class World:
    def __init__(self, gw: Gateway, servers: Servers) -> None:
        self.gw, self.servers = gw, servers
        self.client = FakeClient()

    async def ask(self, api: Api = Api.CHAT, **body: Any) -> None:
        """One request; its answer is in `client`."""
        self.client = FakeClient()
        raw = orjson.dumps({**CHAT, "stream": True, **body})
        await lifecycle.handle(self.gw, Arrival(api, raw, {}, now_s()), self.client)

    async def error(self, **body: Any) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            await self.ask(**body)
        assert self.client.calls == []
        return caught.value

    @property
    def events(self) -> list[Any]:
        data = [data_of(frame) for frame in FrameDecoder().feed(self.client.body) if not is_comment(frame)]
        return [each if each == b"[DONE]" else orjson.loads(each) for each in data]

    @property
    def text(self) -> str:
        choices = [each["choices"] for each in self.events if each != b"[DONE]" and "choices" in each]
        return "".join(each[0]["delta"]["content"] for each in choices if each)

    @property
    def record(self) -> dict[str, Any]:
        record = self.gw.explain.newest()
        assert record is not None
        return record.as_json()


def story(test: Callable[[World], Any], *names: str, **sections: Any) -> Callable[[], None]:
    """Run a test over a fleet of two pairs, and see that nothing is left."""

    @timeless
    async def run() -> None:
        servers = Servers()
        gw = gateway(servers, *names, **sections)
        async with started(gw):
            await asyncio.sleep(0.01)
            world = World(gw, servers)
            await test(world)
        assert gw.decider.bookings.live() == 0
        assert len(gw.decider.queue) == 0
        assert not gw.decider.owners.index.pending_blocks()
        assert gw.releaser.pending == 0
        await asyncio.sleep(0)
        assert not tasks.running()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def only_host(host: str, answer: Callable[[dict[str, Any]], Answer]) -> Behaviour:
    return lambda asked, body: answer(body) if asked == host else None


def first_calls(role: str, *answers: Answer) -> Behaviour:
    """The first calls of a role are answered so, the others well."""
    left: Iterator[Answer] = iter(answers)
    return lambda host, body: next(left, None) if host.startswith(role) else None


def failed(status: int = 500, message: str = "boom") -> FakeExchange:
    return FakeExchange(status, orjson.dumps({"error": {"message": message}}), whole=True)


def dying(*sent: bytes) -> FakeExchange:
    exchange = FakeExchange(200, *sent)
    exchange.break_off()
    return exchange
