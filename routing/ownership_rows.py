"""The rows of one boot of an engine on one tier: runs by tail, and which runs each block is in. Pure.

Rows of several writers may overlap; a block counts as long as any row has it. Memory: about 100 bytes a block beside
the block itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from routing.ownership import Run, truncated


@dataclass(slots=True)
class Row:
    """One held run; it counts until `expires_s`."""

    run: Run
    expires_s: float


class TierRows:
    """`rows`: tail → row, the least recently used first; `tails`: block → the tail, or tails, of the rows with it."""

    __slots__ = ("rows", "tails")

    def __init__(self) -> None:
        self.rows: dict[bytes, Row] = {}
        self.tails: dict[bytes, bytes | tuple[bytes, ...]] = {}

    def put(self, run: Run, expires_s: float) -> bool:
        """Hold `run` until then; whether any of its blocks is new. Of two runs with one tail the longer stays."""
        before = len(self.tails)
        if (known := self.rows.get(run.tail)) is not None:
            if len(known.run.blocks) >= len(run.blocks):
                self.touch(run.tail, max(known.expires_s, expires_s))
                return False
            expires_s = max(expires_s, known.expires_s)
            kept, known.run = known.run, run
            self.touch(run.tail, expires_s)
            self._index(run.blocks[: len(run.blocks) - len(kept.blocks)], run.tail)
            return len(self.tails) > before
        self.rows[run.tail] = Row(run, expires_s)
        self._index(run.blocks, run.tail)
        return len(self.tails) > before

    def put_new(self, run: Run, expires_s: float) -> bool:
        """Hold `run` if none of its blocks is held; whether it was so. One walk over the blocks: that is what costs."""
        if run.tail in self.rows:
            return False
        owners = list(map(self.tails.setdefault, run.blocks, repeat(run.tail)))
        if owners.count(run.tail) == len(owners):
            self.rows[run.tail] = Row(run, expires_s)
            return True
        for block, owner in zip(run.blocks, owners, strict=True):
            if owner is run.tail:
                del self.tails[block]
        return False

    def remove(self, tail: bytes) -> list[bytes]:
        """End a row; the blocks that no row has any more."""
        row = self.rows.pop(tail)
        gone = []
        for block in row.run.blocks:
            owners = self.tails[block]
            if isinstance(owners, bytes):
                del self.tails[block]
                gone.append(block)
            else:
                left = tuple(owner for owner in owners if owner != tail)
                self.tails[block] = left[0] if len(left) == 1 else left
        return gone

    def cut(self, tail: bytes, lost: Container[bytes]) -> list[bytes]:
        """The row ends before the first of `lost`, or ends whole where it has none; the blocks that are gone."""
        row = self.rows[tail]
        gone = self.remove(tail)
        left = truncated(row.run, lost)
        if left is None or left == row.run:
            return gone
        self.put(left, row.expires_s)
        return [block for block in gone if block not in self.tails]

    def touch(self, tail: bytes, expires_s: float) -> None:
        """The row was used: it lives until then, and is the most recent one."""
        row = self.rows.pop(tail)
        row.expires_s = expires_s
        self.rows[tail] = row

    def with_any(self, blocks: Iterable[bytes]) -> dict[bytes, None]:
        """The tails of the rows that have any of these blocks, in the order of the blocks."""
        found: dict[bytes, None] = {}
        for owners in map(self.tails.get, blocks):
            if isinstance(owners, bytes):
                found[owners] = None
            elif owners is not None:
                found.update(dict.fromkeys(owners))
        return found

    def lives(self, block: bytes, now_s: float) -> bool:
        """Whether a row that still counts has this block."""
        owners = self.tails.get(block)
        if owners is None:
            return False
        if isinstance(owners, bytes):
            return self.rows[owners].expires_s > now_s
        return any(self.rows[owner].expires_s > now_s for owner in owners)

    def _index(self, blocks: Sequence[bytes], tail: bytes) -> None:
        before = list(map(self.tails.setdefault, blocks, repeat(tail)))
        if before.count(tail) == len(before):
            return
        for block, owners in zip(blocks, before, strict=True):
            if owners is not tail:
                self.tails[block] = (*((owners,) if isinstance(owners, bytes) else owners), tail)
