"""The events of a batch, joined where they continue each other and cut where they are large. Pure.

Engines may publish an event for every page. What an event costs grows with its chain; joined, a chain is paid once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored

_End = tuple[int | None, int, Medium]
"""What a stored event is continued by: its last page, the size of its pages, its medium."""


def joined(events: Iterable[KvEvent], most_pages: int) -> Iterator[KvEvent]:
    """Events of at most `most_pages` pages that together mean the same; each comes after looking at as many, at most.

    Stores of several chains may be mixed: as long as nothing is removed between them, their order does not matter.
    A page behind another belongs to what that one belongs to, so only the first one's salt and adapter count.
    """
    runs: list[_Run] = []
    ends: dict[_End, _Run] = {}
    looked = 0
    for event in events:
        for part in slices(event, most_pages):
            size = 1 if isinstance(part, PagesCleared) else max(1, len(part.hashes))
            looked += size
            if looked > most_pages or (runs and type(part) is not type(runs[0].first)):
                yield from (run.event() for run in runs)
                runs, ends, looked = [], {}, size
            start = _start(part)
            run = None if start is None else ends.pop(start, None)
            if run is None:
                run = _Run(part)
                runs.append(run)
            else:
                run.parts.append(part)
            if (end := _end(part)) is not None:
                ends[end] = run
    yield from (run.event() for run in runs)


def slices(event: KvEvent, pages: int) -> Iterator[KvEvent]:
    """The event in parts of at most `pages` pages, which together mean the same."""
    if not isinstance(event, PagesStored | PagesRemoved) or len(event.hashes) <= pages:
        yield event
        return
    for at in range(0, len(event.hashes), pages):
        hashes = event.hashes[at : at + pages]
        if isinstance(event, PagesRemoved):
            yield PagesRemoved(hashes, event.medium)
        else:
            tokens = event.token_ids[at * event.page_tokens : (at + pages) * event.page_tokens]
            yield replace(event, hashes=hashes, token_ids=tokens, parent=event.hashes[at - 1] if at else event.parent)


class _Run:
    """Events of one kind, each of which continues the one before it."""

    __slots__ = ("first", "parts")

    def __init__(self, first: KvEvent) -> None:
        self.first = first
        self.parts = [first]

    def event(self) -> KvEvent:
        """All of them in one."""
        first = self.first
        if len(self.parts) == 1 or isinstance(first, PagesCleared):
            return first
        hashes = [page for part in self.parts if not isinstance(part, PagesCleared) for page in part.hashes]
        if isinstance(first, PagesRemoved):
            return PagesRemoved(hashes, first.medium)
        tokens = [token for part in self.parts if isinstance(part, PagesStored) for token in part.token_ids]
        return replace(first, hashes=hashes, token_ids=tokens)


def _start(event: KvEvent) -> _End | None:
    """What the event continues; None for a page that begins a prompt. A removal continues every other."""
    if isinstance(event, PagesStored):
        return None if event.parent is None else (event.parent, event.page_tokens, event.medium)
    return _end(event)


def _end(event: KvEvent) -> _End | None:
    if isinstance(event, PagesStored):
        return (event.hashes[-1], event.page_tokens, event.medium) if event.hashes else None
    return (None, 0, event.medium if isinstance(event, PagesRemoved) else Medium.GPU)
