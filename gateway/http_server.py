"""The HTTP edge: routes, bodies in, answers out. A shell around `lifecycle.py` on aiohttp.

It turns GatewayError into a status with an OpenAI-shaped body, and a client that goes away into a cancellation.
`tests/contract/test_http_server.py` says what a replacement must do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Mapping

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import admin_api, auth, lifecycle, relay
from gateway.attempt import CLIENT_PATIENCE_S
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.live import wanted_rid
from gateway.openai_api import Api
from gateway.uploads import Uploads

_log = logging.getLogger("pdgate.http")
_connections_log = logging.getLogger("pdgate.http.connections")
_IDLE_S = 75.0
"""How long a connection may be without a whole request head: more than the 60 s of common load balancers."""
_BACKLOG = 4096
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RELAYED = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
_NOT_ON_PAIRS = (
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
    "/v1/classify",
    "/classify",
    "/encode",
    "/api/chat",
    "/api/generate",
    "/v1/audio/transcriptions",
)
"""Routes of SGLang that a prefill/decode pair cannot serve, or that are not built yet: 501 rather than 404."""


def make_app(gw: Gateway) -> web.Application:
    """The application of one gateway."""
    limit_bytes = gw.config.server.max_payload_bytes
    app = web.Application(client_max_size=limit_bytes, middlewares=[_whole_or_broken_off, _errors_as_json])
    uploads = Uploads(limit_bytes)
    for api in Api:
        app.router.add_post(api.value, _generation(gw, uploads, api))
    for path in _RELAYED:
        app.router.add_post(path, _relay(gw, uploads, path))
    app.router.add_post("/abort_request", _abort(gw, uploads))
    for path in _NOT_ON_PAIRS:
        app.router.add_route("*", path, _not_built)
    admin_api.add_routes(app, gw)
    return app


def make_runner(gw: Gateway, shutdown_grace_s: float) -> web.AppRunner:
    """What serves connections; `listen` opens its port."""
    return web.AppRunner(
        make_app(gw),
        access_log=None,
        logger=_connections_log,
        handler_cancellation=True,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=shutdown_grace_s,
    )


async def listen(runner: web.AppRunner, host: str, port: int) -> int:
    """Accept connections from now on; the port. Raises OSError."""
    site = web.TCPSite(runner, host, port, reuse_address=True, backlog=_BACKLOG)
    await site.start()
    for listening in getattr(site._server, "sockets", ()):
        # Inherited by what it accepts: the kernel drops a client that does not take what was left at the end.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CLIENT_PATIENCE_S * 1000))
    return int(runner.addresses[0][1])


def unheard(runner: web.AppRunner) -> int:
    """Connections that were accepted and have not asked for anything yet."""
    connections = () if runner.server is None else runner.server.connections
    return sum(getattr(each, "_request_count", 1) == 0 for each in connections)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a log record of aiohttp's server is of a fault of ours: what a client got wrong is no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_connections_log.addFilter(_is_ours)


def _generation(gw: Gateway, uploads: Uploads, api: Api) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        arrival_s = asyncio.get_running_loop().time()
        try:
            auth.check(gw.config.server.api_key, request.headers)
            body = await uploads.body(request)
        except GatewayError as error:  # what comes in is counted by its lifecycle
            gw.metrics.request(api, error.status)
            raise
        client = _AiohttpClient(request)
        await lifecycle.handle(gw, lifecycle.Arrival(api, body, request.headers, arrival_s), client)
        return client.response

    return handle


def _relay(gw: Gateway, uploads: Uploads, path: str) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        auth.check(gw.config.server.api_key, request.headers)
        body = await uploads.body(request)
        status, answer = await relay.relay(gw, path, body)
        return web.Response(status=status, body=answer, content_type="application/json")

    return handle


def _abort(gw: Gateway, uploads: Uploads) -> _Handler:
    """`/abort_request` as SGLang has it, by the id of an answer or the rid its client had asked for: always 200."""

    async def handle(request: web.Request) -> web.StreamResponse:
        auth.check(gw.config.server.api_key, request.headers)
        rid = wanted_rid(await uploads.body(request))
        return web.json_response({"aborted": gw.live.abort(rid)})

    return handle


async def _not_built(request: web.Request) -> web.StreamResponse:
    raise GatewayError(
        501,
        f"{request.path} is not served on prefill/decode pairs; served: {', '.join([*Api, '/v1/models'])}",
        code="unsupported_route",
        safe_to_retry=False,
    )


class _Stream(web.StreamResponse):
    """A stream whose status line leaves together with its first bytes."""

    _send_headers_immediately = False


class _AiohttpClient:
    """The client's connection as `gateway.reply` wants it."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse = web.StreamResponse()

    async def begin(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        self.response = _Stream(status=status, headers=headers)
        await self.response.prepare(self._request)
        await self.response.write(first)

    async def write(self, data: bytes) -> None:
        await self.response.write(data)

    async def end(self) -> None:
        await self.response.write_eof()

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.response = web.Response(status=status, headers=headers, body=body)
        await _send(self._request, self.response)


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    """Write what is still to be written of an answer."""
    await response.prepare(request)
    await response.write_eof()


@web.middleware
async def _whole_or_broken_off(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """See each answer out. A client that has gone, or does not read, loses its connection at once.

    Closing it in peace would wait for ever until the client has taken what is still to be sent.
    """
    try:
        response = await handler(request)
        async with asyncio.timeout(CLIENT_PATIENCE_S):
            await _send(request, response)
        return response
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError from None


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error)
    except web.HTTPNotFound:
        return error_response(
            GatewayError(
                404, f"there is no {request.method} {request.path} here", code="unsupported_route", safe_to_retry=False
            )
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        refused = GatewayError(
            405, f"{request.path} takes {allowed}, not {request.method}", code="method_not_allowed", safe_to_retry=False
        )
        refused.headers["allow"] = allowed
        return error_response(refused)
    except (ConnectionError, web.HTTPException):
        raise
    except Exception:  # a fault of ours: this is the last place where it can still become an answer
        if request.writer.output_size:
            raise  # which breaks the connection off: nobody must take what was sent for the whole
        _log.exception("%s %s", request.method, request.path)
        return error_response(
            GatewayError(500, "a fault of the gateway; its log says more", code="internal_error", kind="server_error")
        )


def error_response(error: GatewayError) -> web.Response:
    """A GatewayError as the answer a client library understands."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.safe_to_retry is not None:
        headers["x-should-retry"] = "true" if error.safe_to_retry else "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = orjson.dumps(error.openai_error())
    response = web.Response(status=error.status, headers=headers, body=body, content_type="application/json")
    if headers.get("connection") == "close":
        response.force_close()
    return response
