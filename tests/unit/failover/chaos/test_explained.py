"""What canaries hold is nobody's leak, and hides no other."""

from __future__ import annotations

import pytest

from failover.chaos import explained
from failover.chaos.explained import JOURNAL, Canary
from failover.chaos.history import Ledger
from failover.chaos.leftovers import GAUGES

ONE = Canary("gateway0", "77", "prefill0", "decode1", uncached_tokens=30, kv_tokens=40)
OTHER = Canary("gateway1", "78", "prefill1", "decode1", uncached_tokens=3, kv_tokens=4)


def test_only_rooms_of_canaries_are_taken_out_of_a_ledger() -> None:
    found = (Ledger("decode1", {"77": 40, "9": 5}), Ledger("prefill0", {"77": 30}))
    assert explained.ledgers(found, [ONE, OTHER]) == (Ledger("decode1", {"9": 5}), Ledger("prefill0", {}))
    assert explained.ledgers(found, []) == found


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("pdgate_live_bookings of gateway0", 1),
        ("pdgate_live_bookings of gateway1", 1),
        ("pdgate_releases_pending of gateway0", 1),
        ("pdgate_pinned_requests of gateway0", 2),
        ("pdgate_booked_uncached_tokens of gateway0", 30),
        ("pdgate_booked_kv_tokens of gateway0", 40),
        ("pdgate_booked_kv_tokens of gateway1", 4),
        ("pdgate_booked_elsewhere_tokens of gateway1", 77),
        ("pdgate_kv_unaccounted_tokens of gateway0", 77),
        ("requests alive on decode1", 2),
        ("requests alive on prefill0", 1),
        ("requests alive on decode0", 0),
        ("cached tokens that are locked on prefill1", 7),
        ("pdgate_queue_requests of gateway0", 0),
        ("open files of gateway0", 0),
        ("crashes of gateway0", 0),
        (JOURNAL, 2),
    ],
)
def test_canaries_explain_so_much_and_no_more(name: str, most: int) -> None:
    for count in (0, most, most + 5):
        assert explained.counts({name: count}, [ONE, OTHER]) == {name: max(0, count - most)}


def test_every_gauge_of_what_is_booked_knows_of_canaries() -> None:
    booked = {name for name in GAUGES if "booked" in name or "bookings" in name}
    assert booked <= {*explained._OF_GATEWAYS, *explained._OF_ALL_GATEWAYS}
    assert {*explained._OF_GATEWAYS, *explained._OF_ALL_GATEWAYS} <= set(GAUGES)
