"""What an upstream client must do, against a raw server that misbehaves on purpose.

A faster implementation is one more entry of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import hashlib
import os
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing

import pytest
import uvloop

from engines import tasks
from engines.errors import UpstreamError
from engines.types import FailureKind
from engines.upstream import Exchange, Upstream
from tests.contract.upstream_server import CHUNKED, OK, Connection, Request, chunk, serving, sockets_to
from tests.machine import time_limit

Make = Callable[..., Upstream]
IMPLEMENTATIONS = [pytest.param(Upstream, id="aiohttp")]
SOON_S = 5.0

# The newer hook for this acts on a whole folder.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture:DeprecationWarning")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture
async def upstream(make: Make) -> AsyncIterator[Upstream]:
    client = make()
    await client.start()
    yield client
    await client.close()


async def soon(work: Awaitable[object]) -> object:
    async with time_limit(SOON_S):
        return await work


async def failure(exchange: Exchange) -> UpstreamError:
    """The error that the body ends with."""
    async with time_limit(SOON_S):
        with pytest.raises(UpstreamError) as caught:
            async for _ in exchange.chunks():
                pass
    exchange.close()
    return caught.value


async def until_closed(port: int) -> None:
    async with time_limit(SOON_S):
        while any(True for _ in sockets_to(port)):  # noqa: ASYNC110, the kernel has no event for it
            await asyncio.sleep(0.001)


async def answer_ok(connection: Connection) -> None:
    while True:
        await connection.request()
        await connection.send(OK)


# --- the request ---


async def test_request_goes_out_as_it_is(upstream: Upstream) -> None:
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(OK)

    body = b'{ "odd" :\t"spacing", "n": 1e0 }'
    async with serving(script) as server:
        await upstream.fetch(
            "POST", f"{server.url}/a%2fb%7E?q=%20x&y=+", body=body, headers={"X-Tag": "A b"}, timeout_s=SOON_S
        )
    (request,) = seen
    assert request.line == b"POST /a%2fb%7E?q=%20x&y=+ HTTP/1.1"
    assert request.body_sha == hashlib.sha256(body).hexdigest()
    assert request.headers[b"content-type"] == b"application/json"
    assert request.headers[b"accept-encoding"] == b"identity"
    assert request.headers[b"host"] == b"127.0.0.1:%d" % server.port
    assert request.headers[b"x-tag"] == b"A b"
    assert b"transfer-encoding" not in request.headers


async def test_own_content_type_wins(upstream: Upstream) -> None:
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(OK)

    async with serving(script) as server:
        await upstream.fetch("POST", server.url, body=b"x", headers={"content-type": "text/plain"}, timeout_s=SOON_S)
    assert seen[0].headers[b"content-type"] == b"text/plain"


async def test_no_body_has_no_content_type(upstream: Upstream) -> None:
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        for _ in range(2):
            seen.append(await connection.request())
            await connection.send(OK)

    async with serving(script) as server:
        await upstream.fetch("GET", server.url, timeout_s=SOON_S)
        await upstream.fetch("POST", server.url, timeout_s=SOON_S)
    assert [b"content-type" in request.headers for request in seen] == [False, False]


@pytest.mark.parametrize("size_bytes", [0, 1, 262_144, 262_145, 1_000_000])
async def test_body_of_any_size(upstream: Upstream, size_bytes: int) -> None:
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(OK)

    body = bytes(range(256)) * (size_bytes // 256 + 1)
    async with serving(script) as server:
        await upstream.fetch("POST", server.url, body=body[:size_bytes], timeout_s=SOON_S)
    assert (seen[0].body_bytes, seen[0].body_sha) == (size_bytes, hashlib.sha256(body[:size_bytes]).hexdigest())


async def test_big_body_is_not_copied(upstream: Upstream) -> None:
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(OK)

    body = b"0123456789abcdef" * (6 * 1024 * 1024)
    async with serving(script) as server:
        tracemalloc.start()
        try:
            await upstream.fetch("POST", server.url, body=body, timeout_s=60)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert seen[0].body_sha == hashlib.sha256(body).hexdigest()
    assert peak_bytes < len(body) / 8


async def test_answer_before_the_body_is_sent(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        connection.freeze()
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await asyncio.Event().wait()

    async with serving(script) as server:
        reply = await upstream.fetch("POST", server.url, body=bytes(32 * 1024 * 1024), timeout_s=SOON_S)
        assert (reply.status, reply.body) == (413, b"big")
        await until_closed(server.port)


# --- the answer ---


async def test_status_and_lower_case_headers(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 503 Down\r\nX-MiXed: Ab\r\nRETRY-AFTER: 3\r\nContent-Length: 4\r\n\r\nbusy")

    async with serving(script) as server:
        reply = await upstream.fetch("GET", server.url, timeout_s=SOON_S)
    assert (reply.status, reply.body) == (503, b"busy")
    assert (reply.headers["x-mixed"], reply.headers["retry-after"]) == ("Ab", "3")


async def test_redirects_cookies_and_codings_are_left_alone(upstream: Upstream) -> None:
    packed = gzip.compress(b"plain")
    seen: list[Request] = []

    async def script(connection: Connection) -> None:
        for _ in range(2):
            seen.append(await connection.request())
            await connection.send(
                b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nSet-Cookie: a=b\r\nContent-Encoding: gzip\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(packed), packed)
            )

    async with serving(script) as server:
        url = f"http://localhost:{server.port}"  # a bare address would have no cookies anyway
        replies = [await upstream.fetch("GET", url, timeout_s=SOON_S) for _ in range(2)]
    assert [(reply.status, reply.body) for reply in replies] == [(302, packed)] * 2
    assert not any(b"cookie" in request.headers for request in seen)


async def test_each_chunk_comes_when_it_is_sent(upstream: Upstream) -> None:
    seen = asyncio.Semaphore(0)
    parts = [b"data: %d\n\n" % n for n in range(20)]

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        for part in parts:
            await connection.send(chunk(part))
            await seen.acquire()
        await connection.send(b"0\r\n\r\n")

    got: list[bytes] = []
    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("POST", server.url, body=b"{}")
        async for data in exchange.chunks():
            got.append(data)
            seen.release()
        exchange.close()
    assert got == parts


async def test_head_comes_before_any_body(upstream: Upstream) -> None:
    go = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        await go.wait()
        await connection.send(chunk(b"late") + b"0\r\n\r\n")

    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("POST", server.url, body=b"{}")
        go.set()
        assert await exchange.read(100) == b"late"
        exchange.close()


@pytest.mark.parametrize("cut", [1, 7, 100, 4096])
async def test_binary_survives_any_framing(upstream: Upstream, cut: int) -> None:
    body = bytes(range(256)) * 64

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        for start in range(0, len(body), cut):
            await connection.send(chunk(body[start : start + cut]))
        await connection.send(b"0\r\n\r\n")

    async with serving(script) as server:
        assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S)).body == body


async def test_slow_reader_holds_the_server_back(upstream: Upstream) -> None:
    sent_bytes = 0

    async def script(connection: Connection) -> None:
        nonlocal sent_bytes
        await connection.request()
        await connection.send(CHUNKED)
        while True:
            await connection.send(chunk(bytes(1 << 20)))
            sent_bytes += 1 << 20

    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("GET", server.url)
        before = -1
        while sent_bytes > before:
            before = sent_bytes
            await asyncio.sleep(0.1)
        exchange.close()
    assert sent_bytes < 64 << 20


async def test_body_until_close(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it")

    async with serving(script) as server:
        assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S)).body == b"all of it"


# --- failures ---


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1]:1", "http://127.0.0.1:99999", "http://a..b/"])
async def test_no_connection_is_definite(upstream: Upstream, url: str) -> None:
    with pytest.raises(UpstreamError) as caught:
        await upstream.open("POST", url, body=b"{}")
    assert (caught.value.kind, caught.value.definite) == (FailureKind.CONNECT, True)
    assert url in caught.value.message


async def test_connect_timeout_is_definite(make: Make) -> None:
    client = make(connect_timeout_s=0.1)
    await client.start()
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):  # more than its backlog: further SYNs are dropped
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with time_limit(SOON_S):
            with pytest.raises(UpstreamError) as caught:
                await client.open("GET", f"http://127.0.0.1:{full.getsockname()[1]}")
    await client.close()
    assert (caught.value.kind, caught.value.definite) == (FailureKind.TIMEOUT, True)


async def close_at_once(connection: Connection) -> None:
    await connection.request()


async def reset_at_once(connection: Connection) -> None:
    await connection.request()
    connection.reset()


async def half_a_head(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Le")


async def not_http(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await connection.gone()


async def bad_length(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n")
    await connection.gone()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (close_at_once, FailureKind.RESET),
        (reset_at_once, FailureKind.RESET),
        (half_a_head, FailureKind.RESET),
        (not_http, FailureKind.GARBLED),
        (bad_length, FailureKind.GARBLED),
    ],
)
async def test_no_head(upstream: Upstream, script: Callable, kind: FailureKind) -> None:
    async with serving(script) as server, time_limit(SOON_S):
        with pytest.raises(UpstreamError) as caught:
            await upstream.open("POST", server.url, body=b"{}")
        assert (caught.value.kind, caught.value.definite) == (kind, False)
        assert "\n" not in caught.value.message
        await until_closed(server.port)


async def head_then_close(connection: Connection) -> None:
    await connection.send(CHUNKED)


async def cut_in_a_chunk(connection: Connection) -> None:
    await connection.send(CHUNKED + chunk(b"whole") + b"a\r\nhalf")


async def cut_between_chunks(connection: Connection) -> None:
    await connection.send(CHUNKED + chunk(b"whole"))


async def cut_before_the_last_line(connection: Connection) -> None:
    await connection.send(CHUNKED + chunk(b"whole") + b"0\r\n")


async def short_of_its_length(connection: Connection) -> None:
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")


@pytest.mark.parametrize(
    "answer",
    [head_then_close, cut_in_a_chunk, cut_between_chunks, cut_before_the_last_line, short_of_its_length],
)
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_cut_body_is_a_reset(upstream: Upstream, answer: Callable, how: str) -> None:
    opened = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await answer(connection)
        await opened.wait()
        if how == "rst":
            connection.reset()

    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("POST", server.url, body=b"{}")
        opened.set()
        error = await failure(exchange)
        assert (error.kind, error.definite) == (FailureKind.RESET, False)
        await until_closed(server.port)


@pytest.mark.parametrize("reading", [True, False])
async def test_broken_framing_within_the_body(upstream: Upstream, reading: bool) -> None:
    opened, broken = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(b"whole"))
        await opened.wait()
        await connection.send(b"zz\r\nbad\r\n")
        await connection.gone()
        broken.set()

    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("POST", server.url, body=b"{}")
        if reading:
            failing = tasks.spawn(failure(exchange), "reader")
            await asyncio.sleep(0)
            opened.set()
            error = await failing
        else:
            opened.set()
            await broken.wait()
            error = await failure(exchange)
    assert error.kind is FailureKind.GARBLED


async def test_close_ends_a_waiting_reader(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        await connection.gone()

    async with serving(script) as server, time_limit(SOON_S):
        exchange = await upstream.open("GET", server.url)
        failing = tasks.spawn(failure(exchange), "reader")
        await asyncio.sleep(0.01)
        exchange.close()
        assert (await failing).kind is FailureKind.RESET


async def test_too_large_an_answer(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        while True:
            await connection.send(chunk(bytes(1000)))

    async with serving(script) as server:
        with pytest.raises(UpstreamError, match="more than 5000 bytes") as caught:
            await upstream.fetch("GET", server.url, timeout_s=SOON_S, limit_bytes=5000)
        await until_closed(server.port)
    assert caught.value.kind is FailureKind.GARBLED


async def test_reading_too_much_drops_the_connection(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(bytes(1000)))
        await connection.gone()

    async with serving(script) as server:
        exchange = await upstream.open("GET", server.url)
        with pytest.raises(UpstreamError):
            await exchange.read(999)
        await until_closed(server.port)


async def test_answer_of_just_the_limit(upstream: Upstream) -> None:
    async with serving(answer_ok) as server:
        assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S, limit_bytes=2)).body == b"ok"


# --- deadlines and cancelling ---


async def silent(connection: Connection) -> None:
    await connection.request()
    await connection.gone()


async def test_fetch_times_out(upstream: Upstream) -> None:
    async with serving(silent) as server:
        with pytest.raises(UpstreamError) as caught:
            await upstream.fetch("GET", server.url, timeout_s=0.05)
        await until_closed(server.port)
    assert (caught.value.kind, caught.value.definite) == (FailureKind.TIMEOUT, False)


async def test_the_callers_deadline_is_the_callers(upstream: Upstream) -> None:
    async with serving(silent) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await upstream.open("GET", server.url)
        await until_closed(server.port)


async def test_cancel_while_waiting_for_the_head(upstream: Upstream) -> None:
    received, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        received.set()
        await connection.gone()
        left.set()

    async with serving(script) as server:
        opening = tasks.spawn(upstream.open("POST", server.url, body=b"{}"), "open")
        await soon(received.wait())
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await soon(left.wait())


async def test_cancel_while_a_frozen_server_takes_no_body(upstream: Upstream) -> None:
    frozen = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.head()
        connection.freeze()
        frozen.set()
        await asyncio.Event().wait()

    async with serving(script) as server:
        opening = tasks.spawn(upstream.open("POST", server.url, body=bytes(32 * 1024 * 1024)), "open")
        await soon(frozen.wait())
        await asyncio.sleep(0.1)  # until every buffer between the two is full
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until_closed(server.port)


async def test_cancel_within_the_body(upstream: Upstream) -> None:
    left = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(b"first"))
        await connection.gone()
        left.set()

    async def read(exchange: Exchange, first: asyncio.Event) -> None:
        try:
            async with aclosing(exchange.chunks()) as chunks:
                async for _ in chunks:
                    first.set()
        finally:
            exchange.close()

    async with serving(script) as server:
        first = asyncio.Event()
        exchange = await upstream.open("GET", server.url)
        reading = tasks.spawn(read(exchange, first), "read")
        await soon(first.wait())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await soon(left.wait())
        await until_closed(server.port)


# --- the pool ---


async def test_connection_is_used_again(upstream: Upstream) -> None:
    async with serving(answer_ok) as server:
        for _ in range(5):
            exchange = await upstream.open("POST", server.url, body=b"{}")
            assert await exchange.read(10) == b"ok"
            exchange.close()
            exchange.close()
        assert server.accepted == 1


async def test_nagle_is_off(upstream: Upstream) -> None:
    async with serving(answer_ok) as server:
        await upstream.fetch("GET", server.url, timeout_s=SOON_S)
        (end,) = (twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for twin in sockets_to(server.port))
    assert end


async def test_close_before_the_end_drops_the_connection(upstream: Upstream) -> None:
    left = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        if connection.number == 1:
            await connection.send(CHUNKED + chunk(b"first"))
            await connection.gone()
            left.set()
        await connection.send(OK)

    async with serving(script) as server:
        exchange = await upstream.open("GET", server.url)
        exchange.close()
        exchange.close()
        await soon(left.wait())
        assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S)).body == b"ok"
        assert server.accepted == 2


async def test_close_after_reuse_does_no_harm(upstream: Upstream) -> None:
    go = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK)
        await connection.request()
        await connection.send(CHUNKED)
        await go.wait()
        await connection.send(chunk(b"mine") + b"0\r\n\r\n")

    async with serving(script) as server, time_limit(SOON_S):
        first = await upstream.open("POST", server.url, body=b"{}")
        await first.read(10)
        second = await upstream.open("POST", server.url, body=b"{}")
        first.close()
        go.set()
        assert await second.read(10) == b"mine"
        second.close()
        assert server.accepted == 1


async def test_idle_connection_is_dropped_before_the_server_does(make: Make) -> None:
    client = make(idle_s=0.05)
    await client.start()
    async with serving(answer_ok) as server:
        await client.fetch("POST", server.url, body=b"{}", timeout_s=SOON_S)
        await asyncio.sleep(0.1)
        await client.fetch("POST", server.url, body=b"{}", timeout_s=SOON_S)
        assert server.accepted == 2
    await client.close()


async def test_a_long_lived_connection_keeps_nothing_of_its_exchanges(upstream: Upstream) -> None:
    opened = asyncio.Semaphore(0)

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(CHUNKED)
            await opened.acquire()
            await connection.send(chunk(b"ok") + b"0\r\n\r\n")

    async with serving(script) as server:

        async def exchange(times: int) -> int:
            for _ in range(times):
                running = await upstream.open("POST", server.url, body=b"{}")
                opened.release()
                assert await running.read(10) == b"ok"
                running.close()
            gc.collect()
            return len(gc.get_objects())

        before = await exchange(20)
        assert await exchange(200) - before < 200
        assert server.accepted == 1


async def test_reset_of_an_idle_connection_is_no_news(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    opened, read = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        await opened.wait()
        await connection.send(chunk(b"ok") + b"0\r\n\r\n")
        await read.wait()
        if connection.number == 1:
            connection.reset()

    async with serving(script) as server:
        exchange = await upstream.open("GET", server.url)
        opened.set()
        assert await exchange.read(10) == b"ok"
        exchange.close()
        read.set()
        await until_closed(server.port)
        del exchange
        assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S)).body == b"ok"
        gc.collect()
    assert caplog.records == []


async def test_idle_connection_closed_by_the_server(upstream: Upstream) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK)

    async with serving(script) as server:
        for _ in range(3):
            assert (await upstream.fetch("POST", server.url, body=b"{}", timeout_s=SOON_S)).body == b"ok"
            await until_closed(server.port)
        assert server.accepted == 3


async def test_a_thousand_at_once(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    count, arrived = 1000, 0
    all_here = asyncio.Event()

    async def script(connection: Connection) -> None:
        nonlocal arrived
        await connection.request()
        arrived += 1
        if arrived == count:
            all_here.set()
        await all_here.wait()
        await connection.send(OK)

    client = make(connect_timeout_s=60)  # a busy machine may need more than the default for all of them
    await client.start()
    async with serving(script) as server:
        fetches = (client.fetch("POST", server.url, body=b"{}", timeout_s=60) for _ in range(count))
        replies = await asyncio.gather(*fetches)
    await client.close()
    assert {reply.body for reply in replies} == {b"ok"}


async def test_no_descriptor_left_is_no_fault_of_the_server(upstream: Upstream) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(answer_ok) as server:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(UpstreamError, match="file descriptors") as caught:
                await upstream.open("POST", server.url, body=b"{}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (caught.value.kind, caught.value.definite) == (FailureKind.STATUS, True)
        assert (await upstream.fetch("POST", server.url, body=b"{}", timeout_s=SOON_S)).body == b"ok"


async def test_ipv6_literal(upstream: Upstream) -> None:
    try:
        async with serving(answer_ok, host="::1") as server:
            assert (await upstream.fetch("GET", server.url, timeout_s=SOON_S)).body == b"ok"
    except OSError:
        pytest.skip("no IPv6 here")


async def test_proxies_of_the_environment_are_ignored(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    client = make()
    await client.start()
    async with serving(answer_ok) as server:
        assert (await client.fetch("GET", server.url, timeout_s=SOON_S)).body == b"ok"
    await client.close()


async def test_closed_client(make: Make) -> None:
    client = make()
    await client.start()
    received = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        received.set()
        await connection.gone()

    async with serving(script) as server:
        opening = tasks.spawn(client.open("GET", server.url), "open")
        await soon(received.wait())
        await client.close()
        await client.close()
        with pytest.raises(UpstreamError):
            await soon(opening)
        await until_closed(server.port)
        with pytest.raises(UpstreamError) as caught:
            await client.open("GET", server.url)
    assert (caught.value.kind, caught.value.definite) == (FailureKind.CONNECT, True)
