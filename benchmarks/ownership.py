"""What prefix ownership costs at a million blocks: memory, CPU, the longest call. `python -m benchmarks.ownership`.

Runs are of 188 blocks (a prompt of 12 K tokens); chats are of 20 turns that add one to four blocks each. Each setting
is measured in a fresh process: memory as growth of the resident set, times as CPU of the calling thread; a "longest"
call is one that would have held up the event loop.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from resource import getpagesize

from engines.types import EngineId
from routing.index import PrefixIndex

BLOCKS = 1_000_000
RUN_BLOCKS = 188
ENGINES = tuple(EngineId(f"p{i}") for i in range(8))
TURNS, TURN_BLOCKS, CHATS_AT_ONCE = 20, (1, 2, 3, 4), 200
MOVING_RATIOS = (0.25, 1.0)
MATCHES = 500
ROUNDS = 5
REDIS_PART = "benchmarks.ownership_redis"

Chain = tuple[bytes, ...]


def main() -> None:
    chats: list[Callable[[], str]] = [partial(chats_that_move, ratio) for ratio in MOVING_RATIOS]
    for measure in (shared_by_all, one_owner_each, *chats):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            print(fresh.submit(measure).result(), flush=True)
    if importlib.util.find_spec(REDIS_PART) is not None:
        importlib.import_module(REDIS_PART).main()


def shared_by_all() -> str:
    """Every run held by all engines: memory, filling, matching."""
    index, lines = filled([ENGINES] * (BLOCKS // RUN_BLOCKS))
    known = [chain(number) for number in Random(0).sample(range(BLOCKS // RUN_BLOCKS), MATCHES)]
    new = [chain(-1 - number) for number in range(MATCHES)]
    half = RUN_BLOCKS // 2
    halves = [(*ours[:half], *theirs[half:]) for ours, theirs in zip(known, new, strict=True)]
    for name, prompts in (("hit", known), ("half", halves), ("miss", new)):
        lines.append(f"  {f'match of {RUN_BLOCKS} blocks: {name}':<34} {match_us(index, prompts):7.1f} µs")
    return "\n".join([f"{BLOCKS} blocks, each held by {len(ENGINES)} engines", *lines])


def one_owner_each() -> str:
    """Every run held by one engine, some 125 K blocks each: filling, forgetting, leaving."""
    runs = BLOCKS // RUN_BLOCKS
    index, lines = filled([(ENGINES[number % len(ENGINES)],) for number in range(runs)])
    per_engine = index.held_blocks(ENGINES[0])
    last = max(range(3, runs, len(ENGINES)))  # the run that engine 3 used last: when it is gone, all that it had is
    for engine_id in ENGINES:
        index.set_capacity(engine_id, per_engine)
    stalls: dict[str, Iterator[Callable[[], object]]] = {
        "add_held beyond the capacity": (partial(index.add_held, ENGINES[0], chain(-1 - i)) for i in range(500)),
        "evict of 188 blocks": (partial(index.evict, ENGINES[1], chain(8 * i + 1)) for i in range(200)),
        "evict of the last block": (partial(index.evict, ENGINES[2], chain(8 * i + 2)[-1:]) for i in range(200)),
        "evict of a middle block": (partial(index.evict, ENGINES[2], chain(8 * i + 2)[90:91]) for i in range(200)),
        f"correct, {per_engine} forgotten": (partial(index.correct, ENGINES[3], chain(last), 0) for _ in "1"),
        f"drop_engine of {per_engine}": (partial(index.drop_engine, ENGINES[4]) for _ in "1"),
        "add_held while that is removed": (partial(index.add_held, ENGINES[5], chain(-900 - i)) for i in range(500)),
    }
    for name, calls in stalls.items():
        lines.append(told(name, [cpu_ms(call) for call in calls]))
    return "\n".join([f"{BLOCKS} blocks, each held by one engine", *lines])


def chats_that_move(moving_ratio: float) -> str:
    """Chats with short turns, each turn a claim of the whole chat; this ratio of the turns goes to any engine."""
    index = PrefixIndex(BLOCKS)
    gc.collect()
    before_bytes = resident_bytes()
    blocks = chats = 0
    sum_ms = longest_ms = 0.0  # and no list of times, which would count as memory
    while blocks < BLOCKS:
        at_once = [chat(number, moving_ratio) for number in range(chats, chats + CHATS_AT_ONCE)]
        chats += CHATS_AT_ONCE
        blocks += sum(len(data) // 16 for data, _ in at_once)
        for turn in range(TURNS):
            for data, turns in at_once:
                engine_id, end = turns[turn]
                took_ms = cpu_ms(partial(index.add_held, engine_id, chain_of(data[: 16 * end])))
                sum_ms += took_ms
                longest_ms = max(longest_ms, took_ms)
    del at_once, data, turns
    gc.collect()
    grown_bytes = resident_bytes() - before_bytes
    prompts = [chain_of(chat(number, moving_ratio)[0]) for number in Random(0).sample(range(chats), MATCHES)]
    return "\n".join(
        [
            f"{blocks} blocks in chats of {TURNS} turns, {moving_ratio:.0%} of them on any of {len(ENGINES)} engines",
            f"  memory {grown_bytes / blocks:.1f} bytes a block (the index says {index.memory_bytes() / blocks:.1f})",
            f"  {'add_held of a turn: mean':<34} {1e3 * sum_ms / chats / TURNS:7.1f} µs, longest {longest_ms:6.3f} ms",
            f"  {'match of a whole chat':<34} {match_us(index, prompts):7.1f} µs",
        ]
    )


def chat(number: int, moving_ratio: float) -> tuple[bytes, list[tuple[EngineId, int]]]:
    """The hashes of the chat of this number; for each of its turns the engine and how many blocks it has by then."""
    random = Random(number)
    ends = list(accumulate(random.choices(TURN_BLOCKS, k=TURNS)))
    engines = [random.choice(ENGINES)]
    while len(engines) < TURNS:
        engines.append(random.choice(ENGINES) if random.random() < moving_ratio else engines[-1])
    return random.randbytes(16 * ends[-1]), list(zip(engines, ends, strict=True))


def filled(owners_of_runs: list[tuple[EngineId, ...]]) -> tuple[PrefixIndex, list[str]]:
    """An index in which run i is held by these engines, and what that cost."""
    index = PrefixIndex(BLOCKS)
    gc.collect()
    before_bytes = resident_bytes()
    new_ms, known_ms = array("d"), array("d")
    for number, owners in enumerate(owners_of_runs):
        for engine_id in owners:
            blocks = chain(number)  # anew: each holder tells it in a message of its own
            times = new_ms if engine_id == owners[0] else known_ms
            times.append(cpu_ms(partial(index.add_held, engine_id, blocks)))
    del blocks
    gc.collect()
    total = len(owners_of_runs) * RUN_BLOCKS
    grown_bytes = resident_bytes() - before_bytes
    lines = [
        f"  memory {grown_bytes / total:.1f} bytes a block (the index says {index.memory_bytes() / total:.1f})",
        f"  filled in {(sum(new_ms) + sum(known_ms)) / 1e3:.2f} s CPU",
    ]
    for what, times in (("new", new_ms), ("known", known_ms)):
        if times:
            lines.append(told(f"add_held of {RUN_BLOCKS} {what} blocks", times))
    return index, lines


def told(name: str, times_ms: Sequence[float]) -> str:
    return f"  {name:<34} {1e3 * statistics.median(times_ms):7.1f} µs, longest {max(times_ms):6.3f} ms"


def chain(number: int) -> Chain:
    """The run of this number, in fresh objects as they come from a request."""
    return chain_of(Random(number).randbytes(16 * RUN_BLOCKS))


def chain_of(data: bytes) -> Chain:
    return tuple(data[start : start + 16] for start in range(0, len(data), 16))


def match_us(index: PrefixIndex, prompts: list[Chain]) -> float:
    """Median over rounds of the mean CPU time of a match; the objects are new in every round, as requests are."""
    rounds = []
    for _ in range(ROUNDS):
        fresh = [tuple(bytes(bytearray(block)) for block in prompt) for prompt in prompts]
        rounds.append(1e3 * cpu_ms(partial(deque, map(index.match, fresh), 0)) / len(fresh))
    return statistics.median(rounds)


def cpu_ms(call: Callable[[], object]) -> float:
    started_s = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started_s)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


if __name__ == "__main__":
    main()
