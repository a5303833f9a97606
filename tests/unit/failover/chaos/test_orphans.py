"""Rooms tell whose they are, also of a gateway that is gone."""

from __future__ import annotations

from random import Random

import pytest

from engines.sglang_wire import RoomMaker, process_of
from failover.chaos import orphans
from failover.chaos.orphans import Orphans
from failover.chaos.record import Orphan

A, B = 1000, 2000
ALIVE: dict[str, list[float]] = {"gateway0": [], "gateway1": []}


def room(process_id: int, number: int = 0) -> str:
    rooms = RoomMaker(Random(7), process_id)
    return str([rooms.next_room() for _ in range(number + 1)][-1])


def seen() -> Orphans:
    found = Orphans()
    found.learn("gateway0", 1.0, A)
    found.learn("gateway1", 1.0, B)
    return found


def test_rooms_begin_with_the_process_id_that_they_were_made_with() -> None:
    assert process_of(int(room(A))) == A
    assert process_of(RoomMaker(Random(1), (1 << 20) - 1).next_room(8, 3)) == (1 << 20) - 1


def test_only_what_is_of_the_dead_is_noted_with_when_it_was_seen_last() -> None:
    found = seen()
    found.look(4.0, "decode0", [room(A), room(B)], ALIVE)
    assert found.found == ()
    died = {**ALIVE, "gateway0": [5.0]}
    found.look(5.1, "decode0", [room(A), room(B)], died)
    found.look(5.2, "prefill0", [room(A)], died)
    found.look(7.5, "decode0", [room(A), room(A, 1)], died)
    found.look(9.0, "decode0", [room(B)], died)
    assert found.found == (
        Orphan("gateway0", 5.0, "decode0", room(A), 7.5),
        Orphan("gateway0", 5.0, "prefill0", room(A), 5.2),
        Orphan("gateway0", 5.0, "decode0", room(A, 1), 7.5),
    )


def test_the_process_in_its_place_is_another() -> None:
    found = seen()
    died = {**ALIVE, "gateway0": [5.0]}
    found.learn("gateway0", 6.0, 3000)
    found.look(7.0, "decode0", [room(3000), room(A)], died)
    assert [each.room for each in found.found] == [room(A)]
    both = {**ALIVE, "gateway0": [5.0, 8.0]}
    found.look(9.0, "decode0", [room(3000), room(A)], both)
    assert [(each.room, each.died_s, each.seen_s) for each in found.found] == [
        (room(A), 5.0, 9.0),
        (room(3000), 8.0, 9.0),
    ]


def test_a_process_may_have_had_several_ids() -> None:
    found = seen()
    found.learn("gateway0", 1.0, 3000)
    found.look(6.0, "decode0", [room(A), room(3000)], {"gateway0": [5.0]})
    assert len(found.found) == 2


def test_of_whom_nothing_was_learned_nothing_is_known() -> None:
    found = seen()
    assert found.knows("gateway0", 5.0)
    assert not found.knows("gateway0", 0.5), "it was begun later"
    assert not found.knows("gateway2", 5.0)
    found.look(6.0, "decode0", [room(77)], {"gateway2": [5.0]})
    assert found.found == ()


def test_no_more_are_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "MAX_ORPHANS", 3)
    found = seen()
    found.look(6.0, "decode0", [room(A, number) for number in range(9)], {"gateway0": [5.0]})
    found.look(8.0, "decode0", [room(A, number) for number in range(9)], {"gateway0": [5.0]})
    assert [each.seen_s for each in found.found] == [8.0] * 3
