from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from engines.timing import LinkTiming
from engines.types import EngineId
from routing.cost import DEFAULT_COST, DecodeSide, PrefillSide, pair_transfer_s
from routing.pairing import best_pair, fastest_links, separate_choice
from routing.policies.baselines import LeastCost
from routing.types import Choice, RequestView, RoutingSnapshot
from tests.unit.routing.fleets import decode, prefill, request, snapshot

SLOW = LinkTiming(1e9, 0.005)
FAST = LinkTiming(100e9, 0.001)


def ids(*pairs: str) -> frozenset[tuple[EngineId, EngineId]]:
    return frozenset((EngineId(p), EngineId(d)) for p, d in (pair.split("-") for pair in pairs))


def choose(fleet: RoutingSnapshot, wanted: RequestView | None = None, seed: int = 0) -> Choice:
    choice = best_pair(wanted or request(), fleet, DEFAULT_COST, Random(seed))
    assert choice is not None
    return choice


def pair_of(choice: Choice) -> str:
    return f"{choice.best.prefill}-{choice.best.decode}"


def fleet(size: int = 3, **fields: object) -> RoutingSnapshot:
    return snapshot([prefill(f"p{i}") for i in range(size)], [decode(f"d{i}") for i in range(size)], **fields)


def test_the_shorter_queue_and_the_emptier_decode_win() -> None:
    busy = snapshot(
        [prefill("p0", booked_s=1.0), prefill("p1")],
        [decode("d0", booked_tokens=300_000, booked_requests=30), decode("d1")],
    )
    assert pair_of(choose(busy)) == "p1-d1"


def test_an_owner_wins_until_its_queue_costs_more_than_the_hit_gains() -> None:
    owner = {"hit_tokens": 11_000}
    assert pair_of(choose(snapshot([prefill("p0"), prefill("p1", booked_s=0.5, **owner)], [decode()]))) == "p1-d0"
    assert pair_of(choose(snapshot([prefill("p0"), prefill("p1", booked_s=5.0, **owner)], [decode()]))) == "p0-d0"


def test_sides_that_look_best_alone_lose_to_a_pair_on_a_fast_link() -> None:
    slow = dict.fromkeys(ids("p0-d0", "p0-d1", "p1-d0"), SLOW)
    racks = snapshot([prefill("p0"), prefill("p1", booked_s=0.2)], [decode("d0"), decode("d1")], links=slow)
    assert pair_of(choose(racks)) == "p1-d1"


def test_blocked_pairs_are_never_chosen_nor_considered() -> None:
    wanted = request(excluded_pairs=ids("p0-d0"))
    choice = choose(fleet(2, incompatible=ids("p1-d1", "p0-d1")), wanted)
    assert [(c.prefill, c.decode) for c in choice.considered] == [("p1", "d0")]


@pytest.mark.parametrize("nothing", [snapshot(), snapshot([prefill()]), snapshot(decodes=[decode()])])
def test_without_a_pair_there_is_no_choice(nothing: RoutingSnapshot) -> None:
    assert best_pair(request(), nothing, DEFAULT_COST, Random(0)) is None
    assert separate_choice(request(), nothing, DEFAULT_COST, Random(0), LeastCost(), LeastCost()) is None


def test_ties_break_by_the_seed_and_evenly() -> None:
    counts = Counter(pair_of(choose(fleet(), seed=seed)) for seed in range(270))
    assert len(counts) == 9
    assert min(counts.values()) > 12
    assert choose(fleet(), seed=7) == choose(fleet(), seed=7)


def test_considered_is_bounded_and_shows_the_neighbours_of_the_best() -> None:
    choice = choose(fleet(12))
    assert len(choice.considered) == 16
    assert {c.prefill for c in choice.considered} > {choice.best.prefill}
    assert {c.decode for c in choice.considered} > {choice.best.decode}
    one = best_pair(request(), fleet(12), DEFAULT_COST, Random(0), limit=1)
    assert one is not None
    assert one.considered == (one.best,)


def test_a_candidate_tells_its_hit() -> None:
    assert choose(snapshot([prefill(hit_tokens=500)], [decode()])).best.hit_tokens == 500


def test_a_prefill_is_bounded_by_its_fastest_link() -> None:
    links = dict.fromkeys(ids("p0-d0", "p0-d1", "p1-d0"), SLOW) | dict.fromkeys(ids("p2-d0"), FAST)
    bounds = fastest_links(fleet(2, links=links))
    assert bounds[EngineId("p0")] == SLOW, "every pair has a slow link of its own"
    assert bounds[EngineId("p1")] == fleet().default_link, "p1-d1 has the default link"
    assert bounds[EngineId("p2")] == FAST


def test_separate_choice_passes_over_prefills_without_a_decode() -> None:
    apart = fleet(2, incompatible=ids("p0-d0", "p0-d1", "p1-d0"))
    choice = separate_choice(request(), apart, DEFAULT_COST, Random(0), LeastCost(), LeastCost())
    assert choice is not None
    assert pair_of(choice) == "p1-d1"
    assert choice.considered == (choice.best,)


@pytest.mark.parametrize("links", [False, True])
def test_few_pairs_are_priced(monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    priced = Counter[str]()

    def counted(wanted: RequestView, p: PrefillSide, d: DecodeSide, among: RoutingSnapshot) -> float:
        priced["pairs"] += 1
        return pair_transfer_s(wanted, p, d, among)

    monkeypatch.setattr("routing.pairing.pair_transfer_s", counted)
    rng = Random(5)
    pairs = [(EngineId(f"p{i}"), EngineId(f"d{j}")) for i in range(40) for j in range(40)]
    own = {pair: LinkTiming(rng.uniform(20e9, 50e9), 0.005) for pair in pairs}
    choose(fleet(40, links=own if links else {}))
    assert priced["pairs"] < 200
