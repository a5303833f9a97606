"""Runs one scenario after another and reports each: on the terminal, as JSON, JUnit XML, HTML and records. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

from rich.console import Console
from rich.status import Status

from failover.chaos import junit, record_file, report_text, stop_key
from failover.chaos.history import History
from failover.chaos.invariants import judge
from failover.chaos.plain import plain
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Record
from failover.chaos.scenario import Scenario, ScenarioError
from failover.chaos.verdict import Broken, Judgement, Verdict
from failover.chaos.world import Unable


@dataclass(frozen=True, slots=True)
class Job:
    """One run to do. `again`: the command that does it again; `out`: where its record goes; `fleet`: a real one.

    `resume`: where its record is there, from before an interruption, that is judged instead.
    """

    scenario: Scenario
    seed: int
    long: bool
    again: str
    out: Path | None = None
    fleet: RealFleet | None = None
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is written beside the lines: `json` one object on standard output, the lines then on standard error."""

    json: bool = False
    junit: Path | None = None
    html: Path | None = None


@dataclass(slots=True)
class Report:
    """Tells of each run when it is over, and of all of them at the end. Records are kept only for the HTML."""

    outputs: Outputs
    stopped: bool = False
    last: tuple[Record, Judgement] | None = None
    differences: Sequence[str] | None = None
    """Of a replay from its record: told at the end, and any is no success."""
    _runs: list[tuple[str, int, Judgement]] = field(default_factory=list)
    _objects: list[dict[str, Any]] = field(default_factory=list)
    _cases: list[ElementTree.Element] = field(default_factory=list)
    _kept: list[tuple[Record, Judgement]] = field(default_factory=list)

    @property
    def lines_to(self) -> TextIO:
        return sys.stderr if self.outputs.json else sys.stdout

    def add(self, record: Record, judgement: Judgement, again: str) -> None:
        """One run is over."""
        for line in report_text.lines(record, judgement, again):
            print(line, file=self.lines_to, flush=True)
        self.stopped, self.last = self.stopped or record.stopped, (record, judgement)
        self._runs.append((record.scenario.name, record.seed, judgement))
        self._objects.append(_as_object(record, judgement, again))
        self._cases.append(junit.case(record, judgement, again))
        if self.outputs.html is not None:
            self._kept.append((record, judgement))

    def finish(self) -> int:
        """Write the files and the sum, which is the last line; the exit status. OSError where a file cannot be."""
        told = report_text.total(self._runs, self.stopped)
        if self.outputs.junit is not None:
            self.outputs.junit.write_text(junit.document(self._cases), encoding="utf-8")
        if self.outputs.html is not None:
            from failover.chaos import report_html

            self.outputs.html.write_text(report_html.render(self._kept), encoding="utf-8")
        if self.outputs.json:
            counts = {"scenarios": told.scenarios, "seeds": told.seeds, "violations": told.violations}
            rest = {"stopped": told.stopped, "differences": self.differences, "runs": self._objects}
            print(json.dumps({**counts, **rest}, indent=2))
        if self.differences is not None:
            lines = [f"differs: {each}" for each in self.differences] or ["the same schedule and verdict"]
            print(*lines, sep="\n", file=self.lines_to)
        print(told, file=self.lines_to, flush=True)
        return 130 if self.stopped else 1 if told.violations or self.differences else 0


def _as_object(record: Record, judgement: Judgement, again: str) -> dict[str, Any]:
    return {
        "scenario": record.scenario.name,
        "seed": record.seed,
        "long": record.long,
        "version": record.version,
        "stopped": record.stopped,
        "passed": judgement.passed,
        "figures": dict(judgement.figures),
        "verdicts": [{**plain(verdict), "held": verdict.held} for verdict in judgement.verdicts],
        "faults": [plain(fault) for fault in record.planned],
        "again": again,
    }


async def carry_out(jobs: Sequence[Job], report: Report) -> None:
    """Do all jobs, one after another, until a signal stops the one that runs.

    The first SIGINT or SIGTERM, or the stop key, lets the run undo its faults and end its processes, and judges what
    there is; the second signal ends it at once.
    """
    stop = asyncio.Event()
    keys, status = stop_key.pressed(stop.set), Console(stderr=True).status("")
    with _stopped_by_signals(stop), keys as can_press, status:
        for job in jobs:
            if (kept := _kept(job)) is not None:
                report.add(kept, judge(kept), job.again)
                continue
            record, judgement = await _one(job, status, stop, f" ({stop_key.KEY} stops it)" if can_press else "")
            report.add(record, judgement, job.again)
            if stop.is_set():
                report.stopped = True
                break


async def _one(job: Job, status: Status, stop: asyncio.Event, hint: str) -> tuple[Record, Judgement]:
    from failover.chaos import real_run, runner

    name = report_text.heading(job.scenario.name, job.seed, job.long)

    def tell(words: str) -> None:
        status.update(f"{name}: {words}{'' if stop.is_set() else hint}")

    tell("starts")
    try:
        if job.fleet is not None:
            record = await real_run.run(job.scenario, job.fleet, job.seed, long=job.long, tell=tell, stop=stop)
        else:
            record = await runner.run(job.scenario, job.seed, long=job.long, tell=tell, stop=stop)
    except (Unable, ScenarioError, OSError) as error:  # a fleet, a trace, or this machine that cannot be used
        return _not_run(job, str(error), stop.is_set())
    if job.out is not None:
        record_file.write(record, job.out)
    return record, judge(record)


def _kept(job: Job) -> Record | None:
    """The whole record of this very run, where it is to be used; a scenario that was edited since is another run."""
    if not job.resume or job.out is None or not job.out.exists():
        return None
    record = record_file.read(job.out)
    made = record.scenario, record.seed, record.long, record.fleet, record.version
    wanted = job.scenario, job.seed, job.long, job.fleet, version("pdgate")
    return record if made == wanted and not record.stopped else None


def _not_run(job: Job, problem: str, stopped: bool) -> tuple[Record, Judgement]:
    """A run that could not be carried out has shown nothing, and has no record that could be judged again."""
    empty = Record(
        job.scenario, job.seed, job.long, version("pdgate"), (), (), (), (), (), History(()), 0.0, None, stopped=stopped
    )
    wrong = Verdict("carried_out", "", (Broken(f"it could not be carried out: {problem}"),))
    return empty, Judgement((wrong,), judge(empty).figures)


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGINT, signal.SIGTERM)

    def ask() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in signals:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
