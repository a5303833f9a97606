"""Whether the KV that servers report in use is explained by live attempts; what is not leaks, or is somebody else's.

Live attempts are those of all gateways that share the fleet. Those of the others are known a moment late
(`routing/bookings_log.py`): what one has just sent may look unaccounted for that long, and what a gateway that died had
sent does until its engines drop it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.types import EngineId, EngineLoad, EngineView, Role
from gateway.bookings import Bookings


@dataclass(frozen=True, slots=True)
class _Explained:
    """What was booked on a server when a load report came, and what of that report it can explain."""

    load: EngineLoad
    booked_tokens: int
    tokens: int


class KvAudit:
    """Compares each load report with the bookings of its time."""

    def __init__(self, bookings: Bookings) -> None:
        self._bookings = bookings
        self._explained: dict[EngineId, _Explained] = {}

    def note(self, view: EngineView) -> None:
        """A load report may have come: remember what explains it."""
        before = self._explained.get(view.engine_id)
        if view.load is not None and (before is None or before.load is not view.load):
            booked = self._booked_tokens(view)
            tokens = booked if before is None else max(booked, before.booked_tokens)
            self._explained[view.engine_id] = _Explained(view.load, booked, tokens)

    def unaccounted_tokens(self, view: EngineView) -> int | None:
        """KV tokens in use on a server that no live attempt explains; None while it reports no load.

        A report is compared with what was booked when it came or at the one before, whichever is more: bookings that
        ended since were still in it.
        """
        if view.load is None:
            return None
        noted = self._explained.get(view.engine_id)
        explained = noted.tokens if noted is not None and noted.load is view.load else self._booked_tokens(view)
        return max(0, view.load.used_tokens - explained)

    def _booked_tokens(self, view: EngineView) -> int:
        if view.spec.role is Role.PREFILL:
            return self._bookings.prefill_kv_tokens(view.engine_id)
        return self._bookings.decode_kv_tokens(view.engine_id)
