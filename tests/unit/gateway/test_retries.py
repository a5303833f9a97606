"""Further attempts of all requests together: what the fleet and the bookings make of the budget and of the turns."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from engines.timing import PrefillWork
from engines.types import EngineId, Health
from gateway.bookings import Booking, Bookings
from gateway.config import RetryConfig
from gateway.retries import Retries
from routing.index import Hit
from tests.fakes import FACTS, now_s, request, timeless, up

P0, P1, D0 = EngineId("http://p0"), EngineId("http://p1"), EngineId("http://d0")


def booked(number: int) -> Booking:
    return Booking(f"r{number}", P0, D0, PrefillWork(10), 20, 0.1, 0.0)


class Scene:
    def __init__(self, config: RetryConfig | None = None) -> None:
        self.fleet = up("p0", "p1", "d0")
        self.bookings = Bookings()
        self.retries = Retries(config or RetryConfig(), self.fleet, self.bookings, Random(1))

    def allowed(self, tries: int = 1000) -> int:
        return sum(self.retries.may_retry(D0) for _ in range(tries))


@timeless
async def test_the_budget_covers_what_a_decode_had_when_it_died() -> None:
    scene = Scene()
    for number in range(40):
        scene.bookings.book(booked(number))
        scene.retries.fresh(D0)
    for number in range(40):
        scene.bookings.release(booked(number), now_s())
    assert scene.allowed() == 56
    assert scene.retries.budget_left < 1.0
    assert scene.retries.retry_after_s == 1.0
    await asyncio.sleep(1.0)
    assert scene.allowed() == 1


@timeless
async def test_the_ratio_is_the_configured_one() -> None:
    scene = Scene(RetryConfig(budget_ratio=0.5))
    assert scene.allowed() == 16
    for _ in range(10):
        scene.retries.fresh(D0)
    assert scene.allowed() == 5


@timeless
async def test_ready_prefills_give_room_for_chunks() -> None:
    scene = Scene(RetryConfig(prefill_chunks=3))
    chunk = FACTS.chunk_tokens

    async def takes(tokens: int) -> bool:
        try:
            async with scene.retries.turn(tokens, now_s() + 0.1):
                return True
        except TimeoutError:
            return False

    async with scene.retries.turn(1, now_s()):
        assert await takes(6 * chunk - 1)
        assert not await takes(6 * chunk)
        scene.fleet.set_health(P1, Health.SUSPECTED)
        assert await takes(3 * chunk - 1)
        assert not await takes(3 * chunk)
        scene.fleet.set_health(P0, Health.NOT_READY)
        assert not await takes(1)
    assert await takes(10**9)


@timeless
async def test_what_the_best_ready_prefill_holds_need_not_be_computed() -> None:
    scene = Scene()
    asked = request(prompt_tokens=1000, blocks=[bytes([number]) * 16 for number in range(10)], block_tokens=100.0)
    match = {P0: Hit(held_blocks=4, pending_blocks=8), P1: Hit(held_blocks=9), D0: Hit(held_blocks=10)}
    assert scene.retries.tokens_to_compute(asked, match) == 100
    scene.fleet.set_health(P1, Health.SUSPECTED)
    assert scene.retries.tokens_to_compute(asked, match) == 600
    assert scene.retries.tokens_to_compute(asked, {}) == 1000
    assert scene.retries.tokens_to_compute(asked, {P0: Hit(held_blocks=10)}) == 1


@timeless
async def test_pauses_are_spread() -> None:
    pauses = {Scene().retries.delay_s(0.2)} | {0.2}
    assert len(pauses) == 2
    assert Scene().retries.delay_s(0.2) == pytest.approx(0.2, abs=0.1)
    assert Scene().retries.delay_s(0.0) == 0.0
