"""The decider under any interleaving of requests, cancellations, ends and restarts: nothing is left or lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.types import EngineId, Health
from gateway.decider import Decision
from gateway.errors import GatewayError
from routing.queueing import QueueLimits
from tests.fakes import FACTS, decider, now_s, request, timeless, up

NAMES = ("p0", "p1", "d0", "d1")
CHAINS = [tuple(bytes([family, depth]) * 8 for depth in range(6)) for family in range(3)]
OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit"] * 4 + ["cancel", "step", "hand_over", "finish", "finish", "restart", "flip", "wait"]
        ),
        st.integers(0, 1000),
        st.sampled_from([10, 1000, 4000, 7000]),
    ),
    max_size=60,
)


class World:
    """A decider, its requests, and which of their decisions are still to be ended."""

    def __init__(self) -> None:
        self.fleet = up(*NAMES)
        self.at = decider(self.fleet, limits=QueueLimits(20, 1 << 20))
        self.tasks: list[asyncio.Task[Any]] = []
        self.boots = 0

    @property
    def live(self) -> list[Decision]:
        """Decisions that their requests were told of, and that are not over."""
        told = [task.result() for task in self.tasks if task.done() and not task.cancelled() and not task.exception()]
        return [decision for decision in told if not decision.over]

    async def do(self, op: str, number: int, tokens: int) -> None:
        live = self.live
        match op:
            case "submit":
                asked = request(prompt_tokens=tokens, blocks=CHAINS[number % 3], deadline_s=now_s() + number / 100)
                self.tasks.append(asyncio.ensure_future(self.at.submit(asked)))
                if number % 3:
                    await asyncio.sleep(0)
            case "cancel" if self.tasks:
                self.tasks[number % len(self.tasks)].cancel()
            case "step":
                await asyncio.sleep(0)
            case "wait":
                await asyncio.sleep(number / 200)
            case "hand_over" if live:
                self.at.handed_over(live[number % len(live)], cached_tokens=[None, 0, tokens][number % 3])
            case "finish" if live:
                self.at.finished(live[number % len(live)])
            case "restart":
                self.boots += 1
                engine = EngineId(f"http://{NAMES[number % 4]}")
                self.fleet.set_facts(engine, replace(FACTS, boot_fingerprint=f"boot {self.boots}"))
                self.at.restarted(engine)
            case "flip":
                engine = EngineId(f"http://{NAMES[number % 4]}")
                up_now = self.fleet.view(engine).health is Health.READY
                self.fleet.set_health(engine, Health.SUSPECTED if up_now else Health.READY)
                self.at.fleet_changed(engine)

    def check(self) -> None:
        """Bookings are those of decisions that are not over; some of these are not told yet, or never will be."""
        told = {decision.rid for decision in self.live}
        assert self.at.bookings.live() >= len(told)
        for name in NAMES:
            engine = EngineId(f"http://{name}")
            assert self.at.bookings.uncached_tokens(engine) >= 0
            assert 0 <= self.at.bookings.decode_kv_tokens(engine) <= 10_000

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        while live := self.live:
            self.at.finished(live[0])


@given(OPS)
def test_every_interleaving_leaves_nothing(ops: list[tuple[str, int, int]]) -> None:
    @timeless
    async def runs() -> None:
        world = World()
        for op, number, tokens in ops:
            await world.do(op, number, tokens)
            world.check()
        await world.end()
        at = world.at
        assert at.bookings.live() == 0
        assert len(at.queue) == 0
        assert at.queue.body_bytes == 0
        assert not at._waiters
        assert not at.owners.index.pending_blocks()
        assert not any(engine.pending for engine in at.owners.index._engines.values())
        assert not at.owners.store._claims  # type: ignore[attr-defined]
        for name in NAMES:
            engine_id = EngineId(f"http://{name}")
            assert at.bookings.uncached_tokens(engine_id) == at.bookings.decode_kv_tokens(engine_id) == 0

    runs()


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=25))
def test_every_request_is_decided_or_refused_and_in_order(sizes: list[int]) -> None:
    """Each decision ends after a second: all that fit get their turn, the first first."""

    @timeless
    async def runs() -> None:
        at = decider(up("p0", "d0"))
        order: list[int] = []

        async def one(number: int, tokens: int) -> None:
            decision = await at.submit(request(prompt_tokens=tokens, deadline_s=now_s() + 1000))
            order.append(number)
            await asyncio.sleep(1.0)
            at.finished(decision)

        results = await asyncio.gather(
            *(one(number, tokens) for number, tokens in enumerate(sizes)), return_exceptions=True
        )
        assert not [
            error for error in results if isinstance(error, BaseException) and not isinstance(error, GatewayError)
        ]
        assert order == sorted(order)
        assert len(order) == len(sizes)

    runs()


DECODES = tuple(EngineId(f"http://d{number}") for number in range(3))


@given(st.lists(st.tuples(st.integers(1, 6000), st.sets(st.sampled_from(DECODES), max_size=2)), max_size=30))
def test_the_first_never_waits_beside_room_and_nobody_overtakes_its_equals(
    asked: list[tuple[int, set[EngineId]]],
) -> None:
    """Retries with any exclusions: whoever was there first gets each decode first, and the queue always drains."""

    @timeless
    async def runs() -> None:
        at = decider(up("p0", "d0", "d1", "d2"))
        order: list[int] = []

        async def one(number: int, tokens: int, excluded: set[EngineId]) -> None:
            wanted = request(prompt_tokens=tokens, deadline_s=now_s() + 1000, excluded_engines=frozenset(excluded))
            decision = await at.submit(wanted)
            order.append(number)
            assert decision.decode.engine_id not in excluded
            await asyncio.sleep(1.0)
            at.finished(decision)
            # Who is first in the queue now finds every decode that it may use too full for it.
            for first in at.queue.ready(1):
                for name in set(DECODES) - first.excluded_engines:
                    assert at.bookings.decode_kv_tokens(name) + first.kv_tokens > 9500

        await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))
        for line in {frozenset(excluded) for _, excluded in asked}:
            equals = [number for number in order if asked[number][1] == line]
            assert equals == sorted(equals)
        assert len(order) == len(asked)

    runs()
