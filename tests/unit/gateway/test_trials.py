"""Trials of servers on probation: few at a time, each over once."""

from dataclasses import replace

from engines.types import EngineId, Health
from gateway.trials import AT_ONCE, Trials
from tests.fakes import view

P0 = EngineId("http://p0")
ON_PROBATION = replace(view("p0"), health=Health.PROBATION)


def test_a_server_is_full_while_that_many_try_it() -> None:
    trials = Trials()
    for number in range(AT_ONCE):
        assert not trials.is_full(P0)
        trials.begin(ON_PROBATION, f"r{number}")
    assert trials.is_full(P0)
    assert not trials.is_full(EngineId("http://p1"))
    assert trials.over(P0, "r0")
    assert not trials.is_full(P0)


def test_only_a_trial_passes_and_only_once() -> None:
    trials = Trials()
    trials.begin(view("p0"), "before")
    assert not trials.passed(P0, "before")
    trials.begin(ON_PROBATION, "r")
    assert not trials.passed(P0, "before")
    assert not trials.passed(EngineId("http://d0"), "r")
    assert trials.passed(P0, "r")
    assert not trials.passed(P0, "r")
    assert not trials.over(P0, "r")
    assert not trials._rids
