"""For which rooms engines were seen to hold KV, and until when, by their ledgers, looked at again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from failover.chaos.history import Request
from failover.chaos.record import Held

MAX_ROOMS = 200_000


class Holdings:
    """What was seen of one run. Times are of the clock that the requests have too."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}

    def look(self, at_s: float, engine: str, rooms: Iterable[str]) -> None:
        """An engine held KV of these rooms then, or a moment later."""
        for room in rooms:
            if (engine, room) in self._seen or len(self._seen) < MAX_ROOMS:
                since_s, _ = self._seen.get((engine, room), (at_s, at_s))
                self._seen[engine, room] = since_s, at_s

    def after_their_end(self, requests: Iterable[Request]) -> tuple[Held, ...]:
        """Those that were seen after the attempts to which they belong were over."""
        attempts = (each for request in requests for choice in request.choices for each in choice.attempts)
        ends = {str(attempt.room): attempt.ended_s for attempt in attempts if attempt.ended_s is not None}
        every = (Held(*where, *times) for where, times in self._seen.items())
        return tuple(held for held in every if held.room in ends and held.seen_s > ends[held.room])
