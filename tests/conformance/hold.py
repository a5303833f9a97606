"""How long after a decode's first output the prefill's answer comes: the time a gateway must hold that output back.

`python -m tests.conformance.hold` measures it on both sides, one request at a time and with 32 prompts queued.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from pathlib import Path

import aiohttp

from engines.sglang_process import NoEnvironment, load
from tests.conformance.sides import TIME_LIMITS, Side, emulated_side, real_side
from tests.conformance.stage import Stage

PROBES = 40
QUEUED = 32
PROMPT_TOKENS = 100


async def gap_s(stage: Stage, number: int) -> float:
    """Seconds from the decode's first byte to the end of the prefill's answer; negative if that was first."""
    loop = asyncio.get_running_loop()
    body = stage.with_room(
        {
            "input_ids": [300 + number, *range(500, 500 + PROMPT_TOKENS - 1)],
            "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
    )
    prefill, decode = stage.both("/generate", body, str(number))

    async def first() -> float:
        await decode.first.wait()
        return loop.time()

    async def answered() -> float:
        await prefill.done()
        return loop.time()

    first_s, answered_s = await asyncio.gather(first(), answered())
    await decode.done()
    return answered_s - first_s


async def measure(side: Side) -> tuple[list[float], list[float]]:
    """The gaps of single requests, and of QUEUED sent at once (three times)."""
    prefill, decode = await side.pair()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        stage = Stage(prefill, decode, http, side.make)
        await gap_s(stage, 1000)
        idle = [await gap_s(stage, at) for at in range(PROBES)]
        queued: list[float] = []
        for turn in (1, 2, 3):
            queued += await asyncio.gather(*(gap_s(stage, turn * 100 + at) for at in range(QUEUED)))
    return idle, queued


def told(gaps: list[float]) -> str:
    """The distribution in one line, in milliseconds."""
    ordered = sorted(gap * 1000 for gap in gaps)
    late = sum(gap > 0 for gap in ordered) / len(ordered)
    cuts = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    parts = [f"{name} {ordered[min(len(ordered) - 1, int(len(ordered) * at))]:.1f}" for name, at in cuts.items()]
    mean = statistics.fmean(ordered)
    return (
        f"{', '.join(parts)}, max {ordered[-1]:.1f}, mean {mean:.1f} ms; after the decode's first output in {late:.0%}"
    )


async def _main(directory: Path | None) -> None:
    launch = load(directory)
    for side in (real_side(launch), emulated_side(launch.served_model_name)):
        try:
            idle, queued = await measure(side)
        finally:
            await side.stop()
        print(f"{side.name:9} one at a time: {told(idle)}")
        print(f"{side.name:9} {QUEUED} at once:    {told(queued)}", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.hold", description=__doc__)
    parser.add_argument("--sglang-dir", type=Path, metavar="DIR")
    args = parser.parse_args()
    os.environ.update(TIME_LIMITS)
    try:
        asyncio.run(_main(args.sglang_dir))
    except NoEnvironment as error:
        print(f"hold: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
