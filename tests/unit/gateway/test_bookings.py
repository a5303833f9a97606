"""Bookings: each released exactly once, sums that are those of a naive model, queues in whole forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.timing import PrefillTiming, PrefillWork
from engines.types import EngineId
from failover.wedge import Owed
from gateway.bookings import Booking, Bookings
from routing.bookings_log import NOTHING, Totals

P0, P1, D0, D1 = (EngineId(name) for name in ("p0", "p1", "d0", "d1"))
TIMING = PrefillTiming(base_s=1.0, per_token_s=0.01, per_token2_s=1e-6, chunk_tokens=100)


def booking(
    rid: str = "r",
    prompt: int = 100,
    cached: int = 0,
    kv: int = 150,
    at_s: float = 0.0,
    prefill: EngineId = P0,
    decode: EngineId = D0,
    predicted_s: float = 2.0,
) -> Booking:
    return Booking(rid, prefill, decode, PrefillWork(prompt, cached), kv, predicted_s, at_s)


def test_a_booking_is_held_on_both_sides() -> None:
    bookings = Bookings()
    bookings.book(booking(prompt=100, cached=30, kv=150))
    assert (bookings.uncached_tokens(P0), bookings.prefill_requests(P0), bookings.prefill_kv_tokens(P0)) == (70, 1, 100)
    assert (bookings.decode_kv_tokens(D0), bookings.decode_requests(D0)) == (150, 1)
    assert bookings.uncached_tokens(P1) == bookings.decode_kv_tokens(D1) == 0
    assert bookings.live() == 1


def test_hand_over_releases_the_prefill_alone_and_once() -> None:
    bookings, one = Bookings(), booking()
    bookings.book(one)
    assert bookings.prefill_done(one, 3.0) == 3.0
    assert bookings.prefill_done(one, 4.0) is None
    assert (bookings.prefill_requests(P0), bookings.decode_requests(D0), bookings.live()) == (0, 1, 1)


def test_a_decode_owes_what_was_handed_over_and_a_prefill_what_was_not() -> None:
    bookings = Bookings()
    one, two = booking("1", predicted_s=2.0), booking("2", predicted_s=5.0)
    assert bookings.owed(P0) == bookings.owed(D0) == Owed(0)
    for each in (one, two):
        bookings.book(each)
    assert (bookings.owed(P0), bookings.owed(D0)) == (Owed(2, 5.0), Owed(0))
    bookings.prefill_done(two, 1.0)
    assert (bookings.owed(P0), bookings.owed(D0)) == (Owed(1, 2.0), Owed(1))
    bookings.release(one, 2.0)
    bookings.release(two, 2.0)
    assert (bookings.owed(P0), bookings.owed(D0)) == (Owed(0), Owed(0))


def test_release_frees_both_sides_once() -> None:
    bookings, one = Bookings(), booking()
    bookings.book(one)
    assert bookings.release(one, 1.0)
    assert not bookings.release(one, 2.0)
    assert bookings.live() == bookings.decode_kv_tokens(D0) == bookings.uncached_tokens(P0) == 0


def test_what_was_never_booked_releases_nothing() -> None:
    bookings = Bookings()
    assert not bookings.release(booking(), 1.0)
    assert bookings.prefill_done(booking(), 1.0) is None
    assert bookings.version == 0


def test_every_change_is_a_new_version() -> None:
    bookings, one = Bookings(), booking()
    seen = [bookings.version]
    for change in (
        bookings.book,
        lambda each: bookings.prefill_done(each, 1.0),
        lambda each: bookings.release(each, 2.0),
    ):
        change(one)
        seen.append(bookings.version)
    assert seen == sorted(set(seen))


def test_a_prefill_took_from_the_end_of_the_one_before_it() -> None:
    bookings, first, second = Bookings(), booking("a"), booking("b", at_s=1.0)
    bookings.book(first)
    bookings.book(second)
    assert bookings.prefill_done(first, 3.0) == 3.0
    assert bookings.prefill_done(second, 3.5) == 0.5


def test_a_prefill_that_was_idle_took_from_its_own_dispatch() -> None:
    bookings, first, second = Bookings(), booking("a"), booking("b", at_s=10.0)
    bookings.book(first)
    bookings.prefill_done(first, 3.0)
    bookings.book(second)
    assert bookings.prefill_done(second, 11.0) == 1.0


def test_an_idle_prefill_has_no_queue() -> None:
    bookings = Bookings()
    assert bookings.queue_s(P0, TIMING, 5.0) == 0.0
    one = booking()
    bookings.book(one)
    bookings.release(one, 1.0)
    assert bookings.queue_s(P0, TIMING, 5.0) == 0.0


def test_queued_requests_share_forwards() -> None:
    """50 + 50 + 20 new tokens are two forwards of at most 100, not three."""
    bookings = Bookings()
    for rid, new in (("a", 50), ("b", 50), ("c", 20)):
        bookings.book(booking(rid, prompt=new))
    attention = 50**2 + 50**2 + 20**2
    assert bookings.queue_s(P0, TIMING, 0.0) == pytest.approx(2 * 1.0 + 120 * 0.01 + attention * 1e-6)


def test_the_head_of_a_queue_works_while_time_passes_and_no_longer_than_predicted() -> None:
    bookings = Bookings()
    bookings.book(booking("a", predicted_s=2.0))
    bookings.book(booking("b"))
    full_s = bookings.queue_s(P0, TIMING, 0.0)
    assert bookings.queue_s(P0, TIMING, 1.5) == pytest.approx(full_s - 1.5)
    assert bookings.queue_s(P0, TIMING, 99.0) == pytest.approx(full_s - 2.0)


def test_a_wholly_cached_prompt_is_no_forward() -> None:
    bookings = Bookings()
    bookings.book(booking(prompt=100, cached=100))
    assert bookings.queue_s(P0, TIMING, 0.0) == 0.0


# ---- other gateways --------------------------------------------------------------------------------------------------

THEIRS = Totals(1.5, 10, 2, 30, 40, 5)


def readings(bookings: Bookings, engine_id: EngineId) -> Totals:
    """All that is read of an engine."""
    return Totals(
        bookings.queue_s(engine_id, TIMING, 0.0),
        bookings.uncached_tokens(engine_id),
        bookings.prefill_requests(engine_id),
        bookings.prefill_kv_tokens(engine_id),
        bookings.decode_kv_tokens(engine_id),
        bookings.decode_requests(engine_id),
    )


def test_what_others_promised_is_read_and_not_ours() -> None:
    bookings = Bookings()
    bookings.set_others({P0: THEIRS, D0: THEIRS})
    assert readings(bookings, P0) == readings(bookings, D0) == THEIRS
    assert readings(bookings, P1) == NOTHING
    assert bookings.own(P0) == bookings.own(D0) == NOTHING
    assert bookings.own_queue_s(P0, TIMING, 0.0) == 0.0
    assert (bookings.live(), list(bookings.own_engines())) == (0, [])


def test_ours_and_theirs_are_added() -> None:
    bookings, one = Bookings(), booking(prompt=100, cached=30, kv=150)
    bookings.book(one)
    own = {each: readings(bookings, each) for each in (P0, D0)}
    bookings.set_others({P0: THEIRS, D0: THEIRS})
    for each in (P0, D0):
        assert readings(bookings, each) == own[each] + THEIRS
        assert bookings.own(each) == replace(own[each], queue_s=0.0)
        assert bookings.own_queue_s(each, TIMING, 0.0) == own[each].queue_s
    assert set(bookings.own_engines()) == {P0, D0}
    bookings.prefill_done(one, 1.0)
    assert set(bookings.own_engines()) == {D0}
    bookings.release(one, 1.0)
    assert readings(bookings, P0) == THEIRS
    bookings.set_others({})
    assert readings(bookings, P0) == NOTHING


def test_a_change_of_others_is_a_new_version_and_no_change_of_ours() -> None:
    bookings = Bookings()
    told: list[int] = []
    bookings.own_changed = lambda: told.append(bookings.version)
    bookings.set_others({P0: THEIRS})
    bookings.set_others({P0: THEIRS})
    assert (bookings.version, told) == (1, [])
    bookings.set_others({P0: THEIRS + THEIRS})
    assert (bookings.version, told) == (2, [])
    one = booking()
    bookings.book(one)
    bookings.prefill_done(one, 1.0)
    bookings.release(one, 1.0)
    assert told == [3, 4, 5], "told when it is done"


OPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "prefill_done", "release"]),
        st.integers(0, 7),
        st.sampled_from([P0, P1]),
        st.sampled_from([D0, D1]),
        st.integers(0, 500),
        st.integers(0, 600),
    ),
    max_size=60,
)


@given(OPS)
def test_sums_are_those_of_a_naive_model(ops: list[tuple[str, int, EngineId, EngineId, int, int]]) -> None:
    bookings = Bookings()
    prefill: dict[str, Booking] = {}
    decode: dict[str, Booking] = {}
    known: dict[int, Booking] = {}
    for now_s, (op, slot, p, d, prompt, cached) in enumerate(ops):
        if op == "book":
            one = booking(f"{slot}-{now_s}", prompt, cached, prompt + 50, float(now_s), p, d)
            known[slot] = prefill[one.rid] = decode[one.rid] = one
            bookings.book(one)
        elif (one := known.get(slot, booking())) and op == "prefill_done":
            took_s = bookings.prefill_done(one, float(now_s))
            assert (took_s is not None) == (prefill.pop(one.rid, None) is not None)
            assert took_s is None or took_s >= 0.0
        else:
            held = prefill.pop(one.rid, None) is not None
            held = decode.pop(one.rid, None) is not None or held
            assert bookings.release(one, float(now_s)) == held
        for engine in (P0, P1):
            mine = [each for each in prefill.values() if each.prefill == engine]
            assert bookings.uncached_tokens(engine) == sum(each.work.new_tokens for each in mine)
            assert bookings.prefill_kv_tokens(engine) == sum(each.work.prompt_tokens for each in mine)
            assert bookings.prefill_requests(engine) == len(mine)
            queue_s = bookings.queue_s(engine, TIMING, float(now_s))
            assert queue_s >= 0.0
            assert mine or queue_s == 0.0
        for engine in (D0, D1):
            mine = [each for each in decode.values() if each.decode == engine]
            assert bookings.decode_kv_tokens(engine) == sum(each.kv_tokens for each in mine)
            assert bookings.decode_requests(engine) == len(mine)
        assert bookings.live() == len(prefill.keys() | decode.keys())


def test_what_is_booked_on_a_rank_is_counted_there_and_on_its_server() -> None:
    bookings = Bookings()
    one = replace(booking("one", prompt=100, cached=30, kv=150), prefill_rank=1, decode_rank=0)
    two = replace(booking("two", prompt=50, kv=60, at_s=1.0), prefill_rank=0, decode_rank=0)
    for each in (one, two):
        bookings.book(each)
    ranks = bookings.on_prefill_ranks(P0, 3, TIMING, 1.0)
    assert [(on.uncached_tokens, on.requests) for on in ranks] == [(50, 1), (70, 1), (0, 0)]
    assert bookings.on_decode_ranks(D0, 2) == [(210, 2), (0, 0)]
    assert bookings.uncached_tokens(P0) == 120
    alone = Bookings()
    alone.book(booking("one", prompt=100, cached=30, kv=150))
    assert ranks[1].queue_s == alone.queue_s(P0, TIMING, 1.0) > 0.0
    assert bookings.beside(one) == (2, 210)
    assert alone.beside(booking("one", prompt=100, cached=30, kv=150)) == (1, 150)


def test_a_prefill_rank_works_beside_the_others() -> None:
    """The time that one took is not counted from the end of one on another rank."""
    bookings = Bookings()
    one, two = replace(booking("one"), prefill_rank=0), replace(booking("two"), prefill_rank=1)
    for each in (one, two):
        bookings.book(each)
    assert bookings.prefill_done(one, 3.0) == 3.0
    assert bookings.prefill_done(two, 4.0) == 4.0
    assert bookings.prefill_done(two, 5.0) is None
    assert bookings.on_prefill_ranks(P0, 2, TIMING, 5.0) == [(0.0, 0, 0)] * 2
    assert bookings.release(two, 5.0)
    assert not bookings.release(two, 6.0)


def test_what_others_have_promised_is_spread_over_the_ranks() -> None:
    bookings = Bookings()
    bookings.set_others({P0: Totals(4.0, 101, 3), D0: Totals(decode_kv_tokens=301, decode_requests=1)})
    bookings.book(replace(booking(prompt=100, kv=150), prefill_rank=1, decode_rank=1))
    first, second = bookings.on_prefill_ranks(P0, 2, TIMING, 0.0)
    assert first == (2.0, 51, 2)
    assert (second.uncached_tokens, second.requests) == (151, 3)
    assert second.queue_s > 2.0
    assert bookings.on_decode_ranks(D0, 2) == [(151, 1), (301, 2)]
