"""How batches are put into calls of the script that writes them, and what it replies. Pure.

The same calls read the logs: so what others wrote is known before our own entries, and these need not be read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import Keys, shard_of
from routing.ownership_outbox import Batch, Lane
from routing.redis_orders import ScriptCall, load_script

_LOG_KEEP_MS = 10_000
"""Twice what a snapshot takes, several times over: followers who are further behind read rows, not entries."""
READ_COUNT = 64
"""Entries of one log that are read at a time."""
_TIDY_S = 0.3
"""How often the batches of an engine have Redis clear out rows whose time is over."""


class Sent(NamedTuple):
    """One batch as it was sent, and of which boot it was then."""

    lane: Lane
    batch: Batch
    epoch: int | None
    number: int
    ops: bytes

    @property
    def is_current(self) -> bool:
        """Whether no other boot has begun since."""
        return (self.lane.epoch, self.lane.number) == (self.epoch, self.number)


class Written(NamedTuple):
    """What the script says of a batch that it wrote: its entry, and what it was about that Redis does not have.

    `missing`: tails of rows, the last one empty where there are more.
    """

    entry_id: bytes
    entry: log.LogEntry
    lost_cuts: int
    missing: list[bytes]


class Writing:
    """Makes calls of `write.lua`. `max_bytes`: of the operations in one call, unless one batch alone has more."""

    def __init__(self, keys: Keys, replica: str, rows_ms: int, max_bytes: int) -> None:
        self._keys = keys
        self._replica = replica.encode()
        self._max_bytes = max_bytes
        self._script = load_script("routing", "write")
        self._kept = (b"%d" % _LOG_KEEP_MS, b"%d" % rows_ms)
        self._names: dict[EngineId, tuple[int, tuple[bytes, ...]]] = {}

    def groups(self, batches: Sequence[tuple[Lane, Batch]], *, one_each: bool) -> Iterator[list[Sent]]:
        """The batches by the calls they are sent with; `one_each`: their keys lie in different Cluster slots.

        A batch that was refused goes alone, so that others are not refused with it.
        """
        group: list[Sent] = []
        size = 0
        for lane, batch in batches:
            ops = log.pack_ops(batch.ops)
            alone = one_each or batch.refusals > 0
            if group and (alone or size + len(ops) > self._max_bytes):
                yield group
                group, size = [], 0
            group.append(Sent(lane, batch, lane.epoch, lane.number, ops))
            size += self._max_bytes if alone else len(ops)
        if group:
            yield group

    def call(self, group: Sequence[Sent], now_s: float, after: Mapping[bytes, bytes]) -> ScriptCall:
        """`after`: the logs to read before, and after which entry of each."""
        keys: list[bytes] = []
        new_db_epoch = b"%s%x" % (self._replica, group[0].batch.number)
        args = [*self._kept, new_db_epoch, b"%d" % len(group), b"%d" % READ_COUNT]
        for lane, batch, _, number, ops in group:
            tidy = now_s >= lane.tidy_s
            if tidy:
                lane.tidy_s = now_s + _TIDY_S
            keys += self._keys_of(lane.engine_id, number)
            name = log.batch_name(self._replica, batch.number, number, lane.engine_id)
            args += (name, b"1" if tidy else b"0", ops)
        return ScriptCall(self._script, [*keys, *after], [*args, *after.values()])

    def written(self, sent: Sent, reply: Sequence[Any]) -> Written:
        """Of a reply that begins with 1."""
        _, number, seq, db_epoch, entry_id, before, void, lost_cuts, *missing = reply
        numbers = sent.batch.number, number
        void_ops = frozenset(map(int, void.split())) if void else log.NONE
        entry = log.LogEntry(seq, db_epoch, before, self._replica, *numbers, sent.lane.engine_id, void_ops, sent.ops)
        return Written(entry_id, entry, lost_cuts, missing)

    def _keys_of(self, engine_id: EngineId, number: int) -> tuple[bytes, ...]:
        known = self._names.get(engine_id)
        if known is None or known[0] != number:
            shard = shard_of(engine_id)
            of_shard = (self._keys.head(shard), self._keys.log(shard), self._keys.epochs(shard))
            known = self._names[engine_id] = (number, (*of_shard, *row_keys(self._keys, engine_id, number)))
        return known[1]


def row_keys(keys: Keys, engine_id: EngineId, number: int) -> tuple[bytes, bytes, bytes]:
    """Where the rows of one boot are: the runs, when held ones end, when pending ones end."""
    return keys.runs(engine_id, number), keys.expiry(engine_id, number), keys.pending(engine_id, number)
