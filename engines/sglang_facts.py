"""What an SGLang server says of itself, read into our types: facts, boot fingerprint, role, load. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from engines.kv_event_source import kv_event_source
from engines.types import CacheFormat, EngineFacts, EngineLoad, KvEventSource

ROUTE_PROBE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
"""Answers a prefill's topology once all of its ranks have registered, and 503 before."""


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


def facts_of(server_info: Mapping[str, Any], model_info: Mapping[str, Any], ranks: Iterable[str] = ()) -> EngineFacts:
    """What a server says of itself. Raises ValueError naming a field that is missing or of a wrong type."""
    context_tokens = _int(server_info, "max_req_input_len") + 6  # max_req_input_len = context length - 6 (0.5.23)
    chunk_tokens = _int(server_info, "chunked_prefill_size", 8192)
    return EngineFacts(
        model=str(model_info.get("served_model_name") or server_info.get("served_model_name") or ""),
        weight_version=str(model_info.get("weight_version") or ""),
        cache_format=CacheFormat(
            page_size_tokens=_int(server_info, "page_size", 1),
            kv_cache_dtype=str(server_info.get("kv_cache_dtype") or "auto"),
            allocation_policy=str(server_info.get("disaggregation_decode_allocation_policy") or "early"),
            transfer_backend=str(server_info.get("disaggregation_transfer_backend") or ""),
            kv_layout="page_major" if server_info.get("enable_page_major_kv_layout") else "",
        ),
        max_total_tokens=_int(server_info, "max_total_num_tokens"),
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens if chunk_tokens > 0 else context_tokens,  # -1 turns chunking off
        dp_size=max(1, _int(server_info, "dp_size", 1)),
        boot_fingerprint=boot_fingerprint(server_info, ranks),
        version=str(server_info.get("version") or ""),
        max_running_requests=_int(server_info, "max_running_requests", 256),
        radix_cache=_radix_cache(server_info),
        kv_events=_kv_events(server_info),
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
    )


def role_of(server_info: Mapping[str, Any]) -> str:
    """The role a server was started in: `prefill`, `decode`, or `plain`."""
    mode = server_info.get("disaggregation_mode")
    return str(mode) if mode in ("prefill", "decode") else "plain"
