"""The recipes of `docs/chaos.md`: their code stands here between marks, works, and is what the page shows."""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from failover.chaos import cli, fleet_file, invariants, load, scenario_file, schedule
from failover.chaos.checker import Outcome
from failover.chaos.evidence import Run, case_of
from failover.chaos.faults import FAULTS
from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.invariants import INVARIANTS, Finding, judge
from failover.chaos.scenario import Value
from failover.chaos.world import Process, Unable, World
from tests.unit.failover.chaos.records import REFUSED, RESUMED, WHOLE, record

PAGE = (Path(__file__).parents[4] / "docs" / "chaos.md").read_text()

SCENARIO = """\
# recipe: my-outage.toml
about = "One prefill stutters while another is gone."
proves = "What is left of a side that is half broken carries the load."

[fleet]
prefills = 3                # engines and gateways are processes of this machine
speed = 20                  # engines run 20 times as fast as their profile says

[load]
duration_s = [5, 60]        # the short form, and the one of --long
rate_per_s = 20
mix = { stream = 3, whole = 1, sampled = 1, leaves = 0.5 }

[[faults]]
fault = "kill"
target = "prefill0"
at_s = 1
for_s = [1, 10]             # then it comes back

[[faults]]
fault = "stutter"
target = "prefill1"
at_s = 1
jitter_s = 0.5              # by chance up to so much later: --seed fixes it
every_s = 2                 # and again, until the load ends
params = { still_s = 0.1 }

[expect]
refused_ratio = 0.02        # what may be: at most 2 % of the requests are refused
# end of recipe
"""

FLEET = """\
# recipe: staging.toml
gateways = ["http://gw:30000"]
decodes = ["http://d0:30020"]
allow = ["gw:30000", "d0:30020"]        # the only addresses that are ever connected to

[proxies]                               # pdgate chaos listens there, and passes on
"gateway0>decode0" = "0.0.0.0:9101"     # so the gateway is started with --decode http://THIS_HOST:9101
# end of recipe
"""


# recipe: failover/chaos/faults/stutter.py
class Stutter(ProcessFault):
    """A process stands still for `still_s`, `times` times, and runs as long in between."""

    params: ClassVar[Mapping[str, Value]] = {"still_s": 0.2, "times": 5}

    async def apply(self) -> str:
        still_s = float(self._params["still_s"])
        for _ in range(int(self._params["times"])):
            self._befall(signal.SIGSTOP)
            await asyncio.sleep(still_s)
            self._process.send_signal(signal.SIGCONT)
            await asyncio.sleep(still_s)
        return ""

    async def lift(self) -> None:
        if self._still_runs:
            self._process.send_signal(signal.SIGCONT)


# end of recipe


# recipe: failover/chaos/invariants.py
def begun_in_time(run: Run) -> Finding:
    """Every stream that came whole had begun within 5 s."""
    wrong = []
    for request in run.ended(Outcome.WHOLE):
        waited_s = request.events[0].at_s - request.asked_s
        if request.stream and waited_s > 5.0:
            wrong.append(case_of(run.record, f"its first event came after {waited_s:.1f} s", request))
    return Finding(f"{len(run.ended(Outcome.WHOLE))} whole answers", tuple(wrong))


# end of recipe

RECIPE = re.compile(r"^# recipe: (\S+)\n(.*?)\n*# end of recipe$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def test_the_page_shows_every_recipe_as_it_is() -> None:
    recipes = {place: code.strip() for place, code in RECIPE.findall(Path(__file__).read_text())}
    assert len(recipes) == 4
    blocks = [code.strip() for _, code in BLOCK.findall(PAGE)]
    for place, code in recipes.items():
        assert code in blocks, place
        assert f"`{place}`" in PAGE, place


def test_every_block_of_python_or_toml_is_a_recipe() -> None:
    recipes = {code.strip() for _, code in RECIPE.findall(Path(__file__).read_text())}
    assert {code.strip() for kind, code in BLOCK.findall(PAGE) if kind in ("python", "toml")} == recipes


def test_the_fleet_can_be_used() -> None:
    assert fleet_file.parse(FLEET, "staging").links == ("client>gateway0", "gateway0>decode0")


def test_every_command_of_the_page_is_one() -> None:
    parser = argparse.ArgumentParser(prog="pdgate chaos")
    cli.add_arguments(parser)
    words = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("pdgate chaos ")]
    assert {each[2] for each in words} == {"run", "list", "validate", "check", "replay"}
    for each in words:
        parser.parse_args(each[2:])


# -- the scenario -----------------------------------------------------------------------------------------------------


def test_the_scenario_can_be_run() -> None:
    kinds = {**FAULTS, "stutter": Stutter}
    scenario = scenario_file.parse(SCENARIO, "my-outage", kinds)
    planned = schedule.planned(scenario, 1, long=False)
    assert [(each.fault, each.target) for each in planned] == [("kill", "prefill0")] + [("stutter", "prefill1")] * 2
    assert planned == schedule.planned(scenario, 1, long=False)
    assert planned != schedule.planned(scenario, 2, long=False)
    assert 80 < len(load.requests(scenario.load, 1, long=False)) < 120


# -- the fault --------------------------------------------------------------------------------------------------------


@dataclass
class FakeProcess:
    name: str = "prefill1"
    pid: int = 7
    running: bool = True
    told: list[signal.Signals] = field(default_factory=list)

    def send_signal(self, number: signal.Signals) -> None:
        self.told.append(number)


@dataclass
class FakeWorld:
    only: FakeProcess = field(default_factory=FakeProcess)

    def process(self, name: str) -> Process:
        assert name == self.only.name
        return cast("Process", self.only)


def stutter(world: FakeWorld, **params: Value) -> Stutter:
    return Stutter(cast("World", world), "prefill1", {**Stutter.params, **params})


async def test_the_fault_stops_and_goes_on() -> None:
    world = FakeWorld()
    await stutter(world, still_s=0.001, times=3).apply()
    assert world.only.told == [signal.SIGSTOP, signal.SIGCONT] * 3


async def test_the_fault_can_be_interrupted_and_is_lifted_once() -> None:
    world = FakeWorld()
    fault = stutter(world, still_s=60.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fault.apply(), 0.01)
    await fault.lift()
    assert world.only.told == [signal.SIGSTOP, signal.SIGCONT]
    world.only.pid = 8  # another process has its place
    await fault.lift()
    assert world.only.told == [signal.SIGSTOP, signal.SIGCONT]


async def test_the_fault_cannot_befall_who_does_not_run() -> None:
    world = FakeWorld(FakeProcess(running=False))
    with pytest.raises(Unable):
        await stutter(world).apply()
    await stutter(world).lift()
    assert world.only.told == []


def test_the_fault_is_told_like_all_others() -> None:
    assert Stutter.__doc__ is not None
    assert Stutter.__doc__.endswith(".")
    assert Stutter.params.keys() == set(re.findall(r"`(\w+)`", Stutter.__doc__))


# -- the invariant ----------------------------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "INVARIANTS", {**INVARIANTS, begun_in_time.__name__: begun_in_time})


@pytest.mark.usefixtures("known")
def test_the_invariant_holds_and_is_broken() -> None:
    late: Any = replace(WHOLE, asked_s=-5.01, name="r-late")
    whole = replace(late, stream=False, name="r-body")
    assert judge(record(WHOLE, RESUMED, REFUSED)).verdicts[-1].held
    assert judge(record(whole)).verdicts[-1].held
    found = judge(record(RESUMED, late)).verdicts[-1]
    assert (found.invariant, found.evidence) == ("begun_in_time", "2 whole answers")
    [case] = found.broken
    assert (case.what, case.request) == ("its first event came after 5.0 s", "r-late")
