"""`pdgate chaos`: runs scenarios on a fleet of emulated engines, or on a real one, and judges what its clients saw."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from failover.chaos import dry_run, fleet_flags, real_plan, record_file, report_text, scenario_file
from failover.chaos.campaign import Job, Outputs, Report, carry_out
from failover.chaos.faults import FAULTS
from failover.chaos.fleet_flags import FleetError
from failover.chaos.invariants import judge
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Record
from failover.chaos.record_file import RecordFileError
from failover.chaos.scenario import Scenario, ScenarioError, Value
from failover.chaos.verdict import Judgement, Verdict

SHIPPED = Path("examples/chaos")
EXIT = (
    "Exit status: 0 all held, 1 violations, 2 bad input, 130 interrupted: faults are undone, what there is is judged."
)


class UsageError(Exception):
    """The command cannot be run as given; the words name what is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands of `pdgate chaos`."""
    parser.epilog = EXIT
    commands = parser.add_subparsers(dest="chaos_command", metavar="ACTION", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, epilog=EXIT, allow_abbrev=False)
        command.set_defaults(chaos=act)
        return command

    run = add("run", _run, "run scenarios and judge them")
    run.add_argument("files", nargs="+", type=Path, metavar="FILE|DIR", help="scenarios, or folders of them")
    run.add_argument(
        "--seed", type=_whole(0), default=1, metavar="N", help="fixes load and faults (default %(default)s)"
    )
    run.add_argument("--seeds", type=_whole(1), default=1, metavar="N", help="run so many seeds, from --seed on")
    run.add_argument("--long", action="store_true", help="the long form of each (default: the short)")
    run.add_argument("--quick", action="store_true", help="only the scenarios that are marked quick")
    run.add_argument(
        "--out", type=Path, metavar="HISTORY", help="write the record here, with several runs into a folder"
    )
    run.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    run.add_argument(
        "--resume", action="store_true", help="with --out: go on; a run whose record is there is judged, not run again"
    )
    check = add("check", _check, "judge records again")
    check.add_argument("histories", nargs="+", type=Path, metavar="HISTORY", help="records of --out")
    replay = add("replay", _replay, "run a record's scenario, seed and form again, and compare schedule and verdict")
    replay.add_argument("history", type=Path, metavar="HISTORY", help="a record of --out")
    replay.set_defaults(dry_run=False)
    for command in (run, replay):
        fleet_flags.add_arguments(command)
    for command in (run, check, replay):
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")
        command.add_argument("--html", type=Path, metavar="FILE", help="write a page with the timelines")
    shown = add("list", _list, "show what there is")
    shown.add_argument("files", nargs="*", type=Path, default=[SHIPPED], metavar="FILE|DIR", help=f"default {SHIPPED}")
    shown.add_argument("--faults", action="store_true", help="the faults that a scenario can name, instead")
    validate = add("validate", _validate, "check scenarios without running them")
    validate.add_argument("files", nargs="+", type=Path, metavar="FILE|DIR")


def run(args: argparse.Namespace) -> int:
    """Do what is asked; the exit status (EXIT)."""
    try:
        act: Callable[[argparse.Namespace], int] = args.chaos
        return act(args)
    except (UsageError, FleetError, RecordFileError, OSError) as error:
        print(f"pdgate chaos {args.chaos_command}: error: {error}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:  # the second signal
        return 130


def _run(args: argparse.Namespace) -> int:
    scenarios = _read(args.files)
    if args.quick and not (scenarios := [(file, each) for file, each in scenarios if each.quick]):
        raise UsageError("--quick: none of the scenarios is marked quick")
    if args.resume and (args.out is None or args.dry_run):
        raise UsageError("--resume: goes on where --out has records already; give --out, and no --dry-run")
    fleet = fleet_flags.read(args)
    for file, each in scenarios if fleet is not None else ():
        _check_possible(file, each, fleet)
    chosen = [(file, each, args.seed + more) for file, each in scenarios for more in range(args.seeds)]
    if args.dry_run:
        return _dry_run(args, chosen, fleet)
    folder = args.out if args.out is not None and (len(chosen) > 1 or args.out.is_dir()) else None
    report = _report(args)
    if folder is None:
        _check_place("--out", args.out)
    elif folder.exists() and not folder.is_dir():
        raise UsageError(f"--out: several runs are written into a folder, and {folder} is none")
    else:
        folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(each, seed, args.long, _again(args, file, seed), _out(args, folder, each, seed), fleet, args.resume)
        for file, each, seed in chosen
    ]
    asyncio.run(carry_out(jobs, report))
    return report.finish()


def _again(args: argparse.Namespace, file: Path, seed: int) -> str:
    return report_text.command(file, seed, args.long) + fleet_flags.given(args)


def _check_possible(file: Path | str, scenario: Scenario, fleet: RealFleet | None) -> None:
    """UsageError where a scenario cannot be done on a real fleet."""
    try:
        if fleet is not None:
            real_plan.fitted(scenario, fleet)
    except ScenarioError as error:
        raise UsageError(f"{file}: {error}") from error


def _dry_run(args: argparse.Namespace, chosen: Sequence[tuple[Path, Scenario, int]], fleet: RealFleet | None) -> int:
    """Say what each run would do."""
    if args.json or any((args.out, args.junit, args.html)):
        raise UsageError("--dry-run: it prints text, and writes nothing; leave out --json, --out, --junit and --html")
    for file, scenario, seed in chosen:
        try:
            trace = Path(scenario.load.trace).read_text(encoding="utf-8") if scenario.load.trace else ""
            if fleet is None:
                lines = dry_run.on_emulated(scenario, seed, long=args.long, trace=trace)
            else:
                lines = dry_run.on_real(scenario, fleet, seed, long=args.long, trace=trace)
            print(*lines, sep="\n")
        except ScenarioError as error:
            raise UsageError(f"{file}: {error}") from error
    return 0


def _out(args: argparse.Namespace, folder: Path | None, scenario: Scenario, seed: int) -> Path | None:
    if folder is None:
        out: Path | None = args.out
        return out
    return folder / f"{scenario.name}-seed{seed}{'-long' if args.long else ''}.json.gz"


def _check(args: argparse.Namespace) -> int:
    report = _report(args)
    for history in args.histories:
        record = record_file.read(history)
        report.add(record, judge(record), _replay_command(history))
    return report.finish()


def _replay(args: argparse.Namespace) -> int:
    before, report, fleet = record_file.read(args.history), _report(args), fleet_flags.read(args)
    fleet_flags.check_same(before, fleet)
    again = _replay_command(args.history) + fleet_flags.given(args)
    asyncio.run(carry_out([Job(before.scenario, before.seed, before.long, again, fleet=fleet)], report))
    if report.last is not None and not report.stopped:
        report.differences = list(_differences((before, judge(before)), report.last))
    return report.finish()


def _replay_command(history: Path) -> str:
    return f"pdgate chaos replay {shlex.quote(str(history))}"


def _differences(before: tuple[Record, Judgement], after: tuple[Record, Judgement]) -> Iterator[str]:
    """What a replay has not repeated: faults of the schedule, and verdicts."""
    (record, judged), (again, judged_again) = before, after
    for one, other in zip_longest(record.planned, again.planned):
        if one != other:
            lines = [report_text.planned_line(each) if each else "nothing" for each in (one, other)]
            yield f"schedule: {lines[0]}; now {lines[1]}"
    verdicts, now = ({each.invariant: _shown(each) for each in all.verdicts} for all in (judged, judged_again))
    for name in {**verdicts, **now}:
        if verdicts.get(name) != now.get(name):
            yield f"{name}: {verdicts.get(name, 'unknown')}; now {now.get(name, 'unknown')}"


def _shown(verdict: Verdict) -> str:
    return "not seen" if verdict.unseen else "held" if verdict.held else "broken"


def _list(args: argparse.Namespace) -> int:
    if args.faults:
        table = _table("fault", "on", "parameters", "what it does")
        for name, kind in sorted(FAULTS.items()):
            params = ", ".join(f"{param} = {_toml(value)}" for param, value in kind.params.items())
            words = (inspect.getdoc(kind) or "").partition("\n")[0]
            table.add_row(name, ", ".join(sorted(kind.targets)), params, words)
    else:
        table = _table("scenario", "about", "proves")
        for _, scenario in _read(args.files):
            table.add_row(scenario.name + (" (quick)" if scenario.quick else ""), scenario.about, scenario.proves)
    Console().print(table)
    return 0


def _validate(args: argparse.Namespace) -> int:
    wrong = False
    for file in _files(args.files):
        try:
            print(f"{file}: good, {report_text.count(len(_parsed(file).faults), 'fault')}")
        except UsageError as error:
            wrong = True
            print(error, file=sys.stderr)
    return 2 if wrong else 0


def _read(paths: Sequence[Path]) -> list[tuple[Path, Scenario]]:
    """Every scenario that is named; UsageError for the first that cannot be run, or a name that comes twice."""
    found = [(file, _parsed(file)) for file in _files(paths)]
    names = Counter(scenario.name for _, scenario in found)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"two scenarios are called {twice[0]}")
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path}: there is no scenario (*.toml) in this folder")
        yield from inside


def _parsed(file: Path) -> Scenario:
    try:
        scenario = scenario_file.parse(file.read_text(encoding="utf-8"), file.stem, FAULTS)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: this is not text: {error}") from error
    except ScenarioError as error:
        raise UsageError(f"{file}: {error}") from error
    if (trace := scenario.load.trace) and not Path(trace).is_file():
        raise UsageError(f"{file}: load.trace: there is no file {trace}")
    return scenario


def _report(args: argparse.Namespace) -> Report:
    for flag, path in (("--junit", args.junit), ("--html", args.html)):
        _check_place(flag, path)
    return Report(Outputs(args.json, args.junit, args.html))


def _check_place(flag: str, path: Path | None) -> None:
    """Before the run: a long one must not end with nowhere to write to."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(
            f"{flag}: {path} is a folder" if path.is_dir() else f"{flag}: there is no folder {path.parent}"
        )


def _toml(value: Value) -> str:
    return json.dumps(value)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
        return int(text)

    return parse
