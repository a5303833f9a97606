"""What the gateway says of itself: models, health, readiness, metrics, and why a request went where it went."""

from __future__ import annotations

import orjson
from aiohttp import web

from engines.types import EngineView, Role
from gateway import drain
from gateway.context import Gateway
from gateway.drain import attempts_left, drain_state
from gateway.errors import GatewayError
from gateway.join_probe import Join
from gateway.openai_api import openai_models, served
from gateway.owners_api import owners_json, status_json
from gateway.replicas import REPLICA_PATH
from routing.compatibility import Apart


def add_routes(app: web.Application, gw: Gateway) -> None:
    """Add the routes that need no engine call. They stay open where `--api-key` is set, as sglang-router's do."""

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response(text="OK")

    async def readyz(request: web.Request) -> web.StreamResponse:
        by_model = ready_pairs(gw)
        wanted = request.query.get("model")
        pairs = sum(by_model.values()) if wanted is None else by_model.get(wanted, 0)
        fenced = gw.replicas is not None and gw.replicas.is_fenced
        body = {
            "ready": bool(pairs) and not fenced,
            "pairs": pairs,
            "models": gw.fleet.models(),
            "pairs_by_model": by_model,
            "engines": [_engine_json(gw, view) for view in gw.fleet.views()],
            "panic": sorted(gw.decider.panic.roles(gw.fleet.snapshot())),
            "apart": [_apart_json(each) for each in gw.decider.pairs.apart(gw.fleet.snapshot())],
            "pairs_in_trouble": gw.decider.pairs.as_json(),
            "ownership": status_json(gw.shared.store.status()),
            "index": {model: _join_json(join) for model, join in gw.joins.models().items()},
            "replicas": _replicas_json(gw),
        }
        return _json(body, 200 if body["ready"] else 503)

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

    async def canaries(request: web.Request) -> web.StreamResponse:
        return _json({"under_way": gw.canaries.under_way()})

    async def replica(request: web.Request) -> web.StreamResponse:
        return _json({"replica": gw.shared.replica if gw.replicas is None else gw.replicas.name})

    drain.add_routes(app, gw)
    app.router.add_get("/health", health)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{id:.+}", model)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/pdgate/explain/{id}", explain)
    app.router.add_get("/pdgate/owners", owners)
    app.router.add_get("/pdgate/canaries", canaries)
    app.router.add_get(REPLICA_PATH, replica)


def _replicas_json(gw: Gateway) -> dict[str, object] | None:
    """This gateway among its replicas; None where nothing is shared."""
    if gw.replicas is None:
        return None
    status = gw.replicas.status()
    return {
        "name": status.name,
        "process_id": status.process_id,
        "live": status.live,
        "absent": status.absent,
        "reaped": status.reaped,
        "fenced": status.fenced,
        "fencings": status.fencings,
    }


def _context_tokens(gw: Gateway) -> dict[str, int]:
    """The models served, each with the smallest context of its servers."""
    tokens: dict[str, int] = {}
    for view in gw.fleet.views():
        if view.facts is not None and view.facts.model in gw.fleet.models():
            known = tokens.get(view.facts.model, view.facts.context_tokens)
            tokens[view.facts.model] = min(known, view.facts.context_tokens)
    return tokens


def ready_pairs(gw: Gateway) -> dict[str, int]:
    """By model, how many pairs could serve a request now: both up, and able to exchange KV."""
    views = [view for view in gw.fleet.views() if view.takes_rooms and view.facts is not None]
    forbidden = gw.decider.pairs.forbidden(gw.fleet.snapshot())
    pairs = dict.fromkeys(gw.fleet.models(), 0)
    for prefill in views:
        if prefill.facts is None or prefill.spec.role is not Role.PREFILL or gw.monitor.is_stale(prefill.engine_id):
            continue
        model = prefill.facts.model
        for decode in views:
            if decode.spec.role is Role.DECODE and (prefill.engine_id, decode.engine_id) not in forbidden:
                pairs[model] = pairs.get(model, 0) + 1
    return pairs


def _engine_json(gw: Gateway, view: EngineView) -> dict[str, object]:
    state = drain_state(gw, view)
    return {
        "id": view.engine_id,
        "role": view.spec.role,
        "health": view.health,
        "reason": view.reason or None,
        "drain": state,
        "attempts": attempts_left(gw, view),
    }


def _apart_json(found: Apart) -> dict[str, object]:
    """Servers that are not paired, and why; the first of each side stand for the others."""
    return {
        "fit": found.match.fit,
        "reason": found.match.reason,
        "pairs": len(found.prefills) * len(found.decodes),
        "prefill": found.prefills[0],
        "decode": found.decodes[0],
    }


def _join_json(join: Join) -> dict[str, object]:
    """Whether a model's prompts are hashed as ids or as text, and why not as ids."""
    return {
        "kind": join.kind,
        "reason": join.reason or None,
        "engine": join.engine,
        "probe": join.probe or None,
        "text_fields": sorted(join.text_fields),
    }


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
