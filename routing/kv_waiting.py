"""Pages that an engine stored behind a page nobody knows, and what became of them, until that page is known. Pure.

Bounded: the trees that have waited longest are forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.kv_types import PagesRemoved, PagesStored

_EVENT_BYTES = 700
"""Memory of an event of one page that waits, without the page (CPython 3.11, measured)."""


class _Orphans:
    """One tree of pages without its root: the events about it, in order, and how many pages they name."""

    __slots__ = ("events", "named", "parent")

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.events: list[PagesStored | PagesRemoved] = []
        self.named = 0


class WaitingPages:
    """Keeps the events of orphaned pages; no page is ever both here and known."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._by_parent: dict[int, _Orphans] = {}
        self._of: dict[int, _Orphans] = {}
        self.pages = 0
        """Pages named by the events that are kept."""
        self.forgotten = 0
        self._events = 0

    @property
    def events_bytes(self) -> int:
        """About what the events take, without the pages they name."""
        return self._events * _EVENT_BYTES

    def store(self, event: PagesStored) -> None:
        """Keep `event`, whose parent is unknown."""
        assert event.parent is not None
        orphans = self._of.get(event.parent) or self._by_parent.get(event.parent)
        if orphans is None:
            orphans = self._by_parent[event.parent] = _Orphans(event.parent)
        for page in event.hashes:
            self._of.setdefault(page, orphans)
        self._note(orphans, event)

    def remove(self, event: PagesRemoved) -> None:
        """Keep of `event` what is about pages that wait."""
        if not self._of:
            return
        of: dict[_Orphans, list[int]] = {}
        for page in event.hashes:
            if (orphans := self._of.get(page)) is not None:
                of.setdefault(orphans, []).append(page)
        for orphans, pages in of.items():
            if self._by_parent.get(orphans.parent) is orphans:
                self._note(orphans, PagesRemoved(pages, event.medium))

    def take(self, known: Sequence[int]) -> list[PagesStored | PagesRemoved]:
        """The events that waited for these pages, in order."""
        if not self._by_parent:
            return []
        return [event for page in self._by_parent.keys() & set(known) for event in self._drop(page).events]

    def clear(self) -> None:
        """Forget all."""
        self._by_parent.clear()
        self._of.clear()
        self.pages = self._events = 0

    def _note(self, orphans: _Orphans, event: PagesStored | PagesRemoved) -> None:
        orphans.events.append(event)
        self._events += 1
        orphans.named += len(event.hashes)
        self.pages += len(event.hashes)
        while self.pages > self._max_pages:
            self.forgotten += self._drop(next(iter(self._by_parent))).named

    def _drop(self, parent: int) -> _Orphans:
        orphans = self._by_parent.pop(parent)
        self.pages -= orphans.named
        self._events -= len(orphans.events)
        for event in orphans.events:
            for page in event.hashes:
                if self._of.get(page) is orphans:
                    del self._of[page]
        return orphans
