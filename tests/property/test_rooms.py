"""Rooms: none comes twice, none is 0, each fits its prefill's DP rank, over restarts and all DP sizes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sglang_wire import RoomMaker

COUNTER_BITS, SLOT_BITS = 33, 10


class Corner(Random):
    """A source of chance whose every draw is the same extreme."""

    def __init__(self, ones: bool) -> None:
        super().__init__(0)
        self._ones = ones

    def getrandbits(self, bits: int) -> int:
        return (1 << bits) - 1 if self._ones else 0


def counters(maker: RoomMaker, rooms: int) -> set[int]:
    """What is left of `rooms` rooms without their slots: as many values as rooms means that no room comes twice."""
    return {maker.next_room() >> SLOT_BITS for _ in range(rooms)}


def check_uniqueness(rooms: int, processes: int, chunk: int) -> None:
    """Over restarts. In chunks: those of one process lie end to end, so none overlaps another."""
    rng = Random(1)
    for process_id in range(processes):
        maker = RoomMaker(rng, process_id)
        last = None
        for _ in range(rooms // processes // chunk):
            seen = counters(maker, chunk)
            assert len(seen) == chunk
            assert {value >> COUNTER_BITS for value in seen} == {process_id}
            assert max(seen) - min(seen) == chunk - 1
            assert last is None or min(seen) == last + 1
            last = max(seen)


def test_no_room_comes_twice() -> None:
    check_uniqueness(100_000, processes=5, chunk=20_000)


@pytest.mark.long
def test_no_room_of_ten_millions_comes_twice() -> None:
    check_uniqueness(10_000_000, processes=10, chunk=200_000)


@given(st.integers(0, 2**64), st.integers(0, 2**21), st.integers(1, 64), st.data())
def test_a_room_leads_to_its_rank_and_fits_63_bits(
    seed: int, process_id: int, dp_size: int, data: st.DataObject
) -> None:
    maker = RoomMaker(Random(seed), process_id)
    for _ in range(20):
        rank = data.draw(st.integers(0, dp_size - 1))
        room = maker.next_room(dp_size, rank)
        assert 0 < room < 2**63
        assert room % dp_size == rank


@given(st.integers(0, 2**64), st.lists(st.tuples(st.integers(0, 2**20 - 1), st.integers(0, 50)), max_size=10))
def test_no_room_comes_twice_whichever_ids_are_taken(seed: int, takes: list[tuple[int, int]]) -> None:
    maker = RoomMaker(Random(seed))
    seen: set[int] = set()
    made = 0
    for process_id, rooms in takes:
        maker.take_process_id(process_id)
        found = counters(maker, rooms)
        assert {value >> COUNTER_BITS for value in found} <= {process_id}
        seen |= found
        made += rooms
    assert len(seen) == made
    assert 0 not in seen


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("process_id", [0, 2**20 - 1])
def test_the_ends_of_the_range_are_rooms_too(process_id: int, ones: bool) -> None:
    """Where counter and slot are 0 or overflow."""
    maker = RoomMaker(Corner(ones), process_id)
    rooms = [maker.next_room(7, rank % 7) for rank in range(50)]
    assert all(0 < room < 2**63 for room in rooms)
    assert [room % 7 for room in rooms] == [rank % 7 for rank in range(50)]
    assert len(set(rooms)) == 50


def test_a_counter_at_its_end_goes_on_without_a_room_0() -> None:
    maker = RoomMaker(Corner(ones=False), 0)
    maker._counter = (1 << COUNTER_BITS) - 3
    rooms = [maker.next_room(8, 0) for _ in range(6)]
    assert len({room >> SLOT_BITS for room in rooms}) == 6
    assert all(room > 0 and room % 8 == 0 for room in rooms)


def test_every_rank_gets_rooms_when_none_is_wanted() -> None:
    maker = RoomMaker(Random(5))
    assert {maker.next_room(4) % 4 for _ in range(100)} == {0, 1, 2, 3}


def test_processes_of_different_ids_share_no_room() -> None:
    makers = [RoomMaker(Random(9), process_id) for process_id in range(4)]
    rooms = [maker.next_room() for maker in makers for _ in range(100)]
    assert len(set(rooms)) == 400
