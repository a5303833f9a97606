"""Ownership in this process alone: the store of a single gateway, and the reference for the others. No I/O.

Per engine: its latest epoch, and per tier its held rows. Claims keep whole chains and are cut into runs when they are
confirmed, by what is held at that time. Every change can be told as an operation, so that a shared store can send it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

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
)
from routing.ownership_rows import Row, Span, TierRows, missing_runs, reach

NOT_BEGUN = -1
"""The epoch of rows that others wrote, while this process has not seen the engine itself."""

Changed = Callable[[EngineId, int, log.Op], None]
"""Told what this process changed: engine, epoch, operation. Quick; raises nothing."""


@dataclass(slots=True)
class Claim:
    """One dispatched chain, and the tails of its runs that others were told of."""

    engine_id: EngineId
    epoch: int
    blocks: tuple[bytes, ...]
    expires_s: float
    told: tuple[bytes, ...]


@dataclass(slots=True)
class ToldRun:
    """A pending run that others were told of, or will be, and how many of our claims wait for it."""

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

    def hit_blocks(self, blocks: Sequence[bytes], now_s: float) -> int:
        """How many of `blocks`, unbroken from the first, are held on any tier."""
        return reach(
            sorted(
                span
                for rows in self.tiers.values()
                for span in rows.spans(blocks)
                if rows.rows[span.tail].expires_s > now_s
            )
        )


class MemoryOwnership:
    """An `OwnershipStore` without a server behind it; bounded by `max_blocks_per_engine` on each tier."""

    def __init__(self, config: OwnershipConfig | None = None, changed: Changed | None = None) -> None:
        self._config = config or OwnershipConfig()
        self._held_ms = log.duration_ms(self._config.held_s, 0.0)
        self._changed = changed
        self._owners: dict[EngineId, Owner] = {}
        self._claims: dict[ClaimId, Claim] = {}
        self._ids = count(1)
        self._unsaid: dict[tuple[EngineId, bytes], float] = {}
        """Pending runs of ours that nobody was told of yet, by engine and tail, and since when; the oldest first."""
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
            held = owner.tiers[Tier.DEVICE].joined(chain)
            new = Run(chain[held - 1] if held else ROOT, chain[held:]) if held < len(chain) else None
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

    def say_claims(self, until_s: float) -> float | None:
        """Tell of the claims made until then that still wait; when the next one was made, if there is one.

        Most claims of short prompts have ended by then, and were never worth telling.
        """
        for (engine_id, tail), since_s in tuple(self._unsaid.items()):
            if since_s > until_s:
                return since_s
            del self._unsaid[engine_id, tail]
            owner = self._owners[engine_id]
            told = owner.told[tail]
            if told.expires_s > until_s:
                ttl_ms = log.duration_ms(told.expires_s, until_s)
                self._note(engine_id, owner.epoch, log.claim(told.run, ttl_ms))
        return None

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
                held = owner.tiers[Tier.DEVICE].spans(claimed.blocks)
                pending += ((run, claimed.expires_s) for run in missing_runs(claimed.blocks, held))
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
                    rows.discard(tail)
                ended += len(late)
        return ended

    def status(self) -> StoreStatus:
        return StoreStatus("memory", blocks=self._blocks(), refused=self.refused)

    def _blocks(self) -> int:
        return sum(rows.blocks for owner in self._owners.values() for rows in owner.tiers.values())

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
            for tail in owner.told:
                self._unsaid.pop((engine_id, tail), None)
        self._owners[engine_id] = fresh = Owner(epoch, begun)
        return fresh

    def _forget_claim(self, claim: ClaimId) -> Claim | None:
        claimed = self._claims.pop(claim, None)
        if claimed is not None:
            self._owners[claimed.engine_id].claims.discard(claim)
        return claimed

    def _hold_chain(self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float, tier: Tier) -> None:
        for run in self._put_chain(engine_id, owner, blocks, now_s, tier):
            tail = run.tail
            told = owner.told.get(tail)
            said = (engine_id, tail) not in self._unsaid
            ours = said and told is not None and told.run == run and told.expires_s > now_s
            if ours and tail not in owner.promises:  # else the run that Redis has may be another's, and longer
                del owner.told[tail]
                self._note(engine_id, owner.epoch, log.promote(tier, tail, len(run.blocks), self._held_ms))
            else:
                self._note(engine_id, owner.epoch, log.hold(tier, run, self._held_ms))
        self._trim(engine_id, owner, tier)

    def _put_chain(
        self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float, tier: Tier
    ) -> tuple[Run, ...]:
        """Hold what of a chain is new, and let the rest live on; the runs that are new."""
        rows = owner.tiers[tier]
        spans = rows.spans(blocks)
        expires_s = now_s + self._config.held_s
        if not spans and not any(other.rows for other in owner.tiers.values() if other is not rows):
            return rows.put_missing(blocks, spans, expires_s)
        over = {span.tail for span in spans if rows.rows[span.tail].expires_s <= now_s}
        for tail in over:  # its time is over: it counts as new again
            rows.discard(tail)
        spans = [span for span in spans if span.tail not in over]
        held = {tier: other.spans(blocks) for tier, other in owner.tiers.items() if other is not rows and other.rows}
        self._touch(engine_id, owner, {tier: spans, **held}, now_s)
        return rows.put_missing(blocks, spans, expires_s)

    def _trim(self, engine_id: EngineId, owner: Owner, tier: Tier) -> None:
        rows = owner.tiers[tier]
        while rows.blocks > self._config.max_blocks_per_engine:
            tail = next(iter(rows.rows))
            self._note(engine_id, owner.epoch, log.cut(tier, tail, rows.discard(tail).blocks[0]))

    def _cut(self, engine_id: EngineId, owner: Owner, tier: Tier, lost: frozenset[bytes]) -> None:
        rows = owner.tiers[tier]
        for tail in rows.with_any(lost) if rows.rows else ():
            if (row := rows.rows.get(tail)) is not None:
                first = next(filter(lost.__contains__, row.run.blocks), None)
                if first is not None:
                    self._note(engine_id, owner.epoch, log.cut(tier, tail, first))
                    rows.cut(tail, lost)

    def _refresh(self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float) -> None:
        self._touch(
            engine_id, owner, {tier: rows.spans(blocks) for tier, rows in owner.tiers.items() if rows.rows}, now_s
        )

    def _touch(self, engine_id: EngineId, owner: Owner, held: Mapping[Tier, Sequence[Span]], now_s: float) -> None:
        """Let live on what is held of a chain, unbroken from its root, on every tier that has any of it."""
        held_s = self._config.held_s
        hit = reach(sorted(span for spans in held.values() for span in spans))
        for tier, spans in held.items():
            rows = owner.tiers[tier]
            old = [
                tail
                for start, _, tail in spans
                if start < hit
                and rows.rows[tail].expires_s > now_s
                and needs_refresh(rows.rows[tail].expires_s, now_s, held_s)
            ]
            for tail in old:
                rows.touch(tail, now_s + held_s)
            if old:
                self._note(engine_id, owner.epoch, log.touch(tier, old, log.duration_ms(now_s + held_s, now_s)))

    def _tell(self, engine_id: EngineId, owner: Owner, run: Run, now_s: float) -> bytes:
        """Others are told (`say_claims`) of a pending run once, however many claims wait for it."""
        expires_s = now_s + self._config.pending_s
        tail = run.tail
        told = owner.told.get(tail)
        if told is None or told.expires_s <= now_s:
            owner.told[tail] = ToldRun(run, 1 + (told.claims if told else 0), expires_s)
            self._unsaid.pop((engine_id, tail), None)
            self._unsaid[engine_id, tail] = now_s
        else:
            told.claims += 1
        return tail

    def _untell(self, claimed: Claim) -> None:
        """A claim has ended: what it alone waited for is pending no longer."""
        owner = self._owners[claimed.engine_id]
        for tail in claimed.told:
            if (told := owner.told.get(tail)) is not None:
                told.claims -= 1
                if not told.claims:
                    del owner.told[tail]
                    if self._unsaid.pop((claimed.engine_id, tail), None) is None:
                        self._note(claimed.engine_id, owner.epoch, log.drop(tail))

    def _note(self, engine_id: EngineId, epoch: int, op: log.Op) -> None:
        if self._changed is not None:
            self._changed(engine_id, epoch, op)
