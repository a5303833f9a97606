"""Which pairs may exchange KV: every rule by itself, with both values and what to change in its reason."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from engines.types import EngineFacts, Parallelism, Role
from routing.compatibility import Fit, Match, apart, match, pairs_apart
from tests.unit.routing.fleets import FACTS, FORMAT, view


def auto(resolved: str = "auto", **changes: Any) -> EngineFacts:
    """A server that was told no KV dtype."""
    basis = {"model_dtype": "bfloat16", "device": "cuda", "version": "0.5.23", **changes}
    cache_format = replace(FORMAT, kv_cache_dtype=resolved)
    return replace(FACTS, cache_format=cache_format, auto_kv_dtype=True, **basis)


def named(dtype: str) -> EngineFacts:
    return replace(auto(dtype), auto_kv_dtype=False)


def split(**ranks: int) -> EngineFacts:
    return replace(FACTS, parallelism=Parallelism(**ranks))


def test_two_alike_fit() -> None:
    assert match(FACTS, FACTS) == Match(Fit.FITS)
    assert match(FACTS, FACTS).may_pair


@pytest.mark.parametrize(
    ("name", "mend"), [("model", "--served-model-name"), ("weight_version", "/update_weight_version")]
)
def test_a_differing_fact_is_refused_with_both_values(name: str, mend: str) -> None:
    found = match(FACTS, replace(FACTS, **{name: "x"}))
    assert found == Match(Fit.REFUSED, f"{name} differs: {getattr(FACTS, name)} / x ({mend})")
    assert not found.may_pair


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("page_size_tokens", "--page-size"),
        ("kv_cache_dtype", "--kv-cache-dtype"),
        ("allocation_policy", "--disaggregation-decode-allocation-policy"),
        ("transfer_backend", "--disaggregation-transfer-backend"),
        ("kv_layout", "--enable-page-major-kv-layout"),
    ],
)
def test_every_field_of_the_format_is_compared(name: str, mend: str) -> None:
    other = replace(FACTS, cache_format=replace(FORMAT, **{name: 64 if name == "page_size_tokens" else "x"}))
    found = match(FACTS, other)
    assert found.fit is Fit.REFUSED
    assert found.reason.startswith(
        f"{name} differs: {getattr(FORMAT, name)} / {getattr(other.cache_format, name)} ({mend}"
    )


def test_no_field_of_the_format_is_forgotten() -> None:
    for field in fields(FORMAT):
        other = replace(FORMAT, **{field.name: 64 if field.type == "int" else "x"})
        assert match(FACTS, replace(FACTS, cache_format=other)).fit is Fit.REFUSED, field.name


# ---- the KV dtype ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "fit", "said"),
    [
        (auto(), auto(), Fit.FITS, ""),
        (auto("fp8_e4m3"), auto(), Fit.FITS, ""),  # its checkpoint says so, and the decode's is the same
        (auto("fp8_e4m3"), named("fp8_e4m3"), Fit.FITS, ""),
        (named("bfloat16"), named("bfloat16"), Fit.FITS, ""),
        (named("bf16"), named("bfloat16"), Fit.REFUSED, "kv_cache_dtype differs: bf16 / bfloat16"),
        (auto(), named("bfloat16"), Fit.REFUSED, "kv_cache_dtype differs: auto / bfloat16"),
        (named("bfloat16"), auto(), Fit.REFUSED, "kv_cache_dtype differs: bfloat16 / auto"),
        (named("fp8_e4m3"), auto(), Fit.UNPROVEN, "kv_cache_dtype is fp8_e4m3 / auto"),
        (auto(), auto(model_dtype="float16"), Fit.REFUSED, "model_dtype differs: bfloat16 / float16 (--dtype)"),
        (auto(), auto(model_dtype="auto"), Fit.UNPROVEN, "model_dtype differs: bfloat16 / auto"),
        (auto(model_dtype="auto"), auto(model_dtype="auto"), Fit.FITS, ""),
        (auto(), auto(quantization="fp8"), Fit.UNPROVEN, "quantization differs: None / fp8"),
        (auto(), auto(device="cpu"), Fit.UNPROVEN, "device differs: cuda / cpu"),
        (auto(), auto(version="0.5.22"), Fit.NOTED, "version differs: 0.5.23 / 0.5.22"),
        (auto(), auto(version="9", version_known=False), Fit.UNPROVEN, "0.5.23 / 9, of which one is unknown"),
        (auto(version="9", version_known=False), auto(version="9", version_known=False), Fit.FITS, ""),
    ],
)
def test_the_kv_dtype(prefill: EngineFacts, decode: EngineFacts, fit: Fit, said: str) -> None:
    found = match(prefill, decode)
    assert found.fit is fit, found
    assert said in found.reason
    assert bool(found.reason) is bool(said)


def test_a_model_dtype_counts_only_where_kv_follows_it() -> None:
    assert match(named("bfloat16"), replace(named("bfloat16"), model_dtype="float16")).fit is Fit.FITS


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (split(attn_tp=8), split(attn_tp=2), ""),
        (split(attn_tp=2), split(attn_tp=8), ""),
        (split(attn_tp=3), split(attn_tp=2), "do not divide: 3 / 2"),
        (split(attn_tp=2), split(attn_tp=3), "do not divide: 2 / 3"),
        (split(attn_cp=4), split(), ""),
        (split(), split(attn_cp=2), "--attn-cp-size is 2, not 1"),
        (split(pp=4), split(pp=1), ""),
        (split(pp=4), split(pp=4), ""),
        (split(pp=4), split(pp=2), "pipeline ranks differ: 4 / 2"),
        (split(pp=1), split(pp=2), "pipeline ranks differ: 1 / 2"),
        (split(attn_cp=1), split(dcp=2), ""),
        (split(attn_cp=2), split(dcp=2), "--dcp-size 2 needs a prefill with --attn-cp-size 1, not 2"),
    ],
)
def test_ranks_of_a_decode_must_find_theirs(prefill: EngineFacts, decode: EngineFacts, said: str) -> None:
    found = match(prefill, decode)
    assert found.fit is (Fit.REFUSED if said else Fit.FITS)
    assert said in found.reason


@pytest.mark.parametrize("ranks", [{"attn_tp": 2}, {"attn_cp": 2}, {"pp": 2}])
def test_a_late_allocation_needs_a_prefill_of_one_rank(ranks: dict[str, int]) -> None:
    late = replace(FORMAT, allocation_policy="prefill_complete")
    one = replace(FACTS, cache_format=late)
    assert match(one, one).fit is Fit.FITS
    found = match(replace(one, parallelism=Parallelism(**ranks)), one)
    assert found.fit is Fit.REFUSED
    assert "needs a prefill of one rank" in found.reason
    early = match(split(**ranks), FACTS)
    assert early.fit is Fit.FITS


# ---- versions --------------------------------------------------------------------------------------------------------

NEW = replace(FACTS, version="0.5.23", handshake_fields=frozenset({"page_size", "kv_layout"}))
OLD = replace(FACTS, version="0.5.22", handshake_fields=frozenset({"page_size"}))


def test_a_decode_that_cannot_read_its_prefill_is_refused() -> None:
    found = match(NEW, OLD)
    assert found.fit is Fit.REFUSED
    assert "0.5.23 / 0.5.22, and the prefill tells kv_layout," in found.reason
    assert "upgrade decodes before prefills" in found.reason


def test_a_newer_decode_reads_an_older_prefill() -> None:
    assert match(OLD, NEW) == Match(Fit.NOTED, "version differs: 0.5.22 / 0.5.23")
    assert match(OLD, NEW).may_pair


def test_two_of_one_version_understand_each_other() -> None:
    assert match(NEW, replace(OLD, version=NEW.version)).fit is Fit.FITS
    assert match(NEW, replace(OLD, handshake_fields=frozenset())).fit is Fit.NOTED, "what it reads is not known"


def test_all_notes_are_told_at_once() -> None:
    found = match(OLD, replace(NEW, sampling_defaults="openai", deterministic=True))
    assert found.fit is Fit.NOTED
    for said in ("version differs", "sampling_defaults differs: ", "--enable-deterministic-inference"):
        assert said in found.reason


def test_a_refusal_comes_before_a_doubt_and_a_doubt_before_a_note() -> None:
    doubtful = auto(quantization="fp8", sampling_defaults="openai")
    assert match(auto(), doubtful).fit is Fit.UNPROVEN
    assert match(auto(), replace(doubtful, model="x")).fit is Fit.REFUSED


# ---- many ------------------------------------------------------------------------------------------------------------


def test_servers_are_kept_apart_kind_by_kind() -> None:
    odd = replace(FACTS, cache_format=replace(FORMAT, page_size_tokens=64))
    prefills = [view("p0", Role.PREFILL), view("p1", Role.PREFILL, facts=odd), view("p2", Role.PREFILL, facts=None)]
    decodes = [view("d0", Role.DECODE), view("d1", Role.DECODE)]
    (found,) = apart(prefills, decodes)
    assert (found.match.fit, found.prefills, found.decodes) == (Fit.REFUSED, ("p1",), ("d0", "d1"))
    assert found.match.reason.startswith("page_size_tokens differs: 64 / 1")
    assert pairs_apart([found]) == {("p1", "d0"): found.match, ("p1", "d1"): found.match}
    assert apart(prefills[:1], decodes) == []


def test_pairs_worth_a_word_are_not_kept_apart() -> None:
    assert apart([view("p0", Role.PREFILL, facts=OLD)], [view("d0", Role.DECODE, facts=NEW)]) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "x"},
        {"weight_version": "x"},
        {"cache_format": replace(FORMAT, page_size_tokens=64)},
        {"parallelism": Parallelism(attn_cp=2)},
        {"auto_kv_dtype": True},
        {"version": "0.5.20", "handshake_fields": frozenset({"less"})},
    ],
)
def test_unlike_decodes_are_looked_at_one_by_one(changed: dict[str, Any]) -> None:
    """What the comparison reads and the grouping forgot would let the second decode pass for the first."""
    prefill = replace(NEW, cache_format=replace(FORMAT, kv_cache_dtype="bfloat16"))
    good = view("d0", Role.DECODE, facts=prefill)
    bad = view("d1", Role.DECODE, facts=replace(prefill, **changed))
    (found,) = apart([view("p0", Role.PREFILL, facts=prefill)], [good, bad])
    assert found.decodes == ("d1",)


def test_prefills_of_one_version_that_tell_unlike_things_are_looked_at_one_by_one() -> None:
    prefills = [
        view("p0", Role.PREFILL, facts=replace(NEW, handshake_fields=OLD.handshake_fields)),
        view("p1", Role.PREFILL, facts=NEW),
    ]
    (found,) = apart(prefills, [view("d0", Role.DECODE, facts=OLD)])
    assert found.prefills == ("p1",)


@pytest.mark.parametrize("changed", [{"model_dtype": "float16"}, {"quantization": "fp8"}, {"device": "cpu"}])
def test_unlike_autos_are_looked_at_one_by_one(changed: dict[str, Any]) -> None:
    decodes = [view("d0", Role.DECODE, facts=auto()), view("d1", Role.DECODE, facts=auto(**changed))]
    (found,) = apart([view("p0", Role.PREFILL, facts=auto())], decodes)
    assert found.decodes == ("d1",)
    unknown = auto(version="9", version_known=False)
    (found,) = apart([view("p0", Role.PREFILL, facts=auto())], [decodes[0], view("d2", Role.DECODE, facts=unknown)])
    assert found.decodes == ("d2",)
