"""Ownership in this process alone: the store of a single gateway, and the reference for the others. No I/O.

Per engine: its latest epoch, and per tier its held rows. Claims keep whole chains and are cut into runs when they are
confirmed, by what is held at that time. Every change can be told as an operation, so that a shared store can send it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import (
    ROOT,
    ClaimId,
    OwnerRow,
    OwnershipConfig,
    OwnershipListener,
    RowState,
    Run,
    StoreStatus,
    Tier,
    accepts,
    needs_refresh,
    unknown_runs,
)
from routing.ownership_rows import Row, TierRows

NOT_BEGUN = -1
"""The epoch of rows that others wrote, while this process has not seen the engine itself."""

Changed = Callable[[EngineId, int, log.Op], None]
"""Told what this process changed: engine, epoch, operation. Quick; raises nothing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One dispatched chain, and the tails of its runs that others were told of."""

    engine_id: EngineId
    epoch: int
    blocks: tuple[bytes, ...]
    expires_s: float
    told: tuple[bytes, ...]


@dataclass(slots=True)
class ToldRun:
    """A pending run that others were told of, and how many of our claims wait for it."""

    run: Run
    claims: int
    expires_s: float


@dataclass(slots=True)
class Owner:
    """One engine's latest boot. `begun`: this process has seen that boot itself, and calls it `epoch`.

    `told`: tail → our pending run; `promises`: tail → pending run of another process.
    """

    epoch: int
    begun: bool = True
    tiers: dict[Tier, TierRows] = field(default_factory=lambda: {tier: TierRows() for tier in Tier})
    claims: set[ClaimId] = field(default_factory=set)
    told: dict[bytes, ToldRun] = field(default_factory=dict)
    promises: dict[bytes, Row] = field(default_factory=dict)

    def lives(self, block: bytes, now_s: float) -> bool:
        """Whether the block is held on any tier."""
        return any(rows.lives(block, now_s) for rows in self.tiers.values() if rows.tails)

    def hit_blocks(self, blocks: Sequence[bytes], now_s: float) -> int:
        for depth, block in enumerate(blocks):
            if not self.lives(block, now_s):
                return depth
        return len(blocks)


class MemoryOwnership:
    """An `OwnershipStore` without a server behind it; bounded by `max_blocks_per_engine` on each tier."""

    def __init__(self, config: OwnershipConfig | None = None, changed: Changed | None = None) -> None:
        self._config = config or OwnershipConfig()
        self._changed = changed
        self._owners: dict[EngineId, Owner] = {}
        self._claims: dict[ClaimId, Claim] = {}
        self._ids = count(1)
        self.refused = 0

    async def start(self) -> None:
        """Nothing to open."""

    async def stop(self) -> None:
        """Nothing to close."""

    def listen(self, listener: OwnershipListener) -> None:
        """There are no others."""

    def begin(self, engine_id: EngineId, epoch: int, fingerprint: str) -> None:
        self._admit(engine_id, epoch)

    def claim_pending(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> ClaimId:
        claim = ClaimId(next(self._ids))
        if (owner := self._admit(engine_id, epoch)) is not None:
            expires_s = now_s + self._config.pending_s
            chain = tuple(blocks)
            new = _likely_new(owner.tiers[Tier.DEVICE].tails, chain)
            told = (self._tell(engine_id, owner, new, now_s),) if new is not None else ()
            self._claims[claim] = Claim(engine_id, epoch, chain, expires_s, told)
            owner.claims.add(claim)
        return claim

    def confirm(self, claim: ClaimId, now_s: float, tier: Tier = Tier.DEVICE) -> None:
        claimed = self._forget_claim(claim)
        if claimed is None:
            return
        if claimed.expires_s > now_s:
            self._hold_chain(claimed.engine_id, self._owners[claimed.engine_id], claimed.blocks, now_s, tier)
        self._untell(claimed)

    def drop(self, claim: ClaimId) -> None:
        if (claimed := self._forget_claim(claim)) is not None:
            self._untell(claimed)

    def hold(
        self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float, tier: Tier = Tier.DEVICE
    ) -> None:
        if (owner := self._admit(engine_id, epoch)) is not None:
            self._hold_chain(engine_id, owner, blocks, now_s, tier)

    def evict(self, engine_id: EngineId, epoch: int, blocks: Iterable[bytes], tier: Tier | None = None) -> None:
        if (owner := self._admit(engine_id, epoch)) is not None:
            lost = frozenset(blocks)
            for place in Tier if tier is None else (tier,):
                self._cut(engine_id, owner, place, lost)

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        if self._admit(engine_id, epoch) is not None:
            self._clear(engine_id, epoch)
            self._note(engine_id, epoch, log.clear())

    def refresh(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> None:
        if (owner := self._admit(engine_id, epoch)) is not None:
            self._refresh(engine_id, owner, blocks, now_s)

    def owners(self, blocks: Sequence[bytes], now_s: float) -> Mapping[EngineId, int]:
        hits: dict[EngineId, int] = {}
        for engine_id, owner in self._owners.items():
            if hit_blocks := owner.hit_blocks(blocks, now_s):
                hits[engine_id] = hit_blocks
        return hits

    def snapshot(self, now_s: float) -> Iterator[OwnerRow]:
        for engine_id, owner in tuple(self._owners.items()):
            for tier, rows in owner.tiers.items():
                for row in tuple(rows.rows.values()):
                    if row.expires_s > now_s:
                        yield OwnerRow(engine_id, owner.epoch, row.run, RowState.HELD, tier, row.expires_s)
            pending = [(row.run, row.expires_s) for row in owner.promises.values()]
            for claimed in [self._claims[claim] for claim in sorted(owner.claims)]:
                held = owner.tiers[Tier.DEVICE].tails
                pending += ((run, claimed.expires_s) for run in unknown_runs(claimed.blocks, held.__contains__))
            for run, expires_s in pending:
                if expires_s > now_s:
                    yield OwnerRow(engine_id, owner.epoch, run, RowState.PENDING, Tier.DEVICE, expires_s)

    def expire(self, now_s: float) -> int:
        claims = [claim for claim, claimed in self._claims.items() if claimed.expires_s <= now_s]
        for claim in claims:
            if (claimed := self._forget_claim(claim)) is not None:
                self._untell(claimed)
        ended = len(claims)
        for owner in self._owners.values():
            for rows in owner.tiers.values():
                late = [tail for tail, row in rows.rows.items() if row.expires_s <= now_s]
                for tail in late:
                    rows.remove(tail)
                ended += len(late)
        return ended

    def status(self) -> StoreStatus:
        return StoreStatus("memory", blocks=self._blocks(), refused=self.refused)

    def _blocks(self) -> int:
        return sum(len(rows.tails) for owner in self._owners.values() for rows in owner.tiers.values())

    def _admit(self, engine_id: EngineId, epoch: int) -> Owner | None:
        """The engine's rows for a write of `epoch`, emptied when it is a new one; None when it is an old one."""
        owner = self._owners.get(engine_id)
        if owner is None or (epoch > owner.epoch and owner.begun):
            return self._clear(engine_id, epoch)
        if not accepts(owner.epoch, epoch) or (epoch == owner.epoch and not owner.begun):
            self.refused += 1
            return None
        owner.epoch, owner.begun = epoch, True
        return owner

    def _clear(self, engine_id: EngineId, epoch: int, *, begun: bool = True) -> Owner:
        if (owner := self._owners.get(engine_id)) is not None:
            for claim in owner.claims:
                del self._claims[claim]
        self._owners[engine_id] = fresh = Owner(epoch, begun)
        return fresh

    def _forget_claim(self, claim: ClaimId) -> Claim | None:
        claimed = self._claims.pop(claim, None)
        if claimed is not None:
            self._owners[claimed.engine_id].claims.discard(claim)
        return claimed

    def _hold_chain(self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float, tier: Tier) -> None:
        ttl_ms = log.duration_ms(self._config.held_s, 0.0)
        for run in self._put_chain(engine_id, owner, blocks, now_s, tier):
            told = owner.told.get(run.tail)
            ours = told is not None and told.run == run and told.expires_s > now_s
            if ours and run.tail not in owner.promises:  # else the run that Redis has may be another's, and longer
                del owner.told[run.tail]
                self._note(engine_id, owner.epoch, log.promote(tier, run.tail, ttl_ms))
            else:
                self._note(engine_id, owner.epoch, log.hold(tier, run, ttl_ms))
        self._trim(engine_id, owner, tier)

    def _put_chain(
        self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float, tier: Tier
    ) -> tuple[Run, ...]:
        """Hold what of a chain is new, and let the rest live on; the runs that are new."""
        rows = owner.tiers[tier]
        expires_s = now_s + self._config.held_s
        if not blocks:
            return ()
        if blocks[0] not in rows.tails and rows.put_new(whole := Run(ROOT, tuple(blocks)), expires_s):
            if any(blocks[0] in others.tails for others in owner.tiers.values() if others is not rows):
                self._refresh(engine_id, owner, blocks, now_s)
            return (whole,)
        for tail in rows.with_any(blocks):
            if rows.rows[tail].expires_s <= now_s:  # its time is over: it counts as new again
                rows.remove(tail)
        self._refresh(engine_id, owner, blocks, now_s)
        runs = unknown_runs(blocks, rows.tails.__contains__)
        for run in runs:
            rows.put(run, expires_s)
        return runs

    def _trim(self, engine_id: EngineId, owner: Owner, tier: Tier) -> None:
        rows = owner.tiers[tier]
        while len(rows.tails) > self._config.max_blocks_per_engine:
            tail, row = next(iter(rows.rows.items()))
            self._note(engine_id, owner.epoch, log.cut(tier, tail, row.run.blocks[0]))
            rows.remove(tail)

    def _cut(self, engine_id: EngineId, owner: Owner, tier: Tier, lost: frozenset[bytes]) -> None:
        rows = owner.tiers[tier]
        for tail in rows.with_any(lost):
            if (row := rows.rows.get(tail)) is not None:
                first = next((block for block in row.run.blocks if block in lost), None)
                if first is not None:
                    self._note(engine_id, owner.epoch, log.cut(tier, tail, first))
                    rows.cut(tail, lost)

    def _refresh(self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float) -> None:
        held_s = self._config.held_s
        held = {tier: rows for tier, rows in owner.tiers.items() if rows.tails}
        if len(held) == 1:
            [only] = held.values()
            hit = list(takewhile(only.tails.__contains__, blocks))
        else:
            hit = list(takewhile(lambda block: any(block in rows.tails for rows in held.values()), blocks))
        for tier, rows in held.items():
            old = [
                tail
                for tail in rows.with_any(hit)
                if rows.rows[tail].expires_s > now_s and needs_refresh(rows.rows[tail].expires_s, now_s, held_s)
            ]
            for tail in old:
                rows.touch(tail, now_s + held_s)
            if old:
                self._note(engine_id, owner.epoch, log.touch(tier, old, log.duration_ms(now_s + held_s, now_s)))

    def _tell(self, engine_id: EngineId, owner: Owner, run: Run, now_s: float) -> bytes:
        """Others are told of a pending run once, however many claims wait for it."""
        expires_s = now_s + self._config.pending_s
        told = owner.told.get(run.tail)
        if told is None or told.expires_s <= now_s:
            owner.told[run.tail] = ToldRun(run, 1 + (told.claims if told else 0), expires_s)
            self._note(engine_id, owner.epoch, log.claim(run, log.duration_ms(expires_s, now_s)))
        else:
            told.claims += 1
        return run.tail

    def _untell(self, claimed: Claim) -> None:
        """A claim has ended: what it alone waited for is pending no longer."""
        owner = self._owners[claimed.engine_id]
        for tail in claimed.told:
            if (told := owner.told.get(tail)) is not None:
                told.claims -= 1
                if not told.claims:
                    del owner.told[tail]
                    self._note(claimed.engine_id, owner.epoch, log.drop(tail))

    def _note(self, engine_id: EngineId, epoch: int, op: log.Op) -> None:
        if self._changed is not None:
            self._changed(engine_id, epoch, op)


def _likely_new(held: Container[bytes], blocks: tuple[bytes, ...]) -> Run | None:
    """The end of a chain that is not held, found as if what is held were an unbroken run from its root.

    Good enough for a promise, and it spares a look-up for each block: what is held is looked at when it is confirmed.
    """
    new = bisect_left(blocks, True, key=lambda block: block not in held)
    return Run(blocks[new - 1] if new else ROOT, blocks[new:]) if new < len(blocks) else None
