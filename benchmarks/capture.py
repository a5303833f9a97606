"""What it costs to be able to resume: CPU of the gateway per streamed event: `python -m benchmarks.capture`.

The same streams in turns with capture (as by default) and without (`x-pdgate-on-failure: error`, relayed as they come),
through one gateway before one pair. The figure is the median over rounds of CPU with ÷ CPU without; at most 1.1 is
wanted. A chat that is captured is asked for as a completion with ids, which is part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import orjson
import uvloop

from benchmarks.emulator import cpu_s
from benchmarks.storm import Fleet, Plan

WANTED_RATIO = 1.1
_OFF = {"x-pdgate-on-failure": "error"}
_PROMPT = "Tell me a long story about a gateway that never lost a token. " * 4


def _body(path: str, tokens: int, serial: int) -> dict[str, Any]:
    prompt = f"{serial:08d} {_PROMPT}"
    greedy = {"temperature": 0, "ignore_eos": True}
    if path == "/generate":
        return {"text": prompt, "sampling_params": {**greedy, "max_new_tokens": tokens}, "stream": True}
    asked = {"messages": [{"role": "user", "content": prompt}]} if path.endswith("chat/completions") else {}
    asked = asked or {"prompt": prompt}
    return {"model": "emulated", **asked, **greedy, "max_tokens": tokens, "stream": True}


class Bench:
    """One fleet, asked again and again."""

    def __init__(self, fleet: Fleet, streams: int, tokens: int) -> None:
        self._fleet, self._streams, self._tokens = fleet, streams, tokens
        self._serial = 0

    async def us_an_event(self, path: str, headers: dict[str, str]) -> float:
        """Microseconds of the gateway's CPU for each event of one batch of streams."""
        before_s = cpu_s(self._fleet.gateway_pid)
        events = sum(await asyncio.gather(*(self._stream(path, headers) for _ in range(self._streams))))
        return (cpu_s(self._fleet.gateway_pid) - before_s) / events * 1e6

    async def _stream(self, path: str, headers: dict[str, str]) -> int:
        self._serial += 1
        raw = orjson.dumps(_body(path, self._tokens, self._serial))
        sent = {"content-type": "application/json", **headers}
        async with self._fleet.http.post(self._fleet.url + path, data=raw, headers=sent) as answer:
            read = await answer.read()
        if answer.status != 200 or not read.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"a stream was not whole: {read[-300:]!r}")
        return read.count(b"\n\n")


async def run(paths: Sequence[str], rounds: int, streams: int, tokens: int, speed: float) -> dict[str, Any]:
    """The figures of each route."""
    plan = Plan(0, 0, 0, speed, "tiny", 0, 0)
    report: dict[str, Any] = {}
    async with Fleet(plan, 1, 1) as fleet:
        bench = Bench(fleet, streams, tokens)
        await asyncio.sleep(2.0)  # until the gateway knows how its servers tokenize
        for path in paths:
            await bench.us_an_event(path, {})
            on, off = [], []
            for number in range(rounds):
                order = ((on, {}), (off, _OFF)) if number % 2 else ((off, _OFF), (on, {}))
                for figures, headers in order:
                    figures.append(await bench.us_an_event(path, headers))
            ratios = [a / b for a, b in zip(on, off, strict=True)]
            report[path] = {
                "with_us": statistics.median(on),
                "without_us": statistics.median(off),
                "ratio": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4),
            }
            print(path, orjson.dumps(report[path]).decode(), flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--path", action="append", help="a route; all three, if none is given")
    args = parser.parse_args()
    paths = args.path or ["/v1/chat/completions", "/v1/completions", "/generate"]
    report = uvloop.run(run(paths, args.rounds, args.streams, args.tokens, args.speed))
    met = all(figures["ratio"] <= WANTED_RATIO for figures in report.values())
    print(f"at most {WANTED_RATIO}: {'met' if met else 'NOT met'}")


if __name__ == "__main__":
    main()
