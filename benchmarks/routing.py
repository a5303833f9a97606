"""CPU time of the routing core: hashing, prefix match, choice of a pair. `python -m benchmarks.routing`.

Each figure is the median over rounds of process time per call, in µs. "busy" fleets have unlike bookings and hits;
"idle" ones are all ties; "links" ones have a learned bandwidth for every pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from engines.timing import H100_70B, LinkTiming
from engines.types import CacheFormat, EngineFacts, EngineId, EngineSpec, EngineView, Health, Role
from routing.cost import DEFAULT_COST
from routing.index import PrefixIndex
from routing.pairing import best_pair, fastest_links
from routing.prefix import Namespace, root_hash, text_blocks
from routing.types import DecodeState, PrefillState, RequestView, RoutingSnapshot

ROUNDS = 7
SIZES = (4, 16, 64, 256)
PROMPT_BYTES = 12 * 1024


def main() -> None:
    root = root_hash(Namespace("tenant", "model"))
    prompt = Random(0).randbytes(PROMPT_BYTES)
    blocks = text_blocks(root, prompt)
    hash_us = median_us(lambda: text_blocks(root, prompt))
    print(f"hash {PROMPT_BYTES // 1024} KB into {len(blocks)} blocks: {hash_us:.0f} µs")
    print(
        f"{'fleet':>9} {'match':>8} {'one owner':>10} {'claim+hold':>11} {'pair busy':>10} {'idle':>8} {'links':>8}  µs"
    )
    for size in SIZES:
        print(row(size, blocks))


def row(size: int, blocks: tuple[bytes, ...]) -> str:
    """All figures of one fleet of `size` prefills and as many decodes."""
    every, one = indexed(size, blocks, every=1), indexed(size, blocks, every=size)
    owner = EngineId("p0")

    def claim_and_hold() -> None:
        one.add_pending(owner, blocks)
        one.drop(owner, blocks)
        one.add_held(owner, blocks)

    request = a_request(blocks)
    idle, busy = fleet(size, Random(1), busy=False), fleet(size, Random(1), busy=True)
    linked = with_links(busy)
    rng = Random(2)
    figures = (
        median_us(lambda: every.match(blocks)),
        median_us(lambda: one.match(blocks)),
        median_us(claim_and_hold),
        *(median_us(lambda s=s: best_pair(request, s, DEFAULT_COST, rng)) for s in (busy, idle, linked)),
    )
    return f"{size:>4}x{size:<4} " + " ".join(
        f"{x:>{w}.0f}" for x, w in zip(figures, (8, 10, 11, 10, 8, 8), strict=True)
    )


def median_us(call: Callable[[], object], budget_s: float = 0.05) -> float:
    """Median over rounds of the mean CPU time of `call`, each round about `budget_s` long."""
    started_s = time.process_time()
    call()
    once_s = max(1e-7, time.process_time() - started_s)
    calls = max(1, int(budget_s / once_s))
    return statistics.median(_round_us(call, calls) for _ in range(ROUNDS))


def _round_us(call: Callable[[], object], calls: int) -> float:
    started_s = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - started_s) / calls * 1e6


def indexed(size: int, blocks: tuple[bytes, ...], every: int) -> PrefixIndex:
    """An index in which every `every`-th of `size` prefills holds a different length of the chain, the first all."""
    index = PrefixIndex()
    for i in range(size):
        index.add_held(EngineId(f"p{i}"), blocks[: len(blocks) * (size - i) // size] if i % every == 0 else ())
    return index


def a_request(blocks: tuple[bytes, ...]) -> RequestView:
    return RequestView("r", "m", 3072, blocks, 64.0, 350, 1024, 0.0, 10.0, PROMPT_BYTES)


def fleet(size: int, rng: Random, *, busy: bool) -> RoutingSnapshot:
    def prefill(view: EngineView) -> PrefillState:
        if not busy:
            return PrefillState(view, H100_70B.prefill)
        hit_tokens = rng.choice([0, 0, 0, 3072])
        return PrefillState(view, H100_70B.prefill, rng.uniform(0, 2), 9000, 4, hit_tokens, hit_tokens)

    def decode(view: EngineView) -> DecodeState:
        booked_tokens = rng.randrange(600_000) if busy else 0
        return DecodeState(view, H100_70B.decode, 600_000, booked_tokens, booked_tokens // 5000)

    return RoutingSnapshot(
        now_s=0.0,
        prefills=tuple(map(prefill, views(size, Role.PREFILL))),
        decodes=tuple(map(decode, views(size, Role.DECODE))),
        default_link=H100_70B.link,
        kv_bytes_per_token=H100_70B.kv_bytes_per_token,
    )


def views(size: int, role: Role) -> Iterator[EngineView]:
    cache_format = CacheFormat(1, "bf16", "paged", "nixl")
    facts = EngineFacts("m", "1", cache_format, 600_000, 131_072, 8192, 1, "f")
    for i in range(size):
        yield EngineView(EngineSpec(EngineId(f"{role.value[0]}{i}"), "", role), Health.READY, 1, facts)


def with_links(snapshot: RoutingSnapshot) -> RoutingSnapshot:
    """The same with a link of its own for every pair, and the bounds of them kept as a gateway would."""
    rng = Random(3)
    links = {
        (p.view.engine_id, d.view.engine_id): LinkTiming(rng.uniform(20e9, 50e9), 0.005)
        for p in snapshot.prefills
        for d in snapshot.decodes
    }
    linked = replace(snapshot, links=links)
    return replace(linked, link_bounds=fastest_links(linked))


if __name__ == "__main__":
    main()
