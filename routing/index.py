"""The mirror: which engine holds how much of a prompt, for all engines in one walk. Pure, and bounded.

Every engine has three bits, one for each tier, and `routing/segments.py` says which of them have which blocks. Per
engine and tier that is a shadow LRU of its capacity, since an index that never forgets predicts hits that are long
gone. Pending blocks, promised by a dispatch, are counted apart and never forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from engines.types import EngineId
from routing.ownership import Tier
from routing.segments import Holder, Segment, Segments, bits

DEFAULT_CAPACITY_BLOCKS = 16_384
"""A million tokens in blocks of 64: what an engine is thought to cache until `set_capacity` is told."""
MAX_HELD_BLOCKS = 1 << 20
"""No engine is thought to have more on one tier, whatever is said: some 67 M tokens."""
PENDING_BYTES = 130
"""Memory of one block promised by one engine (CPython 3.11, measured)."""
SWEEP_BLOCKS = 512
"""How many blocks that nobody holds any more every change removes, beside as many as it added."""
_TIERS = len(Tier)


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
    """One engine: a holder for each tier, their bits side by side, and the number of promises for each block."""

    __slots__ = ("bit", "engine_id", "holders", "pending")

    def __init__(self, engine_id: EngineId, bit: int, capacity_blocks: int) -> None:
        self.engine_id = engine_id
        self.bit = bit
        self.holders = {tier: Holder(bit << place, capacity_blocks) for place, tier in enumerate(Tier)}
        self.pending: dict[bytes, int] = {}


class PrefixIndex:
    """Block hashes to owners; `version` grows with every change.

    What left with an engine, or was forgotten at once, is removed bit by bit by later changes, so that none takes long.
    """

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS, *, sweep_blocks: int = SWEEP_BLOCKS) -> None:
        self._capacity_blocks = capacity_blocks
        self._sweep_blocks = sweep_blocks
        self._engines: dict[EngineId, _Engine] = {}
        self._by_bit: dict[int, _Engine] = {}
        self._present = 0  # all those bits
        self._segments = Segments()
        self.version = 0

    # ---- questions -----------------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[bytes]) -> Match:
        """The longest run of `blocks` from the first on, for every engine that has any."""
        chain = tuple(blocks)
        hits = self._held(chain)
        for engine_id, engine in self._engines.items():
            if engine.pending:
                hit = hits.get(engine_id, NO_HIT)
                if hit.held_blocks < len(chain) and chain[hit.held_blocks] in engine.pending:
                    hits[engine_id] = hit._replace(pending_blocks=self._ahead(engine, chain, hit.held_blocks))
        return hits

    def held_blocks(self, engine_id: EngineId, tier: Tier = Tier.DEVICE) -> int:
        """How many blocks the engine is thought to have on `tier`."""
        engine = self._engines.get(engine_id)
        return engine.holders[tier].held_blocks if engine is not None else 0

    def pending_blocks(self) -> int:
        """How many blocks are promised by dispatches that have not ended, over all engines."""
        return sum(len(engine.pending) for engine in self._engines.values())

    def memory_bytes(self) -> int:
        """An estimate of what the index occupies; bounded by the capacities of its engines and what is in flight."""
        return self._segments.memory_bytes() + self.pending_blocks() * PENDING_BYTES

    # ---- changes -------------------------------------------------------------------------------------------------

    def set_capacity(self, engine_id: EngineId, blocks: int | None, tier: Tier = Tier.DEVICE) -> None:
        """How many blocks the engine can cache on `tier`; the least recently used beyond that are forgotten now.

        None: the engine says itself what it evicts, and only MAX_HELD_BLOCKS bounds it.
        """
        holder = self._engine(engine_id).holders[tier]
        holder.capacity_blocks = MAX_HELD_BLOCKS if blocks is None else min(max(0, blocks), MAX_HELD_BLOCKS)
        self._segments.shrink(holder)
        self._changed()

    def add_held(self, engine_id: EngineId, blocks: Sequence[bytes], tier: Tier = Tier.DEVICE) -> None:
        """The engine has, and has just used, these consecutive blocks; beyond its capacity it forgets the oldest.

        They need not begin at the root, nor need their ancestors be known: they count as soon as those are held.
        """
        self._segments.use(self._engine(engine_id).holders[tier], tuple(blocks))
        self._changed(added_blocks=len(blocks))

    def add_pending(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        """A request with this chain was dispatched to the engine; ends in one `drop` of the same chain."""
        pending = self._engine(engine_id).pending
        for block in blocks:
            pending[block] = pending.get(block, 0) + 1
        self._changed()

    def drop(self, engine_id: EngineId, blocks: Iterable[bytes]) -> None:
        """One dispatch of this chain has ended: its promise is taken back. Unknown promises do nothing."""
        if (engine := self._engines.get(engine_id)) is None:
            return
        pending = engine.pending
        for block in blocks:
            if (promises := pending.get(block, 0)) > 1:
                pending[block] = promises - 1
            elif promises:
                del pending[block]
        self._changed()

    def evict(self, engine_id: EngineId, blocks: Iterable[bytes], tier: Tier = Tier.DEVICE) -> int:
        """The engine has lost these blocks, in any order, on `tier`; returns how many the index had."""
        if (engine := self._engines.get(engine_id)) is None:
            return 0
        holder = engine.holders[tier]
        before = holder.held_blocks
        self._segments.lose(holder, blocks)
        self._changed()
        return before - holder.held_blocks

    def correct(self, engine_id: EngineId, blocks: Sequence[bytes], reported_blocks: int) -> dict[Tier, list[bytes]]:
        """The engine really hit only `reported_blocks` of this chain: forget the rest, and all that is older.

        Engines evict what was used least recently first, so what was used before a block that is gone is gone as
        well. Returns what was forgotten, the oldest first, by tier, without the tiers that lost nothing. To be called
        before what the same request left there is added.
        """
        if (engine := self._engines.get(engine_id)) is None:
            return {}
        lost = tuple(blocks[max(0, reported_blocks) :])
        forgotten = {tier: self._segments.forget_up_to(holder, lost) for tier, holder in engine.holders.items()}
        self._changed()
        return {tier: gone for tier, gone in forgotten.items() if gone}

    def drop_engine(self, engine_id: EngineId) -> None:
        """Forget the engine with all it had, its capacities too: it has left, or restarted empty."""
        if (engine := self._engines.pop(engine_id, None)) is None:
            return
        self._present ^= engine.bit
        del self._by_bit[engine.bit]
        for holder in engine.holders.values():
            self._segments.leave(holder)
        self._changed()

    # ---- the walk ------------------------------------------------------------------------------------------------

    def _held(self, chain: tuple[bytes, ...]) -> dict[EngineId, Hit]:
        """What every engine holds of `chain`, each block counted where it lies fastest."""
        hits: dict[EngineId, Hit] = {}
        slow: dict[int, tuple[int, int]] = {}
        alive, depth = self._present, 0
        for segment, start, length in self._segments.walk(chain):
            owners = segment.owners
            having = (owners | owners >> 1 | owners >> 2) & alive  # on any of the three tiers
            if depth:
                self._note(hits, alive & ~having, depth, slow)
            for bit in bits(having & ~(owners & ~segment.partial)):
                reach = self._reach(bit, segment, start, length, slow)
                if reach < length:
                    having ^= bit
                    self._note(hits, bit if depth + reach else 0, depth + reach, slow)
            alive = having
            depth += length
            if not alive:
                return hits
        self._note(hits, alive if depth else 0, depth, slow)
        return hits

    def _reach(self, bit: int, segment: Segment, start: int, length: int, slow: dict[int, tuple[int, int]]) -> int:
        """How many of these blocks an engine has on any tier; adds to `slow` those that lie on host and store only."""
        holders = self._by_bit[bit].holders
        device = holders[Tier.DEVICE].blocks_of(segment, start, length)
        if not segment.owners & (bit << 1 | bit << 2):
            return device
        host = holders[Tier.HOST].blocks_of(segment, start, length)
        store = holders[Tier.STORE].blocks_of(segment, start, length)
        faster = max(device, host)
        if faster > device or store > faster:
            on_host, on_store = slow.get(bit, (0, 0))
            slow[bit] = (on_host + faster - device, on_store + max(0, store - faster))
        return max(faster, store)

    def _note(self, hits: dict[EngineId, Hit], engines: int, depth: int, slow: dict[int, tuple[int, int]]) -> None:
        """The run of each of these engines ends at `depth`."""
        if not engines:
            return
        hit = Hit(depth, depth)
        for bit in bits(engines):
            hits[self._by_bit[bit].engine_id] = Hit(depth, depth, *slow[bit]) if bit in slow else hit

    def _ahead(self, engine: _Engine, chain: tuple[bytes, ...], depth: int) -> int:
        """How far an engine that holds `chain` up to `depth` will hold it, when its promises are kept."""
        while depth < len(chain):
            if chain[depth] in engine.pending:
                depth += 1
                continue
            segment, start, length = next(self._segments.walk(chain, depth), (None, 0, 0))
            held = (holder.blocks_of(segment, start, length) for holder in engine.holders.values()) if segment else ()
            if not (reach := max(held, default=0)):
                break
            depth += reach
        return depth

    def _changed(self, added_blocks: int = 0) -> None:
        self.version += 1
        self._segments.sweep(self._sweep_blocks + added_blocks)

    def _engine(self, engine_id: EngineId) -> _Engine:
        """The engine's state, with the lowest free bits when it is new."""
        if (engine := self._engines.get(engine_id)) is None:
            engine = self._engines[engine_id] = _Engine(engine_id, self._free_bit(), self._capacity_blocks)
            self._by_bit[engine.bit] = engine
            self._present |= engine.bit
            for holder in engine.holders.values():
                self._segments.join(holder)
        return engine

    def _free_bit(self) -> int:
        """The lowest of three bits that nobody has, nor has left without having been forgotten."""
        taken = self._segments.holders
        slots = (1 << _TIERS * slot for slot in count())
        return next(bit for bit in slots if not any(bit << place in taken for place in range(_TIERS)))
