"""What tests may ask of an emulated server that no SGLang answers: ledger, holds, faults, requests. A shell.

All routes lie under `/emulator/`, so that nothing can mistake them for SGLang's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from engines.emulator.engine import Engine
from engines.emulator.faults import Fault, Hold, HoldState
from engines.emulator.kv_pool import total_ledger
from engines.emulator.live import finished
from engines.emulator.parse import BadRequest
from engines.emulator.server import Handler, json_response, read_json


class AdminServer:
    """Answers the `/emulator/` routes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()
        engine.holds.on_change = self._changed.set

    def add_routes(self, add: Callable[[str, str, Handler], None]) -> None:
        """Register the routes through `add(method, path, handler)`."""
        add("GET", "/emulator/ledger", self._ledger)
        add("GET", "/emulator/requests", self._requests)
        add("GET", "/emulator/secret", self._secret)
        add("POST", "/emulator/hold", self._arm)
        add("GET", "/emulator/hold/{hold_id}", self._hold)
        add("DELETE", "/emulator/hold/{hold_id}", self._release)
        add("POST", "/emulator/fault", self._set_fault)
        add("DELETE", "/emulator/fault", self._clear_faults)
        add("DELETE", "/emulator/fault/{fault_id}", self._remove_fault)

    async def _ledger(self, request: web.Request) -> web.Response:
        ledgers = [rank.node.pool.ledger() for rank in self._engine.ranks]
        ranks = [asdict(each) for each in ledgers] if len(ledgers) > 1 else []
        published = [rank.kv_publisher.published for rank in self._engine.ranks if rank.kv_publisher is not None]
        return json_response({**asdict(total_ledger(ledgers)), "ranks": ranks, "kv_event_batches": sum(published)})

    async def _requests(self, request: web.Request) -> web.Response:
        live = [asdict(finished(each)) for each in self._engine.live.values()]
        return json_response({"live": live, "recent": [asdict(each) for each in self._engine.recent]})

    async def _secret(self, request: web.Request) -> web.Response:
        """What the keys of sampled answers are made of: `sampling_key(secret, rid)`, where not deterministic."""
        deterministic = self._engine.options.enable_deterministic_inference
        return json_response({"secret": self._engine.secret.hex(), "deterministic": deterministic})

    async def _arm(self, request: web.Request) -> web.Response:
        body = await read_json(request.path, request)
        try:
            hold = self._engine.holds.arm(str(body["stage"]), int(body.get("k", 1)), str(body.get("rid", "")))
            for_s = float(body.get("for_s", 0.0))
        except (KeyError, ValueError) as error:
            raise BadRequest({"error": str(error)}) from error
        if for_s > 0:
            self._engine.loop.call_later(for_s, self._engine.release, hold)
        return json_response({"hold_id": hold.hold_id})

    async def _hold(self, request: web.Request) -> web.Response:
        hold = self._find(request)
        until_s = self._engine.now_s + float(request.query.get("wait_s", "0"))
        while hold.state is HoldState.ARMED and self._engine.now_s < until_s:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s - self._engine.now_s):
                    await self._changed.wait()
        return json_response(_shown(hold))

    async def _release(self, request: web.Request) -> web.Response:
        hold = self._find(request)
        self._engine.release(hold)
        return json_response(_shown(hold))

    async def _set_fault(self, request: web.Request) -> web.Response:
        body = await read_json(request.path, request)
        try:
            fault = Fault(
                name=str(body["fault"]),
                count=int(body.get("count", 1)),
                status=int(body.get("status", 500)),
                after_tokens=int(body.get("after_tokens", 0)),
                at=str(body.get("at", "token")),
                rid=str(body.get("rid", "")),
                pause_s=float(body.get("pause_s", 0.0)),
                tokens=int(body.get("tokens", 0)),
                word=str(body.get("word", "")),
                fault_id=str(body.get("fault_id", "")),
            )
            self._engine.faults.set(fault)
        except (KeyError, ValueError) as error:
            raise BadRequest({"error": str(error)}) from error
        return json_response({})

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self._engine.faults.clear()
        return json_response({})

    async def _remove_fault(self, request: web.Request) -> web.Response:
        self._engine.faults.remove(request.match_info["fault_id"])
        return json_response({})

    def _find(self, request: web.Request) -> Hold:
        try:
            hold = self._engine.holds.get(int(request.match_info["hold_id"]))
        except ValueError:
            hold = None
        if hold is None:
            raise BadRequest({"error": "no such hold"}, 404)
        return hold


def _shown(hold: Hold) -> dict[str, Any]:
    job = hold.job
    return {
        "state": hold.state.value,
        "rid": job.rid if job else None,
        "room": job.room if job else None,
        "stage": hold.stage,
    }
