"""The requests that servers on probation are tried with: few at a time, until one has succeeded.

No I/O. A trial is over when its part on the server went well (`passed`) or the attempt ended (`over`).
"""

from __future__ import annotations

from collections import defaultdict

from engines.types import EngineId, EngineView, Health

AT_ONCE = 2
"""Requests that may be lost to a server that is still broken: one may be a long one, two seldom both are."""


class Trials:
    """The trials under way on all servers."""

    def __init__(self) -> None:
        self._rids: defaultdict[EngineId, set[str]] = defaultdict(set)

    def is_full(self, engine_id: EngineId) -> bool:
        """Whether no further request may try this server now."""
        return len(self._rids.get(engine_id, ())) >= AT_ONCE

    def begin(self, view: EngineView, rid: str) -> None:
        """An attempt was booked on a server; it is a trial where that is on probation."""
        if view.health is Health.PROBATION:
            self._rids[view.engine_id].add(rid)

    def passed(self, engine_id: EngineId, rid: str) -> bool:
        """What the attempt had to do on a server went well; whether that was a trial of it."""
        return bool(self._rids) and self.over(engine_id, rid)

    def over(self, engine_id: EngineId, rid: str) -> bool:
        """The attempt has nothing more to do on a server; whether it was on trial there."""
        rids = self._rids.get(engine_id)
        if rids is None or rid not in rids:
            return False
        rids.remove(rid)
        if not rids:
            del self._rids[engine_id]
        return True
