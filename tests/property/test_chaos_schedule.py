"""Any scenario has one schedule for each seed and form, in order, within its load, of targets that it means."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario
from failover.chaos.schedule import matching, names, planned, proxied

TARGETS = ("prefill0", "prefill*", "all prefill", "decode?", "all decode*", "*", "all gateway", "gateway*>*", "all *>*")
SECONDS = st.floats(0.0, 30.0)
FAULTS = st.builds(
    FaultPlan,
    fault=st.sampled_from(["kill", "freeze"]),
    target=st.sampled_from(TARGETS),
    at_s=SECONDS,
    jitter_s=st.floats(0.0, 5.0),
    for_s=st.none() | st.tuples(SECONDS, SECONDS),
    every_s=st.none() | st.floats(0.5, 20.0),
    phase=st.sampled_from(["", "token:3"]),
    params=st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
)
SCENARIOS = st.builds(
    Scenario,
    name=st.sampled_from(["one", "other"]),
    about=st.just("a"),
    proves=st.just("b"),
    fleet=st.builds(FleetPlan, prefills=st.integers(1, 4), decodes=st.integers(1, 4), gateways=st.integers(1, 3)),
    load=st.builds(LoadPlan, duration_s=st.tuples(st.floats(1.0, 10.0), st.floats(10.0, 40.0))),
    faults=st.lists(FAULTS, max_size=4).map(tuple),
)
SEEDS = st.integers(-(2**63), 2**63)


@given(SCENARIOS, SEEDS, st.booleans())
def test_the_same_again(scenario: Scenario, seed: int, long: bool) -> None:
    assert planned(scenario, seed, long=long) == planned(scenario, seed, long=long)


@given(SCENARIOS, SEEDS, st.booleans())
def test_in_order_and_within_the_load(scenario: Scenario, seed: int, long: bool) -> None:
    schedule = planned(scenario, seed, long=long)
    assert [each.number for each in schedule] == list(range(len(schedule)))
    times = [each.at_s for each in schedule]
    assert times == sorted(times)
    assert all(0 <= at_s < scenario.load.duration_s[long] for at_s in times)


@given(SCENARIOS, SEEDS, st.booleans())
def test_each_is_one_of_the_scenarios_faults(scenario: Scenario, seed: int, long: bool) -> None:
    schedule = planned(scenario, seed, long=long)
    for each in schedule:
        assert any(_comes_from(each.target, fault, scenario.fleet) for fault in scenario.faults)
        assert each.target in names(scenario.fleet)
        assert any(
            (each.fault, each.phase, each.params, each.for_s)
            == (fault.fault, fault.phase, fault.params, fault.for_s and fault.for_s[long])
            for fault in scenario.faults
        )
    assert {each.target for each in schedule if ">" in each.target} == set(proxied(scenario, schedule))


def _comes_from(target: str, fault: FaultPlan, fleet: FleetPlan) -> bool:
    return target in matching(fault.target, fleet)


@given(FAULTS, SEEDS, st.booleans())
def test_as_often_as_it_says(fault: FaultPlan, seed: int, long: bool) -> None:
    """Once, or at each multiple of `every_s` within the load; jitter may move one beyond its end."""
    scenario = Scenario("one", "a", "b", faults=(fault,))
    load_s = scenario.load.duration_s[long]
    every_s = fault.every_s or load_s
    bases = [base_s for base_s in (fault.at_s + at * every_s for at in range(200)) if base_s < load_s]
    bases = bases if fault.every_s else bases[:1]
    members = len(matching(fault.target, scenario.fleet)) if fault.target.startswith("all ") else 1
    got = [each.at_s for each in planned(scenario, seed, long=long)]
    sure = sum(base_s + fault.jitter_s + 0.001 < load_s for base_s in bases)
    assert sure * members <= len(got) <= len(bases) * members
    assert len(got) % members == 0
    for at_s in got:
        assert any(base_s - 0.001 <= at_s <= base_s + fault.jitter_s + 0.001 for base_s in bases)
