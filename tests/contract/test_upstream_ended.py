"""A pooled connection that its server has closed meanwhile: what was never sent goes out on another, once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest

from engines.errors import UpstreamError
from engines.types import FailureKind
from engines.upstream import Upstream
from tests.contract.upstream_server import OK, Connection, serving, sockets_to


async def _when_reused(upstream: Upstream, ends: asyncio.Event) -> None:
    """From now on a pooled connection ends between its being taken for a request and the first byte of that."""

    async def end(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        ends.set()
        assert upstream._session is not None
        assert isinstance(upstream._session.connector, aiohttp.TCPConnector)
        (protocol,) = upstream._session.connector._acquired
        async with asyncio.timeout(5.0):
            while protocol.is_connected():  # noqa: ASYNC110, nobody tells
                await asyncio.sleep(0.001)

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(end)
    trace.freeze()
    assert upstream._session is not None
    upstream._session._trace_configs.append(trace)


@pytest.mark.parametrize("size_bytes", [2, 3_000_000])
async def test_what_was_never_sent_goes_out_on_another_connection(size_bytes: int) -> None:
    ends = asyncio.Event()
    got: list[tuple[int, int]] = []

    async def script(connection: Connection) -> None:
        got.append((connection.number, (await connection.request()).body_bytes))
        await connection.send(OK)
        if connection.number == 1:
            await ends.wait()
        else:
            await connection.gone()

    async with serving(script) as server:
        upstream = Upstream()
        await upstream.start()
        await upstream.fetch("POST", server.url, body=b"{}", timeout_s=5.0)
        await _when_reused(upstream, ends)
        reply = await upstream.fetch("POST", server.url, body=bytes(size_bytes), timeout_s=5.0)
        assert (reply.status, reply.body) == (200, b"ok")
        assert got == [(1, 2), (2, size_bytes)]
        await upstream.close()
        assert not any(sockets_to(server.port))


async def test_what_a_server_may_have_got_does_not() -> None:
    got: list[int] = []

    async def script(connection: Connection) -> None:
        await connection.request()
        got.append(connection.number)

    async with serving(script) as server:
        upstream = Upstream()
        await upstream.start()
        with pytest.raises(UpstreamError) as caught:
            await upstream.fetch("POST", server.url, body=b"{}", timeout_s=5.0)
        assert caught.value.kind is FailureKind.RESET
        assert got == [1]
        await upstream.close()
