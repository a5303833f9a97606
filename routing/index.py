"""The mirror: which engine holds how much of a prompt, for all engines in one walk. Pure, and bounded.

Per tier and block one bitset of owners (a Python int, one bit an engine); per engine and tier a shadow LRU of its
capacity, since an index that never forgets predicts hits that are long gone. Pending blocks, promised by a dispatch,
are counted apart and never evicted. Callers hand in whole chains from the root: they are touched tail first, so an
ancestor is always more recent than its descendants, and what is evicted is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, repeat
from operator import or_
from typing import NamedTuple

from engines.types import EngineId
from routing.ownership import Tier

DEFAULT_CAPACITY_BLOCKS = 16_384
"""A million tokens in blocks of 64: what an engine is thought to cache until `set_capacity` is told."""

HELD_BYTES = 145
"""Memory of one block held by one engine: its hash, and its entry in the shadow LRU (CPython 3.11, measured)."""
BLOCK_BYTES = 80
"""Memory of one distinct block: its entry among the owners, with a bitset of up to 30 engines."""


class Hit(NamedTuple):
    """The unbroken run of a prompt's blocks, from the first on, that one engine has.

    `held_blocks` are there on any tier; `host_blocks` and `store_blocks` say how many of them must be loaded from
    there. `pending_blocks` ≥ `held_blocks` also counts what requests dispatched before will have left there.
    """

    held_blocks: int = 0
    pending_blocks: int = 0
    host_blocks: int = 0
    store_blocks: int = 0


NO_HIT = Hit()
Match = Mapping[EngineId, Hit]
"""Every engine that has the first block at least; for the others there is `NO_HIT`."""


class _Engine:
    """What one engine is thought to have. `lru[tier]` ends with the block used last; `pending` counts promises."""

    __slots__ = ("bit", "capacity_blocks", "lru", "pending")

    def __init__(self, bit: int, capacity_blocks: int) -> None:
        self.bit = bit
        self.capacity_blocks = dict.fromkeys(Tier, capacity_blocks)
        self.lru: dict[Tier, OrderedDict[bytes, None]] = {tier: OrderedDict() for tier in Tier}
        self.pending: dict[bytes, int] = {}


class PrefixIndex:
    """Block hashes to owners; `version` grows with every change."""

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self._capacity_blocks = capacity_blocks
        self._engines: dict[EngineId, _Engine] = {}
        self._ids: dict[int, EngineId] = {}
        self._held: dict[Tier, dict[bytes, int]] = {tier: {} for tier in Tier}
        self._pending: dict[bytes, int] = {}
        self.version = 0

    def match(self, blocks: Sequence[bytes]) -> Match:
        """The longest run of `blocks` from the first on, for every engine that has any."""
        tables = [table for table in self._held.values() if table]
        held = self._runs(blocks, tables)
        ahead = self._runs(blocks, [*tables, self._pending]) if self._pending else held
        if not self._held[Tier.HOST] and not self._held[Tier.STORE]:
            return {engine_id: Hit(held.get(engine_id, 0), run) for engine_id, run in ahead.items()}
        return {
            engine_id: self._tiered(self._engines[engine_id].bit, blocks, held.get(engine_id, 0), run)
            for engine_id, run in ahead.items()
        }

    def set_capacity(self, engine_id: EngineId, blocks: int, tier: Tier = Tier.DEVICE) -> None:
        """How many blocks the engine can cache on `tier`; the least recently used beyond that are forgotten now."""
        engine = self._engine(engine_id)
        engine.capacity_blocks[tier] = max(0, blocks)
        self._shrink(engine, tier)
        self.version += 1

    def add_held(self, engine_id: EngineId, blocks: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        """The engine has, and has just used, this whole chain; beyond its capacity it forgets the oldest leaves."""
        engine = self._engine(engine_id)
        lru, owners, bit = engine.lru[tier], self._held[tier], engine.bit
        for block in reversed(blocks[: engine.capacity_blocks[tier]]):
            if block in lru:
                lru.move_to_end(block)
            else:
                lru[block] = None
                owners[block] = owners.get(block, 0) | bit
        self._shrink(engine, tier)
        self.version += 1

    def add_pending(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        """A request with this chain was dispatched to the engine; ends in one `drop` or `confirm` of the same chain."""
        engine = self._engine(engine_id)
        for block in blocks:
            promises = engine.pending.get(block, 0)
            engine.pending[block] = promises + 1
            if not promises:
                self._pending[block] = self._pending.get(block, 0) | engine.bit
        self.version += 1

    def drop(self, engine_id: EngineId, blocks: Iterable[bytes]) -> None:
        """One dispatch of this chain has ended: its promise is taken back. Unknown promises do nothing."""
        if (engine := self._engines.get(engine_id)) is None:
            return
        for block in blocks:
            promises = engine.pending.get(block, 0)
            if promises > 1:
                engine.pending[block] = promises - 1
            elif promises:
                del engine.pending[block]
                _clear(self._pending, block, engine.bit)
        self.version += 1

    def confirm(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        """The dispatch of this chain succeeded: what was promised is held."""
        self.drop(engine_id, blocks)
        self.add_held(engine_id, blocks)

    def evict(self, engine_id: EngineId, blocks: Iterable[bytes], tier: Tier = Tier.DEVICE) -> int:
        """The engine has lost these blocks on `tier`; returns how many the index had."""
        if (engine := self._engines.get(engine_id)) is None:
            return 0
        lru, owners = engine.lru[tier], self._held[tier]
        lost = [block for block in blocks if block in lru]
        for block in lost:
            del lru[block]
            _clear(owners, block, engine.bit)
        self.version += 1
        return len(lost)

    def correct(self, engine_id: EngineId, blocks: Sequence[bytes], reported_blocks: int) -> int:
        """The engine really hit only `reported_blocks` of this chain: forget the rest, and all that is older.

        Engines evict what was used least recently first, so what was used before a block that is gone is gone as
        well. Returns how many were forgotten. To be called before the `confirm` of the same request.
        """
        if (engine := self._engines.get(engine_id)) is None:
            return 0
        return sum(self._forget_up_to(engine, blocks[max(0, reported_blocks) :], tier) for tier in Tier)

    def _forget_up_to(self, engine: _Engine, lost: Sequence[bytes], tier: Tier) -> int:
        lru, owners = engine.lru[tier], self._held[tier]
        left = {block for block in lost if block in lru}
        before = len(lru)
        while left:
            block, _ = lru.popitem(last=False)
            _clear(owners, block, engine.bit)
            left.discard(block)
        self.version += 1
        return before - len(lru)

    def drop_engine(self, engine_id: EngineId) -> None:
        """Forget the engine with all it had, its capacities too: it has left, or restarted empty."""
        if (engine := self._engines.pop(engine_id, None)) is None:
            return
        for tier, lru in engine.lru.items():
            for block in lru:
                _clear(self._held[tier], block, engine.bit)
        for block in engine.pending:
            _clear(self._pending, block, engine.bit)
        del self._ids[engine.bit]
        self.version += 1

    def held_blocks(self, engine_id: EngineId, tier: Tier = Tier.DEVICE) -> int:
        """How many blocks the engine is thought to have on `tier`."""
        engine = self._engines.get(engine_id)
        return len(engine.lru[tier]) if engine is not None else 0

    def memory_bytes(self) -> int:
        """An estimate of what the index occupies; bounded by the capacities of its engines and what is in flight."""
        distinct = len(self._pending) + sum(map(len, self._held.values()))
        entries = sum(len(engine.pending) + sum(map(len, engine.lru.values())) for engine in self._engines.values())
        return distinct * (BLOCK_BYTES + len(self._engines) // 8) + entries * HELD_BYTES

    def _engine(self, engine_id: EngineId) -> _Engine:
        """The engine's state, with the lowest free bit when it is new."""
        if (engine := self._engines.get(engine_id)) is None:
            bit = next(1 << slot for slot in count() if 1 << slot not in self._ids)
            self._ids[bit] = engine_id
            engine = self._engines[engine_id] = _Engine(bit, self._capacity_blocks)
        return engine

    def _shrink(self, engine: _Engine, tier: Tier) -> None:
        lru, owners = engine.lru[tier], self._held[tier]
        while len(lru) > engine.capacity_blocks[tier]:
            block, _ = lru.popitem(last=False)
            _clear(owners, block, engine.bit)

    def _runs(self, blocks: Sequence[bytes], tables: Sequence[Mapping[bytes, int]]) -> dict[EngineId, int]:
        """For each engine, how many of `blocks` from the first on are in any of `tables`; zeros left out."""
        runs: dict[EngineId, int] = {}
        depth = alive = 0
        for depth, owners in enumerate(_owner_sets(blocks, tables)):
            if not depth:
                alive = owners
            elif lost := alive & ~owners:
                runs.update((self._ids[bit], depth) for bit in _bits(lost))
                alive &= owners
            if not alive:
                return runs
        runs.update((self._ids[bit], depth + 1) for bit in _bits(alive))
        return runs

    def _tiered(self, bit: int, blocks: Sequence[bytes], held: int, ahead: int) -> Hit:
        """The hit of one engine, each held block counted where it lies fastest."""
        device, host = self._held[Tier.DEVICE], self._held[Tier.HOST]
        slow = [block for block in blocks[:held] if not device.get(block, 0) & bit]
        on_host = sum(1 for block in slow if host.get(block, 0) & bit)
        return Hit(held, ahead, on_host, len(slow) - on_host)


def _owner_sets(blocks: Sequence[bytes], tables: Sequence[Mapping[bytes, int]]) -> Iterator[int]:
    """The owners of each block over all `tables`, one by one, at the speed of `map`."""
    if not tables:
        return repeat(0, len(blocks))
    merged: Iterator[int] = map(tables[0].get, blocks, repeat(0))
    for table in tables[1:]:
        merged = map(or_, merged, map(table.get, blocks, repeat(0)))
    return merged


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _clear(owners: dict[bytes, int], block: bytes, bit: int) -> None:
    left = owners[block] & ~bit
    if left:
        owners[block] = left
    else:
        del owners[block]
