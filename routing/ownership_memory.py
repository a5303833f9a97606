"""Ownership in this process alone: the store of a single gateway, and the reference for the others. No I/O.

Per engine: its latest epoch, its held runs by tail, and which run each block is in. Claims keep whole chains and are
cut into runs when they are confirmed, by what is held at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

from engines.types import EngineId
from routing.ownership import (
    ClaimId,
    OwnerRow,
    OwnershipConfig,
    RowState,
    Run,
    Tier,
    accepts,
    needs_refresh,
    truncated,
    unknown_runs,
)


@dataclass(frozen=True, slots=True)
class _Claim:
    engine_id: EngineId
    epoch: int
    blocks: tuple[bytes, ...]
    expires_s: float


@dataclass(slots=True)
class _Owner:
    """One engine's latest epoch. `rows`: run tail → held row, the oldest first; `tails`: block → tail of its run."""

    epoch: int
    rows: dict[bytes, OwnerRow] = field(default_factory=dict)
    tails: dict[bytes, bytes] = field(default_factory=dict)
    claims: set[ClaimId] = field(default_factory=set)

    def put(self, row: OwnerRow) -> None:
        self.rows[row.run.tail] = row
        self.tails.update(dict.fromkeys(row.run.blocks, row.run.tail))

    def remove(self, tail: bytes) -> OwnerRow:
        row = self.rows.pop(tail)
        for block in row.run.blocks:
            del self.tails[block]
        return row

    def hit_blocks(self, blocks: Sequence[bytes], now_s: float) -> int:
        for depth, block in enumerate(blocks):
            tail = self.tails.get(block)
            if tail is None or self.rows[tail].expires_s <= now_s:
                return depth
        return len(blocks)


class MemoryOwnership:
    """An `OwnershipStore` without a server behind it; bounded by `max_blocks_per_engine`."""

    def __init__(self, config: OwnershipConfig | None = None) -> None:
        self._config = config or OwnershipConfig()
        self._owners: dict[EngineId, _Owner] = {}
        self._claims: dict[ClaimId, _Claim] = {}
        self._ids = count(1)
        self.refused = 0

    async def start(self) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to close."""

    def claim_pending(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> ClaimId:
        claim = ClaimId(next(self._ids))
        if (owner := self._admit(engine_id, epoch)) is not None:
            self._claims[claim] = _Claim(engine_id, epoch, tuple(blocks), now_s + self._config.pending_s)
            owner.claims.add(claim)
        return claim

    def confirm(self, claim: ClaimId, now_s: float, tier: Tier = Tier.DEVICE) -> None:
        claimed = self._forget_claim(claim)
        if claimed is None or claimed.expires_s <= now_s:
            return
        owner = self._owners[claimed.engine_id]
        self._drop_stale(owner, claimed.blocks, now_s)
        self.refresh(claimed.engine_id, claimed.epoch, claimed.blocks, now_s)
        for run in unknown_runs(claimed.blocks, owner.tails.__contains__):
            owner.put(self._row(claimed, run, RowState.HELD, tier, now_s + self._config.held_s))
        while len(owner.tails) > self._config.max_blocks_per_engine:
            owner.remove(next(iter(owner.rows)))

    def drop(self, claim: ClaimId) -> None:
        self._forget_claim(claim)

    def evict(self, engine_id: EngineId, epoch: int, blocks: Iterable[bytes]) -> None:
        owner = self._admit(engine_id, epoch)
        if owner is None:
            return
        lost = frozenset(blocks)
        for tail in {owner.tails[block] for block in lost if block in owner.tails}:
            row = owner.remove(tail)
            if (left := truncated(row.run, lost)) is not None:
                owner.put(replace(row, run=left))

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        if self._admit(engine_id, epoch) is not None:
            self._clear(engine_id, epoch)

    def refresh(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> None:
        owner = self._admit(engine_id, epoch)
        if owner is None:
            return
        for tail in {owner.tails[block] for block in takewhile(owner.tails.__contains__, blocks)}:
            row = owner.rows[tail]
            if row.expires_s > now_s and needs_refresh(row.expires_s, now_s, self._config.held_s):
                del owner.rows[tail]
                owner.rows[tail] = replace(row, expires_s=now_s + self._config.held_s)

    def owners(self, blocks: Sequence[bytes], now_s: float) -> Mapping[EngineId, int]:
        hits: dict[EngineId, int] = {}
        for engine_id, owner in self._owners.items():
            if hit_blocks := owner.hit_blocks(blocks, now_s):
                hits[engine_id] = hit_blocks
        return hits

    def snapshot(self, now_s: float) -> Iterator[OwnerRow]:
        for owner in tuple(self._owners.values()):
            yield from (row for row in tuple(owner.rows.values()) if row.expires_s > now_s)
        for claimed in tuple(self._claims.values()):
            if claimed.expires_s > now_s:
                held = self._owners[claimed.engine_id].tails
                for run in unknown_runs(claimed.blocks, held.__contains__):
                    yield self._row(claimed, run, RowState.PENDING, Tier.DEVICE, claimed.expires_s)

    def expire(self, now_s: float) -> int:
        claims = [claim for claim, claimed in self._claims.items() if claimed.expires_s <= now_s]
        for claim in claims:
            self._forget_claim(claim)
        rows = [
            (owner, tail)
            for owner in self._owners.values()
            for tail, row in owner.rows.items()
            if row.expires_s <= now_s
        ]
        for owner, tail in rows:
            owner.remove(tail)
        return len(claims) + len(rows)

    def _admit(self, engine_id: EngineId, epoch: int) -> _Owner | None:
        """The engine's rows for a write of `epoch`, emptied when it is a new one; None when it is an old one."""
        owner = self._owners.get(engine_id)
        if owner is not None and not accepts(owner.epoch, epoch):
            self.refused += 1
            return None
        if owner is None or epoch > owner.epoch:
            return self._clear(engine_id, epoch)
        return owner

    def _clear(self, engine_id: EngineId, epoch: int) -> _Owner:
        if (owner := self._owners.get(engine_id)) is not None:
            for claim in owner.claims:
                del self._claims[claim]
        self._owners[engine_id] = fresh = _Owner(epoch)
        return fresh

    def _forget_claim(self, claim: ClaimId) -> _Claim | None:
        claimed = self._claims.pop(claim, None)
        if claimed is not None:
            self._owners[claimed.engine_id].claims.discard(claim)
        return claimed

    def _drop_stale(self, owner: _Owner, blocks: Sequence[bytes], now_s: float) -> None:
        """Forget runs of this chain whose time is over, so that they count as new again."""
        for tail in {owner.tails[block] for block in blocks if block in owner.tails}:
            if owner.rows[tail].expires_s <= now_s:
                owner.remove(tail)

    def _row(self, claimed: _Claim, run: Run, state: RowState, tier: Tier, expires_s: float) -> OwnerRow:
        return OwnerRow(claimed.engine_id, claimed.epoch, run, state, tier, expires_s)
