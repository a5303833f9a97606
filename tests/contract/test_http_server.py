"""What the HTTP edge must do, seen from a raw socket; what a request means is played by a script.

A faster implementation is one more entry of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
import uvloop

from gateway import http_server, lifecycle, relay, uploads
from gateway.config import ServerConfig
from gateway.context import Gateway
from gateway.errors import bad_request, overloaded
from gateway.http_server import listen, make_runner
from gateway.lifecycle import Arrival
from gateway.openai_api import Api
from gateway.reply import Client
from tests.fakes import FakeUpstream, gateway, probed
from tests.machine import time_limit

Script = Callable[[Arrival, Client], Awaitable[None]]
Serve = Callable[[Gateway], AbstractAsyncContextManager[int]]
SOON_S = 5.0
LIMIT_BYTES = 60 * 1024 * 1024
EVENT_STREAM = {"content-type": "text/event-stream"}

# The newer hook for this acts on a whole folder.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture:DeprecationWarning")


@asynccontextmanager
async def serve_aiohttp(gw: Gateway) -> AsyncIterator[int]:
    """The edge as `app.py` runs it; gives its port."""
    runner = make_runner(gw, 1.0)
    await runner.setup()
    yield await listen(runner, "127.0.0.1", 0)
    await runner.cleanup()


IMPLEMENTATIONS = [pytest.param(serve_aiohttp, id="aiohttp")]


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


@dataclass
class Edge:
    """A served gateway whose requests are answered by `script`."""

    port: int
    gw: Gateway
    script: Script
    arrivals: list[Arrival]


@pytest.fixture(params=IMPLEMENTATIONS)
async def edge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edge]:
    gw = await probed(gateway(FakeUpstream(), "p0", "d0", server=ServerConfig(max_payload_bytes=LIMIT_BYTES)))

    async def handle(gw: Gateway, arrival: Arrival, client: Client) -> None:
        edge.arrivals.append(arrival)
        await edge.script(arrival, client)

    monkeypatch.setattr(lifecycle, "handle", handle)
    async with request.param(gw) as port:
        edge = Edge(port, gw, hello, [])
        yield edge


async def hello(arrival: Arrival, client: Client) -> None:
    await client.whole(200, {"content-type": "application/json", "x-pdgate-attempts": "1"}, b'{"ok":true}')


# ---- a client that sees bytes ----------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"].startswith("application/json")
        error = orjson.loads(self.body)["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        return error


class Raw:
    """One connection to the edge."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *data: bytes) -> None:
        for each in data:
            self.writer.write(each)
            await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), {name.lower(): value for name, value in fields.items()}

    async def answer(self, *, has_body: bool = True) -> Answer:
        async with time_limit(SOON_S):
            status, headers = await self.head()
            body = b""
            if has_body and headers.get("transfer-encoding") == "chunked":
                while chunk := await self.chunk():
                    body += chunk
            elif has_body:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return Answer(status, headers, body)

    async def chunk(self) -> bytes:
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def closed(self) -> bool:
        async with time_limit(SOON_S):
            return await self.reader.read() == b""

    def segments_in(self) -> int:
        """Segments with data that the kernel has taken for this connection: one for each write of the server."""
        info = self.writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("I", info, 152)[0]

    def abort(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def connected(edge: Edge, **options: Any) -> AsyncIterator[Raw]:
    where = {} if "sock" in options else {"host": "127.0.0.1", "port": edge.port}
    raw = Raw(*await asyncio.open_connection(**where, **options))
    yield raw
    raw.close()


def post(body: bytes = b"{}", path: str = Api.CHAT.value, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def request(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()


async def ask(edge: Edge, data: bytes, *, has_body: bool = True) -> Answer:
    async with connected(edge) as raw:
        await raw.send(data)
        return await raw.answer(has_body=has_body)


class Waiting:
    """A script that has begun, and waits until it is cancelled."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, arrival: Arrival, client: Client) -> None:
        if self._stream:
            await client.begin(200, EVENT_STREAM, b"data: 1\n\n")
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# ---- requests and answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", list(Api))
async def test_a_request_arrives_as_it_was_sent(edge: Edge, api: Api) -> None:
    body = b'{ "odd" :\t"spacing" }'
    answer = await ask(edge, post(body, api.value, "X-Tag: A b\r\nTraceparent: t\r\n"))
    (arrival,) = edge.arrivals
    assert (arrival.api, arrival.body) == (api, body)
    assert (arrival.headers["x-tag"], arrival.headers["traceparent"]) == ("A b", "t")
    assert (answer.status, answer.body) == (200, b'{"ok":true}')
    assert answer.headers["x-pdgate-attempts"] == "1"
    assert answer.headers["content-type"] == "application/json"


async def test_status_headers_and_first_output_leave_in_one_write(edge: Edge) -> None:
    written, go_on = asyncio.Event(), asyncio.Event()

    async def stream(arrival: Arrival, client: Client) -> None:
        await client.begin(200, {**EVENT_STREAM, "x-pdgate-prefill": "p0"}, b"data: first\n\n")
        written.set()
        await go_on.wait()
        await client.write(b"data: second\n\n")
        await client.end()

    edge.script = stream
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await written.wait()
        status, headers = await raw.head()
        assert await raw.chunk() == b"data: first\n\n"
        assert raw.segments_in() == 1
        go_on.set()
        assert await raw.chunk() == b"data: second\n\n"
        assert await raw.chunk() == b""
    assert (status, headers["content-type"], headers["x-pdgate-prefill"]) == (200, "text/event-stream", "p0")


async def test_a_whole_answer_leaves_in_one_write(edge: Edge) -> None:
    async with connected(edge) as raw:
        await raw.send(post())
        assert (await raw.answer()).status == 200
        assert raw.segments_in() == 1


async def test_nothing_is_written_before_the_answer_begins(edge: Edge) -> None:
    waiting = Waiting(stream=False)
    edge.script = waiting
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await waiting.begun.wait()
        await asyncio.sleep(0.02)
        assert raw.segments_in() == 0


async def test_each_event_leaves_at_once(edge: Edge) -> None:
    async def stream(arrival: Arrival, client: Client) -> None:
        await client.begin(200, EVENT_STREAM, b"0")
        for number in range(1, 5):
            await seen.wait()
            seen.clear()
            await client.write(b"%d" % number)
        await client.end()

    seen = asyncio.Event()
    edge.script = stream
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await raw.head()
        for number in range(5):
            assert await raw.chunk() == b"%d" % number
            seen.set()


async def test_a_connection_is_kept_for_the_next_request(edge: Edge) -> None:
    async with connected(edge) as raw:
        for number in range(3):
            await raw.send(post(b"%d" % number))
            assert (await raw.answer()).status == 200
    assert [arrival.body for arrival in edge.arrivals] == [b"0", b"1", b"2"]


async def test_a_connection_is_kept_after_a_stream_and_after_an_error(edge: Edge) -> None:
    async def stream(arrival: Arrival, client: Client) -> None:
        if arrival.body == b"bad":
            raise bad_request("no")
        await client.begin(200, EVENT_STREAM, b"a")
        await client.end()

    edge.script = stream
    async with connected(edge) as raw:
        for body, status in ((b"good", 200), (b"bad", 400), (b"good", 200)):
            await raw.send(post(body))
            assert (await raw.answer()).status == status


async def test_pipelined_requests_are_answered_in_order(edge: Edge) -> None:
    async def echo(arrival: Arrival, client: Client) -> None:
        await asyncio.sleep(0.02 if arrival.body == b"slow" else 0)
        await client.whole(200, {}, arrival.body)

    edge.script = echo
    async with connected(edge) as raw:
        await raw.send(post(b"slow") + post(b"quick") + request("GET", "/health"))
        assert [(await raw.answer()).body for _ in range(3)] == [b"slow", b"quick", b"OK"]


async def test_a_connection_ends_when_its_client_asks(edge: Edge) -> None:
    async with connected(edge) as raw:
        await raw.send(post(headers="Connection: close\r\n"))
        assert (await raw.answer()).status == 200
        assert await raw.closed()


async def test_an_old_client_gets_a_stream_that_ends_with_its_connection(edge: Edge) -> None:
    async def stream(arrival: Arrival, client: Client) -> None:
        await client.begin(200, EVENT_STREAM, b"a")
        await client.write(b"b")
        await client.end()

    edge.script = stream
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        _, headers = await raw.head()
        assert "transfer-encoding" not in headers
        assert await raw.reader.read() == b"ab"


# ---- bodies ----------------------------------------------------------------------------------------------------------


async def test_a_large_body_arrives_whole(edge: Edge) -> None:
    body = bytes(range(256)) * (50 * 4096)
    assert (await ask(edge, post(body))).status == 200
    assert edge.arrivals[0].body == body


async def test_a_body_in_chunks_arrives_whole(edge: Edge) -> None:
    head = f"POST {Api.CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert (await ask(edge, head + b"2\r\n{}\r\n3\r\n   \r\n0\r\n\r\n")).status == 200
    assert edge.arrivals[0].body == b"{}   "


async def test_a_client_that_waits_for_leave_to_send_gets_it(edge: Edge) -> None:
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post(b"", headers="Expect: 100-continue\r\n").replace(b"Length: 0", b"Length: 2"))
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(b"{}")
        assert (await raw.answer()).status == 200


async def test_a_body_announced_too_large_is_refused_before_it_is_sent(edge: Edge) -> None:
    head = post(b"").replace(b"Length: 0", b"Length: %d" % (LIMIT_BYTES + 1))
    answer = await ask(edge, head)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert str(LIMIT_BYTES) in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert edge.arrivals == []


async def test_a_body_of_the_greatest_size_is_taken(edge: Edge) -> None:
    assert (await ask(edge, post(bytes(LIMIT_BYTES)))).status == 200
    assert len(edge.arrivals[0].body) == LIMIT_BYTES


async def test_a_body_in_chunks_that_grows_too_large_is_refused(edge: Edge) -> None:
    head = f"POST {Api.CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
    async with connected(edge) as raw:
        sending = asyncio.ensure_future(raw.send(head, *[chunk] * (LIMIT_BYTES // (1 << 20) + 1), b"0\r\n\r\n"))
        answer = await raw.answer()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert edge.arrivals == []


async def test_a_body_that_breaks_off_is_no_request(edge: Edge) -> None:
    async with connected(edge) as raw:
        await raw.send(post(b"x" * 100)[:-50])
        await asyncio.sleep(0.02)
        raw.abort()
    assert (await ask(edge, post())).status == 200
    assert len(edge.arrivals) == 1


@pytest.mark.parametrize("bound", ["PAUSE_S", "BODY_S"])
async def test_a_body_that_does_not_come_is_a_408(edge: Edge, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(uploads, bound, 0.3)

    async def trickle(raw: Raw) -> None:
        while bound == "BODY_S":
            await raw.send(b"x")
            await asyncio.sleep(0.02)

    async with connected(edge) as raw:
        await raw.send(post(b"x" * 100_000)[:-90_000])
        trickling = asyncio.ensure_future(trickle(raw))
        answer = await raw.answer()
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert (answer.headers["connection"], answer.headers["x-should-retry"]) == ("close", "true")
    assert edge.arrivals == []


async def test_a_slow_body_that_goes_on_is_taken(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PAUSE_S", 1.0)
    monkeypatch.setattr(uploads, "_LOOK_S", 0.05)
    data = post(b"x" * 12)
    async with connected(edge) as raw:
        await raw.send(data[:-12])
        for _ in range(12):
            await asyncio.sleep(0.1)
            await raw.send(b"x")
        assert (await raw.answer()).status == 200
    assert edge.arrivals[0].body == b"x" * 12


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_too_many_bytes_on_their_way_in_are_a_503(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(uploads, "ALL_BODIES_BYTES", 0)  # then it is twice the largest body
    size = LIMIT_BYTES - 1000
    head = post(b"").replace(b"Length: 0", b"Length: %d" % size)
    if not announced:
        head = f"POST {Api.CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        head += b"%x\r\n" % size + bytes(size)
    async with serve_aiohttp(edge.gw) as port:
        small = Edge(port, edge.gw, edge.script, [])
        async with connected(small) as first, connected(small) as second:
            await first.send(head)
            await second.send(head)
            async with time_limit(SOON_S):
                while (answer := await ask(small, post(b"x" * 10_000))).status == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "overloaded", "2")
            first.abort()
            async with time_limit(SOON_S):
                while (await ask(small, post(b"x" * 10_000))).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_body_that_is_no_gzip_is_a_400(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    answer = await ask(edge, post(b"not packed", headers="Content-Encoding: gzip\r\n"))
    assert (answer.status, answer.error["code"]) == (400, "invalid_body")
    await asyncio.sleep(0.05)
    assert errors_in(caplog) == []
    assert edge.arrivals == []


async def test_broken_chunks_are_a_400_at_once(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {Api.CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with connected(edge) as raw:
        await raw.send(head + b"1\r\n{\r\n")
        await asyncio.sleep(0.05)
        await raw.send(b"ZZ\r\n}\r\n0\r\n\r\n")
        async with time_limit(2.0):
            answer = await raw.answer()
            assert await raw.closed()
    assert (answer.status, answer.error["code"]) == (400, "invalid_body")
    assert errors_in(caplog) == []
    assert edge.arrivals == []


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unsupported_route"),
        ("POST", "/v1/chat/completions/", 404, "unsupported_route"),
        ("GET", "/%FF%00", 404, "unsupported_route"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 501, "unsupported_route"),
        ("GET", "/v1/responses", 501, "unsupported_route"),
    ],
)
async def test_what_is_not_served_has_the_shape_of_an_error(
    edge: Edge, method: str, path: str, status: int, code: str
) -> None:
    answer = await ask(edge, request(method, path))
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["x-should-retry"] == "false"
    assert ("allow" in answer.headers) is (status == 405)


async def test_a_405_names_what_is_taken(edge: Edge) -> None:
    assert (await ask(edge, request("GET", Api.CHAT.value))).headers["allow"] == "POST"


async def test_head_is_get_without_a_body(edge: Edge) -> None:
    async with connected(edge) as raw:
        await raw.send(request("HEAD", "/v1/models") + request("GET", "/health"))
        head = await raw.answer(has_body=False)
        assert (head.status, (await raw.answer()).body) == (200, b"OK")
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"POST /generate HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_ends_its_connection_only(
    edge: Edge, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(garbage)
        raw.writer.write_eof()
        said = await raw.reader.read()
    assert said == b"" or said.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert edge.arrivals == []
    assert errors_in(caplog) == []
    assert (await ask(edge, post())).status == 200


async def test_a_head_that_is_too_long_is_refused(edge: Edge) -> None:
    answer = await ask(edge, post(headers=f"X-Long: {'x' * 100_000}\r\n"))
    assert 400 <= answer.status < 500
    assert (await ask(edge, post())).status == 200


@pytest.mark.parametrize("authorization", ["", "Authorization: Bearer wrong\r\n", "Authorization: Bearer \xff\r\n"])
@pytest.mark.parametrize("path", [Api.CHAT.value, "/tokenize"])
async def test_a_wrong_key_is_a_401(edge: Edge, authorization: str, path: str) -> None:
    object.__setattr__(edge.gw.config.server, "api_key", "secret")
    data = post(path=path, headers="@").replace(b"@", authorization.encode("latin-1"))
    answer = await ask(edge, data)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        401,
        "invalid_api_key",
        "authentication_error",
    )
    assert answer.headers["www-authenticate"] == "Bearer"
    assert edge.arrivals == []
    assert (await ask(edge, post(headers="Authorization: Bearer secret\r\n"))).status == 200


async def test_errors_carry_their_headers(edge: Edge) -> None:
    async def refuse(arrival: Arrival, client: Client) -> None:
        error = overloaded("full", retry_after_s=2.5)
        error.headers["x-pdgate-request-id"] = "r1"
        raise error

    edge.script = refuse
    answer = await ask(edge, post())
    assert (answer.status, answer.error["message"]) == (429, "full")
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("3", "true")
    assert answer.headers["x-pdgate-request-id"] == "r1"


async def test_a_bug_is_a_500_in_the_shape_of_an_error(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(arrival: Arrival, client: Client) -> None:
        raise RuntimeError("secret detail")

    edge.script = broken
    answer = await ask(edge, post())
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert "secret detail" in caplog.text


async def test_a_bug_in_the_middle_of_a_stream_breaks_it_off(edge: Edge) -> None:
    """A client must not take what it got for the whole."""

    async def broken(arrival: Arrival, client: Client) -> None:
        await client.begin(200, EVENT_STREAM, b"data: 1\n\n")
        raise RuntimeError("boom")

    edge.script = broken
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await raw.head()
        assert await raw.chunk() == b"data: 1\n\n"
        assert await raw.reader.read() == b"", "no closing chunk"


# ---- clients that go, and clients that are slow ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_goes_cancels_its_request(edge: Edge, stream: bool, how: str) -> None:
    waiting = Waiting(stream=stream)
    edge.script = waiting
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await waiting.begun.wait()
        getattr(raw, how)()
        async with time_limit(1.0):
            await waiting.cancelled.wait()


async def test_a_client_that_goes_leaves_others_alone(edge: Edge) -> None:
    waiting = Waiting(stream=True)
    edge.script = waiting
    async with connected(edge) as stays, connected(edge) as goes, time_limit(SOON_S):
        await stays.send(post())
        await waiting.begun.wait()
        waiting.begun.clear()
        await goes.send(post())
        await waiting.begun.wait()
        goes.abort()
        await waiting.cancelled.wait()
        await stays.head()
        assert await stays.chunk() == b"data: 1\n\n"


async def test_a_client_that_goes_is_noticed_by_a_write(edge: Edge) -> None:
    ended = asyncio.Event()

    async def stream(arrival: Arrival, client: Client) -> None:
        await client.begin(200, EVENT_STREAM, b"x")
        try:
            while True:
                await client.write(b"x" * 1000)
                await asyncio.sleep(0)
        finally:
            ended.set()

    edge.script = stream
    async with connected(edge) as raw, time_limit(SOON_S):
        await raw.send(post())
        await raw.head()
        raw.abort()
        await ended.wait()


async def test_a_slow_client_holds_its_stream_back(edge: Edge) -> None:
    piece, pieces = bytes(1 << 16), 1000
    written = 0
    ended = asyncio.Event()

    async def stream(arrival: Arrival, client: Client) -> None:
        nonlocal written
        await client.begin(200, EVENT_STREAM, b"x")
        for _ in range(pieces):
            await client.write(piece)
            written += len(piece)
        await client.end()
        ended.set()

    async def stands_still() -> int:
        before = -1
        while before != written:  # the kernel has no event for a full buffer
            before = written
            await asyncio.sleep(0.05)
        return written

    edge.script = stream
    async with connected(edge, limit=1 << 16) as raw, time_limit(20.0):
        await raw.send(post())
        held = await stands_still()
        assert 0 < held < 20 * 1024 * 1024, "what the kernel's buffers take, and little more"
        assert not ended.is_set()
        await raw.head()
        size = 0
        while chunk := await raw.chunk():
            size += len(chunk)
        assert size == 1 + pieces * len(piece)


SENT = bytes(1 << 22)


async def left_of(raw: Raw) -> int:
    """Read on: how many bytes still come until the connection ends."""
    size = 0
    async with time_limit(SOON_S):
        try:
            while piece := await raw.reader.read(1 << 16):
                size += len(piece)
        except ConnectionResetError:
            pass
    return size


def narrow(edge: Edge) -> socket.socket:
    """A connection that takes little before it is read."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    small.connect(("127.0.0.1", edge.port))
    return small


async def test_a_client_that_was_given_up_loses_its_connection_at_once(edge: Edge) -> None:
    """To close it in peace would wait until it has read all."""
    given_up = asyncio.Event()

    async def stream(arrival: Arrival, client: Client) -> None:
        await client.begin(200, EVENT_STREAM, b"x")
        try:
            async with asyncio.timeout(0.2):
                await client.write(SENT * 2)
        except TimeoutError:
            given_up.set()
            raise ConnectionAbortedError("the client does not read") from None

    edge.script = stream
    async with connected(edge, sock=narrow(edge), limit=1024) as raw, time_limit(SOON_S):
        await raw.send(post())
        await given_up.wait()
        await asyncio.sleep(0.05)
        assert await left_of(raw) < len(SENT) * 2


async def test_a_whole_answer_is_sent_before_its_request_is_over(edge: Edge) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def whole(arrival: Arrival, client: Client) -> None:
        begun.set()
        await client.whole(200, {}, SENT * 4)
        over.set()

    edge.script = whole
    async with connected(edge, sock=narrow(edge), limit=1024) as raw, time_limit(SOON_S):
        await raw.send(post())
        await begun.wait()
        await asyncio.sleep(0.1)
        assert not over.is_set()
        assert len((await raw.answer()).body) == len(SENT) * 4
        await over.wait()


async def test_an_answer_of_any_kind_is_waited_for_within_bounds(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(gw: Gateway, path: str, body: bytes) -> tuple[int, bytes]:
        return 200, SENT * 2

    monkeypatch.setattr(relay, "relay", answer)
    monkeypatch.setattr(http_server, "CLIENT_PATIENCE_S", 0.2)
    async with connected(edge, sock=narrow(edge), limit=1024) as raw:
        await raw.send(post(path="/tokenize"))
        await asyncio.sleep(0.5)
        assert await left_of(raw) < len(SENT) * 2


@pytest.mark.parametrize("sent", [b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"])
async def test_a_connection_without_a_request_is_closed(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "_IDLE_S", 0.2)
    async with serve_aiohttp(edge.gw) as port, connected(Edge(port, edge.gw, hello, [])) as raw:
        await raw.send(sent)
        async with time_limit(2.0):
            assert await raw.closed()


# ---- calls for any one server ----------------------------------------------------------------------------------------


async def test_a_relayed_call_keeps_status_and_body(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(gw: Gateway, path: str, body: bytes) -> tuple[int, bytes]:
        assert (path, body) == ("/tokenize", b'{"text":"hi"}')
        return 422, b'{"tokens":[1]}'

    monkeypatch.setattr(relay, "relay", answer)
    answer = await ask(edge, post(b'{"text":"hi"}', "/tokenize"))
    assert (answer.status, answer.body, answer.headers["content-type"]) == (422, b'{"tokens":[1]}', "application/json")
