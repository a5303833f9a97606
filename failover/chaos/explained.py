"""What gateways' own canaries hold, taken out of what a run has left behind: it is nobody's leak. Pure.

Gateways try pairs of engines with tiny requests of their own, in trouble again and again, and one whose prefill has
come back too fast may wait on its decode for as long as SGLang waits (`gateway/canaries.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from failover.chaos.history import Ledger

JOURNAL = "attempts in the journal"


@dataclass(frozen=True, slots=True)
class Canary:
    """One that is under way, by its gateway's word. Engines are called by their names here."""

    gateway: str
    room: str
    prefill: str
    decode: str
    uncached_tokens: int
    kv_tokens: int

    @property
    def tokens(self) -> int:
        return self.uncached_tokens + self.kv_tokens


def _one(canary: Canary) -> int:
    return 1


def _on_both(canary: Canary) -> int:
    return 2


_OF_GATEWAYS: Mapping[str, Callable[[Canary], int]] = {
    "pdgate_live_bookings": _one,
    "pdgate_releases_pending": _one,
    "pdgate_pinned_requests": _on_both,
    "pdgate_booked_uncached_tokens": lambda canary: canary.uncached_tokens,
    "pdgate_booked_kv_tokens": lambda canary: canary.kv_tokens,
}
"""What a canary adds to the gauges of its own gateway, at most."""
_OF_ALL_GATEWAYS = ("pdgate_booked_elsewhere_tokens", "pdgate_kv_unaccounted_tokens")
"""Gauges to which the canaries of every gateway may add their tokens."""
_OF_ENGINES: Mapping[str, Callable[[Canary], int]] = {
    "requests alive on": _one,
    "cached tokens that are locked on": lambda canary: canary.tokens,
}


def ledgers(found: Iterable[Ledger], canaries: Iterable[Canary]) -> tuple[Ledger, ...]:
    """The same without the rooms of canaries."""
    rooms = {canary.room for canary in canaries}
    return tuple(
        Ledger(each.engine, {room: tokens for room, tokens in each.by_room.items() if room not in rooms})
        for each in found
    )


def counts(found: Mapping[str, int], canaries: Iterable[Canary]) -> dict[str, int]:
    """The same without what canaries may have added to each; never below 0."""
    every = tuple(canaries)
    return {name: max(0, count - sum(_added(name, canary) for canary in every)) for name, count in found.items()}


def _added(name: str, canary: Canary) -> int:
    if name == JOURNAL:
        return 1
    what, _, of = name.rpartition(" of ")
    if what in _OF_ALL_GATEWAYS:
        return canary.tokens
    if what in _OF_GATEWAYS:
        return _OF_GATEWAYS[what](canary) if of == canary.gateway else 0
    what, _, engine = name.rpartition(" ")
    return _OF_ENGINES[what](canary) if what in _OF_ENGINES and engine in (canary.prefill, canary.decode) else 0
