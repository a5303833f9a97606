"""The poison guard of one process: requests under which servers died, and for how long they stay refused.

Pure over the time it is given; bounded in entries. A fingerprint is any bytes that name the content of a request. What
other gateways refuse comes in by `hear`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

REFUSED_S = 600.0
"""A request that ended two servers is refused for this long."""
MAX_ENTRIES = 10_000


def _nobody(fingerprint: bytes) -> None:
    """Nobody else wants to know."""


class PoisonGuard:
    """Remembers fingerprints of requests that ended servers."""

    def __init__(self, refused_s: float = REFUSED_S, max_entries: int = MAX_ENTRIES) -> None:
        self._refused_s = refused_s
        self._max_entries = max_entries
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self.on_refused: Callable[[bytes], None] = _nobody
        """Called with what this gateway itself has refused."""

    def refuse(self, fingerprint: bytes, now_s: float) -> None:
        """Refuse this content from now on, for `refused_s`."""
        self._keep(fingerprint, now_s + self._refused_s)
        self.on_refused(fingerprint)

    def hear(self, fingerprint: bytes, left_s: float, now_s: float) -> None:
        """Another gateway refuses this content, for `left_s` yet; believed for `refused_s` at most."""
        until_s = now_s + min(left_s, self._refused_s)
        if until_s > max(now_s, self._until_s.get(fingerprint, now_s)):
            self._keep(fingerprint, until_s)

    def refused(self, now_s: float) -> Iterator[tuple[bytes, float]]:
        """What is refused at `now_s`, and for how many seconds yet."""
        yield from ((name, until_s - now_s) for name, until_s in self._until_s.items() if until_s > now_s)

    def is_refused(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether this content ended servers lately."""
        until_s = self._until_s.get(fingerprint)
        if until_s is None:
            return False
        if until_s <= now_s:
            del self._until_s[fingerprint]
            return False
        return True

    def _keep(self, fingerprint: bytes, until_s: float) -> None:
        self._until_s[fingerprint] = until_s
        self._until_s.move_to_end(fingerprint)
        while len(self._until_s) > self._max_entries:
            self._until_s.popitem(last=False)

    def __len__(self) -> int:
        return len(self._until_s)
