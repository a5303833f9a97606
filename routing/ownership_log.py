"""What changes in ownership as short operations: how they are packed for Redis and its log, and packed runs. Pure.

One operation is `kind, place, ttl_ms, data`; a batch is their concatenation, and the same bytes go to the script that
writes them and into the log that others follow. Blocks are 16 bytes each. Times are durations: clocks are not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import Struct, error
from typing import NamedTuple

from engines.types import EngineId
from routing.ownership import ROOT, Run, Tier

BLOCK_BYTES = 16
_NO_PARENT = bytes(BLOCK_BYTES)
_HEADER = Struct(">ccII")
_PROMOTED = Struct(f">{BLOCK_BYTES}sI")
HEADER_BYTES = _HEADER.size
NONE: frozenset[int] = frozenset()

CLAIM = b"c"
"""Data: packed run. It was dispatched, and is pending until PROMOTE, DROP or its time."""
HOLD = b"h"
"""Data: packed run. It is held; of two rows with one tail the longer stays."""
PROMOTE = b"p"
"""Data: tail of a pending run, and of how many blocks it is (4 bytes): it is held on `place` now. The blocks themselves
are not sent again; a pending run of another length is another's."""
DROP = b"d"
"""Data: tail of a pending run, which is gone."""
TOUCH = b"t"
"""Data: tails of held runs, which live for `ttl_ms` from now."""
CUT = b"x"
"""Data: tail of a held run, and the block it now ends before; where it lacks that block, all of it goes."""
CLEAR = b"0"
"""Nothing of this boot is held or pending any more."""

PENDING_PLACE = b"p"
"""Of pending runs, which have no tier yet."""
TIER_PLACE = {Tier.DEVICE: b"d", Tier.HOST: b"h", Tier.STORE: b"s"}
PLACE_TIER = {place: tier for tier, place in TIER_PLACE.items()}


def _fits_run(length: int) -> bool:
    return length >= 2 * BLOCK_BYTES and not length % BLOCK_BYTES


_PENDING_ONLY = frozenset((PENDING_PLACE,))
_TIERS = frozenset(PLACE_TIER)
_Shape = tuple[frozenset[bytes], Callable[[int], bool]]
_NO_SHAPE: _Shape = (frozenset(), bool)
_SHAPES: dict[bytes, _Shape] = {
    CLAIM: (_PENDING_ONLY, _fits_run),
    HOLD: (_TIERS, _fits_run),
    PROMOTE: (_TIERS, _PROMOTED.size.__eq__),
    DROP: (_PENDING_ONLY, BLOCK_BYTES.__eq__),
    TOUCH: (_TIERS, lambda length: not length % BLOCK_BYTES),
    CUT: (_TIERS, (2 * BLOCK_BYTES).__eq__),
    CLEAR: (_PENDING_ONLY, (0).__eq__),
}
"""On which places each kind of operation can be, and whether its data can be so long."""


class Op(NamedTuple):
    """One operation on one boot of an engine. `place`: a tier's, or that of pending runs."""

    kind: bytes
    place: bytes
    ttl_ms: int
    data: bytes

    @property
    def tail(self) -> bytes:
        """The run it is about, where it is about one."""
        return self.data[:BLOCK_BYTES] if self.kind in (CUT, PROMOTE) else self.data[-BLOCK_BYTES:]

    @property
    def promoted_blocks(self) -> int:
        """Of how many blocks the run is that a PROMOTE is about."""
        return int.from_bytes(self.data[BLOCK_BYTES:])

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + len(self.data)


class BadOps(ValueError):
    """These bytes are no packed operations: written by something else, or by another version."""


class LogEntry(NamedTuple):
    """One entry of a shard's log: its place in it, whose batch it is, and what that does.

    `before`: id of the entry before it, or empty. `batch`: the number that the writer gave it. `number`: of the boot.
    `void`: the indexes of the operations that found nothing to do.
    """

    seq: int
    db_epoch: bytes
    before: bytes
    writer: bytes
    batch: int
    number: int
    engine_id: EngineId
    void: frozenset[int]
    ops: bytes


def batch_name(writer: bytes, batch: int, number: int, engine_id: EngineId) -> bytes:
    """What the script is told of a batch beside its operations, and puts into the entry."""
    return b"%s %d %d %s" % (writer, batch, number, engine_id.encode())


def unpack_entry(fields: Mapping[bytes, bytes]) -> LogEntry:
    """Raises BadOps where it is no entry of a log."""
    try:
        seq, db_epoch, before, writer, batch, number, engine = fields[b"h"].split(b" ", 6)
        void = frozenset(map(int, fields[b"x"].split())) if b"x" in fields else NONE
        before = b"" if before == b"-" else before
        engine_id = EngineId(engine.decode())
        return LogEntry(int(seq), db_epoch, before, writer, int(batch), int(number), engine_id, void, fields[b"o"])
    except (KeyError, ValueError) as problem:
        raise BadOps(f"no entry of a log: {problem}") from None


def order_of(entry_id: bytes) -> tuple[int, ...]:
    """By which ids of entries compare; raises ValueError where it is none."""
    return tuple(map(int, entry_id.split(b"-")))


def pack_ops(ops: Iterable[Op]) -> bytes:
    parts: list[bytes] = []
    for kind, place, ttl_ms, data in ops:
        parts += (_HEADER.pack(kind, place, ttl_ms, len(data)), data)
    return b"".join(parts)


def rows_made(ops: Iterable[Op]) -> set[tuple[bytes, bytes]]:
    """The rows that these operations make, by place and tail."""
    return {(op.place, op.tail) for op in ops if op.kind in (HOLD, PROMOTE, CLAIM)}


def unpack_ops(packed: bytes) -> Iterator[Op]:
    """The operations of a batch, in order; raises BadOps at the first that is none."""
    at = 0
    while at < len(packed):
        try:
            kind, place, ttl_ms, length = _HEADER.unpack_from(packed, at)
        except error as problem:
            raise BadOps(str(problem)) from None
        at += _HEADER.size + length
        if at > len(packed):
            raise BadOps("the data of an operation ends early")
        places, fits = _SHAPES.get(kind, _NO_SHAPE)
        if place not in places or not fits(length):
            raise BadOps(f"no operation is {kind!r} on {place!r} with {length} bytes")
        yield Op(kind, place, ttl_ms, packed[at - length : at])


def pack_run(run: Run) -> bytes:
    """The parent (zeros for the root), then the blocks."""
    return (run.parent or _NO_PARENT) + b"".join(run.blocks)


def is_run(packed: bytes) -> bool:
    """Whether these bytes can be a parent and at least one block."""
    return _fits_run(len(packed))


def unpack_run(packed: bytes) -> Run:
    """Raises BadOps where it is no packed run."""
    if not is_run(packed):
        raise BadOps(f"a run of {len(packed)} bytes")
    parent, *blocks = split_blocks(packed)
    return Run(ROOT if parent == _NO_PARENT else parent, tuple(blocks))


def split_blocks(packed: bytes) -> list[bytes]:
    """What was joined, one by one."""
    return [packed[at : at + BLOCK_BYTES] for at in range(0, len(packed), BLOCK_BYTES)]


def duration_ms(until_s: float, now_s: float) -> int:
    """A time to live as it is sent: never zero, which would end a row at once, and never more than 32 bits."""
    return max(1, min(round((until_s - now_s) * 1000), 0xFFFF_FFFF))


def claim(run: Run, ttl_ms: int) -> Op:
    return Op(CLAIM, PENDING_PLACE, ttl_ms, pack_run(run))


def hold(tier: Tier, run: Run, ttl_ms: int) -> Op:
    return Op(HOLD, TIER_PLACE[tier], ttl_ms, pack_run(run))


def promote(tier: Tier, tail: bytes, blocks: int, ttl_ms: int) -> Op:
    """`blocks`: of the run that is meant."""
    return Op(PROMOTE, TIER_PLACE[tier], ttl_ms, _PROMOTED.pack(tail, blocks))


def drop(tail: bytes) -> Op:
    return Op(DROP, PENDING_PLACE, 0, tail)


def touch(tier: Tier, tails: Sequence[bytes], ttl_ms: int) -> Op:
    return Op(TOUCH, TIER_PLACE[tier], ttl_ms, b"".join(tails))


def cut(tier: Tier, tail: bytes, first_lost: bytes) -> Op:
    return Op(CUT, TIER_PLACE[tier], 0, tail + first_lost)


def clear() -> Op:
    return Op(CLEAR, PENDING_PLACE, 0, b"")
