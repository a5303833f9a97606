"""`python -m tests.conformance`: run the table on both sides, compare, and say what differs.

What the real side answered is kept in the SGLang environment's folder and used again while case, SGLang and model are
the same; the emulator is always asked afresh. The status is 0 only if nothing differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import aiohttp

from engines.emulator.process import ServerFailed
from engines.sglang_process import Launch, NoEnvironment, load
from tests.conformance.cases import CASES, Case
from tests.conformance.compare import Difference, differences, reduced
from tests.conformance.explained import EXPLAINED, Explained, explanation
from tests.conformance.sides import TIME_LIMITS, Side, emulated_side, real_side
from tests.conformance.store import Store

ASKED_AGAIN = ".time"
"""Where only durations differ, both sides are asked once more: other programs may have slowed one of them."""


UNPLAYED = (ServerFailed, aiohttp.ClientError, OSError, LookupError, ValueError)
"""A play that does not come to its end, because a server is not as it must be, differs."""


class NoSuchCase(Exception):
    """Nothing was asked for."""


class RealSideFailed(Exception):
    """There is nothing to compare with."""


async def judge(case: Case, real: Side, emulator: Side, store: Store) -> tuple[list[Difference], dict[str, Any]]:
    """Run one case on both sides; what differs, and both observations."""
    kept = store.get(case)
    try:
        seen = kept or await real.observe(case)
    except ServerFailed as error:
        raise RealSideFailed(f"a real server does not start: {error}") from error
    emulated = await emulator.observe(case)
    found = _compared(case, seen, emulated)
    unexplained = [each for each in found if explanation(case.name, each) is None]
    if unexplained and all(each.path.endswith(ASKED_AGAIN) for each in unexplained):
        seen, kept = await real.observe(case), None
        emulated = await emulator.observe(case)
        found = _compared(case, seen, emulated)
    if kept is None:
        store.put(case, seen)
    return found, {"real": seen, "emulated": emulated}


def _compared(case: Case, real: dict[str, Any], emulated: dict[str, Any]) -> list[Difference]:
    left, right = (reduced(each, case.loose, case.timed) for each in (real, emulated))
    return list(differences(left, right))


async def run(cases: Sequence[Case], real: Side, emulator: Side, store: Store) -> dict[str, Any]:
    """Run the cases and say what differs; all that was seen, by case."""
    counts = {"agree": 0, "explained": 0, "differ": 0}
    used: set[Explained] = set()
    report: dict[str, Any] = {}
    for number, case in enumerate(cases, 1):
        try:
            found, observations = await judge(case, real, emulator, store)
        except RealSideFailed:
            raise
        except UNPLAYED as error:
            found, observations = [Difference("the play", f"{type(error).__name__}: {error}", "")], {}
        rows = {difference.path: explanation(case.name, difference) for difference in found}
        used |= {row for row in rows.values() if row is not None}
        open_ones = [difference for difference in found if rows[difference.path] is None]
        verdict = "differ" if open_ones else "explained" if found else "agree"
        counts[verdict] += 1
        print(f"{number:4}/{len(cases)}  {verdict:9}  {case.name}", file=sys.stderr, flush=True)
        for difference in open_ones:
            print(f"           {difference.path}:\n             real     {difference.real!r}", file=sys.stderr)
            print(f"             emulated {difference.emulated!r}", file=sys.stderr, flush=True)
        _print_measured(observations)
        told = [{"path": one.path, "real": one.real, "emulated": one.emulated} for one in found]
        report[case.name] = {"verdict": verdict, "differences": told, **observations}
    if len(cases) == len(CASES):
        for row in [row for row in EXPLAINED if row not in used]:
            print(f"explained, but no difference any more: {row.case}: {row.path}", file=sys.stderr)
    print(f"{len(cases)} cases: " + ", ".join(f"{count} {word}" for word, count in counts.items()), flush=True)
    return report


def _print_measured(observations: dict[str, Any]) -> None:
    if not observations:
        return
    real, emulated = (observations[side]["facts"] for side in ("real", "emulated"))
    for name in real:
        if name.startswith("measured") and name in emulated:
            print(f"           {name}: real {real[name]:.3g}, emulated {emulated[name]:.3g}", file=sys.stderr)


async def _main(args: argparse.Namespace, launch: Launch) -> dict[str, Any]:
    cases = [case for case in CASES if fnmatchcase(case.name, f"*{args.only}*")]
    if args.fault_free:
        cases = [case for case in cases if not case.fault]
    if not cases:
        raise NoSuchCase(f"no case's name contains {args.only!r}; they are in tests/conformance/cases.py")
    real, emulator = real_side(launch), emulated_side(launch.served_model_name)
    try:
        return await run(cases, real, emulator, Store(launch, fresh=args.fresh))
    finally:
        await real.stop()
        await emulator.stop()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    add = parser.add_argument
    add("--fault-free", action="store_true", help="only the cases without faults")
    add("--only", default="", metavar="PATTERN", help="only the cases whose name contains it; * and ? work")
    add("--fresh", action="store_true", help="ask the real side again, whatever is kept")
    add("--out", type=Path, metavar="FILE", help="write both sides' observations and what differs as JSON")
    add("--sglang-dir", type=Path, metavar="DIR", help="the SGLang environment; default: where make sglang put it")
    args = parser.parse_args()
    if args.out is not None and not args.out.absolute().parent.is_dir():
        print(f"conformance: --out {args.out}: there is no such folder", file=sys.stderr)
        return 2
    os.environ.update(TIME_LIMITS)
    try:
        report = asyncio.run(_main(args, load(args.sglang_dir)))
    except (NoEnvironment, NoSuchCase, RealSideFailed) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1))
    return int(any(each["verdict"] == "differ" for each in report.values()))


if __name__ == "__main__":
    sys.exit(main())
