"""Which processes and links a run has, what a target means among them, and when faults come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario
from failover.chaos.schedule import matching, names, planned, proxied

ROOT = Path(__file__).parents[4]
TWO_GATEWAYS = FleetPlan(prefills=2, decodes=1, gateways=2)


def scenario(
    *faults: FaultPlan, fleet: FleetPlan = TWO_GATEWAYS, duration_s: tuple[float, float] = (10, 20)
) -> Scenario:
    return Scenario("some", "a", "b", fleet, LoadPlan(duration_s=duration_s), faults)


def test_a_fleet_has_these_names() -> None:
    assert names(FleetPlan(prefills=1, decodes=1)) == {
        "gateway0": "gateway",
        "prefill0": "prefill",
        "decode0": "decode",
        "client>gateway0": "link",
        "gateway0>prefill0": "link",
        "gateway0>decode0": "link",
        "prefill0>decode0": "link",
    }


@pytest.mark.parametrize(("gateways", "redis", "there"), [(1, False, False), (1, True, True), (2, False, True)])
def test_replicas_share_a_redis(gateways: int, redis: bool, there: bool) -> None:
    found = names(FleetPlan(gateways=gateways, redis=redis))
    assert ("redis" in found) is there
    assert ("gateway0>redis" in found) is there


@pytest.mark.parametrize(
    ("target", "means"),
    [
        ("prefill1", ["prefill1"]),
        ("prefill*", ["prefill0", "prefill1"]),
        ("all prefill*", ["prefill0", "prefill1"]),
        ("all prefill", ["prefill0", "prefill1"]),
        ("all gateway", ["gateway0", "gateway1"]),
        ("redis", ["redis"]),
        ("prefill", []),
        ("prefill2", []),
        ("gateway*>redis", ["gateway0>redis", "gateway1>redis"]),
        ("all client>*", ["client>gateway0", "client>gateway1"]),
        ("prefill*>decode0", ["prefill0>decode0", "prefill1>decode0"]),
        ("gateway0>*", ["gateway0>prefill0", "gateway0>prefill1", "gateway0>decode0", "gateway0>redis"]),
        ("*", ["gateway0", "gateway1", "prefill0", "prefill1", "decode0", "redis"]),
        ("all link", [name for name in names(TWO_GATEWAYS) if ">" in name]),
        ("decode0>prefill0", []),
    ],
)
def test_a_target_means(target: str, means: list[str]) -> None:
    assert list(matching(target, TWO_GATEWAYS)) == means


def test_faults_come_in_order_of_time_and_are_numbered() -> None:
    late, early = FaultPlan("kill", "decode0", at_s=5.0), FaultPlan("freeze", "redis", at_s=2.0, for_s=(1.0, 4.0))
    short, long = (planned(scenario(late, early), 1, long=form) for form in (False, True))
    assert [(each.number, each.fault, each.at_s, each.for_s) for each in short] == [
        (0, "freeze", 2.0, 1.0),
        (1, "kill", 5.0, None),
    ]
    assert [each.for_s for each in long] == [4.0, None]


def test_one_by_chance_and_all() -> None:
    one, every = (planned(scenario(FaultPlan("kill", target)), 1, long=False) for target in ("prefill*", "all prefill"))
    assert len(one) == 1
    assert [each.target for each in every] == ["prefill0", "prefill1"]
    chosen = {planned(scenario(FaultPlan("kill", "prefill*")), seed, long=False)[0].target for seed in range(20)}
    assert chosen == {"prefill0", "prefill1"}


def test_a_fault_comes_again_until_the_load_ends() -> None:
    again = scenario(FaultPlan("kill", "prefill*", at_s=1.0, every_s=3.0))
    assert [each.at_s for each in planned(again, 1, long=False)] == [1.0, 4.0, 7.0]
    assert [each.at_s for each in planned(again, 1, long=True)] == [1.0, 4.0, 7.0, 10.0, 13.0, 16.0, 19.0]


def test_another_fault_changes_nothing_about_the_first() -> None:
    first, other = (FaultPlan("kill", "prefill*", jitter_s=3.0, every_s=2.0), FaultPlan("kill", "gateway*"))
    alone = planned(scenario(first), 5, long=True)
    both = planned(scenario(first, other), 5, long=True)
    assert [(each.target, each.at_s) for each in alone] == [
        (each.target, each.at_s) for each in both if each.target.startswith("prefill")
    ]


def test_jitter_spreads_a_fault_over_its_time() -> None:
    spread = scenario(FaultPlan("kill", "gateway0", at_s=1.0, jitter_s=4.0))
    times = [planned(spread, seed, long=False)[0].at_s for seed in range(100)]
    assert 1.0 <= min(times) < 1.5
    assert 4.5 < max(times) <= 5.0


def test_each_fault_has_its_own_chance() -> None:
    late = FaultPlan("kill", "gateway0", jitter_s=5.0)
    first, second = planned(scenario(late, late), 5, long=True)
    assert first.at_s != second.at_s
    other = Scenario("other", "a", "b", TWO_GATEWAYS, LoadPlan(), (late,))
    assert planned(other, 5, long=True)[0].at_s not in (first.at_s, second.at_s)


def test_links_of_faults_and_those_that_are_named_get_a_proxy() -> None:
    cut = scenario(FaultPlan("cut", "gateway1>redis"), FaultPlan("kill", "redis"))
    faults = planned(cut, 1, long=False)
    assert proxied(cut, faults) == ("gateway1>redis",)
    named = scenario(FaultPlan("cut", "gateway1>redis"), fleet=FleetPlan(2, 1, 2, links=("client>*", "*>redis")))
    assert proxied(named, faults) == ("client>gateway0", "client>gateway1", "gateway0>redis", "gateway1>redis")


def test_every_process_makes_the_same_schedule() -> None:
    code = (
        "from failover.chaos.scenario import *; from failover.chaos import load, schedule\n"
        "faults = FaultPlan('kill', '*', 1.0, 2.0, None, 1.0),\n"
        "print(schedule.planned(Scenario('some', 'a', 'b', faults=faults), 3, long=False))\n"
        "print(load.requests(LoadPlan(mix=dict.fromkeys(load.KINDS, 1.0)), 3, long=False))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert b"kill" in outputs.pop()
