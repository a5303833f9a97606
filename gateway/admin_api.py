"""What the gateway says of itself: models, health, readiness, metrics, and why a request went where it went."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from aiohttp import web

from engines.types import Health, Role
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.openai_api import openai_models, served
from gateway.owners_api import owners_json, status_json
from routing.filters import difference
from routing.ownership import StoreState, StoreStatus


def add_routes(app: web.Application, gw: Gateway) -> None:
    """Add the routes that need no engine call. They stay open where `--api-key` is set, as sglang-router's do."""

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response(text="OK")

    async def readyz(request: web.Request) -> web.StreamResponse:
        pairs = ready_pairs(gw)
        engines = [
            {"id": view.engine_id, "role": view.spec.role, "health": view.health, "reason": view.reason or None}
            for view in gw.fleet.views()
        ]
        body = {
            "ready": bool(pairs),
            "pairs": pairs,
            "models": gw.fleet.models(),
            "engines": engines,
            "ownership": status_json(gw.shared.store.status()),
        }
        return _json(body, 200 if pairs else 503)

    async def models(request: web.Request) -> web.StreamResponse:
        return _json(openai_models(_context_tokens(gw), gw.started_s))

    async def model(request: web.Request) -> web.StreamResponse:
        name, known = request.match_info["id"], _context_tokens(gw)
        served(name, known)
        return _json(openai_models({name: known[name]}, gw.started_s)["data"][0])

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=gw.metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def explain(request: web.Request) -> web.StreamResponse:
        request_id = request.match_info["id"]
        record = gw.explain.newest() if request_id == "newest" else gw.explain.find(request_id)
        if record is None and request_id == "newest":
            raise GatewayError(404, "no request has come yet", code="not_found", safe_to_retry=False)
        if record is None:
            raise GatewayError(
                404,
                f"request {request_id!r} is not among the last {gw.config.explain.ring} (--explain-ring)",
                code="not_found",
                safe_to_retry=False,
            )
        return _json(record.as_json())

    async def owners(request: web.Request) -> web.StreamResponse:
        return _json(await owners_json(gw))

    app.router.add_get("/health", health)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", model)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/pdgate/explain/{id}", explain)
    app.router.add_get("/pdgate/owners", owners)


def _context_tokens(gw: Gateway) -> dict[str, int]:
    """The models served, each with the smallest context of its servers."""
    tokens: dict[str, int] = {}
    for view in gw.fleet.views():
        if view.facts is not None and view.facts.model in gw.fleet.models():
            known = tokens.get(view.facts.model, view.facts.context_tokens)
            tokens[view.facts.model] = min(known, view.facts.context_tokens)
    return tokens


def ready_pairs(gw: Gateway) -> int:
    """How many pairs could serve a request now: both up, and able to exchange KV."""
    views = [view for view in gw.fleet.views() if view.health is Health.READY and view.facts is not None]
    return sum(
        1
        for prefill in views
        if prefill.spec.role is Role.PREFILL and not gw.monitor.is_stale(prefill.engine_id)
        for decode in views
        if decode.spec.role is Role.DECODE
        and prefill.facts is not None
        and decode.facts is not None
        and difference(prefill.facts, decode.facts) is None
    )


def fleet_gauges(gw: Gateway) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """The gauges over the fleet, as they are now."""
    bookings, decider = gw.decider.bookings, gw.decider
    for view in gw.fleet.views():
        labels = {"engine": str(view.engine_id), "role": str(view.spec.role)}
        yield "pdgate_engine_ready", "1 when new rooms may go to it", labels, float(view.health is Health.READY)
        yield "pdgate_engine_epoch", "Grows with every noticed restart", labels, float(view.epoch)
        unaccounted = decider.unaccounted_tokens(view)
        yield (
            "pdgate_kv_unaccounted_tokens",
            "KV tokens in use that no live attempt explains; NaN when unknown",
            labels,
            float("nan") if unaccounted is None else float(unaccounted),
        )
        if view.spec.role is Role.PREFILL:
            booked = bookings.uncached_tokens(view.engine_id)
            yield "pdgate_booked_uncached_tokens", "Prompt tokens promised to a prefill", labels, float(booked)
            held = decider.owners.index.held_blocks(view.engine_id)
            yield "pdgate_owned_blocks", "Prefix blocks an instance is thought to hold", labels, float(held)
        else:
            booked = bookings.decode_kv_tokens(view.engine_id)
            yield "pdgate_booked_kv_tokens", "KV tokens promised to a decode", labels, float(booked)
    yield "pdgate_queue_requests", "Requests that wait for a pair", {}, float(len(decider.queue))
    yield "pdgate_queue_bytes", "Bytes of bodies that wait", {}, float(decider.queue.body_bytes)
    yield "pdgate_live_bookings", "Attempts whose bookings are not released", {}, float(bookings.live())
    yield "pdgate_releases_pending", "Abandoned attempts not known to be free", {}, float(gw.releaser.pending)
    yield "pdgate_index_bytes", "Memory of the prefix index", {}, float(decider.owners.index.memory_bytes())
    yield from _ownership_gauges(gw.shared.store.status())
    for (side, engine_id), error in decider.learned.errors().items():
        labels = {"engine": str(engine_id), "side": side}
        yield "pdgate_prediction_error_ratio", "Mean relative error of predicted times", labels, error


def _ownership_gauges(status: StoreStatus) -> Iterator[tuple[str, str, dict[str, str], float]]:
    for state in StoreState:
        labels = {"store": status.kind, "state": str(state)}
        yield "pdgate_ownership_state", "1 for the state that it is in", labels, float(state is status.state)
    yield "pdgate_ownership_blocks", "Prefix blocks in the store, of all engines", {}, float(status.blocks)
    yield "pdgate_ownership_queued_bytes", "Changes that wait to be written", {}, float(status.queued_bytes)
    yield "pdgate_ownership_dropped", "Changes given up for want of room, since the start", {}, float(status.dropped)
    yield "pdgate_ownership_refused", "Changes that named an old boot, since the start", {}, float(status.refused)
    yield "pdgate_ownership_resyncs", "Shards that were read anew, since the start", {}, float(status.resyncs)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
