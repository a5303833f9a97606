"""Which tests fail on a busy machine: `python -m tests.flaky PATH…` runs each path in copies at once, again and again.

Prints what failed and how often, and the words it failed with; exit status 1 if anything did. Two cores with four
copies are about as busy as a CI machine ever is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-m", default="not long", help="as of pytest")
    parser.add_argument("-k", default="", help="as of pytest")
    asked = parser.parse_args()
    failed = Counter[str]()
    for path in asked.paths:
        for number in range(asked.rounds):
            found = _round(path, asked.copies, ("-m", asked.m, "-k", asked.k))
            failed.update(found)
            print(f"{path} round {number + 1}: {len(found)} failed", flush=True)
    runs = asked.copies * asked.rounds
    for words, count in failed.most_common():
        print(f"{count:3} of {runs}: {words}")
    return int(bool(failed))


def _round(path: str, copies: int, further: tuple[str, ...]) -> list[str]:
    """What failed when so many copies of `path` ran at once; the output of those that failed is kept in a file."""
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", path, *further)
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(copies)]
    found: list[str] = []
    for each in running:
        output = each.communicate()[0].decode(errors="replace")
        if each.returncode not in (0, 5):  # 5: nothing to run
            found += [" - ".join(filter(None, match)) for match in _FAILED.findall(output)] or [f"{path}: no summary"]
            with tempfile.NamedTemporaryFile("w", prefix="flaky-", suffix=".log", delete=False) as log:
                log.write(output)
            print(f"  {Path(log.name)}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
