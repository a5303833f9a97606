"""Which holder has which blocks, kept as segments: what is under the prefix index. Pure, and bounded by its callers.

A block names its whole prefix, so blocks that follow each other in one chain do so in every chain: they are kept as
*segments*. A holder (one engine's one tier, known by one bit) has a beginning of a segment, and has used all that it
has of it at once: what uses a part only splits the segment. So memory and time go by segments, about one for each part
of a prompt that was new, and all that is kept per block is where it lies.

Each holder's segments stand in the order of last use. Chains are used tail first, so an ancestor is always more recent
than its descendants, and what is forgotten is always a leaf. What nobody holds any more is removed by `sweep`, little
by little: forgetting much at once takes no longer than forgetting its segments.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import compress, count
from operator import ne

MAX_SEGMENT_BLOCKS = 256
"""Bounds what one split copies; a longer run is several segments."""

MAX_BEHIND = 16
"""A segment that more holders have is not lengthened: those who are left with a part are looked at one by one."""

BLOCK_BYTES = 72
"""Memory of one distinct block beside the tables: its hash, and its place in a segment (CPython 3.11, measured)."""
SEGMENT_BYTES = 200
"""Memory of one segment beside its blocks."""
HOLD_BYTES = 115
"""Memory of one segment being held by one holder."""

_TABLES = 256
"""Blocks lie in many small tables, by their first byte: one of a million would stop the loop whenever it grew."""
_HOLD_COST_BLOCKS = 4
"""Taking a segment from a holder that has left takes as long as removing so many blocks."""


class Segment:
    """Consecutive blocks. The holders in `owners` hold a beginning of them; those also in `partial` not all.

    While there are owners, one holds all. `grows`: it ends where its last chain ended, so that chain may lengthen it.
    """

    __slots__ = ("blocks", "grows", "owners", "partial")

    def __init__(self, blocks: tuple[bytes, ...], *, grows: bool = True) -> None:
        self.blocks = blocks
        self.grows = grows
        self.owners = 0
        self.partial = 0

    def may_grow(self) -> bool:
        """Whether a chain that ends with it lengthens it, rather than being followed by a new one."""
        return self.grows and len(self.blocks) < MAX_SEGMENT_BLOCKS and self.owners.bit_count() <= MAX_BEHIND


class _Hold:
    """One holder has the first `blocks` of a segment; a ring in order of use, closed by the holder's `end`."""

    __slots__ = ("blocks", "newer", "older", "segment")

    def __init__(self, segment: Segment, blocks: int = 0) -> None:
        self.segment = segment
        self.blocks = blocks
        self.newer = self.older = self

    def put_before(self, other: _Hold) -> None:
        """Become the one used just before `other`."""
        self.older, self.newer = other.older, other
        other.older.newer = other.older = self

    def take_out(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class Holder:
    """What one engine is thought to have on one tier. `end` closes the ring of its holds: `end.newer` is the oldest."""

    __slots__ = ("bit", "capacity_blocks", "end", "held_blocks", "holds")

    def __init__(self, bit: int, capacity_blocks: int) -> None:
        self.bit = bit
        self.capacity_blocks = capacity_blocks
        self.held_blocks = 0
        self.holds: dict[Segment, _Hold] = {}
        self.end = _Hold(Segment(()))

    def blocks_of(self, segment: Segment, start: int, length: int) -> int:
        """How many of `length` blocks of `segment` from `start` on it has."""
        if (hold := self.holds.get(segment)) is None or hold.blocks <= start:
            return 0
        blocks = hold.blocks - start
        return blocks if blocks < length else length


class Segments:
    """Blocks to their segments, and bits to holders; those of holders that are leaving as well."""

    def __init__(self) -> None:
        self.holders: dict[int, Holder] = {}
        self._leaving: list[Holder] = []
        self._segments: dict[bytes, Segment] = {}  # by first block
        # Block to first block of its segment. Not to the segment: a table of plain bytes costs the collector nothing.
        self._firsts: list[dict[bytes, bytes]] = [{} for _ in range(_TABLES)]
        self._unowned: list[Segment] = []

    def join(self, holder: Holder) -> None:
        """From now on the holder's bit is taken."""
        self.holders[holder.bit] = holder

    def leave(self, holder: Holder) -> None:
        """Forget all that the holder has: not at once, but its bit is free only when that is done (`sweep`)."""
        self._leaving.append(holder)

    def memory_bytes(self) -> int:
        """An estimate of what all this occupies."""
        holds = sum(len(holder.holds) for holder in self.holders.values())
        tables = sum(map(sys.getsizeof, filter(None, self._firsts)))
        segments = len(self._segments) * (SEGMENT_BYTES + len(self.holders) // 4)
        return tables + sum(map(len, self._firsts)) * BLOCK_BYTES + segments + holds * HOLD_BYTES

    # ---- reading -------------------------------------------------------------------------------------------------

    def walk(self, chain: tuple[bytes, ...], at: int = 0) -> Iterator[tuple[Segment, int, int]]:
        """What `chain[at:]` runs through, up to the first unknown block: parts as (segment, start, length)."""
        while at < len(chain) and (found := self._find(chain[at])) is not None:
            segment, start = found
            length = _common_blocks(segment.blocks, start, chain, at)
            yield segment, start, length
            at += length

    def _find(self, block: bytes) -> tuple[Segment, int] | None:
        """The segment that a block lies in, and where in it."""
        if (segment := self._segments.get(block)) is not None:
            return segment, 0
        if (first := self._firsts[block[0]].get(block)) is None:
            return None
        segment = self._segments[first]
        return segment, segment.blocks.index(block)

    # ---- using ---------------------------------------------------------------------------------------------------

    def use(self, holder: Holder, chain: tuple[bytes, ...]) -> None:
        """`holder` has, and has just used, these consecutive blocks; it forgets the oldest beyond its capacity."""
        for segment in reversed(self._covering(holder, chain[: holder.capacity_blocks])):
            if (hold := holder.holds.get(segment)) is None:
                hold = holder.holds[segment] = _Hold(segment)
                segment.owners |= holder.bit
            else:
                hold.take_out()
            hold.put_before(holder.end)
            holder.held_blocks += len(segment.blocks) - hold.blocks
            hold.blocks = len(segment.blocks)
            segment.partial &= ~holder.bit
        self.shrink(holder)

    def _covering(self, holder: Holder, chain: tuple[bytes, ...]) -> list[Segment]:
        """The segments that make up `chain`, which is about to be used by `holder`: split and made as need be."""
        parts: list[Segment] = []
        at = 0
        while at < len(chain):
            if (found := self._find(chain[at])) is None:
                at += self._append(parts, holder, chain[at : at + MAX_SEGMENT_BLOCKS])
                continue
            segment, start = found
            if start:
                segment = self._split(segment, start)
            length = _common_blocks(segment.blocks, 0, chain, at)
            if length < len(segment.blocks):
                self._split(segment, length)
            parts.append(segment)
            at += length
        return parts

    def _append(self, parts: list[Segment], holder: Holder, following: tuple[bytes, ...]) -> int:
        """Make a segment of what follows `parts`, or lengthen their last, up to the first known block; by how many.

        `following` is no longer than a segment. Others who have the last are left with a part of it.
        """
        last = parts[-1] if parts else None
        if last is not None and last.may_grow():
            new = self._place_unknown(following[: MAX_SEGMENT_BLOCKS - len(last.blocks)], last.blocks[0])
            last.blocks += new
            last.partial = last.owners & ~holder.bit
        else:
            new = self._place_unknown(following, following[0])
            segment = self._segments[new[0]] = Segment(new)
            parts.append(segment)
        return len(new)

    def _place_unknown(self, blocks: tuple[bytes, ...], first: bytes) -> tuple[bytes, ...]:
        """Put the blocks before the first known one into the segment that begins with `first`; returns them."""
        tables = self._firsts
        for place, block in enumerate(blocks):
            table = tables[block[0]]
            if block in table:
                return blocks[:place]
            table[block] = first
        return blocks

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut `segment` before its block `at`; returns the second part, in every holder just older than the first."""
        tail = Segment(segment.blocks[at:], grows=segment.grows)
        first = tail.blocks[0]
        self._segments[first] = tail
        for block in tail.blocks:
            self._firsts[block[0]][block] = first
        segment.blocks = segment.blocks[:at]
        segment.grows = False
        for bit in bits(segment.owners):
            holder = self.holders[bit]
            hold = holder.holds[segment]
            if hold.blocks > at:
                part = holder.holds[tail] = _Hold(tail, hold.blocks - at)
                part.put_before(hold)
                hold.blocks = at
                tail.owners |= bit
                tail.partial |= segment.partial & bit
            if hold.blocks == at:
                segment.partial &= ~bit
        if not tail.owners:
            self._unowned.append(tail)
        return tail

    # ---- forgetting ----------------------------------------------------------------------------------------------

    def shrink(self, holder: Holder) -> None:
        """Forget what is beyond the capacity, block by block, the least recently used first."""
        while (excess := holder.held_blocks - holder.capacity_blocks) > 0:
            oldest = holder.end.newer
            self._keep(holder, oldest, max(0, oldest.blocks - excess))

    def lose(self, holder: Holder, blocks: Iterable[bytes]) -> None:
        """`holder` has lost these blocks, in any order."""
        lost = dict.fromkeys(blocks)
        for first, number in Counter(self._firsts[block[0]].get(block, b"") for block in lost).items():
            segment = self._segments.get(first)
            if segment is not None and (hold := holder.holds.get(segment)) is not None:
                self._lose(holder, hold, lost, number)

    def _lose(self, holder: Holder, hold: _Hold, lost: Container[bytes], number: int) -> None:
        """`holder` has lost the `number` blocks of a segment that are in `lost`; others behind them it still has."""
        blocks, end = hold.segment.blocks, hold.blocks
        for place in range(len(blocks) - 1, -1, -1):  # from the end, where engines evict
            if blocks[place] not in lost:
                continue
            if place < end:
                if place + 1 < end:
                    self._keep(holder, hold, end)
                    self._split(hold.segment, place + 1)
                end = place
            number -= 1
            if not number:
                break
        self._keep(holder, hold, end)

    def forget_up_to(self, holder: Holder, lost: tuple[bytes, ...]) -> list[bytes]:
        """Forget these blocks and all that was used before any of them; returns what was, the oldest first."""
        left = self._first_lost(holder, lost)
        forgotten: list[bytes] = []
        while left:
            oldest = holder.end.newer
            kept = left.pop(oldest.segment, 0)  # the rest goes in the next round, unless nothing newer is lost
            forgotten += reversed(oldest.segment.blocks[kept : oldest.blocks])
            self._keep(holder, oldest, kept)
        return forgotten

    def _first_lost(self, holder: Holder, lost: tuple[bytes, ...]) -> dict[Segment, int]:
        """Where in each segment the first of the `lost` blocks lies that `holder` has."""
        places: dict[Segment, int] = {}
        at = 0
        while at < len(lost):
            for segment, start, length in self.walk(lost, at):
                if holder.blocks_of(segment, start, length):
                    places.setdefault(segment, start)
                at += length
            at += 1
        return places

    def sweep(self, budget_blocks: int) -> None:
        """Remove about so many blocks that nobody holds, and what holders that are leaving have."""
        while budget_blocks > 0:
            if self._unowned:
                budget_blocks -= self._sweep_segment(self._unowned.pop())
            elif self._leaving:
                self._sweep_holder(self._leaving[-1])
                budget_blocks -= _HOLD_COST_BLOCKS
            else:
                return

    def _sweep_segment(self, segment: Segment) -> int:
        """Remove it, unless it was used again, or removed, since it was left; returns about how many blocks went."""
        first = segment.blocks[0]
        if segment.owners or self._segments.get(first) is not segment:
            return 1
        del self._segments[first]
        self._remove(segment.blocks)
        return len(segment.blocks)

    def _sweep_holder(self, holder: Holder) -> None:
        if holder.holds:
            self._keep(holder, holder.end.newer, 0)
        else:
            self._leaving.pop()
            del self.holders[holder.bit]

    def _keep(self, holder: Holder, hold: _Hold, blocks: int) -> None:
        """`holder` has only the first `blocks` of this segment any more."""
        segment, bit = hold.segment, holder.bit
        holder.held_blocks -= hold.blocks - blocks
        hold.blocks = blocks
        if blocks == len(segment.blocks):
            return
        if blocks:
            segment.partial |= bit
        else:
            hold.take_out()
            del holder.holds[segment]
            segment.owners &= ~bit
            segment.partial &= ~bit
        self._trim(segment)

    def _trim(self, segment: Segment) -> None:
        """Cut off the end that nobody holds; a segment that nobody holds at all is left for `sweep`."""
        if not segment.owners:
            self._unowned.append(segment)
        elif segment.owners == segment.partial:
            holders = [self.holders[bit] for bit in bits(segment.owners)]
            longest = max(holder.holds[segment].blocks for holder in holders)
            self._remove(segment.blocks[longest:])
            segment.blocks = segment.blocks[:longest]
            segment.partial = sum(holder.bit for holder in holders if holder.holds[segment].blocks < longest)

    def _remove(self, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            table = self._firsts[block[0]]
            del table[block]
            if not table:
                table.clear()  # which, unlike the last pop, gives its memory back


def _common_blocks(mine: tuple[bytes, ...], start: int, chain: tuple[bytes, ...], at: int) -> int:
    """How many blocks are the same from `mine[start]` and `chain[at]` on, which are equal."""
    length = min(len(mine) - start, len(chain) - at)
    left, right = mine[start : start + length], chain[at : at + length]
    if left[-1] == right[-1] and left == right:
        return length
    return next(compress(count(), map(ne, left, right)))


def bits(mask: int) -> Iterator[int]:
    """The single bits of `mask`, the lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
