"""Release: the end of the legs is the only acknowledgement; aborts repeat, sockets close late, leaks are named."""

import asyncio
from collections.abc import Sequence

import pytest

from engines.types import Leg
from failover import release as module
from failover.release import Counted, release


class Legs:
    """Two open legs of which one ends after a given number of aborts."""

    def __init__(self, end_after: dict[Leg, int]) -> None:
        self.aborts: list[Leg] = []
        self.closed: list[Leg] = []
        self.dropped = False
        self._left = dict(end_after)
        self._open = [leg for leg in (Leg.DECODE, Leg.PREFILL) if leg in end_after]
        self._ended = asyncio.Event()

    @property
    def open_legs(self) -> Sequence[Leg]:
        return tuple(self._open)

    async def wait_ended(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def post_abort(self, leg: Leg) -> None:
        self.aborts.append(leg)
        self._left[leg] -= 1
        if self._left[leg] == 0:
            self._open.remove(leg)
        if not self._open:
            self._ended.set()

    def drop_output(self) -> None:
        self.dropped = True

    def close(self, leg: Leg) -> None:
        self.closed.append(leg)
        if leg in self._open:
            self._open.remove(leg)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPOST_AFTER_S", (0.005, 0.01, 0.01, 0.01))
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.005)


async def gone(leg: Leg) -> Counted:
    return Counted.GONE


async def test_the_decode_is_aborted_first() -> None:
    legs = Legs({Leg.DECODE: 1, Leg.PREFILL: 1})
    released = await release(legs, gone)
    assert legs.aborts == [Leg.DECODE, Leg.PREFILL]
    assert released.aborts == 2
    assert released.closed == ()
    assert legs.dropped


async def test_a_lost_abort_is_repeated_and_only_to_what_is_open() -> None:
    legs = Legs({Leg.DECODE: 1, Leg.PREFILL: 3})
    released = await release(legs, gone)
    assert legs.aborts == [Leg.DECODE, Leg.PREFILL, Leg.PREFILL, Leg.PREFILL]
    assert released.closed == ()


async def test_what_does_not_end_is_closed_and_watched() -> None:
    legs = Legs({Leg.DECODE: 99})
    released = await release(legs, gone)
    assert legs.closed == [Leg.DECODE]
    assert released.closed == (Leg.DECODE,)
    assert released.leaking == ()
    assert len(legs.aborts) == 4


async def test_a_server_that_goes_on_counting_is_named() -> None:
    async def still_there(leg: Leg) -> Counted:
        return Counted.STILL_THERE

    legs = Legs({Leg.DECODE: 99, Leg.PREFILL: 1})
    released = await release(legs, still_there, watch_s=0.03)
    assert released.leaking == (Leg.DECODE,)


async def test_legs_that_have_ended_get_no_abort() -> None:
    legs = Legs({})
    assert (await release(legs, gone)).aborts == 0
    assert legs.aborts == []
