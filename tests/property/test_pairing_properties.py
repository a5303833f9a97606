"""`best_pair` is the brute-force minimum of `cost_terms` over all allowed pairs, whatever the fleet."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from routing.cost import DEFAULT_COST, cost_terms
from routing.pairing import best_pair, fastest_links
from routing.types import RequestView, RoutingSnapshot
from tests.unit.routing.fleets import random_fleet, random_request


def all_totals(request: RequestView, fleet: RoutingSnapshot) -> dict[tuple[str, str], float]:
    blocked = request.excluded_pairs | fleet.incompatible
    return {
        pair: cost_terms(request, p, d, fleet).total_s
        for p in fleet.prefills
        for d in fleet.decodes
        if (pair := (p.view.engine_id, d.view.engine_id)) not in blocked
    }


def check_fleet(seed: int) -> None:
    rng = Random(seed)
    fleet = random_fleet(rng)
    request = random_request(rng, fleet)
    totals = all_totals(request, fleet)
    choice = best_pair(request, fleet, DEFAULT_COST, rng)
    if choice is None:
        assert not totals, f"seed {seed}"
        return
    assert choice.best.terms.total_s == pytest.approx(min(totals.values()), abs=1e-9), f"seed {seed}"
    assert choice.considered[0] == choice.best
    assert len(choice.considered) <= 16
    seen = [candidate.terms.total_s for candidate in choice.considered]
    assert seen == pytest.approx(sorted(seen), abs=1e-9), f"seed {seed}"
    pairs = [(candidate.prefill, candidate.decode) for candidate in choice.considered]
    assert len(set(pairs)) == len(pairs)
    for candidate, pair in zip(choice.considered, pairs, strict=True):
        assert candidate.terms.total_s == pytest.approx(totals[pair], abs=1e-9), f"seed {seed}"


@pytest.mark.parametrize("first_seed", range(0, 500, 50))
def test_best_pair_is_the_brute_force_minimum(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        check_fleet(seed)


@pytest.mark.long
def test_best_pair_is_the_brute_force_minimum_of_ten_thousand_fleets() -> None:
    for seed in range(10_000):
        check_fleet(seed)


@pytest.mark.parametrize("seed", range(50))
def test_the_order_of_engines_changes_nothing(seed: int) -> None:
    rng = Random(seed)
    fleet = random_fleet(rng)
    request = random_request(rng, fleet)
    shuffled = replace(
        fleet,
        prefills=tuple(rng.sample(fleet.prefills, len(fleet.prefills))),
        decodes=tuple(rng.sample(fleet.decodes, len(fleet.decodes))),
    )
    one = best_pair(request, fleet, DEFAULT_COST, Random(1))
    other = best_pair(request, shuffled, DEFAULT_COST, Random(2))
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.best.terms.total_s == pytest.approx(other.best.terms.total_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(50))
def test_kept_link_bounds_give_the_same_choice(seed: int) -> None:
    rng = Random(seed)
    fleet = random_fleet(rng)
    request = random_request(rng, fleet)
    kept = replace(fleet, link_bounds=fastest_links(fleet))
    assert best_pair(request, fleet, DEFAULT_COST, Random(1)) == best_pair(request, kept, DEFAULT_COST, Random(1))
