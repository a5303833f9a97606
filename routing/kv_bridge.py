"""From an engine's pages to our blocks: rebuilds our chain from its KV events, for one engine and DP rank. Pure.

Engines name pages by hashes of their own. A stored page names the page before it, so its tokens continue a chain that
is known. A *span* is the least common multiple of page and block; a *segment* is consecutive pages of one span with
the blocks that end in them. Where prompts part within a span, several segments continue the same one. A block is held
on a tier while all its pages are there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored
from routing.kv_segment import (
    FORKS_BYTES,
    HASH_BYTES,
    MEDIA,
    MEDIA_OF,
    PAGE_BYTES,
    SEGMENT_BYTES,
    TIERS,
    Segment,
    bits,
    forks_of,
    span_of,
)
from routing.kv_waiting import WaitingPages
from routing.ownership import Tier
from routing.prefix import text_blocks

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """The engine has this whole chain, from its root on, on `tier`."""

    blocks: tuple[bytes, ...]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine does not have these blocks on `tier`."""

    blocks: tuple[bytes, ...]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine has nothing any more."""


Change = Held | Lost | Cleared


class KvBridge:
    """What one rank of one engine has, page by page, and what that means in blocks.

    `root_of(cache_salt, lora)` is the root of our chain. Pages behind an unknown page wait for it, at most an eighth of
    `max_pages`; those that wait longest are forgotten. Beyond `max_pages` the bridge is `overflowed`: it forgets
    everything, and follows nothing until `reset` or until the engine has cleared its cache.
    """

    def __init__(
        self, root_of: Callable[[str | None, str | None], bytes], block_tokens: int, page_tokens: int, max_pages: int
    ) -> None:
        if min(block_tokens, page_tokens, max_pages) < 1:
            raise ValueError("the sizes of blocks and pages, and the number of pages, must be positive")
        span_tokens = math.lcm(block_tokens, page_tokens)
        starts = range(0, span_tokens, block_tokens)
        self._root_of = root_of
        self._page_tokens = page_tokens
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self._span_pages = span_tokens // page_tokens
        self._ends = [-(-(start + block_tokens) // page_tokens) for start in starts]
        self._needs = [bits(start // page_tokens, end) for start, end in zip(starts, self._ends, strict=True)]
        self._whole = [sum(end <= page for end in self._ends) for page in range(self._span_pages + 1)]
        self._max_pages = max_pages
        self._copies: dict[tuple[Tier, bytes], int] | None = {} if block_tokens % page_tokens else None
        """How often a block is held, where pages of different prompts may begin with the same block."""
        self._pages: dict[int, Segment] = {}
        self._segments = self._forked = 0
        """Segments, and those of them that have forks."""
        self._waiting = WaitingPages(max(1, max_pages // 8))
        self.overflowed = False

    @property
    def pages(self) -> int:
        """Pages that are remembered, those that wait included."""
        return len(self._pages) + self._waiting.pages

    @property
    def memory_bytes(self) -> int:
        """About what the bridge takes, at most: 115 bytes for a page of one token where prompts fill blocks of 64."""
        segments = self._segments * SEGMENT_BYTES + self._forked * FORKS_BYTES
        return self.pages * (PAGE_BYTES + self._page_bytes) + segments + self._waiting.events_bytes

    @property
    def forgotten_pages(self) -> int:
        """Pages that waited in vain."""
        return self._waiting.forgotten

    def reset(self) -> None:
        """Forget everything: the engine has nothing any more."""
        self._pages.clear()
        self._segments = self._forked = 0
        self._waiting.clear()
        if self._copies:
            self._copies.clear()
        self.overflowed = False

    def apply(self, event: KvEvent) -> list[Change]:
        """What the event changes, in order. ValueError for pages of another size than the bridge's."""
        if isinstance(event, PagesCleared):
            self.reset()
            return [Cleared()]
        if isinstance(event, PagesStored) and event.page_tokens != self._page_tokens:
            raise ValueError(f"a page of {event.page_tokens} tokens, where {self._page_tokens} were announced")
        if isinstance(event, PagesStored) and event.hashes and not self._follows_known(event):
            if not self.overflowed:
                self._waiting.store(event)
            return []
        changes: list[Change] = []
        due: list[PagesStored | PagesRemoved] = [event]  # the next one last
        while due and not self.overflowed:  # ends: what waited never waits again
            now = due.pop()
            if isinstance(now, PagesRemoved):
                changes += self._remove(now)
            elif now.hashes and self._follows_known(now):
                changes += self._store(now)
                due += reversed(self._waiting.take(now.hashes))
        return changes

    # ---- pages come and go -------------------------------------------------------------------------------------------

    def _follows_known(self, event: PagesStored) -> bool:
        return event.parent is None or event.parent in self._pages or event.hashes[0] in self._pages

    def _store(self, event: PagesStored) -> list[Change]:
        pages, hashes = self._pages, event.hashes
        before = None if event.parent is None else pages.get(event.parent)
        root = self._root_of(event.cache_salt, event.lora) if event.parent is None else b""
        stop = 0 if before is None or event.parent is None else before.start + before.position(event.parent) + 1
        packed, tokens = array("q", hashes).tobytes(), array("I", event.token_ids).tobytes()
        gained: list[tuple[Segment, int]] = []
        at = 0
        while at < len(hashes):
            segment = pages.get(hashes[at])
            if segment is None:
                start = stop % self._span_pages
                size = self._unknown(hashes, at, self._span_pages - start)
                own = packed[at * HASH_BYTES : (at + size) * HASH_BYTES]
                own_tokens = tokens[at * self._page_bytes : (at + size) * self._page_bytes]
                if before is not None and start and before.stop == start:
                    segment, position = before, start - before.start
                    self._lengthen(segment, own, own_tokens)
                else:
                    segment, position = Segment(before, root, start, own, own_tokens), 0
                    self._join(segment)
                pages.update(dict.fromkeys(hashes[at : at + size], segment))
            else:
                position = segment.position(hashes[at])
                size = segment.run(position, packed[at * HASH_BYTES : (at + self._span_pages) * HASH_BYTES])
            gained += self._set(segment, position, size, event.medium, there=True)
            before, stop, root = segment, segment.start + position + size, b""
            at += size
        if len(pages) > self._max_pages:
            self.reset()
            self.overflowed = True
            return []
        return self._held(gained, TIERS[event.medium])

    def _unknown(self, hashes: Sequence[int], at: int, most: int) -> int:
        """How many pages from `at` on, of `most`, are new, each named once."""
        wanted = hashes[at : at + most]
        seen: set[int] = set(wanted)
        if len(seen) == len(wanted) and self._pages.keys().isdisjoint(seen):
            return len(wanted)
        seen.clear()
        for size, page in enumerate(wanted):
            if page in self._pages or page in seen:
                return size
            seen.add(page)
        return len(wanted)

    def _join(self, segment: Segment) -> None:
        """Put a new segment behind the one it continues."""
        before = segment.before
        self._segments += 1
        if before is not None:
            before.followers += 1
            if segment.start:
                if before.forks is None:
                    before.forks = {}
                    self._forked += 1
                before.forks[segment] = None
        segment.blocks = self._new_blocks(segment, segment.start)

    def _lengthen(self, segment: Segment, hashes: bytes, tokens: bytes) -> None:
        """The segment goes on with these pages, of the same span."""
        stop = segment.stop
        segment.lengthen(hashes, tokens)
        segment.blocks += self._new_blocks(segment, stop)

    def _new_blocks(self, segment: Segment, start: int) -> tuple[bytes, ...]:
        """The blocks that end in the segment's pages from page `start` of the span on."""
        count = self._whole[segment.stop] - self._whole[start]
        if not count:
            return ()
        tokens = [
            piece.tokens[: (stop - piece.start) * self._page_bytes] for piece, stop in span_of(segment, segment.stop)
        ]
        unhashed = b"".join(reversed(tokens))[self._whole[start] * self._block_bytes :]
        return text_blocks(self._last_block(segment), unhashed, self._block_bytes)[:count]

    def _remove(self, event: PagesRemoved) -> list[Change]:
        hashes, lost = event.hashes, []
        packed = array("q", hashes).tobytes()
        at = 0
        while at < len(hashes):
            segment = self._pages.get(hashes[at])
            if segment is None:
                at += 1
                continue
            position = segment.position(hashes[at])
            size = segment.run(position, packed[at * HASH_BYTES : (at + self._span_pages) * HASH_BYTES])
            lost += self._set(segment, position, size, event.medium, there=False)
            self._prune(segment)
            at += size
        self._waiting.remove(event)
        blocks = tuple(self._block(segment, number) for segment, number in lost)
        return [Lost(blocks, TIERS[event.medium])] if blocks else []

    def _prune(self, segment: Segment) -> None:
        """Forget segments that are nowhere, from `segment` up, as long as nothing continues them."""
        now: Segment | None = segment
        while now is not None and not now.followers and not any(now.present):
            for page in array("q", now.hashes):
                self._pages.pop(page, None)
            self._segments -= 1
            before = now.before
            if before is not None:
                before.followers -= 1
                if now.start and before.forks is not None:
                    del before.forks[now]
                    if not before.forks:
                        before.forks = None
                        self._forked -= 1
            now = before

    def _set(
        self, segment: Segment, position: int, size: int, medium: Medium, *, there: bool
    ) -> list[tuple[Segment, int]]:
        """Note whether pages of the segment are on `medium`; the blocks (of their spans) that are gained or lost."""
        tier, at = TIERS[medium], MEDIA.index(medium)
        pages = bits(position, position + size)
        was = segment.on(tier)
        touched = [segment, *forks_of(segment)]
        is_new = there and not was and not segment.forks
        held_before = [0] if is_new else [self._held_blocks(each, tier) for each in touched]
        segment.present[at] = segment.present[at] | pages if there else segment.present[at] & ~pages
        if segment.on(tier) == was:
            return []
        changed = []
        for each, before in zip(touched, held_before, strict=True):
            differs = before ^ self._held_blocks(each, tier)
            first = self._whole[each.start]
            changed += [(each, first + own) for own in range(len(each.blocks)) if differs >> own & 1]
        return changed if self._copies is None else self._counted(changed, tier, self._copies, 1 if there else -1)

    def _counted(
        self, changed: list[tuple[Segment, int]], tier: Tier, copies: dict[tuple[Tier, bytes], int], step: int
    ) -> list[tuple[Segment, int]]:
        """Those of the changed blocks of which this was the first copy, or the last."""
        found = []
        for segment, number in changed:
            key = (tier, self._block(segment, number))
            count = copies[key] = copies.get(key, 0) + step
            if not count:
                del copies[key]
            if count == max(step, 0):
                found.append((segment, number))
        return found

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _held(self, gained: list[tuple[Segment, int]], tier: Tier) -> list[Change]:
        """As few chains as hold all blocks that were gained; what is missing above them is said to be lost."""
        told: set[bytes] = set()
        changes: list[Change] = []
        for segment, number in reversed(gained):
            if self._block(segment, number) not in told:
                blocks, partly = self._walk(segment, self._ends[number], tier)
                told.update(blocks)
                changes.append(Held(blocks, tier))
                if missing := tuple(self._missing(partly, tier)):
                    changes.append(Lost(missing, tier))
        return changes

    def _walk(self, segment: Segment, stop: int, tier: Tier) -> tuple[tuple[bytes, ...], list[tuple[Segment, int]]]:
        """The chain from the root to page `stop`; and the segments on it of which something may not be on `tier`.

        It is walked for each piece of a long prompt, so it makes no call for a segment.
        """
        medium, whole, span_pages = MEDIA_OF[tier][0], self._whole, self._span_pages
        path: list[tuple[bytes, ...]] = []
        partly: list[tuple[Segment, int]] = []
        now: Segment | None = segment
        while now is not None:
            start, count = now.start, whole[stop] - whole[now.start]
            path.append(now.blocks[:count])
            if start or now.present[medium] != now.all_pages:
                partly.append((now, count))
            stop, now = start or span_pages, now.before
        path.reverse()
        return tuple(chain.from_iterable(path)), partly

    def _missing(self, path: Iterable[tuple[Segment, int]], tier: Tier) -> Iterator[bytes]:
        for piece, count in path:
            held = self._held_blocks(piece, tier)
            if held & bits(0, count) != bits(0, count):
                missing = (piece.blocks[own] for own in range(count) if not held >> own & 1)
                yield from (block for block in missing if not self._copies or (tier, block) not in self._copies)

    def _held_blocks(self, segment: Segment, tier: Tier) -> int:
        """Which of the segment's own blocks are held, as a bitset."""
        if not segment.blocks:
            return 0
        there = segment.on(tier) << segment.start
        if segment.before is not None:
            for piece, stop in span_of(segment.before, segment.start):
                there |= (piece.on(tier) & bits(0, stop - piece.start)) << piece.start
        first, held = self._whole[segment.start], 0
        for own in range(len(segment.blocks)):
            need = self._needs[first + own]
            held |= (there & need == need) << own
        return held

    def _block(self, segment: Segment, number: int) -> bytes:
        """Block `number` of the span, which ends in the segment."""
        return segment.blocks[number - self._whole[segment.start]]

    def _path(self, segment: Segment, stop: int) -> Iterator[tuple[Segment, int]]:
        """The segments from `segment` up to the root, each with its number of blocks on the way to page `stop`."""
        now: Segment | None = segment
        while now is not None:
            yield now, self._whole[stop] - self._whole[now.start]
            stop = now.start or self._span_pages
            now = now.before

    def _last_block(self, segment: Segment) -> bytes:
        """What the next block that ends in the segment continues."""
        if segment.blocks:
            return segment.blocks[-1]
        if segment.before is None:
            return segment.root
        for piece, count in self._path(segment.before, segment.start or self._span_pages):
            if count:
                return piece.blocks[count - 1]
            if piece.before is None:
                return piece.root
        raise AssertionError("a path ends at a root")
