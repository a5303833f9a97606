"""Request bodies, read within bounds: of one body's bytes and time, and of all that are being read together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gateway.errors import GatewayError, bad_request

_log = logging.getLogger("pdgate.http")
BODY_S = 300.0
"""How long a whole body may take: 100 MB at 3 Mbit/s."""
PAUSE_S = 30.0
"""How long a body may bring nothing at all."""
ALL_BODIES_BYTES = 2 * 1024**3
"""Bytes of bodies that may be on their way in together, or twice the largest body if that is more."""
_LOOK_S = 0.25


class Uploads:
    """The bodies under way. A body counts with its announced length, and with what has come where that is more."""

    def __init__(self, body_limit_bytes: int) -> None:
        self._body_limit_bytes = body_limit_bytes
        self._budget_bytes = max(ALL_BODIES_BYTES, 2 * body_limit_bytes)
        self.held_bytes = 0

    async def body(self, request: web.Request) -> bytes:
        """The whole body. Raises GatewayError: 400 broken, 408 too slow, 413 too large, 503 too much at once."""
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read(request)
        except TimeoutError:
            message = f"the body did not come in time: {PAUSE_S:g} s at a stretch, {BODY_S:g} s in all"
            raise _last(GatewayError(408, message, code="request_timeout", safe_to_retry=True)) from None
        except web.RequestPayloadError as error:
            _log.debug("%s: %s", request.path, error)
            raise _last(bad_request("the body's framing or content coding is broken", code="invalid_body")) from None

    async def _read(self, request: web.Request) -> bytes:
        parts: list[bytes] = []
        size_bytes = 0
        with self._counted() as share:
            share.grow_to(request.content_length or 0)
            while part := await _next_part(request):
                parts.append(part)
                size_bytes += len(part)
                share.grow_to(size_bytes)
            return b"".join(parts)

    @contextmanager
    def _counted(self) -> Iterator[_Share]:
        share = _Share(self)
        try:
            yield share
        finally:
            self.held_bytes -= share.size_bytes

    def take(self, size_bytes: int, more_bytes: int) -> None:
        """Count `more_bytes` of a body that is then of `size_bytes`; raises GatewayError beyond a limit."""
        if size_bytes > self._body_limit_bytes:
            raise GatewayError(
                413,
                f"the body is larger than {self._body_limit_bytes} bytes (--max-payload-size)",
                code="request_too_large",
                safe_to_retry=False,
            )
        if self.held_bytes + more_bytes > self._budget_bytes:
            raise GatewayError(
                503,
                f"bodies of {self._budget_bytes} bytes are on their way in already",
                code="overloaded",
                kind="service_unavailable",
                retry_after_s=2.0,
                safe_to_retry=True,
            )
        self.held_bytes += more_bytes


class _Share:
    """What one body counts."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self.size_bytes = 0

    def grow_to(self, size_bytes: int) -> None:
        """Count a body of `size_bytes`, of which some may be counted already."""
        if size_bytes > self.size_bytes:
            self._uploads.take(size_bytes, size_bytes - self.size_bytes)
            self.size_bytes = size_bytes


async def _next_part(request: web.Request) -> bytes:
    """The next bytes of a body, b"" at its end. Raises TimeoutError after PAUSE_S without any."""
    until_s = asyncio.get_running_loop().time() + PAUSE_S
    while asyncio.get_running_loop().time() < until_s:
        try:
            async with asyncio.timeout(_LOOK_S):
                return await request.content.readany()
        except TimeoutError:
            if _is_broken(request):
                request.content.feed_eof()  # nobody need wait for more
                raise web.RequestPayloadError("broken chunked framing") from None
    raise TimeoutError


def _is_broken(request: web.Request) -> bool:
    """Whether something follows a body that has no end.

    aiohttp (3.14) takes broken framing for a next, bad request, and leaves whoever reads the body waiting for ever.
    """
    return bool(request.protocol._messages) and not request.content.is_eof()


def _last(error: GatewayError) -> GatewayError:
    """The answer is its connection's last: nobody knows where a next request would begin."""
    error.headers["connection"] = "close"
    return error
