"""Token counts and lists that the engine tells of its part of a stream, put right for the whole of it. Pure.

The prompt of an attempt that continues ends with output of earlier attempts: it counts as output again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

OUTPUT_LISTS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)
"""Lists of `meta_info` with a row for each output token (`_INCREMENTAL_STREAMING_META_INFO_KEYS` of SGLang), of those
that a stream which is continued may have."""


def usage_over_seam(usage: Mapping[str, Any], carried_tokens: int) -> Json:
    """The `usage` of an OpenAI answer, `carried_tokens` of whose prompt are output of the attempts before."""
    prompt_tokens = usage["prompt_tokens"] - carried_tokens
    completion_tokens = (usage.get("completion_tokens") or 0) + carried_tokens
    joined = {
        **usage,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        cached_tokens = min(details["cached_tokens"], prompt_tokens)
        joined["prompt_tokens_details"] = {**details, "cached_tokens": cached_tokens}
    return joined


def new_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The `usage` of an answer whose engine told none; cached tokens are not known."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def without_nulls(usage: Mapping[str, Any]) -> Json:
    """A usage as `/v1/completions` ends with: without what is null."""
    return {name: value for name, value in usage.items() if value is not None}


def meta_over_seam(meta: Mapping[str, Any], earlier: Mapping[str, Any], carried_tokens: int, *, join: bool) -> Json:
    """The `meta_info` of `/generate`, `earlier` being the last of the attempts before.

    `join`: its lists are to hold all output tokens, not those of this event alone.
    """
    joined = dict(meta)
    prompt_tokens = meta["prompt_tokens"] - carried_tokens
    joined["prompt_tokens"] = prompt_tokens
    joined["completion_tokens"] = (meta.get("completion_tokens") or 0) + carried_tokens
    if isinstance(meta.get("cached_tokens"), int):
        joined["cached_tokens"] = min(meta["cached_tokens"], prompt_tokens)
    if isinstance(details := meta.get("cached_tokens_details"), dict):
        joined["cached_tokens_details"] = _at_most(details, prompt_tokens)
    if isinstance(meta.get("output_token_logprobs_length"), int):
        joined["output_token_logprobs_length"] = meta["output_token_logprobs_length"] + carried_tokens
    for name in OUTPUT_LISTS if join else ():
        if isinstance(meta.get(name), list) and isinstance(earlier.get(name), list):
            joined[name] = [*earlier[name], *meta[name]]
    if isinstance(spans := meta.get("weight_versions"), list):
        joined["weight_versions"] = _spans(spans, earlier.get("weight_version"), carried_tokens)
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and isinstance(finish.get("length"), int):
        joined["finish_reason"] = {**finish, "length": finish["length"] + carried_tokens}
    return joined


def _at_most(details: Mapping[str, Any], tokens: int) -> Json:
    """Cached tokens by medium, no more than `tokens` together: the end of a prompt is not cached twice."""
    left, kept = tokens, {}
    for medium, count in details.items():
        kept[medium] = min(count, left) if type(count) is int else count
        left -= kept[medium] if type(count) is int else 0
    return kept


def _spans(spans: list[Any], earlier_version: Any, carried_tokens: int) -> list[Json]:
    """Which weights wrote which output tokens; those of earlier attempts were written by `earlier_version`."""
    moved = [{**span, "start": span["start"] + carried_tokens, "end": span["end"] + carried_tokens} for span in spans]
    if moved and moved[0].get("version") == earlier_version:
        return [{**moved[0], "start": 0}, *moved[1:]]
    return [{"version": earlier_version, "start": 0, "end": carried_tokens}, *moved]
