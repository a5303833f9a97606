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

from engines.types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored
from routing.kv_waiting import WaitingPages
from routing.ownership import Tier
from routing.prefix import text_blocks

_TOKEN_BYTES = 4
_HASH_BYTES = 8
_PAGE_BYTES, _SEGMENT_BYTES = 105, 360
"""Memory of a page (its entry among the pages just grown, its hash) and of a segment (CPython 3.11, measured)."""
_MEDIA = tuple(Medium)
_TIERS = {
    Medium.GPU: Tier.DEVICE,
    Medium.CPU_PINNED: Tier.HOST,
    Medium.DISK: Tier.STORE,
    Medium.EXTERNAL: Tier.STORE,
}
_MEDIA_OF = {tier: tuple(at for at, medium in enumerate(_MEDIA) if _TIERS[medium] is tier) for tier in Tier}


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


class _Segment:
    """Pages of a span, the first at `start`. `before` is the segment they continue: of this span, or the one before.

    `root` begins the chain where there is none before. `present` is a bitset of the segment's pages for each medium.
    `forks` continue it within its span; `followers` counts all that continue it. Hashes and tokens are packed.
    """

    __slots__ = ("before", "blocks", "followers", "forks", "hashes", "present", "root", "start", "tokens")

    def __init__(self, before: _Segment | None, root: bytes, start: int, hashes: bytes, tokens: bytes) -> None:
        self.before = before
        self.root = root
        self.start = start
        self.hashes = hashes
        self.tokens = tokens
        self.blocks: tuple[bytes, ...] = ()
        self.present = [0] * len(_MEDIA)
        self.forks: tuple[_Segment, ...] = ()
        self.followers = 0

    @property
    def stop(self) -> int:
        """The page of the span that follows the segment's last."""
        return self.start + len(self.hashes) // _HASH_BYTES

    def position(self, page: int) -> int:
        """Where `page` is among the segment's own pages."""
        wanted = array("q", (page,)).tobytes()
        at = self.hashes.find(wanted)
        while at % _HASH_BYTES:
            at = self.hashes.find(wanted, at + 1)
        return at // _HASH_BYTES

    def run(self, position: int, wanted: bytes) -> int:
        """How many of the pages `wanted` (packed) are the segment's own from `position` on; the first one is."""
        own = self.hashes[position * _HASH_BYTES : position * _HASH_BYTES + len(wanted)]
        if wanted.startswith(own):
            return len(own) // _HASH_BYTES
        starts = range(0, len(own), _HASH_BYTES)
        differs = (at for at in starts if own[at : at + _HASH_BYTES] != wanted[at : at + _HASH_BYTES])
        return next(differs) // _HASH_BYTES

    def on(self, tier: Tier) -> int:
        """The segment's own pages that are on `tier`, as a bitset."""
        pages = 0
        for medium in _MEDIA_OF[tier]:
            pages |= self.present[medium]
        return pages


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
        self._needs = [_bits(start // page_tokens, end) for start, end in zip(starts, self._ends, strict=True)]
        self._whole = [sum(end <= page for end in self._ends) for page in range(self._span_pages + 1)]
        self._max_pages = max_pages
        self._copies: dict[tuple[Tier, bytes], int] | None = {} if block_tokens % page_tokens else None
        """How often a block is held, where pages of different prompts may begin with the same block."""
        self._pages: dict[int, _Segment] = {}
        self._waiting = WaitingPages(max(1, max_pages // 8))
        self.overflowed = False

    @property
    def pages(self) -> int:
        """Pages that are remembered, those that wait included."""
        return len(self._pages) + self._waiting.pages

    @property
    def memory_bytes(self) -> int:
        """About what the bridge takes, at most: 115 bytes for a page of one token in blocks of 64."""
        return self.pages * (_PAGE_BYTES + self._page_bytes + _SEGMENT_BYTES // self._span_pages)

    @property
    def forgotten_pages(self) -> int:
        """Pages that waited in vain."""
        return self._waiting.forgotten

    def reset(self) -> None:
        """Forget everything: the engine has nothing any more."""
        self._pages.clear()
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
        changes: list[Change] = []
        due: list[KvEvent] = [event]
        while due and not self.overflowed:
            now = due.pop(0)
            if isinstance(now, PagesRemoved):
                changes += self._remove(now)
            elif isinstance(now, PagesStored) and now.hashes:
                changes += self._store(now)
                due[:0] = self._waiting.take(now.hashes) if now.hashes[-1] in self._pages else []
        return changes

    # ---- pages come and go -------------------------------------------------------------------------------------------

    def _store(self, event: PagesStored) -> list[Change]:
        pages, hashes = self._pages, event.hashes
        before = None if event.parent is None else pages.get(event.parent)
        if event.parent is not None and before is None and hashes[0] not in pages:
            self._waiting.store(event)
            return []
        root = self._root_of(event.cache_salt, event.lora) if event.parent is None else b""
        stop = 0 if before is None or event.parent is None else before.start + before.position(event.parent) + 1
        packed, tokens = array("q", hashes).tobytes(), array("I", event.token_ids).tobytes()
        gained: list[tuple[_Segment, int]] = []
        at = 0
        while at < len(hashes):
            segment = pages.get(hashes[at])
            if segment is None:
                start = stop % self._span_pages
                size = self._unknown(hashes, at, self._span_pages - start)
                own = tokens[at * self._page_bytes : (at + size) * self._page_bytes]
                segment = _Segment(before, root, start, packed[at * _HASH_BYTES : (at + size) * _HASH_BYTES], own)
                self._join(segment)
                pages.update(dict.fromkeys(hashes[at : at + size], segment))
                position = 0
            else:
                position = segment.position(hashes[at])
                size = segment.run(position, packed[at * _HASH_BYTES : (at + self._span_pages) * _HASH_BYTES])
            gained += self._set(segment, position, size, event.medium, there=True)
            before, stop, root = segment, segment.start + position + size, b""
            at += size
        if len(pages) > self._max_pages:
            self.reset()
            self.overflowed = True
            return []
        return self._held(gained, _TIERS[event.medium])

    def _unknown(self, hashes: Sequence[int], at: int, most: int) -> int:
        """How many pages from `at` on, of `most`, are new."""
        wanted = hashes[at : at + most]
        if self._pages.keys().isdisjoint(wanted):
            return len(wanted)
        return next(size for size, page in enumerate(wanted) if page in self._pages)

    def _join(self, segment: _Segment) -> None:
        """Put a new segment behind the one it continues, and compute the blocks that end in it."""
        before, start = segment.before, segment.start
        tokens = [segment.tokens]
        if before is not None:
            before.followers += 1
            if start:
                before.forks += (segment,)
                cuts = _span(before, start)
                tokens += [piece.tokens[: (stop - piece.start) * self._page_bytes] for piece, stop in cuts]
        count = self._whole[segment.stop] - self._whole[start]
        if count:
            unhashed = b"".join(reversed(tokens))[self._whole[start] * self._block_bytes :]
            segment.blocks = text_blocks(self._last_block(segment), unhashed, self._block_bytes)[:count]

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
            size = segment.run(position, packed[at * _HASH_BYTES : (at + self._span_pages) * _HASH_BYTES])
            lost += self._set(segment, position, size, event.medium, there=False)
            self._prune(segment)
            at += size
        self._waiting.remove(event)
        blocks = tuple(self._block(segment, number) for segment, number in lost)
        return [Lost(blocks, _TIERS[event.medium])] if blocks else []

    def _prune(self, segment: _Segment) -> None:
        """Forget segments that are nowhere, from `segment` up, as long as nothing continues them."""
        now: _Segment | None = segment
        while now is not None and not now.followers and not any(now.present):
            for page in array("q", now.hashes):
                self._pages.pop(page, None)
            if now.before is not None:
                now.before.followers -= 1
                now.before.forks = tuple(fork for fork in now.before.forks if fork is not now)
            now = now.before

    def _set(
        self, segment: _Segment, position: int, size: int, medium: Medium, *, there: bool
    ) -> list[tuple[_Segment, int]]:
        """Note whether pages of the segment are on `medium`; the blocks (of their spans) that are gained or lost."""
        tier, at = _TIERS[medium], _MEDIA.index(medium)
        bits = _bits(position, position + size)
        was = segment.on(tier)
        touched = [segment, *_forks_of(segment)]
        is_new = there and not was and not segment.forks
        held_before = [0] if is_new else [self._held_blocks(each, tier) for each in touched]
        segment.present[at] = segment.present[at] | bits if there else segment.present[at] & ~bits
        if segment.on(tier) == was:
            return []
        changed = []
        for each, before in zip(touched, held_before, strict=True):
            differs = before ^ self._held_blocks(each, tier)
            first = self._whole[each.start]
            changed += [(each, first + own) for own in range(len(each.blocks)) if differs >> own & 1]
        return changed if self._copies is None else self._counted(changed, tier, self._copies, 1 if there else -1)

    def _counted(
        self, changed: list[tuple[_Segment, int]], tier: Tier, copies: dict[tuple[Tier, bytes], int], step: int
    ) -> list[tuple[_Segment, int]]:
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

    def _held(self, gained: list[tuple[_Segment, int]], tier: Tier) -> list[Change]:
        """As few chains as hold all blocks that were gained; what is missing above them is said to be lost."""
        told: set[bytes] = set()
        changes: list[Change] = []
        for segment, number in reversed(gained):
            if self._block(segment, number) not in told:
                path = list(self._path(segment, self._ends[number]))
                chain = tuple(block for piece, count in reversed(path) for block in piece.blocks[:count])
                told.update(chain)
                changes.append(Held(chain, tier))
                if missing := tuple(self._missing(path, tier)):
                    changes.append(Lost(missing, tier))
        return changes

    def _missing(self, path: Iterable[tuple[_Segment, int]], tier: Tier) -> Iterator[bytes]:
        for piece, count in path:
            held = self._held_blocks(piece, tier)
            if held & _bits(0, count) != _bits(0, count):
                missing = (piece.blocks[own] for own in range(count) if not held >> own & 1)
                yield from (block for block in missing if not self._copies or (tier, block) not in self._copies)

    def _held_blocks(self, segment: _Segment, tier: Tier) -> int:
        """Which of the segment's own blocks are held, as a bitset."""
        if not segment.blocks:
            return 0
        there = segment.on(tier) << segment.start
        if segment.before is not None:
            for piece, stop in _span(segment.before, segment.start):
                there |= (piece.on(tier) & _bits(0, stop - piece.start)) << piece.start
        first, held = self._whole[segment.start], 0
        for own in range(len(segment.blocks)):
            need = self._needs[first + own]
            held |= (there & need == need) << own
        return held

    def _block(self, segment: _Segment, number: int) -> bytes:
        """Block `number` of the span, which ends in the segment."""
        return segment.blocks[number - self._whole[segment.start]]

    def _path(self, segment: _Segment, stop: int) -> Iterator[tuple[_Segment, int]]:
        """The segments from `segment` up to the root, each with its number of blocks on the way to page `stop`."""
        now: _Segment | None = segment
        while now is not None:
            yield now, self._whole[stop] - self._whole[now.start]
            stop = now.start or self._span_pages
            now = now.before

    def _last_block(self, segment: _Segment) -> bytes:
        """What the first block that ends in the segment continues."""
        if segment.before is None:
            return segment.root
        for piece, count in self._path(segment.before, segment.start or self._span_pages):
            if count:
                return piece.blocks[count - 1]
            if piece.before is None:
                return piece.root
        raise AssertionError("a path ends at a root")


def _bits(start: int, stop: int) -> int:
    return (1 << stop) - (1 << start)


def _span(segment: _Segment, stop: int) -> Iterator[tuple[_Segment, int]]:
    """The pieces of one span before its page `stop`, the last of which is in `segment`; each with where it is cut."""
    now: _Segment | None = segment
    while stop and now is not None:
        yield now, stop
        stop = now.start
        now = now.before


def _forks_of(segment: _Segment) -> Iterator[_Segment]:
    for fork in segment.forks:
        yield fork
        yield from _forks_of(fork)
