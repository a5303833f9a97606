"""The rows of one boot of an engine on one tier: runs by tail, and by first block. Pure.

A block's hash names all its ancestors, so rows that share a block are alike before it, and a row with any block of a
whole chain begins in that chain: chains are looked up by the first blocks of rows, and nothing is kept for each block.
Rows of several writers may overlap; a block counts as long as any row has it. What overlaps, or was lost from the
middle of a row, is found by a walk over all rows: 2 to 4 ms for 65,536 blocks. Memory beside the blocks: 8 bytes a
block and 400 a row, 50 more of one that does not begin its chain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count
from typing import NamedTuple

from routing.ownership import ROOT, Run, truncated

_FEW = 4096
"""Blocks that are looked up one by one; where more are lost, a walk over all rows is cheaper."""


@dataclass(slots=True)
class Row:
    """One held run; it counts until `expires_s`."""

    run: Run
    expires_s: float


class Span(NamedTuple):
    """The blocks of a chain, from `start` to before `end`, that the row with this tail has."""

    start: int
    end: int
    tail: bytes


class TierRows:
    """`rows`: tail → row, the least recently used first; `blocks`: of all rows, those that overlap counted twice."""

    __slots__ = ("_doubtful", "_firsts", "_inner", "_shared", "blocks", "rows")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows: dict[bytes, Row] = {}
        self.blocks = 0
        self._firsts: dict[bytes, bytes | tuple[bytes, ...]] = {}  # the tail, or tails, of the rows that begin with it
        self._inner: set[bytes] = set()  # those of them that are not the first of their chain
        self._shared: set[bytes] = set()  # first blocks that another row has as well
        self._doubtful: set[bytes] = set()  # first blocks of which that is not known

    # ---- whole chains --------------------------------------------------------------------------------------------

    def spans(self, blocks: Sequence[bytes]) -> list[Span]:
        """What every row has of a whole chain, by where that begins."""
        firsts = self._firsts
        starts: Iterable[int] = (0,) if blocks and blocks[0] in firsts else ()
        if self._inner and not self._inner.isdisjoint(blocks):
            starts = compress(count(), map(firsts.__contains__, blocks))
        return [
            Span(start, start + _alike(self.rows[tail].run.blocks, blocks, start), tail)
            for start in starts
            for tail in _each(firsts[blocks[start]])
        ]

    def joined(self, blocks: Sequence[bytes]) -> int:
        """How many blocks of a chain, from the first on, rows have that join each other: `reach`, but for overlaps."""
        depth = 0
        while depth < len(blocks) and (tails := self._firsts.get(blocks[depth])) is not None:
            depth += max(_alike(self.rows[tail].run.blocks, blocks, depth) for tail in _each(tails))
        return depth

    def put_missing(self, blocks: Sequence[bytes], spans: Collection[Span], expires_s: float) -> tuple[Run, ...]:
        """Hold until then what no row has of a whole chain, whose `spans` these are; the runs that are new."""
        runs = missing_runs(blocks, spans)
        for run in runs:
            self._add(run, expires_s)
        return runs

    # ---- rows ----------------------------------------------------------------------------------------------------

    def put(self, run: Run, expires_s: float) -> bool:
        """Hold `run` until then; whether that was new. Of two runs with one tail the longer stays."""
        if (known := self.rows.get(run.tail)) is not None:
            expires_s = max(expires_s, known.expires_s)
            if len(known.run.blocks) >= len(run.blocks):
                self.touch(run.tail, expires_s)
                return False
            self.discard(run.tail)
        first = run.blocks[0]
        if first in self._firsts:
            self._shared.add(first)
        elif run.parent != ROOT and (self._shared or self._doubtful or run.parent not in self.rows):
            # A row that begins before `run` and shares blocks with it has its parent, not as its tail.
            self._doubtful.add(first)
        if self._inner:
            self._shared.update(filter(self._inner.__contains__, run.blocks[1:]))
        self._add(run, expires_s)
        return True

    def discard(self, tail: bytes) -> Run:
        """End a row."""
        run = self.rows.pop(tail).run
        self.blocks -= len(run.blocks)
        first = run.blocks[0]
        left = tuple(each for each in _each(self._firsts[first]) if each != tail)
        if left:
            self._firsts[first] = left[0] if len(left) == 1 else left
        else:
            del self._firsts[first]
            self._inner.discard(first)
            self._shared.discard(first)
            self._doubtful.discard(first)
        return run

    def remove(self, tail: bytes) -> list[bytes]:
        """End a row; the blocks that no row has any more."""
        shares = self._shares(tail)
        return self._gone(self.discard(tail).blocks, shares)

    def cut(self, tail: bytes, lost: Container[bytes]) -> list[bytes]:
        """The row ends before the first of `lost`, or ends whole where it has none; the blocks that are gone."""
        shares = self._shares(tail)
        expires_s = self.rows[tail].expires_s
        run = self.discard(tail)
        left = truncated(run, lost)
        kept = 0
        if left is not None and len(left.blocks) < len(run.blocks):
            kept = len(left.blocks)
            if shares:
                self.put(left, expires_s)
            else:
                self._add(left, expires_s)
        return self._gone(run.blocks[kept:], shares)

    def touch(self, tail: bytes, expires_s: float) -> None:
        """The row was used: it lives until then, and is the most recent one."""
        row = self.rows.pop(tail)
        row.expires_s = expires_s
        self.rows[tail] = row

    def with_any(self, lost: Collection[bytes]) -> list[bytes]:
        """The tails of the rows that have any of these blocks, which are a set.

        Caches forget from the end: as a rule all are of rows whose tail is among them, and no others are looked at.
        """
        if len(lost) <= _FEW:
            tails = list(filter(self.rows.__contains__, lost))
            found = sum(sum(map(lost.__contains__, self.rows[tail].run.blocks)) for tail in tails)
            if found == len(lost) and not any(map(self._shares, tails)):
                return tails
        lost = frozenset(lost)
        return [tail for tail, row in self.rows.items() if not lost.isdisjoint(row.run.blocks)]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _add(self, run: Run, expires_s: float) -> None:
        tail, first = run.blocks[-1], run.blocks[0]
        self.rows[tail] = Row(run, expires_s)
        self.blocks += len(run.blocks)
        if run.parent != ROOT:
            self._inner.add(first)
        known = self._firsts.setdefault(first, tail)
        if known is not tail:
            self._firsts[first] = (*_each(known), tail)

    def _shares(self, tail: bytes) -> bool:
        """Whether other rows may have blocks of this one; else none has."""
        if self._doubtful:
            for row in self.rows.values():
                if not self._doubtful.isdisjoint(row.run.blocks):
                    self._shared.update(self._doubtful.intersection(row.run.blocks[1:]))
            self._doubtful.clear()
        return bool(self._shared) and not self._shared.isdisjoint(self.rows[tail].run.blocks)

    def _gone(self, blocks: Sequence[bytes], shared: bool) -> list[bytes]:
        """Those of the blocks of a row that has ended which no row has."""
        gone = dict.fromkeys(blocks)
        for row in self.rows.values() if shared else ():
            if not gone.keys().isdisjoint(row.run.blocks):
                for block in row.run.blocks:
                    gone.pop(block, None)
        return list(gone)


def reach(spans: Iterable[Span]) -> int:
    """How many blocks of a chain, unbroken from the first, are in the spans; these by where they begin."""
    depth = 0
    for start, end, _ in spans:
        if start > depth:
            break
        depth = max(depth, end)
    return depth


def missing_runs(blocks: Sequence[bytes], spans: Collection[Span]) -> tuple[Run, ...]:
    """The parts of a whole chain that are in no span: usually its end, or more parts when middle blocks were lost."""
    if not spans:
        return (Run(ROOT, tuple(blocks)),) if blocks else ()
    runs = []
    depth = 0
    for start, end, _ in (*spans, Span(len(blocks), len(blocks), b"")):
        if start > depth:
            runs.append(Run(blocks[depth - 1] if depth else ROOT, tuple(blocks[depth:start])))
        depth = max(depth, end)
    return tuple(runs)


def _alike(own: Sequence[bytes], blocks: Sequence[bytes], start: int) -> int:
    """How many blocks `own` and the chain from `start` on have in common: equal blocks have equal ancestors."""
    most = min(len(own), len(blocks) - start)
    if own[most - 1] == blocks[start + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda at: own[at] != blocks[start + at])


def _each(tails: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (tails,) if isinstance(tails, bytes) else tails
