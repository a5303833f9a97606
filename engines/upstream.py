"""The HTTP client to the servers: one connection pool, exchanges whose body comes as it is sent.

Shell. It owns sockets and nothing else: no deadline of a request, no second POST of what a server may have got, no
meaning of a status. Library exceptions become `UpstreamError` here and nowhere else. `tests/contract/test_upstream.py`
says what a replacement must do.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter
from aiohttp.payload import Payload
from yarl import URL

from engines.errors import UpstreamError
from engines.types import FailureKind

_JSON = "application/json"
_SLICE_BYTES = 256 * 1024
_ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
_RESENDS = 2
"""How often a request goes out on another connection that ended before anything of it was sent. Its server had closed
it as idle, which a gateway that stood still for a second learns too late; a server that is gone refuses the next."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. Header names are lower-case; of a repeated header the last value is kept."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Exchange:
    """An answer whose head has come. Whoever holds it must `close()` it, after which `chunks()` ends in RESET.

    Header names are lower-case; of a repeated header the last value is kept.
    """

    __slots__ = ("_response", "_url", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response = response
        self._url = url
        self.status = response.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes: never empty, never held back, transfer coding removed, content coding kept.

        Raises UpstreamError: RESET when the connection is lost before the body's end, GARBLED when its framing is
        broken.
        """
        content = self._response.content
        unwatch = _fail_on_broken_framing(self._response)
        try:
            while data := await content.readany():
                yield data
        except (aiohttp.ClientError, OSError) as error:
            raise _of_body(error, self._url) from error
        finally:
            unwatch()

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body. Raises as `chunks()`, and GARBLED beyond `limit_bytes`; then the connection is dropped."""
        parts: list[bytes] = []
        size_bytes = 0
        async for part in self.chunks():
            parts.append(part)
            size_bytes += len(part)
            if size_bytes > limit_bytes:
                self.close()
                raise UpstreamError(FailureKind.GARBLED, f"{self._url}: an answer of more than {limit_bytes} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection up: to the pool if the body has wholly come, else at once. Idempotent."""
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            # A plain close waits until a frozen server has taken what is still to be sent.
            connection.transport.abort()
        self._response.close()


class Upstream:
    """A pool of connections to any number of servers.

    `idle_s` must stay below the 5 s after which SGLang closes an idle connection (`SGLANG_TIMEOUT_KEEP_ALIVE`).
    `max_connections` 0 means no limit: an abort must never wait behind the requests it is to end.
    """

    def __init__(self, *, connect_timeout_s: float = 2.0, idle_s: float = 4.0, max_connections: int = 0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool, on the running loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=self._idle_s),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "pdgate"},
            skip_auto_headers=("Content-Type",),
        )

    async def close(self) -> None:
        """Close every connection, also those in use. Idempotent; the pool may be started again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def open(
        self, method: str, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """Send a request and return when the head of its answer has come, whatever its status.

        `body` goes out as it is, as JSON unless `headers` say otherwise. The caller closes the exchange and owns the
        deadline; cancelling drops the connection. Raises UpstreamError: CONNECT (definite) when none was made, RESET
        when it was lost, GARBLED when the answer is not HTTP, STATUS (definite) when we have no descriptor left for it.
        """
        if self._session is None:
            raise UpstreamError(FailureKind.CONNECT, f"{url}: the client is closed", definite=True)
        resends = 0
        while True:
            sent = None if body is None else _Body(body)
            try:
                response = await self._session.request(
                    method, URL(url, encoded=True), data=sent, headers=_with_type(headers, sent), allow_redirects=False
                )
            except (aiohttp.ClientError, OSError, ValueError) as error:
                _abort(sent)
                if resends < _RESENDS and _had_ended(error, sent):
                    resends += 1
                    continue
                raise _of_head(error, url) from error
            except asyncio.CancelledError:
                _abort(sent)
                raise
            return Exchange(response, url)

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        limit_bytes: int = _ANSWER_LIMIT_BYTES,
    ) -> Reply:
        """One whole exchange within `timeout_s`. Raises as `open()` and `Exchange.read()`, and TIMEOUT."""
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self.open(method, url, body=body, headers=headers)
                try:
                    return Reply(exchange.status, exchange.headers, await exchange.read(limit_bytes))
                finally:
                    exchange.close()
        except TimeoutError as error:
            raise UpstreamError(FailureKind.TIMEOUT, f"{url}: no whole answer in {timeout_s:g} s") from error


class _Body(Payload):
    """A request body written in slices, so that 100 MB neither block the loop nor are copied."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type=_JSON)
        self._size = len(value)
        self.transport: asyncio.Transport | None = None
        self.may_be_out = False
        """Whether any of it was given to a connection that was open."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        if isinstance(writer, StreamWriter):
            self.transport = writer.transport
            self.may_be_out = self.transport is not None and not self.transport.is_closing()
        view = memoryview(self._value)
        for start in range(0, len(view), _SLICE_BYTES):
            await writer.write(view[start : start + _SLICE_BYTES])


def _abort(sent: _Body | None) -> None:
    # The library closes gracefully, which waits for ever for a frozen server to take the rest of the body.
    if sent is not None and sent.transport is not None:
        sent.transport.abort()


def _had_ended(error: Exception, sent: _Body | None) -> bool:
    """Whether a connection that was made had ended before any of the request was given to it."""
    was_lost = isinstance(error, aiohttp.ClientConnectionError) and not isinstance(
        error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    )
    return was_lost and sent is not None and not sent.may_be_out


def _with_type(headers: Mapping[str, str] | None, sent: _Body | None) -> Mapping[str, str] | None:
    if sent is None or (headers is not None and any(name.lower() == "content-type" for name in headers)):
        return headers
    return {**(headers or {}), "Content-Type": _JSON}


class _BrokenFraming(aiohttp.ClientPayloadError):
    """The body's chunks cannot be told apart."""


def _fail_on_broken_framing(response: aiohttp.ClientResponse) -> Callable[[], None]:
    """Make the body fail when its framing breaks; returns how to stop watching.

    aiohttp (3.14) then closes the connection, but leaves whoever reads the body waiting for ever.
    """
    protocol = response.connection.protocol if response.connection is not None else None
    if protocol is None:
        return _nothing

    def fail(_: object = None) -> None:
        if not response.content.is_eof() and response.content.exception() is None:
            response.content.set_exception(_BrokenFraming(str(protocol.exception())))

    lost = protocol.closed
    if lost is None:
        fail()
        return _nothing
    lost.add_done_callback(fail)
    return lambda: _forget(lost, fail)


def _nothing() -> None:
    pass


def _forget(lost: asyncio.Future[None], callback: Callable[[object], None]) -> None:
    lost.remove_done_callback(callback)
    # One for the life of the connection: the end of an idle one is no news, but unread it would be logged.
    lost.remove_done_callback(_read)
    lost.add_done_callback(_read)


def _read(lost: asyncio.Future[None]) -> None:
    if not lost.cancelled():
        lost.exception()


def _of_head(error: Exception, url: str) -> UpstreamError:
    if isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
        # No fault of the server's, of which nothing was asked.
        return UpstreamError(FailureKind.STATUS, f"{url}: the gateway is out of file descriptors", definite=True)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        # Not refused: the host may be gone, or both hosts so busy that this loop was late.
        return UpstreamError(FailureKind.TIMEOUT, f"{url}: {error}", definite=True)
    # A ValueError is a URL without a meaning, sometimes noticed by the resolver only.
    if isinstance(error, (aiohttp.ClientConnectorError, ValueError)):
        return UpstreamError(FailureKind.CONNECT, f"{url}: {error}", definite=True)
    if isinstance(error, aiohttp.ClientResponseError):
        return UpstreamError(FailureKind.GARBLED, f"{url}: not an HTTP answer: {_one_line(error.message)}")
    return UpstreamError(FailureKind.RESET, f"{url}: connection lost before an answer: {_reason(error)}")


def _of_body(error: Exception, url: str) -> UpstreamError:
    if isinstance(error, _BrokenFraming):
        return UpstreamError(FailureKind.GARBLED, f"{url}: broken framing within the answer: {_one_line(str(error))}")
    return UpstreamError(FailureKind.RESET, f"{url}: connection lost within the answer: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed by the server"
    return _one_line(str(error))


def _one_line(text: str) -> str:
    return " ".join(text.split())
