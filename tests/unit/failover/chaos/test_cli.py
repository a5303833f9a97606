"""`pdgate chaos`, on a runner that runs nothing: what is run, what is written, and the exit status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from failover.chaos import real_run, record_file, report_html, runner
from failover.chaos.faults import FAULTS
from failover.chaos.fleet_file import of_urls
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Planned, Record
from failover.chaos.scenario import Scenario, ScenarioError
from failover.chaos.world import Unable
from gateway.cli import main
from tests.unit.failover.chaos.records import BROKEN, WHOLE, record

TOML = 'about = "a"\nproves = "p"\n[[faults]]\nfault = "kill"\ntarget = "prefill0"\n'


@dataclass
class Runner:
    """Gives `made` for every run; `during` happens while one runs."""

    made: Record = field(default_factory=record)
    during: Callable[[], Any] = lambda: None
    runs: list[tuple[str, int, bool]] = field(default_factory=list)
    fleets: list[RealFleet] = field(default_factory=list)

    async def run(self, scenario: Scenario, seed: int, *, long: bool, tell: Any, stop: asyncio.Event) -> Record:
        self.runs.append((scenario.name, seed, long))
        tell("3 of 9 requests")
        self.during()
        await asyncio.sleep(0.01 if self.during is not Runner.during else 0)
        return replace(self.made, scenario=scenario, seed=seed, long=long, stopped=stop.is_set())

    async def run_real(self, scenario: Scenario, fleet: RealFleet, seed: int, **others: Any) -> Record:
        self.fleets.append(fleet)
        return replace(await self.run(scenario, seed, **others), fleet=fleet)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Runner:
    made = Runner()
    monkeypatch.setattr(runner, "run", made.run)
    monkeypatch.setattr(real_run, "run", made.run_real)
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with two scenarios in `two`, of which b is quick."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.toml").write_text(TOML)
    (tmp_path / "two" / "b.toml").write_text("quick = true\n" + TOML)
    (tmp_path / "two" / "README.md").write_text("no scenario")
    return tmp_path


def chaos(*words: str | Path) -> int:
    return main(["chaos", *map(str, words)])


# -- run --------------------------------------------------------------------------------------------------------------


def test_a_folder_runs_with_every_seed(fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("run", "two", "--seed", "5", "--seeds", "2") == 0
    assert fake.runs == [("a", 5, False), ("a", 6, False), ("b", 5, False), ("b", 6, False)]
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told[:-1]] == [f"held    {n}, seed {s}" for n in "ab" for s in (5, 6)]
    assert told[-1] == "2 scenarios, 2 seeds: 0 violations"


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["two/a.toml"], [("a", 1, False)]),
        (["two", "--long"], [("a", 1, True), ("b", 1, True)]),
        (["two", "--quick"], [("b", 1, False)]),
        (["two/b.toml", "two/a.toml", "--seed", "0"], [("b", 0, False), ("a", 0, False)]),
    ],
)
def test_what_is_run(fake: Runner, folder: Path, words: list[str], runs: list[Any]) -> None:
    assert chaos("run", *words) == 0
    assert fake.runs == runs


def test_violations_are_told_with_the_command_that_shows_them_again(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.made = record(WHOLE, BROKEN)
    assert chaos("run", "two/a.toml", "--seed", "4", "--long") == 1
    told = capsys.readouterr().out
    assert "    again: pdgate chaos run two/a.toml --seed 4 --long\n" in told
    assert told.endswith("\n1 scenario, 1 seed: 1 violation\n")


@pytest.mark.parametrize(
    "error",
    [Unable("decode0 did not answer"), ScenarioError("load.trace", "line 3 is none"), OSError("too many open files")],
)
def test_a_run_that_cannot_be_carried_out_is_no_success(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails() -> None:
        raise error

    fake.during = fails
    assert chaos("run", "two", "--junit", "j.xml", "--out", "all") == 1
    assert os.listdir("all") == []
    told = capsys.readouterr().out
    assert "    carried_out:\n" in told
    assert told.count(f"it could not be carried out: {error}") == 2
    assert told.endswith("2 scenarios, 1 seed: 2 violations\n")
    assert len(list(ElementTree.parse("j.xml").iter("failure"))) == 2


def test_json_is_one_object_and_all_else_is_on_standard_error(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.made = record(WHOLE, BROKEN, unseen={"deaths": "dark"})
    assert chaos("run", "two/a.toml", "--json") == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert {name: told[name] for name in ("scenarios", "seeds", "violations", "stopped", "differences")} == {
        "scenarios": 1,
        "seeds": 1,
        "violations": 1,
        "stopped": False,
        "differences": None,
    }
    [one] = told["runs"]
    assert (one["scenario"], one["seed"], one["passed"], one["figures"]["broken"]) == ("a", 1, False, 1)
    verdicts = {each["invariant"]: each for each in one["verdicts"]}
    assert verdicts["broken"]["broken"][0]["request"] == "r-broken"
    assert (verdicts["broken"]["held"], verdicts["deaths"]["unseen"]) == (False, "dark")
    assert one["faults"][0]["fault"] == "kill"
    assert one["again"] == "pdgate chaos run two/a.toml --seed 1"
    assert err.endswith("1 scenario, 1 seed: 1 violation\n")
    assert "BROKEN  a, seed 1" in err


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_record_is_written(fake: Runner, folder: Path) -> None:
    assert chaos("run", "two/a.toml", "--out", "one.json") == 0
    assert record_file.read(Path("one.json")) == replace(record(), scenario=made("a"), seed=1)
    Path("here").mkdir()
    assert chaos("run", "two/a.toml", "--out", "here", "--long") == 0
    assert os.listdir("here") == ["a-seed1-long.json.gz"]


def test_several_records_go_into_a_folder(fake: Runner, folder: Path) -> None:
    assert chaos("run", "two", "--seeds", "2", "--out", "new/all") == 0
    names = [f"{name}-seed{seed}.json.gz" for name in "ab" for seed in (1, 2)]
    assert sorted(os.listdir("new/all")) == names
    assert record_file.read(folder / "new/all/b-seed2.json.gz").seed == 2


def made(name: str) -> Scenario:
    from failover.chaos import scenario_file

    return scenario_file.parse(TOML, name, FAULTS)


def test_what_was_interrupted_goes_on(fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.made = replace(fake.made, version=version("pdgate"))
    resumed = ("run", "two", "--seeds", "2", "--out", "kept", "--resume")
    assert chaos(*resumed) == 0
    assert len(fake.runs) == 4, "there was nothing to go on from"
    (folder / "kept/a-seed2.json.gz").unlink()
    stopped = folder / "kept/b-seed1.json.gz"
    record_file.write(replace(record_file.read(stopped), stopped=True), stopped)
    fake.runs.clear()
    assert chaos(*resumed) == 0
    assert fake.runs == [("a", 2, False), ("b", 1, False)]
    assert capsys.readouterr().out.splitlines()[-1] == "2 scenarios, 2 seeds: 0 violations"
    (folder / "two/a.toml").write_text(TOML.replace("prefill0", "prefill1"))
    fake.runs.clear()
    assert chaos(*resumed) == 0
    assert fake.runs == [("a", 1, False), ("a", 2, False)], "a scenario that was edited is another"
    assert chaos("run", "two", "--resume") == 2
    assert "--out" in capsys.readouterr().err


def test_the_page_is_of_all_runs(fake: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(runs: Any) -> str:
        return ", ".join(f"{made.scenario.name} {judged.passed}" for made, judged in runs)

    monkeypatch.setattr(report_html, "render", render)
    assert chaos("run", "two", "--html", "page.html", "--junit", "j.xml") == 0
    assert Path("page.html").read_text() == "a True, b True"
    assert [each.get("name") for each in ElementTree.parse("j.xml").iter("testcase")] == ["a, seed 1", "b, seed 1"]


# -- interrupted ------------------------------------------------------------------------------------------------------


def test_the_stop_key_is_like_the_first_signal(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard, terminal = os.openpty()
    monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp())
    with os.fdopen(terminal, "rb", buffering=0) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        fake.during = lambda: os.write(keyboard, b"q")
        assert chaos("run", "two") == 130
    os.close(keyboard)
    assert fake.runs == [("a", 1, False)]
    assert capsys.readouterr().out.startswith("stopped a, seed 1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_judged_and_no_other_begins(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    fake.during = lambda: os.kill(os.getpid(), number)
    assert chaos("run", "two", "--out", "all", "--junit", "j.xml") == 130
    assert fake.runs == [("a", 1, False)]
    told = capsys.readouterr().out
    assert told.startswith("stopped a, seed 1: 2 requests")
    assert told.endswith("\nstopped: 1 scenario, 1 seed: 1 violation\n")
    assert os.listdir("all") == ["a-seed1.json.gz"]
    assert Path("j.xml").exists()


def test_the_second_signal_ends_it_at_once(fake: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stubborn(*args: Any, **named: Any) -> Record:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(runner, "run", stubborn)
    assert chaos("run", "two") == 130


def test_signals_are_as_before_afterwards(fake: Runner, folder: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert chaos("run", "two") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# -- check and replay -------------------------------------------------------------------------------------------------


def saved(made: Record, name: str = "one.json.gz") -> str:
    record_file.write(made, Path(name))
    return name


def test_check_gives_the_verdict_of_the_run(fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fake.made, status in ((record(), 0), (record(WHOLE, BROKEN), 1)):
        assert chaos("run", "two/a.toml", "--out", "r.json") == status
        of_run = capsys.readouterr().out.splitlines()
        assert chaos("check", "r.json") == status
        assert [each for each in capsys.readouterr().out.splitlines() if "again" not in each] == [
            each for each in of_run if "again" not in each
        ]


def test_check_takes_several(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    histories = [saved(record(), "a.json"), saved(record(WHOLE, BROKEN, seed=4), "b.json")]
    assert chaos("check", *histories, "--junit", "j.xml") == 1
    told = capsys.readouterr().out
    assert "again: pdgate chaos replay b.json\n" in told
    assert told.endswith("1 scenario, 2 seeds: 1 violation\n")
    assert len(list(ElementTree.parse("j.xml").iter("testcase"))) == 2


def test_a_stopped_record_is_checked_as_such(folder: Path) -> None:
    assert chaos("check", saved(record(stopped=True))) == 130


def test_a_replay_that_does_the_same_is_a_success(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos("replay", saved(record(long=True))) == 0
    assert fake.runs == [("calm", 3, True)]
    assert capsys.readouterr().out.endswith("\nthe same schedule and verdict\n1 scenario, 1 seed: 0 violations\n")


def test_a_replay_tells_what_differs(fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.made = record(planned=(Planned(0, "kill", "prefill1", 0.01, None), Planned(1, "cut", "a>b", 2.0, None)))
    fake.made = replace(fake.made, faults=(*fake.made.faults, replace(fake.made.faults[0], number=1)))
    assert chaos("replay", saved(record(WHOLE, BROKEN, unseen={"deaths": "dark"}))) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "differs: schedule: fault 0: kill on prefill0, planned at 0.01 s; now fault 0: kill on prefill1, planned at "
        "0.01 s",
        "differs: schedule: nothing; now fault 1: cut on a>b, planned at 2.00 s",
        "differs: broken: broken; now held",
        "differs: deaths: not seen; now held",
        "1 scenario, 1 seed: 0 violations",
    ]


def test_an_interrupted_replay_is_not_compared(fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.during = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert chaos("replay", saved(record(WHOLE, BROKEN))) == 130
    told = capsys.readouterr().out
    assert "differs" not in told
    assert "the same" not in told


def test_a_replay_of_violations_that_come_again_is_no_success(fake: Runner, folder: Path) -> None:
    fake.made = record(WHOLE, BROKEN)
    assert chaos("replay", saved(fake.made)) == 1


# -- a real fleet -----------------------------------------------------------------------------------------------------

LINK_TOML = TOML.replace("kill", "reset").replace("prefill0", "client>gateway0")
URL = "http://127.0.0.1:30000"
FLEET_TOML = f'gateways = ["{URL}"]\nallow = ["127.0.0.1:30000"]\n'


@pytest.fixture
def real(folder: Path) -> Path:
    """The present folder, with a scenario and a fleet that fit."""
    (folder / "link.toml").write_text(LINK_TOML)
    (folder / "lab.toml").write_text(FLEET_TOML)
    return folder


def test_a_run_on_a_real_fleet(fake: Runner, real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.made = record(WHOLE, BROKEN)
    flags = ["--url", URL, "--allow", "10.0.0.1:1", "--url", "http://10.0.0.1:1"]
    assert chaos("run", "link.toml", *flags, "--seed", "4") == 1
    [fleet] = fake.fleets
    assert (fleet.gateways, fleet.allow) == ((URL, "http://10.0.0.1:1"), ("10.0.0.1:1", "127.0.0.1:30000"))
    again = f"again: pdgate chaos run link.toml --seed 4 --url {URL} --url http://10.0.0.1:1 --allow 10.0.0.1:1\n"
    assert again in capsys.readouterr().out
    assert chaos("run", "link.toml", "--fleet", "lab.toml", "--model", "m") == 1
    assert (fake.fleets[1].name, fake.fleets[1].model) == ("lab", "m")
    assert "again: pdgate chaos run link.toml --seed 1 --fleet lab.toml --model m\n" in capsys.readouterr().out
    assert chaos("run", "link.toml", "--url", URL, "--model", "m") == 1
    assert fake.fleets[2].model == "m"


def test_a_replay_needs_the_same_fleet(fake: Runner, real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.made = record(fleet=of_urls([URL], []))
    name = saved(fake.made)
    assert chaos("replay", name, "--url", URL) == 0
    assert "the same schedule and verdict" in capsys.readouterr().out
    assert chaos("replay", name) == 2
    assert "the record is of the real fleet --url: name it by --fleet or --url" in capsys.readouterr().err
    assert chaos("replay", name, "--url", "http://127.0.0.1:1") == 2
    assert "this is not the fleet of the record" in capsys.readouterr().err
    assert chaos("replay", saved(record()), "--url", URL) == 2
    assert "the record is of a fleet that was started for it" in capsys.readouterr().err
    assert len(fake.runs) == 1


def test_a_dry_run_only_tells(fake: Runner, real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("run", "link.toml", "--seeds", "2", "--dry-run", "--fleet", "lab.toml") == 0
    told = capsys.readouterr().out
    assert "link, seed 1, on the fleet lab: nothing is sent" in told
    assert "link, seed 2, on the fleet lab: nothing is sent" in told
    assert chaos("run", "two", "--dry-run") == 0
    assert "a, seed 1: nothing is started or sent\n" in capsys.readouterr().out
    assert fake.runs == []
    assert sorted(os.listdir()) == ["lab.toml", "link.toml", "two"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["two/a.toml", "--url", URL], "two/a.toml: on the real fleet --url: faults[0]: kill needs processes"),
        (["link.toml", "two/a.toml", "--fleet", "lab.toml"], "two/a.toml: on the real fleet lab: faults[0]: kill"),
        (["link.toml", "--url", "http://10.0.0.1:1"], "say --allow 10.0.0.1:1"),
        (["link.toml", "--url", URL, "--fleet", "lab.toml"], "--fleet and --url: name the fleet by one of them"),
        (["link.toml", "--allow", "10.0.0.1:1"], "--allow and --model: name a fleet too"),
        (["link.toml", "--fleet", "none.toml"], "none.toml: No such file"),
        (["link.toml", "--fleet", "bin.toml"], "bin.toml: this is not text"),
        (["link.toml", "--fleet", "bad.toml"], "bad.toml: gateways[0]: 127.0.0.1:30000 is not allowed"),
        (
            ["link.toml", "--fleet", "key.toml"],
            "key.toml: api_key_env: the environment variable NO_SUCH_KEY is not set",
        ),
        (["link.toml", "--dry-run", "--json"], "--dry-run: it prints text"),
    ],
)
def test_a_real_fleet_that_cannot_be_used(
    fake: Runner, real: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (real / "bin.toml").write_bytes(b"\xff\xfe")
    (real / "bad.toml").write_text(FLEET_TOML.replace('allow = ["127.0.0.1:30000"]', ""))
    (real / "key.toml").write_text(FLEET_TOML + 'api_key_env = "NO_SUCH_KEY"\n')
    assert chaos("run", *words) == 2
    assert said in capsys.readouterr().err
    assert fake.runs == []


# -- list and validate ------------------------------------------------------------------------------------------------


def test_list_shows_scenarios(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("list", "two") == 0
    told = capsys.readouterr().out
    assert "a " in told
    assert "b (quick)" in told


def test_list_shows_every_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert chaos("list", "--faults") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows.keys() >= FAULTS.keys()
    assert "decode" in rows["die_at_token"]
    assert "token = 5" in rows["die_at_token"]
    assert all((kind.__doc__ or "").split(".")[0].split(";")[0][:20] in rows[name] for name, kind in FAULTS.items())


def test_validate_tells_all_that_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("validate", "two") == 0
    assert capsys.readouterr().out == "two/a.toml: good, 1 fault\ntwo/b.toml: good, 1 fault\n"
    (folder / "two" / "a.toml").write_text(TOML.replace("prefill0", "prefill9"))
    (folder / "two" / "c.toml").write_text(TOML.replace("kill", "kil"))
    assert chaos("validate", "two") == 2
    out, err = capsys.readouterr()
    assert out == "two/b.toml: good, 1 fault\n"
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        ["two/a.toml", "faults[0].target"],
        ["two/c.toml", "faults[0].fault"],
    ]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "none.toml"], "none.toml: No such file or directory"),
        (["run", "two/README.md"], "this is not TOML"),
        (["run", "bin.toml"], "bin.toml: this is not text"),
        (["run", "traced.toml"], "traced.toml: load.trace: there is no file none.jsonl"),
        (["run", "empty"], "empty: there is no scenario (*.toml) in this folder"),
        (["run", "two", "two/a.toml"], "two scenarios are called a"),
        (["run", "two/a.toml", "--quick"], "--quick: none of the scenarios is marked quick"),
        (["run", "two", "--seeds", "0"], "--seeds: expected a whole number from 1 on, got '0'"),
        (["run", "two", "--seed", "-1"], "--seed: expected a whole number from 0 on, got '-1'"),
        (["run", "two", "--junit", "no/j.xml"], "--junit: there is no folder no"),
        (["run", "two", "--html", "two"], "--html: two is a folder"),
        (["run", "two/a.toml", "--out", "no/r.json"], "--out: there is no folder no"),
        (["run", "two", "--out", "bin.toml"], "--out: several runs are written into a folder, and bin.toml is none"),
        (["check", "none.json"], "none.json: No such file or directory"),
        (["check", "bin.toml"], "bin.toml: it is cut off, or no JSON"),
        (["replay", "bin.toml"], "bin.toml: it is cut off, or no JSON"),
        (["list", "none"], "none: No such file or directory"),
        (["list"], "examples/chaos: No such file or directory"),
        (["validate", "empty"], "empty: there is no scenario (*.toml) in this folder"),
        ([], "the following arguments are required: ACTION"),
    ],
)
def test_bad_input_is_told_and_nothing_runs(
    fake: Runner, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "bin.toml").write_bytes(b"\xff\xfe")
    (folder / "traced.toml").write_text(TOML + '[load]\ntrace = "none.jsonl"\n')
    try:
        status = chaos(*words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0
    assert status == 2
    assert said in capsys.readouterr().err
    assert fake.runs == []
