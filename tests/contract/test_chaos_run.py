"""Chaos runs with real processes: what their records say, and that nothing outlives them.

Processes are forked from one that has imported what they run, but where their own way of starting is looked at.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from engines import tasks
from engines.emulator.tokens import decode
from failover.chaos import children, eyes, runner
from failover.chaos.checker import Outcome, check, outcome
from failover.chaos.children import Program
from failover.chaos.driver import Driver
from failover.chaos.faults.kill import Kill
from failover.chaos.history import History
from failover.chaos.load import Asked
from failover.chaos.processes import Processes
from failover.chaos.record import Record
from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario
from failover.chaos.world import Unable
from tests import warm
from tests.machine import Stopwatch, time_limit

LOAD = LoadPlan(
    (3.0, 3.0), 20.0, {"stream": 2, "sampled": 2, "several": 1, "generate": 1, "completion": 1, "leaves": 1}
)
SCENARIO = Scenario("a run", "about", "proves", load=LOAD)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs are forked from one that has imported them."""
    cold = children.execute

    async def execute(command: Sequence[str], log: Path) -> Program:
        if "-m" not in command:
            return await cold(command, log)
        module, *flags = command[command.index("-m") + 1 :]
        if "--die-with" in flags:
            flags[flags.index("--die-with") + 1] = str(warm._parent()[0])
        with log.open("ab") as output:
            return warm.start(module, flags, output.fileno())

    monkeypatch.setattr(children, "execute", execute)


async def carried_out(scenario: Scenario, seed: int = 1) -> Record:
    told: list[str] = []
    watch = Stopwatch()
    record = await runner.run(scenario, seed, long=False, tell=told.append, stop=asyncio.Event())
    assert len(told) >= watch.of(record.load_s), "progress is told about once a second"
    assert tasks.running() == (), "a task is left"
    return record


def check_good(record: Record) -> None:
    """Nothing is wrong with what clients read, and nothing is left."""
    problems = check(record.history, decode)
    assert not problems, "\n".join(map(str, problems))
    assert record.settled_s is not None
    assert not record.stopped
    assert not record.unseen
    assert [fault.problem for fault in record.faults] == [""] * len(record.planned)
    for fault in record.faults:
        assert fault.applied_s is not None
        assert fault.lifted_s is not None


def marks(record: Record, instance: str) -> list[str]:
    return [mark.what for mark in record.marks if mark.instance == instance and " for " not in mark.what]


def outcomes(record: Record) -> set[Outcome]:
    return {outcome(request) for request in record.history.requests}


@pytest.fixture
def decode0_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed decode0 stays dead until it is seen that gateway0 knows, and half of the load comes when it is back."""
    worlds: list[Processes] = []
    lift, play = Kill.lift, Driver.play

    class Noted(Processes):
        async def __aenter__(self) -> Self:
            worlds.append(self)
            return await super().__aenter__()

    def thought() -> list[str]:
        [world] = worlds
        return [mark.what for mark in world.marks if mark.instance == "decode0" and " for gateway0" in mark.what]

    async def lift_late(fault: Kill) -> None:
        await until(lambda: len(thought()) >= 1)
        await lift(fault)

    async def play_halves(driver: Driver, load: Sequence[Asked]) -> None:
        await play(driver, load[: len(load) // 2])
        await until(lambda: thought()[-1:] in (["ready for gateway0"], ["probation for gateway0"]))
        await play(driver, load[len(load) // 2 :])

    monkeypatch.setattr(runner, "Processes", Noted)
    monkeypatch.setattr(Kill, "lift", lift_late)
    monkeypatch.setattr(Driver, "play", play_halves)


@pytest.mark.usefixtures("warm_start", "decode0_is_missed")
async def test_a_decode_is_killed_and_a_prefill_frozen() -> None:
    faults = (
        FaultPlan("kill", "decode0", at_s=0.5, for_s=(0.1, 0.1), phase="token:3"),
        FaultPlan("freeze", "prefill0", at_s=0.5, for_s=(0.5, 0.5)),
    )
    record = await carried_out(replace(SCENARIO, faults=faults))
    check_good(record)
    assert Outcome.WHOLE in outcomes(record)
    assert Outcome.LOST not in outcomes(record), "the checker allows it where a gateway died"
    assert marks(record, "decode0") == ["started", "killed", "started"]
    assert marks(record, "prefill0") == ["started", "frozen", "thawed"]
    back_s = [mark.at_s for mark in record.marks if mark.instance == "decode0" and mark.what == "started"][1]
    requests = record.history.requests
    attempts = [attempt for each in requests for choice in each.choices for attempt in choice.attempts]
    assert any(len(choice.attempts) > 1 for each in requests for choice in each.choices), "nobody was disturbed"
    assert {attempt.decode for attempt in attempts} == {"decode0", "decode1"}
    again = [each for each in attempts if each.decode == "decode0" and each.began_s > back_s]
    keys = {each.decode_key for each in attempts if each.decode_key}
    assert again, "the new process was not used"
    assert len(keys) > 5, "no sampled answers were judged"
    assert len(requests) == len({each.name for each in requests}) > 30
    held = [sample.used_tokens for sample in record.samples if sample.instance == "decode1"]
    assert len(held) > 5
    assert max(held) > 0
    assert {each.engine for each in record.history.ledgers} == {"prefill0", "prefill1", "decode0", "decode1"}


@pytest.mark.usefixtures("warm_start")
async def test_a_gateway_of_two_is_killed_and_links_go_silent() -> None:
    """Two gateways know every engine by one URL, and still each has a link of its own to it."""
    faults = (
        FaultPlan("silent", "gateway1>decode0", at_s=0.4, for_s=(0.5, 0.5), params={"direction": "both"}),
        FaultPlan("kill", "gateway0", at_s=1.2, for_s=(0.5, 0.5)),
        FaultPlan("delay", "prefill0>decode0", at_s=0.2, for_s=(1.0, 1.0)),
        FaultPlan("reset", "client>gateway1", at_s=2.0, for_s=(0.1, 0.1)),
    )
    fleet = FleetPlan(gateways=2, links=("gateway*>redis",))
    expect = replace(SCENARIO.expect, settle_s=30.0)
    record = await carried_out(replace(SCENARIO, faults=faults, fleet=fleet, expect=expect))
    assert record.unseen.keys() <= {eyes.UNTOLD}
    check_good(replace(record, unseen={}))
    assert "attempts in the journal" in record.history.left_over
    assert marks(record, "gateway0") == ["started", "killed", "started"]
    [death] = record.history.deaths
    assert death.gateway == "gateway0"
    asked = {
        name: [each for each in record.history.requests if each.gateway == name] for name in ("gateway0", "gateway1")
    }
    assert all(len(each) > 4 for each in asked.values())
    attempts = [attempt for each in record.history.requests for choice in each.choices for attempt in choice.attempts]
    known = {attempt.decode for attempt in attempts if not attempt.rid.startswith("untold")}
    assert known == {"decode0", "decode1"}
    for each in asked["gateway1"]:
        assert outcome(each) is not Outcome.LOST
    assert {each.name for each in record.instances} > {"redis", "gateway0", "gateway1"}


@pytest.mark.usefixtures("warm_start")
async def test_a_run_that_is_stopped_ends_at_once_in_good_order() -> None:
    stop, told = asyncio.Event(), list[str]()
    scenario = replace(SCENARIO, fleet=FleetPlan(1, 1), faults=(FaultPlan("freeze", "decode0", at_s=0.3),))
    scenario = replace(scenario, load=replace(LOAD, duration_s=(60.0, 60.0)))
    watch = Stopwatch()
    running = tasks.spawn(runner.run(scenario, 1, long=False, tell=told.append, stop=stop), "run")
    await until(lambda: any("freeze decode0" in line for line in told))
    stop.set()
    async with time_limit(10.0):
        record = await running
    assert record.stopped
    assert marks(record, "decode0") == ["started", "frozen", "thawed"]
    assert record.faults[0].lifted_s is not None
    assert watch.of(record.load_s) < 10
    assert check(History(record.history.requests), decode) == []


@pytest.mark.usefixtures("warm_start")
async def test_a_run_that_is_stopped_starts_nothing_and_waits_for_nobody() -> None:
    """A decode is dead, a gateway is told to end while it has long answers, and an engine stands still with a fault."""
    stop, told = asyncio.Event(), list[str]()
    faults = (
        FaultPlan("kill", "decode0", at_s=0.1),
        FaultPlan("stop", "gateway0", at_s=0.6, params={"grace_s": 60.0}),
        FaultPlan("leak", "prefill0", at_s=0.1),
        FaultPlan("freeze", "prefill0", at_s=0.7),
    )
    load = replace(LOAD, mix={"stream": 1}, duration_s=(60.0, 60.0), output_tokens=(5_000, 6_000))
    scenario = replace(SCENARIO, fleet=FleetPlan(1, 2), faults=faults, load=load)
    running = tasks.spawn(runner.run(scenario, 1, long=False, tell=told.append, stop=stop), "run")
    await until(lambda: any("freeze prefill0" in line for line in told))
    stop.set()
    async with time_limit(5.0):
        record = await running
    assert record.stopped
    assert marks(record, "decode0") == ["started", "killed"]
    assert marks(record, "prefill0") == ["started", "frozen", "thawed"]
    assert marks(record, "gateway0") == ["started", "told to end", "killed"]
    assert [fault.problem for fault in record.faults] == [""] * 4
    lifted = {each.fault for each in record.planned if record.faults[each.number].lifted_s is not None}
    assert lifted == {"leak", "freeze"}


async def test_a_cancelled_run_leaves_no_process() -> None:
    """Real child processes; one of them frozen."""
    told: list[str] = []
    others = {*own_children(os.getpid())}
    faults = (FaultPlan("freeze", "decode0", at_s=0.1),)
    scenario = replace(SCENARIO, fleet=FleetPlan(1, 1, redis=True), faults=faults)
    running = tasks.spawn(runner.run(scenario, 1, long=False, tell=told.append, stop=asyncio.Event()), "run")
    await until(lambda: any("freeze decode0" in line for line in told))
    pids = {*own_children(os.getpid())} - others
    assert len(pids) == 4
    await tasks.stop(running)
    assert running.cancelled()
    assert [pid for pid in pids if lives(pid)] == []
    assert tasks.running() == ()


async def test_a_run_whose_process_is_killed_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import asyncio\n"
        "from failover.chaos import runner\n"
        "from failover.chaos.scenario import FleetPlan, Scenario\n"
        "scenario = Scenario('a', 'b', 'c', fleet=FleetPlan(1, 1, redis=True))\n"
        "tell = lambda words: print(words, flush=True)\n"
        "asyncio.run(runner.run(scenario, 1, long=False, tell=tell, stop=asyncio.Event()))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script), cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60.0)
    pids = own_children(process.pid)
    assert len(pids) == 4
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(map(lives, pids)))


@pytest.mark.usefixtures("warm_start")
async def test_what_cannot_be_started_says_why() -> None:
    fleet = FleetPlan(1, 1, gateway_flags=("--no-such-flag",))
    with pytest.raises(Unable, match=r"gateway0 ended when it was started.*--no-such-flag"):
        await runner.run(replace(SCENARIO, fleet=fleet), 1, long=False, tell=lambda words: None, stop=asyncio.Event())


def own_children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    async with time_limit(within_s):
        while True:
            if true():
                return
            await asyncio.sleep(0.02)
