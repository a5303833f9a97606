"""What this process still has to write to Redis, and what it wrote and has not read back, per engine. Pure; bounded.

An engine's lane also knows which boot is current: our epoch and fingerprint for it, and the number that Redis gave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import Tier

_OP_OVERHEAD_BYTES = 150
"""Of Python's objects, for one queued operation."""
_MAX_UNREAD = 256
"""Batches of one engine that were written and not read back; beyond that the engine is read anew instead."""
_WORTH_LEAST: tuple[frozenset[bytes], ...] = (
    frozenset((log.CLAIM, log.TOUCH, log.DROP)),
    frozenset((log.HOLD, log.PROMOTE)),
    frozenset((log.CUT, log.CLEAR)),
)
"""What is given up first: hints; then what can be written again from the mirror; what others cannot know, last."""


@dataclass(slots=True)
class Batch:
    """Operations that are, or were, written together. `seq`: of their entry in the log, once that is known.

    `applied`: how often the lane's rows had been changed from outside when the first operation was done here.
    """

    number: int
    ops: tuple[log.Op, ...]
    applied: int
    seq: int | None = None
    refusals: int = 0

    @property
    def size_bytes(self) -> int:
        return sum([op.size_bytes for op in self.ops])


@dataclass(slots=True)
class Lane:
    """One engine. `number` 0: no boot is known in Redis. `outdated`: our epoch is not its current boot.

    `settled`: Redis has said that our epoch is its current boot `number`. `begun_before`: the number to claim again
    after a loss of data. `again`: rows that are to be written anew, since operations had to be dropped. `tidy_s`: when
    the next batch may have Redis clear out what has expired.
    """

    engine_id: EngineId
    epoch: int | None = None
    fingerprint: str = ""
    number: int = 0
    begun_before: int = 0
    settled: bool = False
    outdated: bool = False
    force: bool = False
    announce: bool = False
    again: bool = False
    queue: deque[tuple[int, log.Op]] = field(default_factory=deque)
    queued_bytes: int = 0
    unread: deque[Batch] = field(default_factory=deque)
    applied: int = 0
    queue_applied: int = 0
    evicted: dict[Tier, set[bytes]] = field(default_factory=dict)
    recut: dict[tuple[Tier, bytes], bytes] = field(default_factory=dict)
    tidy_s: float = 0.0

    @property
    def unsettled(self) -> bool:
        """Redis must be asked which number our boot has."""
        return self.epoch is not None and not self.settled and not self.outdated

    def unwritten(self) -> Batch | None:
        """The batch that was sent and is not known to be written; at most one, the latest."""
        return self.unread[-1] if self.unread and self.unread[-1].seq is None else None

    def outstanding(self) -> Iterator[log.Op]:
        """Everything of ours that the log may still bring, in order."""
        for batch in self.unread:
            yield from batch.ops
        yield from (op for epoch, op in self.queue if epoch == self.epoch)

    def begin(self, epoch: int, fingerprint: str) -> None:
        """A boot was seen whose number is to be asked for."""
        self.epoch, self.fingerprint = epoch, fingerprint
        self.settled = self.outdated = self.force = self.announce = False
        self.begun_before = 0
        self.forget_unread()

    def forget_unread(self) -> None:
        self.unread.clear()
        self.evicted.clear()
        self.recut.clear()

    def forget_passed(self, seq: int) -> None:
        """The log is read from after `seq` on: batches up to there are not coming back."""
        self.unread = deque(batch for batch in self.unread if batch.seq is None or batch.seq > seq)

    def read_back(self, number: int) -> Batch | None:
        """One of our batches came back in the log; what came before it is not coming any more. None: it came before."""
        if number not in [batch.number for batch in self.unread]:
            return None
        while (batch := self.unread.popleft()).number != number:
            pass
        if not self.unread and not self.queue:
            self.evicted.clear()
        return batch


class Outbox:
    """All lanes, and the bound on what is queued. `dropped`: operations given up; `refused`: those of old boots."""

    def __init__(self, max_bytes: int, max_batch_bytes: int) -> None:
        self.lanes: dict[EngineId, Lane] = {}
        self.queued_bytes = 0
        self.dropped = 0
        self.refused = 0
        self._max_bytes = max_bytes
        self._max_batch_bytes = max_batch_bytes
        self._batches = 0

    def lane(self, engine_id: EngineId) -> Lane:
        if (lane := self.lanes.get(engine_id)) is None:
            lane = self.lanes[engine_id] = Lane(engine_id)
        return lane

    def add(self, engine_id: EngineId, epoch: int, op: log.Op) -> None:
        """Queue one operation; beyond the bound the fullest lane gives up what is worth least."""
        lane = self.lane(engine_id)
        if not lane.queue:
            lane.queue_applied = lane.applied
        lane.queue.append((epoch, op))
        size = op.size_bytes + _OP_OVERHEAD_BYTES
        lane.queued_bytes += size
        self.queued_bytes += size
        if self.queued_bytes > self._max_bytes:
            self._shed(max(self.lanes.values(), key=lambda each: each.queued_bytes))

    def has_work(self) -> bool:
        return any(
            lane.unsettled or (lane.settled and (lane.queue or lane.announce or lane.unwritten()))
            for lane in self.lanes.values()
        )

    def next_batches(self, max_bytes: int) -> list[tuple[Lane, Batch]]:
        """What to write now, at most one batch an engine: a batch that may not have arrived comes first, unchanged."""
        found = []
        for lane in self.lanes.values():
            if not lane.settled or max_bytes <= 0:
                continue
            batch = lane.unwritten() or self._form(lane)
            if batch is not None:
                found.append((lane, batch))
                max_bytes -= batch.size_bytes
        return found

    def written(self, lane: Lane, batch: Batch, seq: int) -> None:
        batch.seq = seq
        if len(lane.unread) > _MAX_UNREAD:
            lane.unread.popleft()
            lane.applied += 1  # what was between is not known: nothing may be skipped

    def discard(self, lane: Lane) -> int:
        """Give up all that is queued or unread for a boot that is over; how many operations had not been written."""
        unwritten = lane.unwritten()
        ended = len(lane.queue) + (len(unwritten.ops) if unwritten else 0)
        lane.queue.clear()
        self._count(lane, 0)
        lane.forget_unread()
        return ended

    def abandon(self, lane: Lane, batch: Batch) -> None:
        """Redis does not take this batch, and never will."""
        lane.unread = deque(each for each in lane.unread if each is not batch)
        self.dropped += len(batch.ops)
        lane.again = True

    def _form(self, lane: Lane) -> Batch | None:
        ops: list[log.Op] = []
        taken = 0
        while lane.queue and taken < self._max_batch_bytes:
            epoch, op = lane.queue[0]
            if lane.epoch is not None and epoch > lane.epoch:
                break  # its boot was not begun yet
            lane.queue.popleft()
            if epoch == lane.epoch:
                ops.append(op)
            else:
                self.refused += 1
            taken += op.size_bytes + _OP_OVERHEAD_BYTES
        self._count(lane, lane.queued_bytes - taken)
        if not ops and not lane.announce:
            return None
        lane.announce = False
        self._batches += 1
        batch = Batch(self._batches, tuple(ops), lane.queue_applied)
        lane.unread.append(batch)
        return batch

    def _count(self, lane: Lane, queued_bytes: int) -> None:
        self.queued_bytes += queued_bytes - lane.queued_bytes
        lane.queued_bytes = queued_bytes

    def _shed(self, lane: Lane) -> None:
        target = lane.queued_bytes // 2
        for kinds in _WORTH_LEAST:
            kept: deque[tuple[int, log.Op]] = deque()
            size = 0
            excess = lane.queued_bytes - target
            for epoch, op in lane.queue:
                op_size = op.size_bytes + _OP_OVERHEAD_BYTES
                if excess > 0 and op.kind in kinds:
                    excess -= op_size
                    self.dropped += 1
                    lane.again = lane.again or op.kind in (log.HOLD, log.PROMOTE)
                else:
                    kept.append((epoch, op))
                    size += op_size
            lane.queue = kept
            self._count(lane, size)
            if size <= target:
                return


def fingerprint_name(fingerprint: str) -> str:
    """A boot fingerprint as Redis keeps it: bounded, and without white space."""
    return blake2b(fingerprint.encode(), digest_size=12).hexdigest()


def first_lost(blocks: Iterable[bytes], lost: set[bytes]) -> bytes | None:
    """The first of `blocks` that is among `lost`."""
    return next((block for block in blocks if block in lost), None)
