"""The HTTP edge: routes, bodies in, answers out. A shell around `lifecycle.py` on aiohttp.

It turns GatewayError into a status with an OpenAI-shaped body, and a client that goes away into a cancellation.
`tests/contract/test_http_server.py` says what a replacement must do.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping

import orjson
from aiohttp import web

from gateway import admin_api, auth, lifecycle, relay
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.live import wanted_rid
from gateway.openai_api import Api

_log = logging.getLogger("pdgate.http")
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
    app = web.Application(client_max_size=gw.config.server.max_payload_bytes, middlewares=[_errors_as_json])
    for api in Api:
        app.router.add_post(api.value, _generation(gw, api))
    for path in _RELAYED:
        app.router.add_post(path, _relay(gw, path))
    app.router.add_post("/abort_request", _abort(gw))
    for path in _NOT_ON_PAIRS:
        app.router.add_route("*", path, _not_built)
    admin_api.add_routes(app, gw)
    return app


def _generation(gw: Gateway, api: Api) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        arrival_s = asyncio.get_running_loop().time()
        auth.check(gw.config.server.api_key, request.headers)
        body = await _body(request, gw.config.server.max_payload_bytes)
        client = _AiohttpClient(request)
        await lifecycle.handle(gw, lifecycle.Arrival(api, body, request.headers, arrival_s), client)
        return client.response

    return handle


def _relay(gw: Gateway, path: str) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        auth.check(gw.config.server.api_key, request.headers)
        body = await _body(request, gw.config.server.max_payload_bytes)
        status, answer = await relay.relay(gw, path, body)
        return web.Response(status=status, body=answer, content_type="application/json")

    return handle


def _abort(gw: Gateway) -> _Handler:
    """`/abort_request` as SGLang has it, by the id of an answer or the rid its client had asked for: always 200."""

    async def handle(request: web.Request) -> web.StreamResponse:
        auth.check(gw.config.server.api_key, request.headers)
        rid = wanted_rid(await _body(request, gw.config.server.max_payload_bytes))
        return web.json_response({"aborted": gw.live.abort(rid)})

    return handle


async def _not_built(request: web.Request) -> web.StreamResponse:
    raise GatewayError(
        501,
        f"{request.path} is not served on prefill/decode pairs; served: {', '.join([*Api, '/v1/models'])}",
        code="unsupported_route",
        safe_to_retry=False,
    )


async def _body(request: web.Request, limit_bytes: int) -> bytes:
    """The whole body. A too large one is refused by its announced length, before it is read."""
    try:
        if request.content_length is not None and request.content_length > limit_bytes:
            raise web.HTTPRequestEntityTooLarge(limit_bytes, request.content_length)
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise GatewayError(
            413,
            f"the body is larger than {limit_bytes} bytes (--max-payload-size)",
            code="request_too_large",
            safe_to_retry=False,
        ) from None


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
    except ConnectionError:
        raise asyncio.CancelledError from None  # the client has gone in the middle of a write
    except web.HTTPException:
        raise
    except Exception:
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
    return web.Response(status=error.status, headers=headers, body=body, content_type="application/json")
