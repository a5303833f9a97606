"""What a terminal shows: one line where all is well, and all that it takes to see again what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from failover.chaos.invariants import judge
from failover.chaos.record import FaultRun, Planned, Record
from failover.chaos.report_text import (
    MAX_CASES,
    MAX_CHARS,
    case_line,
    command,
    fault_line,
    heading,
    lines,
    total,
    violations,
)
from failover.chaos.verdict import Broken, Judgement, Verdict
from tests.unit.failover.chaos.records import LEFT, LOST, REFUSED, RESUMED, WHOLE, record

AGAIN = "pdgate chaos run calm.toml --seed 3"


def shown(made: Record) -> list[str]:
    return list(lines(made, judge(made), AGAIN))


def test_a_run_in_which_all_held_is_one_line() -> None:
    assert shown(record(WHOLE, RESUMED, LEFT)) == [
        "held    calm, seed 3: 3 requests (2 whole, 1 left), 4 attempts, 1 fault, longest pause 0.0 s, settled in 0.2 s"
    ]


def test_what_is_broken_is_shown_with_all_that_it_takes_to_see_it_again() -> None:
    hung = replace(LOST, status=200)
    assert shown(record(WHOLE, hung, long=True)) == [
        "BROKEN  calm, seed 3, long: 2 requests (1 whole, 1 lost), 2 attempts, 1 fault, longest pause 0.0 s, "
        "settled in 0.2 s",
        "    one_end (1 of 2 requests ended, 0 were killed):",
        "        r-lost, attempt r-lost.0.0: end: a connection that broke, status 200 instead of one proper end",
        "            fault 0: kill on prefill0, from 0.01 s to 0.60 s",
        "    again: pdgate chaos run calm.toml --seed 3",
    ]


def test_what_could_not_be_seen_is_said_also_where_all_held() -> None:
    [first, second] = shown(record(unseen={"deaths": "a real fleet"}))
    assert first.startswith("held")
    assert second == "    not seen: deaths: a real fleet"


def test_a_stopped_run_says_so() -> None:
    assert shown(record(stopped=True, settled_s=None))[0].startswith("stopped calm, seed 3: ")


def test_many_cases_are_counted() -> None:
    many = [replace(REFUSED, name=f"r{number}") for number in range(MAX_CASES + 3)]
    told = shown(record(WHOLE, *many))
    assert sum("status 503: no room" in line for line in told) == MAX_CASES
    assert "        and 3 more" in told
    assert not any("more" in line for line in shown(record(WHOLE, *many[:MAX_CASES])))


@pytest.mark.parametrize(
    ("plan", "became", "said"),
    [
        (Planned(2, "kill", "decode1", 4.0, 1.0), (), "fault 2: kill on decode1, planned at 4.00 s for 1 s"),
        (
            Planned(2, "delay", "client>gateway0", 4.0, None, params={"delay_s": 0.5}),
            (FaultRun(2, 4.01, None),),
            "fault 2: delay delay_s=0.5 on client>gateway0, from 4.01 s, never lifted",
        ),
        (
            Planned(2, "kill", "decode1", 4.0, 1.0, "token:5"),
            (FaultRun(1, 1.0, 2.0), FaultRun(2, 4.5, 5.5)),
            "fault 2: kill on decode1 at token:5, from 4.50 s to 5.50 s",
        ),
    ],
)
def test_a_fault_is_told_with_its_kind_target_and_time(plan: Planned, became: tuple[FaultRun, ...], said: str) -> None:
    assert fault_line(record(faults=became), plan) == said


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Broken("2 left of tasks"), "2 left of tasks"),
        (Broken("late", "r1"), "r1: late"),
        (Broken("late", "r1", "a1"), "r1, attempt a1: late"),
        (Broken("x" * (MAX_CHARS - 4), "r1"), "r1: " + "x" * (MAX_CHARS - 4)),
        (Broken("x" * (MAX_CHARS - 3), "r1"), "r1: " + "x" * (MAX_CHARS - 7) + "..."),
        (Broken("said \x1b[31mred\n“hm”", "r1"), "r1: said \\x1b[31mred\\n“hm”"),
    ],
)
def test_a_case_is_one_line_whatever_an_engine_has_said(case: Broken, said: str) -> None:
    assert case_line(case) == said


def test_the_command_that_runs_it_again() -> None:
    assert command("examples/chaos/a.toml", 7, False) == "pdgate chaos run examples/chaos/a.toml --seed 7"
    assert command("my files/a.toml", 7, True) == "pdgate chaos run 'my files/a.toml' --seed 7 --long"
    assert heading("a", 7, True) == "a, seed 7, long"


def test_the_sum_is_one_line() -> None:
    good, bad = judge(record()), judge(record(WHOLE, REFUSED, replace(REFUSED, name="r-too")))
    assert violations(bad) == 2
    assert str(total([("a", 1, good), ("b", 1, good), ("a", 2, good)])) == "2 scenarios, 2 seeds: 0 violations"
    assert str(total([("a", 1, good), ("a", 2, bad)])) == "1 scenario, 2 seeds: 2 violations"
    one = Judgement((Verdict("x", "", (Broken("bad"),)),), {})
    assert str(total([("a", 1, one)], stopped=True)) == "stopped: 1 scenario, 1 seed: 1 violation"
