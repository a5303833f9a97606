"""Entries of the bookings stream: what is said when, what is believed for how long, what a stranger's entry does."""

from __future__ import annotations

import pytest

from engines.types import EngineId
from routing.bookings_log import AGAIN_S, FORGOTTEN_S, NOTHING, Entry, Others, Publication, Totals, pack, unpack

P, D = EngineId("http://p0"), EngineId("http://d0")
WORK = Totals(0.25, 100, 2, 300)
KV = Totals(decode_kv_tokens=500, decode_requests=3)


def test_an_entry_comes_back_as_it_was() -> None:
    entry = Entry("me", 7, True, {P: WORK, D: KV, EngineId("x"): NOTHING})
    assert unpack(pack(entry)) == entry
    assert unpack(pack(Entry("me", 8, False, {}))) == Entry("me", 8, False, {})


@pytest.mark.parametrize(
    "totals",
    [
        b"",
        b"[]",
        b"7",
        b'{"e":[]}',
        b'{"e":[0,1,2,3,4]}',
        b'{"e":[0,1,2,3,4,5,6]}',
        b'{"e":[0,-1,2,3,4,5]}',
        b'{"e":[0,1.5,2,3,4,5]}',
        b'{"e":[0,true,2,3,4,5]}',
        b'{"e":[-0.1,1,2,3,4,5]}',
        b'{"e":["1",1,2,3,4,5]}',
        b'{"e":[1e300,1,2,3,4,5]}',
        b'{"e":[0,9007199254740992,2,3,4,5]}',
        b'{"e":7}',
    ],
)
def test_what_is_no_entry_is_nothing(totals: bytes) -> None:
    fields = pack(Entry("me", 7, True, {})) | {b"totals": totals}
    assert unpack(fields) is None


@pytest.mark.parametrize("change", [{b"number": b"x"}, {b"replica": b"\xff"}])
def test_nor_is_what_has_other_faults(change: dict[bytes, bytes]) -> None:
    assert unpack(pack(Entry("me", 7, True, {})) | change) is None
    assert unpack({}) is None


# ---- saying ----------------------------------------------------------------------------------------------------------


def test_who_has_nothing_says_nothing() -> None:
    publication = Publication("me")
    assert publication.next({}, 0.0) is None
    assert publication.again_in_s(0.0) is None


def test_all_is_said_first_then_changes_then_all_again() -> None:
    publication = Publication("me")
    assert publication.next({P: WORK, D: KV}, 0.0) == Entry("me", 1, True, {P: WORK, D: KV})
    assert publication.again_in_s(0.1) == pytest.approx(AGAIN_S - 0.1)
    assert publication.next({P: WORK, D: KV}, 0.1) is None
    assert publication.next({P: WORK, D: KV + KV}, 0.1) == Entry("me", 2, False, {D: KV + KV})
    assert publication.next({P: WORK}, 0.2) == Entry("me", 3, False, {D: NOTHING})
    assert publication.next({P: WORK}, AGAIN_S) == Entry("me", 4, True, {P: WORK})


def test_the_end_is_said_once() -> None:
    publication = Publication("me")
    publication.next({P: WORK}, 0.0)
    assert publication.next({}, 0.01) == Entry("me", 2, True, {})
    assert publication.next({}, 1.0) is None
    assert publication.again_in_s(1.0) is None


@pytest.mark.parametrize("totals", [{P: WORK}, {}])
def test_after_a_loss_all_is_said_again(totals: dict[EngineId, Totals]) -> None:
    publication = Publication("me")
    publication.next({P: WORK}, 0.0)
    publication.next({P: WORK, D: KV}, 0.01)
    publication.lost()
    assert publication.again_in_s(0.02) == AGAIN_S
    assert publication.next(totals, 0.02) == Entry("me", 3, True, totals)


# ---- hearing ---------------------------------------------------------------------------------------------------------


def test_sums_are_over_all_others_and_without_oneself() -> None:
    others = Others("me")
    assert others.hear([Entry("a", 1, True, {P: WORK}), Entry("b", 1, True, {P: WORK, D: KV})], 0.0)
    assert not others.hear([Entry("me", 1, True, {P: WORK})], 0.0)
    assert others.sums() == {P: WORK + WORK, D: KV}
    assert len(others) == 2
    assert Totals(0.5, 200, 4, 600) == WORK + WORK
    assert Totals(decode_kv_tokens=1000, decode_requests=6) == KV + KV


def test_a_whole_entry_replaces_all_a_part_only_its_own() -> None:
    others = Others("me")
    others.hear([Entry("a", 1, True, {P: WORK, D: KV})], 0.0)
    assert others.hear([Entry("a", 2, False, {P: NOTHING})], 0.1)
    assert others.sums() == {D: KV}
    assert others.hear([Entry("a", 3, True, {P: WORK})], 0.2)
    assert others.sums() == {P: WORK}
    assert not others.hear([Entry("a", 4, True, {P: WORK})], 0.3)


def test_what_was_overtaken_is_skipped() -> None:
    others = Others("me")
    others.hear([Entry("a", 5, True, {P: WORK})], 0.0)
    assert not others.hear([Entry("a", 4, True, {D: KV}), Entry("a", 5, True, {})], 0.1)
    assert others.sums() == {P: WORK}
    assert others.hear([Entry("a", 1, True, {D: KV})], FORGOTTEN_S), "one that counts from 1 again is heard in the end"


def test_who_is_silent_is_forgotten() -> None:
    others = Others("me")
    assert others.forget_at_s() is None
    others.hear([Entry("a", 1, True, {P: WORK})], 0.0)
    others.hear([Entry("b", 1, True, {P: WORK})], 0.5)
    assert others.forget_at_s() == FORGOTTEN_S
    assert not others.forget(FORGOTTEN_S - 0.001)
    assert others.forget(FORGOTTEN_S)
    assert others.sums() == {P: WORK}
    assert others.forget_at_s() == 0.5 + FORGOTTEN_S
    others.hear([Entry("b", 2, True, {})], 1.4)
    assert not others.forget(1.4 + FORGOTTEN_S), "it had nothing any more"
    assert len(others) == 0
