"""Candidates: what all gateways have promised counts once, whether a server's own report shows it already or not."""

from __future__ import annotations

import pytest

from engines.timing import TINY, PrefillWork
from engines.types import EngineId, EngineLoad
from gateway.bookings import Booking, Bookings
from gateway.candidates import decode_state, prefill_state
from gateway.learned import Learned
from routing.bookings_log import Totals
from tests.fakes import now_s, request, timeless, view

P0, D0 = EngineId("http://p0"), EngineId("http://d0")
THEIRS = {P0: Totals(2.0, 300, 3, 400), D0: Totals(decode_kv_tokens=500, decode_requests=4)}


def load(waiting_uncached_tokens: int = 0, total_tokens: int = 0) -> EngineLoad:
    return EngineLoad(1.0, 0, 0, waiting_uncached_tokens, 0, total_tokens, 10_000)


def promised() -> Bookings:
    """100 uncached tokens and 150 of decode KV of ours, and what others have."""
    bookings = Bookings()
    bookings.book(Booking("r", P0, D0, PrefillWork(100), 150, 1.0, now_s()))
    bookings.set_others(THEIRS)
    return bookings


@pytest.mark.parametrize(("reported", "counted"), [(0, 400), (400, 400), (450, 450)])
def test_a_prefill_has_what_all_promised_or_what_it_reports(reported: int, counted: int) -> None:
    @timeless
    async def has() -> None:
        learned, bookings = Learned(TINY), promised()
        state = prefill_state(view("p0", load(reported)), request(), {}, learned, bookings, now_s())
        assert (state.booked_uncached_tokens, state.booked_requests) == (counted, 4)
        own_s = bookings.own_queue_s(P0, state.timing, now_s())
        strangers_s = max(0, reported - 400) * state.timing.per_token_s
        assert state.booked_s == pytest.approx(own_s + 2.0 + strangers_s)

    has()


@pytest.mark.parametrize(("reported", "counted"), [(0, 650), (650, 650), (700, 700)])
def test_a_decode_is_as_full_as_all_promised_or_as_it_reports(reported: int, counted: int) -> None:
    @timeless
    async def has() -> None:
        state = decode_state(view("d0", load(total_tokens=reported)), Learned(TINY), promised())
        assert (state.booked_tokens, state.booked_requests) == (counted, 5)

    has()
