"""DP ranks under any order of requests, ends and restarts: none is overfilled, and nothing is left on any of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.timing import TINY
from engines.types import EngineId
from gateway.decider import Decision
from routing.ranks import cheapest
from tests.fakes import FACTS, decider, now_s, request, timeless, up

NAMES = ("p0", "p1", "d0", "d1")
SIZES = {EngineId(f"http://{name}"): size for name, size in zip(NAMES, (3, 1, 2, 1), strict=True)}
CHAINS = [tuple(bytes([family, depth]) * 8 for depth in range(6)) for family in range(1, 4)]
OPS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 4 + ["hand_over", "finish", "finish", "restart"]),
        st.integers(0, 1000),
        st.sampled_from([10, 1000, 4000, 7000]),
    ),
    max_size=40,
)


class World:
    """A decider before servers of one and of several ranks."""

    def __init__(self) -> None:
        self.fleet = up(*NAMES)
        for engine_id, size in SIZES.items():
            self.fleet.set_facts(engine_id, replace(FACTS, dp_size=size))
        self.at = decider(self.fleet)
        self.tasks: list[asyncio.Task[Any]] = []
        self.boots = 0

    @property
    def live(self) -> list[Decision]:
        told = [task.result() for task in self.tasks if task.done() and not task.cancelled() and not task.exception()]
        return [decision for decision in told if not decision.over]

    async def do(self, op: str, number: int, tokens: int) -> None:
        live = self.live
        match op:
            case "submit":
                asked = request(prompt_tokens=tokens, blocks=CHAINS[number % 3], deadline_s=now_s() + 1000.0)
                self.tasks.append(asyncio.ensure_future(self.at.submit(asked)))
            case "hand_over" if live:
                self.at.handed_over(live[number % len(live)])
            case "finish" if live:
                self.at.finished(live[number % len(live)])
            case "restart":
                self.boots += 1
                engine_id = list(SIZES)[number % len(SIZES)]
                facts = replace(FACTS, dp_size=SIZES[engine_id], boot_fingerprint=f"boot{self.boots}")
                self.fleet.set_facts(engine_id, facts)
                self.at.restarted(engine_id)
                await self.canaries_pass()
        await asyncio.sleep(0)

    async def canaries_pass(self) -> None:
        """Every pair of a restarted prefill is proved, as `gateway/canaries.py` does."""
        began_s = now_s()
        await asyncio.sleep(0.1)
        health = self.at.pairs.health
        for pair in tuple(health.records):
            health.canary_passed(pair, began_s + 0.05, now_s(), text_agrees=True)
        self.at.pump()

    def check(self) -> None:
        bookings = self.at.bookings
        for decision in self.live:
            booking = decision.booking
            for engine_id, rank in ((booking.prefill, booking.prefill_rank), (booking.decode, booking.decode_rank)):
                assert rank is None if SIZES[engine_id] == 1 else rank in range(SIZES[engine_id])
        for engine_id, size in SIZES.items():
            if size > 1:
                own = bookings.own(engine_id)
                prefills = bookings.on_prefill_ranks(engine_id, size, TINY.prefill, now_s())
                assert sum(on.requests for on in prefills) == own.prefill_requests
                assert sum(on.uncached_tokens for on in prefills) == own.uncached_tokens
                live = [each for each in self.live if each.booking.decode == engine_id]
                for rank, on in enumerate(bookings.on_decode_ranks(engine_id, size)):
                    mine = [each.booking for each in live if each.booking.decode_rank == rank]
                    assert on == (sum(each.kv_tokens for each in mine), len(mine))
                    assert len(mine) == 1 or on.kv_tokens <= 0.95 * FACTS.max_total_tokens


@given(OPS)
def test_no_rank_is_overfilled_and_all_is_given_back(ops: list[tuple[str, int, int]]) -> None:
    @timeless
    async def runs() -> None:
        world = World()
        for op in ops:
            await world.do(*op)
            world.check()
        while live := world.live:
            world.at.finished(live[0])
            await asyncio.sleep(0)
            world.check()
        assert not len(world.at.queue)
        assert world.at.bookings.live() == 0
        for engine_id, size in SIZES.items():
            assert world.at.bookings.on_decode_ranks(engine_id, size) == [(0, 0)] * size
            prefills = world.at.bookings.on_prefill_ranks(engine_id, size, TINY.prefill, now_s())
            assert prefills == [(0.0, 0, 0)] * size

    runs()


COSTS = st.lists(st.tuples(st.integers(0, 2).map(float), st.integers(0, 2).map(float)), min_size=1, max_size=8)


@given(COSTS, st.integers(0, 2**64))
def test_no_rank_is_cheaper_than_the_chosen_one(costs: list[tuple[float, float]], first: int) -> None:
    chosen = cheapest(costs, first)
    assert costs[chosen] == min(costs)
    equals = [rank for rank in range(len(costs)) if costs[rank] == min(costs)]
    assert {cheapest(costs, rank) for rank in range(len(costs))} == set(equals), "each of the equal ones has its turn"
