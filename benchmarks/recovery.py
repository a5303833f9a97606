"""How long a broken stream pauses: `python -m benchmarks.recovery`.

Streams run on two decodes, one of which is killed. In the same instant as many fresh requests are sent as streams were
broken, each with the prompt and the output of one of them: their time to first token is what going on costs anyway.
Wanted: the median pause at most detection + 1.3 times theirs, the 99th percentile at most detection + 3 times.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

from benchmarks.storm import Fleet, Plan

WANTED = {50: 1.3, 99: 3.0}
_WARM_S = 2.0


@dataclass
class Stream:
    """One `/generate` stream: its prompt, its output so far, and when each event came."""

    prompt: list[int]
    decode: str = ""
    began_s: float = 0.0
    told_s: float = 0.0
    """When the gateway said that it goes on: it had noticed by then."""
    ids: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    whole: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def next_after_s(self, since_s: float) -> float | None:
        """From then to its next token. What was on its way already does not count: only what follows a pause does."""
        after = [at_s for at_s in self.came_s if at_s > since_s]
        if len(after) < 2:
            return None
        gaps = [(later - sooner, later) for sooner, later in zip([since_s, *after], after, strict=False)]
        return max(gaps)[1] - since_s


async def _read(fleet: Fleet, stream: Stream, tokens: int) -> None:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    raw = orjson.dumps({"input_ids": stream.prompt, "sampling_params": sampling, "stream": True})
    loop = asyncio.get_running_loop()
    stream.began_s = loop.time()
    headers = {"content-type": "application/json"}
    async with fleet.http.post(fleet.url + "/generate", data=raw, headers=headers) as answer:
        stream.decode = answer.headers.get("x-pdgate-decode", "")
        pending = b""
        async for chunk in answer.content.iter_any():
            *frames, pending = (pending + chunk).split(b"\n\n")
            for frame in frames:
                if frame.startswith(b"data: {"):
                    stream.ids = orjson.loads(frame[6:]).get("output_ids") or stream.ids
                    stream.came_s.append(loop.time())
                    stream.began.set()
                elif frame.startswith(b": pdgate"):
                    stream.told_s = loop.time()
                stream.whole = stream.whole or frame == b"data: [DONE]"


def _prompt(seed: int, tokens: int) -> list[int]:
    return [(seed + number) % 250 + 3 for number in range(tokens)]


async def _one_kill(plan: Plan, streams: int, tokens: int, serial: int) -> dict[str, list[float]]:
    loop = asyncio.get_running_loop()
    found: dict[str, list[float]] = {"pause": [], "detection": [], "fresh": [], "not_whole": []}
    async with Fleet(plan, 2, 2) as fleet:
        await asyncio.sleep(_WARM_S)
        running = [Stream(_prompt(serial * 7 + number * 13, plan.prompt_tokens)) for number in range(streams)]
        reads = [asyncio.ensure_future(_read(fleet, stream, tokens)) for stream in running]
        await asyncio.gather(*(stream.began.wait() for stream in running))
        await asyncio.sleep(1.0)
        by_decode: dict[str, list[Stream]] = {}
        for stream in running:
            by_decode.setdefault(stream.decode, []).append(stream)
        victim = max(fleet.decodes, key=lambda server: len(by_decode.get(server.url, ())))
        broken = by_decode[victim.url]
        killed_s = loop.time()
        victim.send_signal(signal.SIGKILL)
        fresh = [Stream([*stream.prompt, *stream.ids]) for stream in broken]
        others = [asyncio.ensure_future(_read(fleet, stream, 4)) for stream in fresh]
        await asyncio.gather(*reads, *others)
        await victim.kill()
        for stream in broken:
            found["not_whole"] += [] if stream.whole else [1.0]
            pause_s = stream.next_after_s(killed_s)
            found["detection"] += [stream.told_s - killed_s] if stream.told_s else []
            found["pause"] += [] if pause_s is None else [pause_s]
        found["fresh"] = [stream.came_s[0] - stream.began_s for stream in fresh if stream.came_s]
    return found


def shown(found: dict[str, list[float]]) -> dict[str, Any]:
    """The figures, and whether they are as wanted."""
    report: dict[str, Any] = {"broken_streams": len(found["pause"]), "not_whole": len(found["not_whole"])}
    for name in ("detection", "pause", "fresh"):
        report[name] = {f"p{at}": _percentile(found[name], at) for at in WANTED}
    report["allowed"] = {
        f"p{at}": report["detection"][f"p{at}"] + factor * report["fresh"][f"p{at}"] for at, factor in WANTED.items()
    }
    report["met"] = all(report["pause"][f"p{at}"] <= report["allowed"][f"p{at}"] for at in WANTED)
    return report


def _percentile(values: Sequence[float], at: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[at - 1] if len(values) > 1 else values[0]


async def run(plan: Plan, kills: int, streams: int, tokens: int) -> dict[str, Any]:
    """So many kills, each of a fleet of its own."""
    total: dict[str, list[float]] = {}
    for serial in range(kills):
        found = await _one_kill(plan, streams, tokens, serial)
        print(orjson.dumps(shown(found)).decode(), flush=True)
        for name, values in found.items():
            total.setdefault(name, []).extend(values)
    return shown(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--streams", type=int, default=40, help="on both decodes together")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--speed", type=float, default=1.0)
    args = parser.parse_args()
    plan = Plan(0, 0, args.prompt_tokens, args.speed, "h100-70b", 0, 0)
    print(
        orjson.dumps(uvloop.run(run(plan, args.kills, args.streams, args.tokens)), option=orjson.OPT_INDENT_2).decode()
    )


if __name__ == "__main__":
    main()
