"""What a terminal shows of runs: a line each, what is wrong with all it takes to see it again, and a sum. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from failover.chaos.record import Planned, Record
from failover.chaos.verdict import Broken, Judgement, Verdict

MAX_CASES = 10
"""Of one invariant that are shown; the rest is counted."""
MAX_CHARS = 300
"""Of a case that are shown: the words of an engine, within those of a gateway, have no end. JSON has all of them."""
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Sum:
    """All runs of one command together."""

    scenarios: int
    seeds: int
    violations: int
    stopped: bool = False

    def __str__(self) -> str:
        counts = f"{count(self.scenarios, 'scenario')}, {count(self.seeds, 'seed')}: "
        return ("stopped: " if self.stopped else "") + counts + count(self.violations, "violation")


def violations(judgement: Judgement) -> int:
    """How many cases are wrong in one run."""
    return sum(len(verdict.broken) for verdict in judgement.verdicts)


def heading(name: str, seed: int, long: bool) -> str:
    """What a run is called while it runs and after."""
    return f"{name}, seed {seed}{', long' if long else ''}"


def command(file: Path | str, seed: int, long: bool) -> str:
    """What runs it again."""
    return f"pdgate chaos run {shlex.quote(str(file))} --seed {seed}{' --long' if long else ''}"


def lines(record: Record, judgement: Judgement, again: str) -> Iterator[str]:
    """One line where all is well; else also what is not, and `again`, the command that shows it again."""
    name = heading(record.scenario.name, record.seed, record.long)
    held = "stopped" if record.stopped else "held" if judgement.passed else "BROKEN"
    yield f"{held:<8}{name}: {_figures(judgement)}"
    for verdict in judgement.verdicts:
        if verdict.unseen:
            yield f"{_INDENT}not seen: {verdict.invariant}: {verdict.unseen}"
    for verdict in judgement.verdicts:
        if not verdict.held:
            yield from failure(record, verdict)
    if not judgement.passed:
        yield f"{_INDENT}again: {again}"


def failure(record: Record, verdict: Verdict) -> Iterator[str]:
    """One invariant that did not hold, with its cases."""
    yield f"{_INDENT}{verdict.invariant}{f' ({verdict.evidence})' if verdict.evidence else ''}:"
    planned = {fault.number: fault for fault in record.planned}
    for case in verdict.broken[:MAX_CASES]:
        yield f"{_INDENT * 2}{case_line(case)}"
        if case.fault is not None:
            yield f"{_INDENT * 3}{fault_line(record, planned[case.fault])}"
    if (more := len(verdict.broken) - MAX_CASES) > 0:
        yield f"{_INDENT * 2}and {more} more"


def case_line(case: Broken) -> str:
    """Who, in which attempt, and what is wrong, on one line whatever characters an engine has said."""
    names = [case.request, f"attempt {case.attempt}" if case.attempt else ""]
    text = ": ".join(part for part in (", ".join(filter(None, names)), case.what) if part)
    text = text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def fault_line(record: Record, fault: Planned) -> str:
    """A fault with its target and the time that it was on, or was planned for."""
    became = next((each for each in record.faults if each.number == fault.number), None)
    if became is None or became.applied_s is None:
        return planned_line(fault)
    until = ", never lifted" if became.lifted_s is None else f" to {became.lifted_s:.2f} s"
    return f"{_who(fault)}, from {became.applied_s:.2f} s{until}"


def planned_line(fault: Planned) -> str:
    """A fault of the schedule."""
    lasts = "" if fault.for_s is None else f" for {fault.for_s:g} s"
    return f"{_who(fault)}, planned at {fault.at_s:.2f} s{lasts}"


def _who(fault: Planned) -> str:
    params = "".join(f" {name}={value}" for name, value in fault.params.items())
    at = f" at {fault.phase}" if fault.phase else ""
    return f"fault {fault.number}: {fault.fault}{params} on {fault.target}{at}"


def total(runs: Sequence[tuple[str, int, Judgement]], stopped: bool = False) -> Sum:
    """The sum over runs, each with its scenario's name and its seed."""
    scenarios, seeds = {name for name, _, _ in runs}, {seed for _, seed, _ in runs}
    return Sum(len(scenarios), len(seeds), sum(violations(judgement) for _, _, judgement in runs), stopped)


def _figures(judgement: Judgement) -> str:
    told = judgement.figures
    ends = [f"{told[name]:.0f} {name}" for name in ("whole", "refused", "broken", "left", "lost") if told[name]]
    parts = [f"{count(int(told['requests']), 'request')} ({', '.join(ends)})" if ends else "no requests"]
    parts += [count(int(told[name]), name.removesuffix("s")) for name in ("attempts", "faults")]
    parts.append(f"longest pause {told['longest_pause_s']:.1f} s")
    if "settle_s" in told:
        parts.append(f"settled in {told['settle_s']:.1f} s")
    return ", ".join(parts)


def count(number: int, what: str) -> str:
    """A number of something, in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
