"""A prefill's bootstrap server: where decodes learn its topology and rank ports. A shell: routes over one registry.

Replies are those of SGLang's `CommonKVBootstrapServer`; there is no deregistration, a restarted prefill brings a
fresh registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

ENTRY_LIFETIME_S = 120.0
"""How long a room's DP rank is remembered (`SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL`)."""

_QUERY = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class BootstrapServer:
    """The registry of one prefill and its routes; `now_s` is the loop's clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._topology: dict[str, Any] | None = None
        self._ranks: dict[tuple[int, int, int, int], dict[str, Any]] = {}
        self._room_ranks: dict[int, tuple[float, int]] = {}

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_put("/route", self._put_route)
        app.router.add_get("/route", self._get_route)
        app.router.add_post("/register_dp_rank", self._register_dp_rank)
        app.router.add_post("/query_dp_ranks", self._query_dp_ranks)
        return app

    def register(self, rank: dict[str, Any]) -> None:
        """Take one rank's registration, the body of `PUT /route`."""
        self._topology = {
            "attn_tp_size": rank["attn_tp_size"],
            "attn_cp_size": rank["attn_cp_size"],
            "dp_size": rank["system_dp_size"] if rank["system_dp_size"] > 1 else rank["attn_dp_size"],
            "pp_size": rank["pp_size"],
            "page_size": rank["page_size"],
            "kv_cache_dtype": rank["kv_cache_dtype"],
            "follow_bootstrap_room": rank["load_balance_method"] == "follow_bootstrap_room",
            "enable_dsa_cache_layer_split": rank["enable_dsa_cache_layer_split"],
            "decode_allocation_policy": rank["decode_allocation_policy"],
            "enable_kv_cache_sharding": rank["enable_kv_cache_sharding"],
            "prefill_http_port": rank["prefill_http_port"],
            "target_tp_rank": None,
            "target_tp_ranks": None,
            "target_cp_ranks": None,
            "target_pp_ranks": None,
            "required_dst_info_num": None,
            "required_prefill_response_num": None,
        }
        dp_rank = rank["system_dp_rank"] if rank["system_dp_size"] > 1 else rank["attn_dp_rank"]
        key = (dp_rank, rank["attn_cp_rank"], rank["attn_tp_rank"], rank["pp_rank"])
        self._ranks[key] = {"rank_ip": rank["rank_ip"], "rank_port": rank["rank_port"]}

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _put_route(self, request: web.Request) -> web.Response:
        try:
            self.register(orjson.loads(await request.read()))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            return web.Response(status=400, text=f"Bad registration: {error}")
        return web.Response(text="OK")

    async def _get_route(self, request: web.Request) -> web.Response:
        values = [request.query.get(name) for name in _QUERY]
        if any(value is None for value in values):
            return web.Response(status=400, text="Missing inputs for bootstrap server.")
        try:
            dp, cp, tp, pp = (int(value or "") for value in values)
        except ValueError:
            return web.Response(status=400, text="Missing inputs for bootstrap server.")
        if not self._complete():
            return web.Response(status=503, text="Prefill server not fully registered yet.")
        if (dp, cp, tp, pp) == (-1, -1, -1, -1):
            return web.json_response(self._topology)
        rank = self._ranks.get((dp, cp, tp, pp))
        if rank is None:
            text = f"Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            return web.Response(status=404, text=text)
        return web.json_response(rank)

    def _complete(self) -> bool:
        topology = self._topology
        if topology is None:
            return False
        expected: int = math.prod(topology[name] for name in ("dp_size", "attn_cp_size", "attn_tp_size", "pp_size"))
        return len(self._ranks) >= expected

    async def _register_dp_rank(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        now_s = self._now_s()
        expired = [room for room, (at_s, _) in self._room_ranks.items() if at_s + ENTRY_LIFETIME_S < now_s]
        for room in expired:
            del self._room_ranks[room]
        self._room_ranks[int(body["bootstrap_room"])] = (now_s, int(body["dp_rank"]))
        return web.Response(text="OK")

    async def _query_dp_ranks(self, request: web.Request) -> web.Response:
        rooms = orjson.loads(await request.read())["bootstrap_rooms"]
        return web.json_response(
            {str(room): self._room_ranks[int(room)][1] for room in rooms if int(room) in self._room_ranks}
        )
