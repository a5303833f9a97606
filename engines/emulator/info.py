"""What a server says of itself: health, load, arguments, model, metrics, tokenizer. A shell over an `Engine`.

The fields are SGLang 0.5.23's, no more: there is no start time and no boot id, only the durations of this start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import orjson
from aiohttp import web

from engines.emulator import wire
from engines.emulator.config import Options
from engines.emulator.engine import Engine
from engines.emulator.load_format import as_prometheus, included
from engines.emulator.parse import BadRequest
from engines.emulator.rank import Rank
from engines.emulator.server import Handler, json_response, read_json
from engines.emulator.tokens import chat_text, decode, encode, render_chat
from engines.token_rule import unpack
from engines.types import Role

VERSION = "0.5.23"
_RECORDED = orjson.loads(resources.files("engines.emulator").joinpath("server_args.json").read_bytes())
"""All arguments and model facts of a recorded SGLang 0.5.23; what this server knows better is put over them."""

_REQUEST_MARGIN_TOKENS = 6
"""A 4,096-token context takes prompts of 4,090 tokens at most (`max_req_input_len`)."""


_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
    "the operation will not be performed.)\n"
)


class InfoServer:
    """Answers every route that reports. `startup_time` are this start's own measured durations, in seconds."""

    def __init__(self, engine: Engine, startup_time: Mapping[str, Any]) -> None:
        self._engine = engine
        self._startup_time = startup_time
        self._created = int(engine.wall_s(engine.now_s))
        self.ready = False
        self.draining = False

    def add_routes(self, add: Callable[[str, str, Handler], None]) -> None:
        """Register the routes through `add(method, path, handler)`."""
        for path in ("/health", "/health_generate"):
            add("GET", path, self._health)
        add("GET", "/ready", self._ready)
        add("GET", "/ping", self._ready)
        add("GET", "/", self._root)
        add("GET", "/v1/models", self._models)
        add("GET", "/v1/models/{name}", self._model)
        add("GET", "/v1/loads", self._loads)
        add("GET", "/metrics", self._metrics)
        for path in ("/server_info", "/get_server_info"):
            add("GET", path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            add("GET", path, self._model_info)
        for method in ("GET", "POST"):
            add(method, "/flush_cache", self._flush_cache)
        for prefix in ("", "/v1"):
            add("POST", f"{prefix}/tokenize", self._tokenize)
            add("POST", f"{prefix}/detokenize", self._detokenize)

    async def _health(self, request: web.Request) -> web.Response:
        if self._well:
            await asyncio.sleep(self._engine.timeouts.health_s)
        return self._flag()

    async def _ready(self, request: web.Request) -> web.Response:
        return self._flag()

    @property
    def _well(self) -> bool:
        return self.ready and not self.draining and not self._engine.faults.standing("ill")

    def _flag(self) -> web.Response:
        return web.Response(status=200 if self._well else 503, headers=wire.PLAIN_HEADERS)

    async def _root(self, request: web.Request) -> web.Response:
        return json_response("SGLang is running")

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._engine.options.model:
            error = {
                "message": f"The model '{name}' does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            raise BadRequest({"error": error}, 404)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        options = self._engine.options
        return {
            "id": options.model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": options.model,
            "parent": None,
            "max_model_len": options.context_length,
        }

    async def _loads(self, request: web.Request) -> web.Response:
        now_s = self._engine.wall_s(self._engine.now_s)
        wanted = request.query.get("dp_rank")
        if wanted is not None and not wanted.lstrip("-").isdigit():
            raise BadRequest(wire.number_error("/v1/loads", "dp_rank", "int", wanted, "query", "GET"))
        ranks = [rank for rank in self._engine.ranks if wanted in (None, str(rank.number))]
        plain = {**wire.PLAIN_HEADERS, "content-type": "text/plain; charset=utf-8"}
        try:
            loads = [included(self._load(rank, now_s), request.query.get("include")) for rank in ranks]
        except ValueError:
            return web.Response(status=500, text="Internal Server Error", headers=plain)
        if request.query.get("format") == "prometheus":
            text_type = "text/plain; version=0.0.4; charset=utf-8"
            return web.Response(text=as_prometheus(loads), headers={**plain, "content-type": text_type})
        return json_response(
            {
                "timestamp": datetime.fromtimestamp(now_s, UTC).isoformat(),
                "version": VERSION,
                "accelerator": None,
                "num_accelerators": 1,
                "loads": loads,
            }
        )

    def _load(self, rank: Rank, now_s: float) -> dict[str, Any]:
        node, options = rank.node, rank.options
        load, counters, total = node.load(), node.counters, node.pool.total_tokens
        prefilled = counters.prefill_cached_tokens + counters.prefill_uncached_tokens
        steps = float(counters.decode_steps)
        return {
            "timestamp": now_s,
            "dp_rank": rank.number,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.used_tokens + load.queued_tokens,
            "num_active_tokens": load.used_tokens + load.queued_tokens - load.coming_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": total,
            "max_running_requests": node.profile.max_running_requests,
            "token_usage": round(load.used_tokens / total, 4),
            "gen_throughput": round(rank.tokens_per_s(), 2),
            "cache_hit_rate": round(counters.prefill_cached_tokens / prefilled, 4) if prefilled else 0.0,
            "utilization": -1.0 if options.role is Role.PREFILL else 0.0,
            "total_prefill_uncached_tokens": counters.prefill_uncached_tokens,
            "total_prefill_busy_us": counters.prefill_busy_us,
            "decode_moments": None if options.role is Role.PREFILL else [steps] * 6,
            "memory": {"weight_gb": 0.002, "kv_cache_gb": 0.002, "graph_gb": 0.0, "token_capacity": total},
            "disaggregation": {
                "mode": options.disaggregation_mode,
                "prefill_bootstrap_queue_reqs": load.bootstrap,
                "prefill_inflight_queue_reqs": load.inflight,
                "decode_prealloc_queue_reqs": load.prealloc,
                "decode_transfer_queue_reqs": load.transfer,
                "decode_retracted_queue_reqs": load.retracted,
                "kv_transfer_speed_gb_s": 0.0,
                "kv_transfer_latency_ms": 0.0,
            },
            "queues": {
                "waiting": load.queue,
                "grammar": 0,
                "paused": 0,
                "retracted": load.retracted,
                "prealloc_ready": 0,
            },
        }

    def _arguments(self) -> dict[str, Any]:
        options = self._engine.options
        decode = options.role is Role.DECODE
        return {
            **_RECORDED["server_args"],
            "model_path": options.model,
            "tokenizer_path": options.model,
            "served_model_name": options.model,
            "context_length": options.context_length,
            "max_running_requests": options.max_running_requests,
            "dp_size": options.dp_size,
            "max_total_tokens": options.max_total_tokens,
            "chunked_prefill_size": options.chunked_prefill_size,
            "page_size": options.page_size,
            "disable_radix_cache": options.disable_radix_cache,
            "enable_cache_report": options.enable_cache_report,
            "random_seed": options.random_seed,
            "host": options.host,
            "port": options.port,
            "api_key": options.api_key or None,
            "load_balance_method": "follow_bootstrap_room" if options.role is Role.PREFILL else "round_robin",
            "kv_events_config": options.kv_events_config or None,
            "sampling_defaults": options.sampling_defaults,
            "enable_deterministic_inference": options.enable_deterministic_inference,
            "incremental_streaming_output": options.incremental_streaming_output,
            "reasoning_parser": options.reasoning_parser or None,
            "chat_template": options.chat_template or None,
            "disaggregation_mode": options.disaggregation_mode,
            "disaggregation_bootstrap_port": options.bootstrap_port,
            "disaggregation_transfer_backend": options.transfer_backend.removesuffix("_tcp"),
            "disaggregation_decode_retraction_backup": "cpu_tensor" if decode else None,
            "disaggregation_decode_extra_slots": _extra_slots(options) if decode else None,
            "hicache_ratio": None if decode else 2.0,
        }

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self._engine
        first, options = engine.ranks[0], engine.options
        arguments, total, publisher = self._arguments(), first.node.pool.total_tokens, first.kv_publisher
        return json_response(
            {
                **arguments,
                "launch_command": engine.options.launch_command,
                "status": "ready",
                "max_total_num_tokens": total,
                "max_req_input_len": engine.options.context_length - _REQUEST_MARGIN_TOKENS,
                "startup_time": self._startup_time,
                "hicache_object_layout": {
                    "enabled": False,
                    "backend": None,
                    "page_size": engine.options.page_size,
                    "hicache_object_layout": {"pools": []},
                    "reason": "Hierarchical cache is disabled",
                },
                "kv_events": None if publisher is None else publisher.about(options.page_size, options.dp_size),
                "internal_states": [self._internal_state(rank, arguments) for rank in engine.ranks],
                "version": VERSION,
                "frontend": "python",
            }
        )

    def _internal_state(self, rank: Rank, arguments: Mapping[str, Any]) -> dict[str, Any]:
        scheduler_times = {name: value for name, value in self._startup_time.items() if name != "tokenizer_e2e"}
        total = rank.node.pool.total_tokens
        return {
            **{name: value for name, value in arguments.items() if name != "custom_sigquit_handler"},
            "world_size": rank.options.dp_size,
            "startup_time": scheduler_times,
            "effective_max_running_requests_per_dp": rank.node.profile.max_running_requests,
            "last_gen_throughput": rank.tokens_per_s(),
            "memory_usage": {"weight": 0.002, "kvcache": 0.002, "token_capacity": total},
            "decode_cuda_graph_bs": [],
            "decode_cuda_graph_memory_gb": 0.0,
            "disable_chunked_prefix_cache": True,
            "hicache_ratio": 2.0,
            "pp_max_micro_batch_size": rank.node.profile.max_running_requests,
            "disaggregation_decode_retraction_backup": "cpu_tensor",
        }

    async def _model_info(self, request: web.Request) -> web.Response:
        options = self._engine.options
        own = {
            "model_path": options.model,
            "served_model_name": options.model,
            "tokenizer_path": options.model,
            "disaggregation_mode": options.disaggregation_mode,
            "reasoning_parser": options.reasoning_parser or None,
        }
        recorded = _RECORDED["model_info"]
        cache = {**recorded["embedding"]["cache"], "radix_cache_disabled": options.disable_radix_cache}
        return json_response({**recorded, "embedding": {**recorded["embedding"], "cache": cache}, **own})

    async def _metrics(self, request: web.Request) -> web.Response:
        now_s = self._engine.wall_s(self._engine.now_s)
        text = metrics_text([(rank, self._load(rank, now_s)) for rank in self._engine.ranks], self._engine)
        return web.Response(text=text, headers={**wire.PLAIN_HEADERS, "content-type": "text/plain; version=0.0.4"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        idle = not self._engine.live
        if idle:
            for rank in self._engine.ranks:
                rank.node.pool.flush_cache()
                rank.poke()
        text = _FLUSHED if idle else "Flush cache failed.\n"
        reply = web.Response(body=text.encode(), status=200 if idle else 400, headers=wire.PLAIN_HEADERS)
        reply[wire.UNTYPED] = True
        return reply

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request.path, request)
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise BadRequest(wire.one_of_two(request.path, body))
        if messages is not None:
            asked = body.get("add_generation_prompt")
            prompt = chat_text(body) if asked is None else render_chat(messages, body.get("tools"), bool(asked))
        many = isinstance(prompt, list)
        texts = prompt if isinstance(prompt, list) else [prompt]
        tokens = [unpack(encode(str(text))) for text in texts]
        counts = [len(each) for each in tokens]
        return json_response(
            {
                "tokens": tokens if many else tokens[0],
                "count": counts if many else counts[0],
                "max_model_len": self._engine.options.context_length,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request.path, request)
        tokens, skip = body.get("tokens"), body.get("skip_special_tokens", True)
        if not isinstance(tokens, list):
            raise BadRequest(wire.missing_error(request.path, "tokens", body))
        many = bool(tokens) and isinstance(tokens[0], list)
        return json_response({"text": [decode(each, skip) for each in tokens] if many else decode(tokens, skip)})


def _extra_slots(options: Options) -> int:
    """Places for requests whose KV is coming: twice the batch of a small server."""
    per_rank = max(1, options.max_running_requests // options.dp_size)
    return 2 * per_rank if per_rank <= 32 else 0


def metrics_text(loads: Sequence[tuple[Rank, Mapping[str, Any]]], engine: Engine) -> str:
    """The Prometheus page: the gauges and counters a gateway or an operator looks at."""
    role = engine.options.role
    kind = "unified" if role is Role.PLAIN else role.value
    server = f'engine_type="{kind}",model_name="{engine.options.model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    samples: dict[tuple[str, str], list[str]] = {}
    for rank, load in loads:
        labels = server if len(loads) == 1 else f'dp_rank="{rank.number}",{server}'
        for name, value in _rank_gauges(rank, load).items():
            samples.setdefault((name, "gauge"), []).append(f"sglang:{name}{{{labels}}} {float(value)}")
        for name, value in _rank_totals(rank).items():
            samples.setdefault((name, "counter"), []).append(f"sglang:{name}{{{labels}}} {float(value)}")
    for name, value in (
        ("num_requests_total", engine.requests_total),
        ("num_aborted_requests_total", engine.aborted_total),
        ("generation_tokens_total", sum(rank.node.counters.generated_tokens for rank in engine.ranks)),
        ("prompt_tokens_total", engine.prompt_tokens_total),
    ):
        if name == "num_aborted_requests_total" and not value:
            continue  # a labelled counter is not there before it first counts
        samples[name, "counter"] = [f"sglang:{name}{{{server}}} {float(value)}"]
    lines = []
    for (name, metric_type), values in samples.items():
        family = name.removesuffix("_total") if metric_type == "counter" else name
        lines += [f"# TYPE sglang:{family} {metric_type}", *values]
    return "\n".join(lines) + "\n"


def _rank_gauges(rank: Rank, load: Mapping[str, Any]) -> dict[str, float]:
    queues, pool = load["disaggregation"], rank.node.pool
    evictable = pool.cache.evictable_pages * pool.page_size_tokens if pool.cache else 0
    return {
        "num_running_reqs": load["num_running_reqs"],
        "num_queue_reqs": load["queues"]["waiting"],
        "num_retracted_reqs": queues["decode_retracted_queue_reqs"],
        "token_usage": load["token_usage"],
        "num_used_tokens": load["num_used_tokens"],
        "kv_available_tokens": pool.available_tokens - evictable,
        "kv_evictable_tokens": evictable,
        "max_total_num_tokens": load["max_total_num_tokens"],
        "page_size": pool.page_size_tokens,
        "cache_hit_rate": load["cache_hit_rate"],
        "gen_throughput": load["gen_throughput"],
        "num_prefill_bootstrap_queue_reqs": queues["prefill_bootstrap_queue_reqs"],
        "num_prefill_inflight_queue_reqs": queues["prefill_inflight_queue_reqs"],
        "num_decode_prealloc_queue_reqs": queues["decode_prealloc_queue_reqs"],
        "num_decode_transfer_queue_reqs": queues["decode_transfer_queue_reqs"],
    }


def _rank_totals(rank: Rank) -> dict[str, int]:
    counters = rank.node.counters
    return {
        "num_bootstrap_failed_reqs_total": counters.bootstrap_failures,
        "num_transfer_failed_reqs_total": counters.transfer_failures,
    }
