"""Hard constraints: which engines may serve a request, and which prefills and decodes may pair. Pure.

Every engine left out carries its reason, in words for an operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields

from engines.types import CacheFormat, EngineFacts, EngineId, EngineView, Health, Role
from routing.types import Dropped, RequestView

AUTO_DTYPE = "auto"
"""The engine resolves its KV dtype itself and does not say to what, so equality proves nothing."""

_Pair = tuple[EngineId, EngineId]


def filter_engines(
    request: RequestView, views: Iterable[EngineView]
) -> tuple[tuple[EngineView, ...], tuple[Dropped, ...]]:
    """The engines that may serve `request`, in order, and the others with the first reason against each."""
    kept = []
    dropped = []
    for view in views:
        reason = objection(request, view)
        if reason is None:
            kept.append(view)
        else:
            dropped.append(Dropped(view.engine_id, reason))
    return tuple(kept), tuple(dropped)


def objection(request: RequestView, view: EngineView) -> str | None:
    """Why `view` may not serve `request`, or None. A server whose restart is suspected has health SUSPECTED."""
    if view.health is not Health.READY:
        return f"health is {view.health}" + (f": {view.reason}" if view.reason else "")
    if view.facts is None:
        return "not probed yet: model and limits are unknown"
    if view.engine_id in request.excluded_engines:
        return "this request has failed on it before"
    if view.facts.model != request.model:
        return f"serves model {view.facts.model}, not {request.model}"
    return _too_long(request, view.facts, view.spec.role)


def _too_long(request: RequestView, facts: EngineFacts, role: Role) -> str | None:
    """Against the context with one token of output; against the pool with all KV this side must hold."""
    if request.prompt_tokens >= facts.context_tokens:
        return f"prompt of {request.prompt_tokens} tokens does not fit its context of {facts.context_tokens}"
    if role is Role.PREFILL and request.prompt_tokens > facts.max_total_tokens:
        return f"prompt of {request.prompt_tokens} tokens does not fit its KV pool of {facts.max_total_tokens}"
    if role is not Role.PREFILL and request.kv_tokens > facts.max_total_tokens:
        return (
            f"prompt of {request.prompt_tokens} + {request.expected_output_tokens} expected output tokens "
            f"do not fit its KV pool of {facts.max_total_tokens}"
        )
    return None


def difference(prefill: EngineFacts, decode: EngineFacts, *, trust_auto: bool = True) -> str | None:
    """The first field by which two servers must not exchange KV, with both values, or None."""
    for name in ("model", "weight_version"):
        if (ours := getattr(prefill, name)) != (theirs := getattr(decode, name)):
            return f"{name} differs: {ours} / {theirs}"
    for name in (field.name for field in fields(CacheFormat)):
        if (ours := getattr(prefill.cache_format, name)) != (theirs := getattr(decode.cache_format, name)):
            return f"{name} differs: {ours} / {theirs}"
    if relies_on_auto(prefill, decode) and not trust_auto:
        return "kv_cache_dtype is auto on both: not proven equal"
    return None


def relies_on_auto(prefill: EngineFacts, decode: EngineFacts) -> bool:
    """Whether the two agree only in that each resolves its KV dtype itself; such a pair is worth a canary."""
    return prefill.cache_format.kv_cache_dtype == AUTO_DTYPE == decode.cache_format.kv_cache_dtype


def incompatible_pairs(
    prefills: Iterable[EngineView], decodes: Iterable[EngineView], *, trust_auto: bool = True
) -> Mapping[_Pair, str]:
    """Every pair that must not be formed, with the field that differs; engines without facts are passed over.

    `trust_auto=False` also keeps apart two servers that both say dtype `auto`, until a canary has passed or the
    operator has labelled them. It compares kinds of servers, not servers: a uniform fleet costs one comparison.
    """
    decode_kinds = _by_kind(decodes)
    reasons: dict[_Pair, str] = {}
    for prefill_group in _by_kind(prefills):
        for decode_group in decode_kinds:
            reason = difference(prefill_group[0][1], decode_group[0][1], trust_auto=trust_auto)
            if reason is not None:
                reasons.update(((p, d), reason) for p, _ in prefill_group for d, _ in decode_group)
    return reasons


def _by_kind(views: Iterable[EngineView]) -> list[list[tuple[EngineId, EngineFacts]]]:
    kinds: defaultdict[tuple[str, str, CacheFormat], list[tuple[EngineId, EngineFacts]]] = defaultdict(list)
    for view in views:
        if (facts := view.facts) is not None:
            kinds[facts.model, facts.weight_version, facts.cache_format].append((view.engine_id, facts))
    return list(kinds.values())
