"""Which prefills and decodes may exchange KV, and why not. Pure.

SGLang compares little itself, and late: a decode that is given a prefill with another page size or KV dtype dies at
its first request, one that cannot read what the prefill tells of itself fails every request, and two dtypes that are
both called `auto` give wrong text. Reasons name both values, prefill first, and what to change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engines.types import CacheFormat, EngineFacts, EngineId, EngineView

AUTO = "auto"
_CHECKPOINT_DTYPE = "fp8_e4m3"
"""The only KV dtype that `auto` becomes by the checkpoint, other than the model's own."""

Pair = tuple[EngineId, EngineId]


class Fit(StrEnum):
    """Whether two servers may be paired."""

    FITS = "fits"
    NOTED = "noted"
    """They are paired, and something about it is worth a word."""
    UNPROVEN = "unproven"
    """They are not paired: nothing that they tell proves that they store KV alike."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Match:
    """What is to be said of a pair; the reasons are for an operator."""

    fit: Fit
    reason: str = ""

    @property
    def may_pair(self) -> bool:
        return self.fit in (Fit.FITS, Fit.NOTED)


@dataclass(frozen=True, slots=True)
class Apart:
    """Prefills and decodes none of which may be paired with one of the others, for one reason."""

    match: Match
    prefills: tuple[EngineId, ...]
    decodes: tuple[EngineId, ...]


def match(prefill: EngineFacts, decode: EngineFacts) -> Match:
    """Whether the two may be paired: the first reason to refuse them, else the first doubt, else all notes."""
    for refusal in _refusals(prefill, decode):
        return Match(Fit.REFUSED, refusal)
    if doubt := _dtype_doubt(prefill, decode):
        return Match(Fit.UNPROVEN, doubt)
    notes = "; ".join(_notes(prefill, decode))
    return Match(Fit.NOTED, notes) if notes else Match(Fit.FITS)


def apart(prefills: Iterable[EngineView], decodes: Iterable[EngineView]) -> list[Apart]:
    """All that must not be paired. Engines without facts are passed over.

    It compares kinds of servers, not servers: a uniform fleet costs one comparison.
    """
    decode_kinds = _by_kind(decodes)
    found = []
    for prefill_facts, prefill_ids in _by_kind(prefills):
        for decode_facts, decode_ids in decode_kinds:
            verdict = match(prefill_facts, decode_facts)
            if not verdict.may_pair:
                found.append(Apart(verdict, prefill_ids, decode_ids))
    return found


def pairs_apart(found: Iterable[Apart]) -> Mapping[Pair, Match]:
    """`apart`, pair by pair."""
    return {(p, d): each.match for each in found for p in each.prefills for d in each.decodes}


def _by_kind(views: Iterable[EngineView]) -> list[tuple[EngineFacts, tuple[EngineId, ...]]]:
    kinds: defaultdict[tuple[Any, ...], list[EngineView]] = defaultdict(list)
    for view in views:
        if view.facts is not None:
            kinds[_kind(view.facts)].append(view)
    return [
        (alike[0].facts, tuple(view.engine_id for view in alike))
        for alike in kinds.values()
        if alike[0].facts is not None
    ]


def _kind(facts: EngineFacts) -> tuple[Any, ...]:
    """All that `match` reads; whether a version is known follows from it."""
    return (
        facts.model,
        facts.weight_version,
        facts.cache_format,
        facts.auto_kv_dtype,
        facts.model_dtype,
        facts.quantization,
        facts.device,
        facts.parallelism,
        facts.version,
        facts.handshake_fields,
        facts.sampling_defaults,
        facts.deterministic,
    )


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refusals(prefill: EngineFacts, decode: EngineFacts) -> Iterator[str]:
    if prefill.model != decode.model:
        yield _differs("model", prefill.model, decode.model, "--served-model-name")
    if prefill.weight_version != decode.weight_version:
        yield _differs("weight_version", prefill.weight_version, decode.weight_version, "/update_weight_version")
    yield from _format_refusals(prefill.cache_format, decode.cache_format)
    yield from _dtype_refusals(prefill, decode)
    yield from _split_refusals(prefill, decode)
    yield from _handshake_refusals(prefill, decode)


def _format_refusals(ours: CacheFormat, theirs: CacheFormat) -> Iterator[str]:
    for name, mend in (
        ("page_size_tokens", "--page-size"),
        ("allocation_policy", "--disaggregation-decode-allocation-policy"),
        ("transfer_backend", "--disaggregation-transfer-backend"),
        ("kv_layout", "--enable-page-major-kv-layout, --dsv4-attn-backend"),
    ):
        if (one := getattr(ours, name)) != (other := getattr(theirs, name)):
            yield _differs(name, one, other, mend)


def _dtype_refusals(prefill: EngineFacts, decode: EngineFacts) -> Iterator[str]:
    """A decode compares what the prefill resolved its KV dtype to with its own, of which it tells nothing."""
    ours, theirs = prefill.cache_format.kv_cache_dtype, decode.cache_format.kv_cache_dtype
    if not decode.auto_kv_dtype:
        if ours != theirs:
            yield _differs("kv_cache_dtype", ours, theirs, "--kv-cache-dtype")
    elif not prefill.auto_kv_dtype:
        if ours != _CHECKPOINT_DTYPE:
            yield _differs("kv_cache_dtype", ours, theirs, "--kv-cache-dtype")
    elif prefill.model_dtype != decode.model_dtype and AUTO not in (prefill.model_dtype, decode.model_dtype):
        dtypes = _differs("model_dtype", prefill.model_dtype, decode.model_dtype, "--dtype")
        yield f"{dtypes}, and their KV is stored in it (kv_cache_dtype is auto)"


def _split_refusals(prefill: EngineFacts, decode: EngineFacts) -> Iterator[str]:
    """How a decode finds its counterparts among the ranks of a prefill; where it finds none it dies."""
    ours, theirs = prefill.parallelism, decode.parallelism
    larger, smaller = max(ours.attn_tp, theirs.attn_tp), min(ours.attn_tp, theirs.attn_tp)
    if larger % smaller:
        yield f"attention ranks do not divide: {ours.attn_tp} / {theirs.attn_tp} (--tp-size, --dp-size)"
    if theirs.attn_cp != 1:
        yield f"a decode splits no context: its --attn-cp-size is {theirs.attn_cp}, not 1"
    if theirs.pp not in (1, ours.pp):
        yield f"pipeline ranks differ: {ours.pp} / {theirs.pp} (--pp-size of a decode is 1, or as the prefill's)"
    if theirs.dcp > 1 and ours.attn_cp != 1:
        yield f"a decode with --dcp-size {theirs.dcp} needs a prefill with --attn-cp-size 1, not {ours.attn_cp}"
    if decode.cache_format.allocation_policy == "prefill_complete" and (ours.attn_tp, ours.attn_cp, ours.pp) != (
        1,
        1,
        1,
    ):
        yield (
            "--disaggregation-decode-allocation-policy prefill_complete needs a prefill of one rank, not of "
            f"{ours.attn_tp} tensor, {ours.attn_cp} context and {ours.pp} pipeline ranks"
        )


def _handshake_refusals(prefill: EngineFacts, decode: EngineFacts) -> Iterator[str]:
    """Two of one version understand each other, whatever it is."""
    if prefill.version == decode.version or not decode.handshake_fields:
        return
    if unread := prefill.handshake_fields - decode.handshake_fields:
        yield (
            f"version differs: {prefill.version} / {decode.version}, and the prefill tells "
            f"{', '.join(sorted(unread))}, which such a decode cannot read (upgrade decodes before prefills)"
        )


# ---- doubts and notes ------------------------------------------------------------------------------------------------


def _dtype_doubt(prefill: EngineFacts, decode: EngineFacts) -> str:
    """Why two servers that resolve their KV dtype themselves may come to different ones; "" where they cannot."""
    if not decode.auto_kv_dtype:
        return ""
    if not prefill.auto_kv_dtype:
        return f"kv_cache_dtype is {_CHECKPOINT_DTYPE} / {AUTO}: {_NOT_TOLD}"
    for name in ("model_dtype", "quantization", "device"):
        if (ours := getattr(prefill, name)) != (theirs := getattr(decode, name)):
            return (
                f"kv_cache_dtype is {AUTO} on both, and {name} differs: {ours or None} / {theirs or None}: {_NOT_TOLD}"
            )
    if prefill.version != decode.version and not (prefill.version_known and decode.version_known):
        versions = f"{prefill.version} / {decode.version}"
        return (
            f"kv_cache_dtype is {AUTO} on both, and version differs: {versions}, of which one is unknown: {_NOT_TOLD}"
        )
    return ""


_NOT_TOLD = "what a decode makes of auto it does not tell (name --kv-cache-dtype on both)"


def _notes(prefill: EngineFacts, decode: EngineFacts) -> Iterator[str]:
    if prefill.version != decode.version:
        yield f"version differs: {prefill.version} / {decode.version}"
    if prefill.sampling_defaults != decode.sampling_defaults:
        how = _differs("sampling_defaults", prefill.sampling_defaults, decode.sampling_defaults, "--sampling-defaults")
        yield f"{how}: the first token is sampled by other rules than the rest"
    if prefill.deterministic != decode.deterministic:
        yield "only one of them is started with --enable-deterministic-inference"


def _differs(name: str, ours: object, theirs: object, mend: str) -> str:
    return f"{name} differs: {ours} / {theirs} ({mend})"
