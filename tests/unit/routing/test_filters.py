from __future__ import annotations

from dataclasses import replace

import pytest

from engines.types import EngineId, EngineView, FleetSnapshot, Health, Role
from routing.filters import filter_engines, objection, roles_in_panic
from tests.unit.routing.fleets import FACTS, request, view


@pytest.mark.parametrize("health", [health for health in Health if not health.takes_rooms])
def test_only_ready_engines_are_kept_and_the_reason_names_health(health: Health) -> None:
    kept, dropped = filter_engines(request(), [view("p0", Role.PREFILL, health=health, reason="refused connection")])
    assert not kept
    assert [drop.engine_id for drop in dropped] == ["p0"]
    assert dropped[0].reason == f"health is {health}: refused connection"


def test_a_half_open_server_may_serve_and_a_draining_one_may_not() -> None:
    assert objection(request(), view("p0", Role.PREFILL, health=Health.PROBATION)) is None
    draining = view("p0", Role.PREFILL, draining=True)
    assert objection(request(), draining) == "draining: an operator wants no new rooms on it"


def fleet(decodes: str) -> FleetSnapshot:
    """r: ready, p: on probation, s: slow, d: slow and draining, x: suspected; two prefills are ready."""
    states = {"r": Health.READY, "p": Health.PROBATION, "s": Health.SLOW, "d": Health.SLOW, "x": Health.SUSPECTED}
    views = [view(f"p{number}", Role.PREFILL) for number in range(2)]
    for number, letter in enumerate(decodes):
        views.append(view(f"d{number}", Role.DECODE, health=states[letter], draining=letter == "d"))
    return FleetSnapshot(1, tuple(views))


@pytest.mark.parametrize("decodes", ["ss", "rss", "pss", "ssx", "rrsss", "rssd"])
def test_a_role_is_in_panic_when_the_late_outnumber_the_usable(decodes: str) -> None:
    assert roles_in_panic(fleet(decodes)) == {Role.DECODE}


@pytest.mark.parametrize("decodes", ["", "r", "s", "sx", "rs", "rrss", "rpss", "xxx", "sdd", "rrrrrs"])
def test_and_not_otherwise(decodes: str) -> None:
    assert roles_in_panic(fleet(decodes)) == frozenset()


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


def test_who_failed_as_a_pair_is_avoided_while_there_are_others() -> None:
    p0, p1, d0, d1 = (
        view("p0", Role.PREFILL),
        view("p1", Role.PREFILL),
        view("d0", Role.DECODE),
        view("d1", Role.DECODE),
    )
    once = request(excluded_pairs=frozenset({(p0.engine_id, d0.engine_id)}))
    kept, dropped = filter_engines(once, (p0, p1, d0, d1))
    assert kept == (p1, d1)
    assert [each.reason for each in dropped] == ["this request has failed on a pair with it before"] * 2
    assert filter_engines(once, (p0, d0, d1))[0] == (p0, d1), "the only prefill may not be what failed"
    twice = replace(once, excluded_pairs=once.excluded_pairs | {(p1.engine_id, d1.engine_id)})
    assert filter_engines(twice, (p0, p1, d0, d1))[0] == (p0, p1, d0, d1), "the other pairs are left"
