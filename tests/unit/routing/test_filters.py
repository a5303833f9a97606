from __future__ import annotations

from dataclasses import replace

import pytest

from engines.types import EngineId, EngineView, Health, Role
from routing.filters import difference, filter_engines, incompatible_pairs, objection, relies_on_auto
from tests.unit.routing.fleets import FACTS, FORMAT, request, view

AUTO = replace(FACTS, cache_format=replace(FORMAT, kv_cache_dtype="auto"))


@pytest.mark.parametrize("health", [health for health in Health if health is not Health.READY])
def test_only_ready_engines_are_kept_and_the_reason_names_health(health: Health) -> None:
    kept, dropped = filter_engines(request(), [view("p0", Role.PREFILL, health=health, reason="refused connection")])
    assert not kept
    assert [drop.engine_id for drop in dropped] == ["p0"]
    assert dropped[0].reason == f"health is {health}: refused connection"


def test_kept_engines_keep_their_order() -> None:
    views = [view("p1", Role.PREFILL), view("p2", Role.PREFILL, health=Health.UNKNOWN), view("p0", Role.PREFILL)]
    kept, dropped = filter_engines(request(), views)
    assert [kept_view.engine_id for kept_view in kept] == ["p1", "p0"]
    assert dropped[0].reason == "health is unknown"


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        (view("p0", Role.PREFILL, facts=None), "not probed yet: model and limits are unknown"),
        (view("bad", Role.PREFILL), "this request has failed on it before"),
        (view("p0", Role.PREFILL, facts=replace(FACTS, model="x")), "serves model x, not m"),
        (
            view("p0", Role.PREFILL, facts=replace(FACTS, context_tokens=12_000)),
            "prompt of 12000 tokens does not fit its context of 12000",
        ),
        (
            view("p0", Role.PREFILL, facts=replace(FACTS, max_total_tokens=11_999)),
            "prompt of 12000 tokens does not fit its KV pool of 11999",
        ),
        (
            view("d0", Role.DECODE, facts=replace(FACTS, max_total_tokens=12_349)),
            "prompt of 12000 + 350 expected output tokens do not fit its KV pool of 12349",
        ),
    ],
)
def test_every_objection_has_words(subject: EngineView, reason: str) -> None:
    assert objection(request(excluded_engines=frozenset({EngineId("bad")})), subject) == reason


def test_a_prompt_that_just_fits_is_kept() -> None:
    facts = replace(FACTS, max_total_tokens=12_350, context_tokens=12_001)
    assert objection(request(), view("d0", Role.DECODE, facts=facts)) is None
    assert objection(request(), view("p0", Role.PREFILL, facts=replace(facts, max_total_tokens=12_000))) is None


@pytest.mark.parametrize("name", ["model", "weight_version"])
def test_a_differing_fact_is_named(name: str) -> None:
    assert difference(FACTS, replace(FACTS, **{name: "x"})) == f"{name} differs: {getattr(FACTS, name)} / x"


@pytest.mark.parametrize(
    "name", ["page_size_tokens", "kv_cache_dtype", "allocation_policy", "transfer_backend", "kv_layout"]
)
def test_a_differing_format_field_is_named(name: str) -> None:
    other = replace(FACTS, cache_format=replace(FORMAT, **{name: 64 if name == "page_size_tokens" else "x"}))
    reason = difference(FACTS, other)
    assert reason is not None
    assert reason.startswith(f"{name} differs: ")


def test_auto_is_trusted_only_when_told() -> None:
    assert difference(AUTO, AUTO) is None
    assert difference(AUTO, AUTO, trust_auto=False) == "kv_cache_dtype is auto on both: not proven equal"
    assert difference(AUTO, FACTS) == "kv_cache_dtype differs: auto / bf16"
    assert relies_on_auto(AUTO, AUTO)
    assert not relies_on_auto(AUTO, FACTS)


def test_pairs_of_unlike_kinds_are_all_listed() -> None:
    prefills = [view("p0", Role.PREFILL), view("p1", Role.PREFILL, facts=AUTO), view("p2", Role.PREFILL, facts=None)]
    decodes = [view("d0", Role.DECODE), view("d1", Role.DECODE)]
    assert incompatible_pairs(prefills, decodes) == {
        ("p1", "d0"): "kv_cache_dtype differs: auto / bf16",
        ("p1", "d1"): "kv_cache_dtype differs: auto / bf16",
    }
    assert not incompatible_pairs(prefills[:1], decodes)
