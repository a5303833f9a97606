"""A copy of what all replicas share: this process's own changes at once, and everybody's in the order of the log. Pure.

Own operations are applied again when they are read back, in case others came between; that changes nothing otherwise.
So all mirrors end as the log says, whatever the order in which things were known. The listener is told what applying
really changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import OwnershipConfig, OwnershipListener, Run, Tier
from routing.ownership_memory import NOT_BEGUN, Changed, MemoryOwnership, Owner
from routing.ownership_rows import Row

Field = tuple[bytes, bytes]
"""Names a row as Redis does: its place and its tail."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """One row as it was read from Redis: where, the packed run, how long it lives, and its end by Redis's clock."""

    place: bytes
    packed: bytes
    ttl_ms: int
    expires_ms: int

    @property
    def field(self) -> Field:
        return self.place, self.packed[-log.BLOCK_BYTES :]


def oldest_first(rows: Iterable[SharedRow]) -> list[SharedRow]:
    """The least recently used first, as indexes forget; of equal age, parents before their children."""
    by_age = sorted(rows, key=lambda row: row.expires_ms)
    by_field = {row.field: row for row in by_age}
    ordered: dict[Field, SharedRow] = {}
    for row in by_age:
        line: list[SharedRow] = []
        at: SharedRow | None = row
        while at is not None and at.field not in ordered and at.expires_ms <= row.expires_ms and at not in line[-1:]:
            line.append(at)
            at = by_field.get((at.place, at.packed[: log.BLOCK_BYTES]))
        ordered.update((each.field, each) for each in reversed(line))
    return list(ordered.values())


class ReadRows:
    """All rows of one boot of an engine as they come from Redis, some at a time; `fields` names them."""

    def __init__(self) -> None:
        self.fields: set[Field] = set()
        self._ages: dict[int, list[SharedRow]] = {}

    def add(self, now_ms: int, reply: Sequence[Any]) -> None:
        """Field, packed run and expiry of each row; one may come twice."""
        for field, packed, expires in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
            if (name := (field[:1], field[1:])) not in self.fields:
                self.fields.add(name)
                row = SharedRow(name[0], packed, int(expires) - now_ms, int(expires))
                self._ages.setdefault(row.expires_ms // 1000, []).append(row)

    def oldest_first(self) -> Iterator[SharedRow]:
        """Sorted a second's rows at a time, so that no step is long."""
        for age in sorted(self._ages):
            yield from oldest_first(self._ages[age])


class OwnershipMirror(MemoryOwnership):
    """`MemoryOwnership` that can also be told what others did."""

    def __init__(self, config: OwnershipConfig | None = None, changed: Changed | None = None) -> None:
        super().__init__(config, changed)
        self._listener: OwnershipListener | None = None
        self.on_hold: Callable[[EngineId, Tier, Sequence[bytes]], None] | None = None
        """Told of every chain that this process holds."""

    def listen(self, listener: OwnershipListener) -> None:
        self._listener = listener

    # ---- boots ---------------------------------------------------------------------------------------------------

    def outdate(self, engine_id: EngineId) -> None:
        """Others have seen a newer boot: ours is over, with its rows and claims. Nothing of its epoch counts now."""
        owner = self._owners.get(engine_id)
        self._clear(engine_id, owner.epoch if owner is not None else NOT_BEGUN, begun=False)
        if self._listener is not None:
            self._listener.cleared(engine_id)

    def reopen(self, engine_id: EngineId, epoch: int) -> None:
        """`epoch` is the current boot after all: it may be written to again, and holds nothing."""
        self._clear(engine_id, epoch)
        if self._listener is not None:
            self._listener.cleared(engine_id)

    def begun(self, engine_id: EngineId, epoch: int) -> bool:
        """Whether writes of this epoch count now."""
        owner = self._owners.get(engine_id)
        return owner is not None and owner.begun and owner.epoch == epoch

    # ---- the log -------------------------------------------------------------------------------------------------

    def apply(self, engine_id: EngineId, ops: Iterable[log.Op], now_s: float, *, own: bool) -> bool:
        """Do what an entry of the log says; whether the mirror could follow.

        It cannot where an operation works on a row that it does not have: then the engine is to be read anew.
        """
        owner = self._owner(engine_id)
        followed = True
        for op in ops:
            followed &= _APPLY[op.kind](self, engine_id, owner, op, now_s, own)
        return followed

    def _owner(self, engine_id: EngineId) -> Owner:
        if (owner := self._owners.get(engine_id)) is None:
            owner = self._clear(engine_id, NOT_BEGUN, begun=False)
        return owner

    def _apply_claim(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        if not own:
            self._promise(engine_id, owner, op.data, now_s + op.ttl_ms / 1000)
        return True

    def _apply_hold(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        self._put(engine_id, owner, log.PLACE_TIER[op.place], op.data, now_s + op.ttl_ms / 1000, own=own)
        return True

    def _apply_promote(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        """A run of just that length is meant: another with its tail may be pending as well, or held.

        Redis then has that run, or a longer one with its tail; so must we.
        """
        tier, tail, until_s = log.PLACE_TIER[op.place], op.tail, now_s + op.ttl_ms / 1000
        rows = owner.tiers[tier]
        row = rows.rows.get(tail)
        held = row is not None and len(row.run.blocks) >= op.promoted_blocks
        if row is not None and held:
            if not own:
                rows.touch(tail, max(until_s, row.expires_s))
        elif (run := _meant(owner, op)) is not None:
            held = True
            if rows.put(run, until_s) and self._listener is not None:
                self._listener.held(engine_id, run, tier)
        self._unpromise(engine_id, owner, tail)
        return held

    def _apply_drop(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        self._unpromise(engine_id, owner, op.tail)
        return True

    def _apply_touch(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        if not own:
            rows = owner.tiers[log.PLACE_TIER[op.place]]
            for tail in log.split_blocks(op.data):
                if (row := rows.rows.get(tail)) is not None:
                    rows.touch(tail, max(row.expires_s, now_s + op.ttl_ms / 1000))
        return True

    def _apply_cut(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        tier = log.PLACE_TIER[op.place]
        rows = owner.tiers[tier]
        if op.tail not in rows.rows:
            return own  # we cut it when we wrote that
        self._lost(engine_id, tier, rows.cut(op.tail, (op.data[log.BLOCK_BYTES :],)))
        return True

    def _apply_clear(self, engine_id: EngineId, owner: Owner, op: log.Op, now_s: float, own: bool) -> bool:
        had_any = any(rows.rows for rows in owner.tiers.values())
        for tail in tuple(owner.promises):
            self._unpromise(engine_id, owner, tail)
        for rows in owner.tiers.values():
            rows.clear()
        if had_any and self._listener is not None:
            self._listener.cleared(engine_id)
        return True

    # ---- rows read from Redis ------------------------------------------------------------------------------------

    def merge(self, engine_id: EngineId, rows: Iterable[SharedRow], now_s: float) -> None:
        """Take rows that Redis has. What is known already costs little, and keeps its time."""
        owner = self._owner(engine_id)
        for row in rows:
            until_s = now_s + row.ttl_ms / 1000
            if not log.is_run(row.packed):
                continue  # of another version of pdgate
            if (tier := log.PLACE_TIER.get(row.place)) is not None:
                self._put(engine_id, owner, tier, row.packed, until_s, own=True)
            elif row.place == log.PENDING_PLACE and row.field[1] not in owner.told:
                self._promise(engine_id, owner, row.packed, until_s)

    def has_longer(self, engine_id: EngineId, row: SharedRow) -> bool:
        """Whether we hold more under the name of a row than Redis does."""
        tier, known = log.PLACE_TIER.get(row.place), None
        if tier is not None and log.is_run(row.packed):
            known = self._owner(engine_id).tiers[tier].rows.get(row.field[1])
        return known is not None and len(row.packed) < (len(known.run.blocks) + 1) * log.BLOCK_BYTES

    def forget_row(self, engine_id: EngineId, place: bytes, tail: bytes) -> None:
        """A row that we have is over."""
        tier = log.PLACE_TIER[place]
        self._lost(engine_id, tier, self._owner(engine_id).tiers[tier].remove(tail))

    def beyond(self, engine_id: EngineId, fields: Container[Field], now_s: float) -> Iterator[log.Op]:
        """What would have to be written for every live row that is not among `fields`, and for our claims.

        May be read slowly: rows that have ended meanwhile are left out.
        """
        owner = self._owner(engine_id)
        for tier, rows in owner.tiers.items():
            for tail, row in tuple(rows.rows.items()):
                if (log.TIER_PLACE[tier], tail) in fields or row.expires_s <= now_s:
                    continue
                if self._owners.get(engine_id) is owner and rows.rows.get(tail) is row:
                    yield log.hold(tier, row.run, log.duration_ms(row.expires_s, now_s))
        for tail, told in tuple(owner.told.items()):
            lives = told.expires_s > now_s and self._owners.get(engine_id) is owner and owner.told.get(tail) is told
            said = (engine_id, tail) not in self._unsaid  # else nobody would be told of its end
            if lives and said and (log.PENDING_PLACE, tail) not in fields:
                yield log.claim(told.run, log.duration_ms(told.expires_s, now_s))

    def forget_beyond(self, engine_id: EngineId, fields: Container[Field], *, promises_only: bool) -> None:
        """Redis has just `fields`: what else others are thought to hold, or to have promised, is over."""
        owner = self._owner(engine_id)
        for tier, rows in () if promises_only else owner.tiers.items():
            gone: list[bytes] = []
            for tail in tuple(rows.rows):
                if (log.TIER_PLACE[tier], tail) not in fields:
                    gone += rows.remove(tail)
            self._lost(engine_id, tier, gone)
        for tail in tuple(owner.promises):
            if (log.PENDING_PLACE, tail) not in fields:
                self._unpromise(engine_id, owner, tail)

    # ---- single rows ---------------------------------------------------------------------------------------------

    def has_row(self, engine_id: EngineId, tier: Tier, tail: bytes) -> bool:
        owner = self._owners.get(engine_id)
        return owner is not None and tail in owner.tiers[tier].rows

    def missing_rows(self, engine_id: EngineId, tail: bytes, now_s: float) -> Iterator[log.Op]:
        """Redis does not have what we hold under this tail: what to write."""
        if (owner := self._owners.get(engine_id)) is not None:
            for tier, rows in owner.tiers.items():
                if (row := rows.rows.get(tail)) is not None and row.expires_s > now_s:
                    yield log.hold(tier, row.run, log.duration_ms(row.expires_s, now_s))

    def blocks_of(self, engine_id: EngineId, op: log.Op) -> Sequence[bytes]:
        """The blocks that a HOLD or PROMOTE is about, as far as they are known."""
        if op.kind == log.HOLD:
            return log.split_blocks(op.data)[1:]
        run = _meant(self._owner(engine_id), op)
        return run.blocks if run is not None else ()

    def cut_row(self, engine_id: EngineId, tier: Tier, tail: bytes, first_lost: bytes) -> None:
        """End a row of others before a block that we know to be lost, and tell them."""
        owner = self._owner(engine_id)
        rows = owner.tiers[tier]
        if tail in rows.rows:
            self._note(engine_id, owner.epoch, log.cut(tier, tail, first_lost))
            self._lost(engine_id, tier, rows.cut(tail, (first_lost,)))

    def trim(self, engine_id: EngineId) -> None:
        """Keep the engine within its bound, a quarter more aside, after others have written much of it."""
        if (owner := self._owners.get(engine_id)) is not None and owner.begun:
            for tier, rows in owner.tiers.items():
                if rows.blocks > self._config.max_blocks_per_engine * 5 // 4:
                    self._trim(engine_id, owner, tier)

    def expire(self, now_s: float) -> int:
        ended = super().expire(now_s)
        for engine_id, owner in tuple(self._owners.items()):
            for tail in [tail for tail, row in owner.promises.items() if row.expires_s <= now_s]:
                self._unpromise(engine_id, owner, tail)
                ended += 1
        return ended

    # ---- with the listener ---------------------------------------------------------------------------------------

    def _put(
        self, engine_id: EngineId, owner: Owner, tier: Tier, packed: bytes, expires_s: float, *, own: bool
    ) -> None:
        rows = owner.tiers[tier]
        known = rows.rows.get(packed[-log.BLOCK_BYTES :])
        if known is not None and len(packed) <= (len(known.run.blocks) + 1) * log.BLOCK_BYTES:
            if not own and expires_s > known.expires_s:
                rows.touch(known.run.tail, expires_s)
            return
        run = log.unpack_run(packed)
        if rows.put(run, expires_s) and self._listener is not None:
            self._listener.held(engine_id, run, tier)

    def _lost(self, engine_id: EngineId, tier: Tier, blocks: list[bytes]) -> None:
        if blocks and self._listener is not None:
            self._listener.lost(engine_id, blocks, tier)

    def _promise(self, engine_id: EngineId, owner: Owner, packed: bytes, expires_s: float) -> None:
        tail = packed[-log.BLOCK_BYTES :]
        if (known := owner.promises.get(tail)) is not None:
            expires_s = known.expires_s = max(known.expires_s, expires_s)
            if len(packed) <= (len(known.run.blocks) + 1) * log.BLOCK_BYTES:
                return
            self._unpromise(engine_id, owner, tail)  # of two promises with one tail the longer stays
        run: Run = log.unpack_run(packed)
        owner.promises[tail] = Row(run, expires_s)
        if self._listener is not None:
            self._listener.promised(engine_id, run.blocks)

    def _unpromise(self, engine_id: EngineId, owner: Owner, tail: bytes) -> None:
        if (row := owner.promises.pop(tail, None)) is not None and self._listener is not None:
            self._listener.unpromised(engine_id, row.run.blocks)

    def _hold_chain(self, engine_id: EngineId, owner: Owner, blocks: Sequence[bytes], now_s: float, tier: Tier) -> None:
        if self.on_hold is not None:
            self.on_hold(engine_id, tier, blocks)
        super()._hold_chain(engine_id, owner, blocks, now_s, tier)

    def _clear(self, engine_id: EngineId, epoch: int, *, begun: bool = True) -> Owner:
        if (owner := self._owners.get(engine_id)) is not None:
            for tail in tuple(owner.promises):
                self._unpromise(engine_id, owner, tail)
        return super()._clear(engine_id, epoch, begun=begun)


def _meant(owner: Owner, op: log.Op) -> Run | None:
    """The pending run that a PROMOTE is about, where its blocks are known."""
    for pending in (owner.promises.get(op.tail), owner.told.get(op.tail)):
        if pending is not None and len(pending.run.blocks) == op.promoted_blocks:
            return pending.run
    return None


_APPLY = {
    log.CLAIM: OwnershipMirror._apply_claim,
    log.HOLD: OwnershipMirror._apply_hold,
    log.PROMOTE: OwnershipMirror._apply_promote,
    log.DROP: OwnershipMirror._apply_drop,
    log.TOUCH: OwnershipMirror._apply_touch,
    log.CUT: OwnershipMirror._apply_cut,
    log.CLEAR: OwnershipMirror._apply_clear,
}
