"""What an entry of the log means to this process: whose it is, which boot it is of, and what it changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import OwnershipListener, Tier
from routing.ownership_mirror import OwnershipMirror
from routing.ownership_outbox import Lane, Outbox, first_lost


@dataclass(slots=True)
class Position:
    """How far one shard was read: `seq` and `last` (id) of the last entry. Not `current`: it is to be read anew.

    `lost`: the data set is not the one that was followed, or has lost entries. `heard_s`: when it last said anything.
    `doubt_seq`: what a head said that was ahead of us; a gap if it still is a moment later. `wrote_seq`: of our latest
    entry, read or not. `not_before_s`: when it may be read anew.
    """

    seq: int = 0
    db_epoch: bytes = b""
    last: bytes = b""
    current: bool = False
    lost: bool = False
    heard_s: float = 0.0
    doubt_seq: int = 0
    wrote_seq: int = 0
    not_before_s: float = 0.0

    def wrote(self, lane: Lane, seq: int, db_epoch: bytes) -> None:
        """Our batch became this entry."""
        self.db_epoch = self.db_epoch or db_epoch
        self.wrote_seq = max(self.wrote_seq, seq)
        if seq <= self.seq:
            lane.forget_passed(seq)  # it was passed while all was read anew, or it was of a lost data set

    def miss(self, lane: Lane) -> bool:
        """Whether a batch of ours, known to be written, was not where it should have been in the log."""
        oldest = lane.unread[0].seq if lane.unread else None
        if oldest is None or oldest > self.seq:
            return False
        self.current, self.lost = False, True
        return True

    def continues(self, entry: log.LogEntry) -> bool:
        """Whether this entry is the next one."""
        same = entry.db_epoch == self.db_epoch or not self.db_epoch
        return same and entry.seq == self.seq + 1 and entry.before == self.last

    def has_passed(self, entry_id: bytes, entry: log.LogEntry) -> bool:
        """Whether an entry was taken already, when it had been asked for twice."""
        known = entry.db_epoch == self.db_epoch and entry.seq <= self.seq
        return known and log.order_of(entry_id) <= log.order_of(self.last)

    def advance(self, entry_id: bytes, entry: log.LogEntry) -> bool:
        """Take an entry as the next one; where it is not the next one, note what that means."""
        if self.continues(entry):
            self.seq, self.db_epoch, self.last = entry.seq, entry.db_epoch, entry_id
            return True
        self.current = False
        same = entry.db_epoch == self.db_epoch or not self.db_epoch
        self.lost = self.lost or not same or entry.seq <= self.seq + 1
        return False

    @property
    def known(self) -> tuple[int, bytes]:
        """What there must be in the log: an entry with this number, and of this data set."""
        return max(self.seq, self.wrote_seq), self.db_epoch

    def compare(self, seq: int, db_epoch: bytes, known: tuple[int, bytes]) -> bool:
        """What the head of the log says of a shard; whether it is to be asked again soon.

        `known`: as it was when the head was asked for; what is written meanwhile proves nothing.
        """
        if seq < known[0] or (known[1] and db_epoch != known[1]):
            self.current, self.lost = False, True
        elif self.doubt_seq > self.seq:
            self.current = False
        elif seq > self.seq:
            self.doubt_seq = seq
            return True
        return False


class Entries:
    """Applies entries to the mirror.

    `reread` is called for an engine whose rows could not be followed, `ask` when a boot is to be settled.
    """

    def __init__(
        self,
        replica: str,
        wanted: Callable[[EngineId], bool],
        mirror: OwnershipMirror,
        outbox: Outbox,
        reread: Callable[[EngineId], None],
        ask: Callable[[], None],
    ) -> None:
        self._replica = replica.encode()
        self._wanted = wanted
        self._mirror = mirror
        self._outbox = outbox
        self._reread = reread
        self._ask = ask
        self.listener: OwnershipListener | None = None
        mirror.on_hold = self._held_again

    def lane_of(self, engine_id: EngineId) -> Lane | None:
        """The lane of an entry's engine; None where nobody here wants to know of it."""
        lane = self._outbox.lanes.get(engine_id)
        return self._outbox.lane(engine_id) if lane is None and self._wanted(engine_id) else lane

    def take(self, lane: Lane, entry: log.LogEntry, now_s: float) -> None:
        """Do what the entry says, unless it is of another boot, or of ours with nothing in between."""
        if not self.see_number(lane, entry.number):
            return
        own = entry.writer == self._replica
        if own:
            batch = lane.read_back(entry.batch)
            if batch is not None and batch.applied == lane.applied:
                return  # the mirror is what this entry made it
        lane.applied += 1  # what we did meanwhile is to be applied again as well, when it comes
        try:
            ops = [_done(op) if at in entry.void else op for at, op in enumerate(log.unpack_ops(entry.ops))]
            if lane.evicted and not own:
                self._note_evicted(lane, ops)
            followed = self._mirror.apply(lane.engine_id, ops, now_s, own=own)
        except log.BadOps:  # of another version of pdgate: the rows themselves may say more
            followed = False
        if not followed:
            self._reread(lane.engine_id)
        if own and lane.recut and not lane.unread:
            self._cut_again(lane)
        if not own:
            self._mirror.trim(lane.engine_id)

    def see_number(self, lane: Lane, number: int) -> bool:
        """Somebody names a boot of an engine; whether it is the one whose rows the mirror has, now."""
        if lane.unsettled:
            return False  # all is read when ours is known
        if number != lane.number and lane.settled:
            # A newer boot; or the last words of an older one; or ours has another number after a loss of data.
            self.ask_again(lane)
            return False
        if number < lane.number:
            self._reread(lane.engine_id)
            return False
        if number > lane.number:
            if lane.number:
                self._mirror.outdate(lane.engine_id)
            lane.number = number
        return True

    def read_number(self, lane: Lane, number: int, *, write: bool) -> bool:
        """This boot is the current one in Redis, 0: none is; whether there is one, and it is not older than ours."""
        if lane.unsettled:
            return False  # comes again when it is settled
        if number >= lane.number:
            return self.see_number(lane, number) and number > 0
        if lane.settled:  # it has lost our boot: tell it again
            lane.again = lane.again or write
            self.ask_again(lane)
            return False
        self._mirror.outdate(lane.engine_id)
        lane.number = number
        return number > 0

    def ask_again(self, lane: Lane) -> None:
        """Redis knows our boot by another number, or knows it no longer: have it settled once more."""
        lane.settled, lane.begun_before = False, lane.number
        self._ask()

    def outdate(self, lane: Lane, number: int) -> None:
        """Our boot of this engine is over: `number` is a newer one."""
        self._mirror.outdate(lane.engine_id)
        lane.settled, lane.outdated, lane.number = False, True, number
        self._outbox.refused += self._outbox.discard(lane)
        if self.listener is not None:
            self.listener.restart_seen(lane.engine_id)

    def evicted(self, lane: Lane, tiers: Iterable[Tier], blocks: Iterable[bytes]) -> None:
        """We told of an eviction; until that is read back, rows of others with these blocks are to be cut as well."""
        if lane.queue or lane.unread:
            for tier in tiers:
                lane.evicted.setdefault(tier, set()).update(blocks)

    def _held_again(self, engine_id: EngineId, tier: Tier, blocks: Sequence[bytes]) -> None:
        lane = self._outbox.lanes.get(engine_id)
        if lane is not None and lane.evicted:
            lane.evicted.get(tier, set()).difference_update(blocks)
            held = frozenset(blocks)
            lane.recut = {key: first for key, first in lane.recut.items() if key[0] is not tier or first not in held}

    def _note_evicted(self, lane: Lane, ops: Sequence[log.Op]) -> None:
        for op in ops:
            if op.kind in (log.HOLD, log.PROMOTE):
                tier = log.PLACE_TIER[op.place]
                if (lost := lane.evicted.get(tier)) and not self._mirror.has_row(lane.engine_id, tier, op.tail):
                    first = first_lost(self._mirror.blocks_of(lane.engine_id, op), lost)
                    if first is not None:
                        lane.recut[tier, op.tail] = first

    def _cut_again(self, lane: Lane) -> None:
        recut, lane.recut = lane.recut, {}
        for (tier, tail), first in recut.items():
            self._mirror.cut_row(lane.engine_id, tier, tail, first)


def _done(void: log.Op) -> log.Op:
    """What an operation that found nothing has done all the same: a promise has ended, if it was about one."""
    return log.drop(void.tail) if void.kind in (log.PROMOTE, log.DROP) else log.touch(Tier.DEVICE, (), 0)
