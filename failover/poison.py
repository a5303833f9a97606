"""The poison guard of one process: requests under which servers died, and for how long they stay refused.

Pure over the time it is given; bounded in entries. A fingerprint is any bytes that name the content of a request.
"""

from __future__ import annotations

from collections import OrderedDict

REFUSED_S = 600.0
"""A request that ended two servers is refused for this long."""
_MAX_ENTRIES = 10_000


class PoisonGuard:
    """Remembers fingerprints of requests that ended servers."""

    def __init__(self, refused_s: float = REFUSED_S, max_entries: int = _MAX_ENTRIES) -> None:
        self._refused_s = refused_s
        self._max_entries = max_entries
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def refuse(self, fingerprint: bytes, now_s: float) -> None:
        """Refuse this content from now on, for `refused_s`."""
        self._until_s[fingerprint] = now_s + self._refused_s
        self._until_s.move_to_end(fingerprint)
        while len(self._until_s) > self._max_entries:
            self._until_s.popitem(last=False)

    def is_refused(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether this content ended servers lately."""
        until_s = self._until_s.get(fingerprint)
        if until_s is None:
            return False
        if until_s <= now_s:
            del self._until_s[fingerprint]
            return False
        return True

    def __len__(self) -> int:
        return len(self._until_s)
