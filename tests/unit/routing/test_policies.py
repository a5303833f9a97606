from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from engines.types import EngineId
from routing.cost import DEFAULT_COST, cost_terms
from routing.pairing import SideLoad, SidePolicy
from routing.policies import POLICIES, SIDE_POLICIES, make_policy
from routing.policies.baselines import LeastCost, PowerOfTwo, RandomPick, RoundRobin, Separate
from routing.policies.cost_based import CostBased
from routing.types import RoutingSnapshot
from tests.unit.routing.fleets import decode, prefill, request, snapshot


def side(*names: str) -> list[SideLoad]:
    return [SideLoad(EngineId(name), float(i), 100 * i, i) for i, name in enumerate(names)]


def fleet() -> RoutingSnapshot:
    return snapshot(
        [prefill(f"p{i}", booked_s=i, booked_uncached_tokens=1000 * i) for i in range(4)],
        [decode(f"d{i}", booked_tokens=1000 * i) for i in range(3)],
    )


def picks(policy: SidePolicy, loads: list[SideLoad], times: int) -> list[str]:
    rng = Random(3)
    return [loads[policy.pick(loads, rng)].engine_id for _ in range(times)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_tells_the_cost_of_what_it_chose(name: str) -> None:
    policy = make_policy(name)
    for seed in range(20):
        choice = policy.choose(request(), fleet(), Random(seed))
        assert choice is not None
        states = {state.view.engine_id: state for state in (*fleet().prefills, *fleet().decodes)}
        p, d = states[choice.best.prefill], states[choice.best.decode]
        assert choice.best.terms == cost_terms(request(), p, d, fleet())  # type: ignore[arg-type]
        assert choice.considered[0] == choice.best


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_chooses_a_blocked_pair(name: str) -> None:
    policy = make_policy(name)
    allowed = (EngineId("p2"), EngineId("d1"))
    blocked = frozenset(
        pair
        for p in fleet().prefills
        for d in fleet().decodes
        if (pair := (p.view.engine_id, d.view.engine_id)) != allowed
    )
    wanted = request(excluded_pairs=blocked)
    for seed in range(10):
        choice = policy.choose(wanted, fleet(), Random(seed))
        assert choice is not None
        assert (choice.best.prefill, choice.best.decode) == allowed
    assert policy.choose(request(excluded_pairs=blocked | {allowed}), fleet(), Random(0)) is None


@pytest.mark.parametrize("name", POLICIES)
def test_the_seed_decides(name: str) -> None:
    assert make_policy(name).choose(request(), fleet(), Random(1)) == make_policy(name).choose(
        request(), fleet(), Random(1)
    )


def test_round_robin_takes_turns() -> None:
    assert picks(RoundRobin(), side("a", "b", "c"), 6) == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_stays_fair_when_the_fleet_changes() -> None:
    policy = RoundRobin()
    assert picks(policy, side("a", "b"), 4) == ["a", "b", "a", "b"]
    assert picks(policy, side("a", "b", "c"), 3) == ["c", "a", "b"]
    assert picks(policy, side("c", "b"), 4) == ["c", "b", "c", "b"]
    assert picks(policy, side("a", "b", "c"), 3) == ["a", "c", "b"], "the one that was away waited longest"


def test_round_robin_forgets_engines_long_gone() -> None:
    policy = RoundRobin()
    for i in range(1000):
        picks(policy, side(f"e{i}"), 1)
    assert len(policy._last_turn) <= 64


def test_power_of_two_never_takes_the_fullest() -> None:
    counts = Counter(picks(PowerOfTwo(), side("a", "b", "c"), 300))
    assert counts["a"] > counts["b"] > 0
    assert "c" not in counts
    assert picks(PowerOfTwo(), side("a"), 1) == ["a"]


def test_random_is_even() -> None:
    assert min(Counter(picks(RandomPick(), side("a", "b", "c"), 300)).values()) > 70


def test_the_least_own_cost_wins_and_equals_share() -> None:
    assert set(picks(LeastCost(), side("a", "b"), 5)) == {"a"}
    equal = [SideLoad(EngineId(name), 1.0, 0, 0) for name in "ab"]
    assert set(picks(LeastCost(), equal, 30)) == {"a", "b"}


def test_a_policy_for_one_side_makes_both_choose_separately() -> None:
    assert isinstance(make_policy(), CostBased)
    assert isinstance(make_policy("cost", decode_policy="round_robin"), Separate)
    policy = make_policy("cost", decode_policy="round_robin")
    chosen = [policy.choose(request(), fleet(), Random(i)) for i in range(3)]
    assert [choice.best.prefill for choice in chosen if choice] == ["p0"] * 3
    assert [choice.best.decode for choice in chosen if choice] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("names", [("best",), ("cost", "best"), ("cost", None, "best")])
def test_an_unknown_name_is_refused_with_those_there_are(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="unknown policy 'best': choose one of cost, round_robin"):
        make_policy(*names)


def test_every_policy_has_its_side() -> None:
    assert set(POLICIES) == set(SIDE_POLICIES)
    assert POLICIES["cost"](DEFAULT_COST) is not None
