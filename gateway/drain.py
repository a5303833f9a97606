"""Draining one server in two steps: no new rooms, then wait until nobody needs what it holds.

A prefill is drained when none of its work is left to be handed over: after that its KV has been fetched. A decode is
when none of its attempts is left. Both count the attempts of all gateways, but each gateway must be told to drain.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum

import orjson
from aiohttp import web

from engines.types import EngineId, EngineView, Role
from gateway import auth
from gateway.context import Gateway
from gateway.errors import GatewayError, bad_request

_log = logging.getLogger("pdgate.drain")
_TOLD = 16


class DrainState(StrEnum):
    """How far the draining of a server has come."""

    DRAINING = "draining"
    DRAINED = "drained"
    """It may be restarted or removed."""


def attempts_left(gw: Gateway, view: EngineView) -> int:
    """Attempts that still need a server, and those whose leg on it is being ended."""
    bookings, engine_id = gw.decider.bookings, view.engine_id
    booked = bookings.prefill_requests if view.spec.role is Role.PREFILL else bookings.decode_requests
    return booked(engine_id) + gw.releaser.on_engine(engine_id)


def drain_state(gw: Gateway, view: EngineView) -> DrainState | None:
    """None where nobody wants it drained."""
    if not view.draining:
        return None
    return DrainState.DRAINING if attempts_left(gw, view) else DrainState.DRAINED


def add_routes(app: web.Application, gw: Gateway) -> None:
    """`POST /admin/drain` and `/admin/undrain` with `{"engine": URL}`. Asking again tells how far it has come."""

    def handler(draining: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            auth.check(gw.config.server.api_key, request.headers)
            engine_id = _engine(gw, await request.read())
            before = gw.fleet.view(engine_id)
            if before.draining != draining:
                gw.fleet.set_draining(engine_id, draining)
                _log.warning("%s %s is %s", before.spec.role, engine_id, "draining" if draining else "back in use")
                gw.decider.fleet_changed(engine_id)
            view = gw.fleet.view(engine_id)
            body = {"engine": engine_id, "drain": drain_state(gw, view), "attempts": attempts_left(gw, view)}
            return web.Response(body=orjson.dumps(body), content_type="application/json")

        return handle

    app.router.add_post("/admin/drain", handler(True))
    app.router.add_post("/admin/undrain", handler(False))


def _engine(gw: Gateway, body: bytes) -> EngineId:
    try:
        engine = orjson.loads(body)["engine"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        raise bad_request('the body must be {"engine": URL}', param="engine") from None
    if not isinstance(engine, str) or not gw.fleet.has(EngineId(engine)):
        known = ", ".join(view.engine_id for view in gw.fleet.views()[:_TOLD])
        raise GatewayError(
            404, f"there is no server {engine!r} here; known: {known}", code="not_found", safe_to_retry=False
        )
    return EngineId(engine)
