"""What an SGLang server says of itself, read into our types: facts, boot fingerprint, role, load. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from engines.kv_event_source import kv_event_source
from engines.sglang_versions import is_known, row_of, warning
from engines.types import CacheFormat, ChatFacts, EngineFacts, EngineLoad, KvEventSource, Parallelism, RankLoad, Role

ROUTE_PROBE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
"""Answers a prefill's topology once all of its ranks have registered, and 503 before."""


AUTO = "auto"
_FRONTEND = "python"
REQUEST_MARGIN_TOKENS = 6
"""`max_req_input_len` is so much below the context, or below the KV pool where that is smaller."""


def boot_fingerprint(server_info: Mapping[str, Any], ranks: Iterable[str] = ()) -> str:
    """What changes at every start of a server: its startup durations as text, its seed, its command, its rank ports.

    SGLang publishes no start time; `startup_time` holds durations, whose last digits no two starts share.
    """
    parts = [
        orjson.dumps(server_info.get("startup_time"), option=orjson.OPT_SORT_KEYS),
        str(server_info.get("random_seed")).encode(),
        str(server_info.get("launch_command")).encode(),
        *(rank.encode() for rank in sorted(ranks)),
    ]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def facts_of(
    server_info: Mapping[str, Any],
    model_info: Mapping[str, Any],
    ranks: Iterable[str] = (),
    route: Mapping[str, Any] | None = None,
) -> EngineFacts:
    """What a server says of itself; `route` is a prefill's own answer to ROUTE_PROBE, which decodes compare.

    Raises ValueError naming a field that is missing or of a wrong type, or a version that is too old.
    """
    version = str(server_info.get("version") or "")
    context_tokens = _int(server_info, "max_req_input_len") + REQUEST_MARGIN_TOKENS
    chunk_tokens = _int(server_info, "chunked_prefill_size", 8192)
    return EngineFacts(
        model=str(model_info.get("served_model_name") or server_info.get("served_model_name") or ""),
        weight_version=str(model_info.get("weight_version") or ""),
        cache_format=_cache_format(server_info, route or {}),
        max_total_tokens=_int(server_info, "max_total_num_tokens"),
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens if chunk_tokens > 0 else context_tokens,  # -1 turns chunking off
        dp_size=max(1, _int(server_info, "dp_size", 1)),
        boot_fingerprint=boot_fingerprint(server_info, ranks),
        version=version,
        max_running_requests=_running_limit(server_info),
        radix_cache=_radix_cache(server_info),
        kv_events=_kv_events(server_info),
        version_known=is_known(version),
        frontend=str(server_info.get("frontend") or ""),
        parallelism=_parallelism(server_info),
        auto_kv_dtype=(server_info.get("kv_cache_dtype") or AUTO) == AUTO,
        model_dtype=_model_dtype(server_info),
        quantization=str(server_info.get("quantization") or ""),
        device=str(server_info.get("device") or ""),
        handshake_fields=row_of(version).route_fields if route is None else frozenset(route),
        sampling_defaults=str(server_info.get("sampling_defaults") or ""),
        deterministic=bool(server_info.get("enable_deterministic_inference")),
        cache_report=bool(server_info.get("enable_cache_report")),
        incremental_streaming=bool(server_info.get("incremental_streaming_output")),
        chat=_chat(server_info, model_info),
    )


def _chat(server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> ChatFacts:
    architectures = model_info.get("architectures") or []
    return ChatFacts(
        reasoning_parser=str(server_info.get("reasoning_parser") or ""),
        tool_call_parser=str(server_info.get("tool_call_parser") or ""),
        chat_template=str(server_info.get("chat_template") or ""),
        completion_template=str(server_info.get("completion_template") or ""),
        model_kind=" ".join(map(str, filter(None, [model_info.get("model_type"), *architectures[:1]]))),
        multimodal=bool(model_info.get("has_image_understanding") or model_info.get("has_audio_understanding")),
        tokenizer=not server_info.get("skip_tokenizer_init"),
        tells_ids=bool(server_info.get("return_input_ids") or server_info.get("return_output_ids")),
        template_kwargs=bool(server_info.get("default_chat_template_kwargs")),
    )


def _cache_format(server_info: Mapping[str, Any], route: Mapping[str, Any]) -> CacheFormat:
    """What `/route` says comes first, as decodes compare that with their own. Its KV dtype is FP8 where the checkpoint
    made `auto` so, which nothing else tells."""
    asked_policy = server_info.get("disaggregation_decode_allocation_policy")
    dsv4 = server_info.get("dsv4_attn_backend") or AUTO  # decides how DeepSeek V4 lays out its KV
    layout = ["page_major"] if server_info.get("enable_page_major_kv_layout") else []
    layout += [f"dsv4 {dsv4}"] if dsv4 != AUTO else []
    return CacheFormat(
        page_size_tokens=_int(server_info, "page_size", 1),
        kv_cache_dtype=str(route.get("kv_cache_dtype") or server_info.get("kv_cache_dtype") or AUTO),
        allocation_policy=str(route.get("decode_allocation_policy") or asked_policy or "early"),
        transfer_backend=str(server_info.get("disaggregation_transfer_backend") or ""),
        kv_layout=", ".join(layout),
    )


def _model_dtype(server_info: Mapping[str, Any]) -> str:
    """What it computes in, as its scheduler says: there a GPU without bfloat16 has put float16."""
    return str(_scheduler(server_info).get("dtype") or server_info.get("dtype") or "")


def _running_limit(server_info: Mapping[str, Any]) -> int:
    """Of one DP rank, as its scheduler has worked it out; the argument may be for all of them, or left open."""
    limit = _scheduler(server_info).get("effective_max_running_requests_per_dp")
    return limit if type(limit) is int and limit > 0 else _int(server_info, "max_running_requests", 256)


def _scheduler(server_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the scheduler of the first DP rank says; they are all alike."""
    states = server_info.get("internal_states")
    return states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}


def _parallelism(server_info: Mapping[str, Any]) -> Parallelism:
    """`attn_tp` as SGLang derives it: the tensor ranks, shared between attention's DP and context ranks."""
    context = max(1, _int(server_info, "attn_cp_size", 1))
    sharing = max(1, _int(server_info, "attn_dp_size", 1)) * context
    return Parallelism(
        attn_tp=max(1, _int(server_info, "tp_size", 1) // sharing),
        attn_cp=context,
        pp=max(1, _int(server_info, "pp_size", 1)),
        dcp=max(1, _int(server_info, "dcp_size", 1)),
    )


def _radix_cache(server_info: Mapping[str, Any]) -> bool:
    """A decode keeps no radix cache unless told to."""
    if server_info.get("disaggregation_mode") == "decode":
        return bool(server_info.get("disaggregation_decode_enable_radix_cache"))
    return not server_info.get("disable_radix_cache")


def _kv_events(server_info: Mapping[str, Any]) -> KvEventSource | None:
    """A server whose events cannot be read is served without them."""
    try:
        return kv_event_source(server_info)
    except ValueError:
        return None


def _int(source: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = source.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"server_info.{name} is {value!r}, not an integer")
    return value


def load_of(loads: Mapping[str, Any]) -> EngineLoad | None:
    """One `/v1/loads` answer summed over its DP ranks; None when it has none."""
    ranks = [rank for rank in loads.get("loads") or () if isinstance(rank, dict)]
    if not ranks:
        return None
    ranks.sort(key=lambda rank: int(rank.get("dp_rank") or 0))

    def total(name: str) -> int:
        return sum(int(rank.get(name) or 0) for rank in ranks)

    return EngineLoad(
        taken_s=min(float(rank.get("timestamp") or 0.0) for rank in ranks),
        running_requests=total("num_running_reqs"),
        waiting_requests=total("num_waiting_reqs"),
        waiting_uncached_tokens=total("num_waiting_uncached_tokens"),
        used_tokens=total("num_used_tokens"),
        total_tokens=total("num_total_tokens"),
        max_total_tokens=total("max_total_num_tokens"),
        prefill_uncached_tokens_total=total("total_prefill_uncached_tokens"),
        prefill_busy_us_total=total("total_prefill_busy_us"),
        ranks=tuple(map(_rank_load, ranks)) if len(ranks) > 1 else (),
        decode_steps_total=sum(map(_decode_steps, ranks)),
        waiting_for_peer_requests=sum(map(_waiting_for_peer, ranks)),
    )


_PEER_QUEUES = ("prefill_bootstrap_queue_reqs", "decode_prealloc_queue_reqs", "decode_transfer_queue_reqs")
"""The queues of requests whose next step is the other server's; all are counted in `num_waiting_reqs`."""


def _waiting_for_peer(rank: Mapping[str, Any]) -> int:
    """While a prefill's finished work waits to be fetched, what waits behind it may lack the pages that it holds."""
    queues = rank.get("disaggregation")
    if not isinstance(queues, dict):
        return 0
    if queues.get("prefill_inflight_queue_reqs"):
        return int(rank.get("num_waiting_reqs") or 0)
    return sum(int(queues.get(name) or 0) for name in _PEER_QUEUES)


def _decode_steps(rank: Mapping[str, Any]) -> float:
    """The first of a decode's moment sums: it grows with every step."""
    moments = rank.get("decode_moments")
    return float(moments[0]) if isinstance(moments, list) and moments else 0.0


def _rank_load(rank: Mapping[str, Any]) -> RankLoad:
    names = ("num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens")
    return RankLoad(*(int(rank.get(name) or 0) for name in names))


def role_of(server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> str:
    """What a server plays now: `prefill`, `decode`, or `plain`; a switch at run time shows in `/model_info` only."""
    mode = model_info.get("disaggregation_mode") or server_info.get("disaggregation_mode")
    return str(mode) if mode in ("prefill", "decode") else "plain"


def join_lines(role: Role, facts: EngineFacts) -> tuple[str, tuple[str, ...]]:
    """What to tell of a server that is seen for the first time: what it is, and what an operator could switch on."""
    cache = facts.cache_format
    is_what = (
        f"SGLang {facts.version or '(no version told)'}, model {facts.model}, {facts.max_total_tokens} tokens of KV "
        f"({cache.kv_cache_dtype}, pages of {cache.page_size_tokens}), context {facts.context_tokens}"
    )
    advice = [warning(facts.version)]
    if facts.frontend not in ("", _FRONTEND):
        advice.append(
            f"its {facts.frontend} front end is not tested with pdgate, and refuses suffix, best_of and others"
        )
    if not facts.cache_report:
        advice.append(f"start it with --enable-cache-report: {_WHY_CACHE_REPORT[role]}")
    if role is Role.PREFILL and facts.radix_cache and facts.kv_events is None:
        advice.append(
            "start it with --kv-events-config, and pdgate with --tokenizer-path: else its evictions are guessed"
        )
    return is_what, tuple(line for line in advice if line)


def needs_attention(facts: EngineFacts) -> bool:
    """Whether what `join_lines` tells is a warning, not advice: the server is of a kind that was never tried."""
    return not facts.version_known or facts.frontend not in ("", _FRONTEND)


_WHY_CACHE_REPORT = {
    Role.PREFILL: "else pdgate learns from /generate alone how much of a prompt was cached",
    Role.DECODE: "else clients are not told their cached tokens",
    Role.PLAIN: "else nobody is told cached tokens",
}
