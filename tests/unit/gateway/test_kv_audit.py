"""The KV audit: what live attempts of all gateways explain is no leak, and what nobody explains is."""

from __future__ import annotations

from engines.timing import PrefillWork
from engines.types import EngineId, EngineLoad, EngineView
from gateway.bookings import Booking, Bookings
from gateway.kv_audit import KvAudit
from routing.bookings_log import Totals
from tests.fakes import view

P0, D0 = EngineId("http://p0"), EngineId("http://d0")


def reports(name: str, used_tokens: int) -> EngineView:
    return view(name, EngineLoad(1.0, 1, 0, 0, used_tokens, used_tokens, 10_000))


def test_tokens_of_all_gateways_are_explained() -> None:
    bookings = Bookings()
    audit = KvAudit(bookings)
    bookings.book(Booking("r", P0, D0, PrefillWork(100), 150, 1.0, 0.0))
    bookings.set_others({P0: Totals(prefill_kv_tokens=40), D0: Totals(decode_kv_tokens=50)})
    for seen, expected in ((reports("p0", 145), 5), (reports("d0", 203), 3), (reports("d0", 10), 0)):
        audit.note(seen)
        assert audit.unaccounted_tokens(seen) == expected


def test_what_others_had_when_the_report_came_was_in_it() -> None:
    bookings = Bookings()
    audit = KvAudit(bookings)
    bookings.set_others({D0: Totals(decode_kv_tokens=50)})
    seen = reports("d0", 50)
    audit.note(seen)
    bookings.set_others({})
    assert audit.unaccounted_tokens(seen) == 0
    for _ in range(2):
        seen = reports("d0", 51)
        audit.note(seen)
    assert audit.unaccounted_tokens(seen) == 51


def test_without_a_report_nothing_is_known() -> None:
    assert KvAudit(Bookings()).unaccounted_tokens(view("d0")) is None
