"""Follows the logs of all shards in Redis, and reads anew what it missed. A shell.

A shard's log is followed while every entry continues the one before: its `seq` is one more, it names that entry's id,
and its `db_epoch` is the same. Else, and where two seconds of silence turn out to be a gap, the shard is read anew:
its position is noted first, then each engine's rows are read in chunks while the log goes on. Entries of an engine
that is being read wait until its rows are merged; applying them again does no harm. What cannot be read (of another
version, or a person's) ends neither task: its shard or engine is read anew a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import SHARDS, Keys, shard_of
from routing.ownership_entries import Entries, Position
from routing.ownership_mirror import Field, OwnershipMirror, SharedRow, oldest_first
from routing.ownership_outbox import Lane, Outbox
from routing.redis_link import Entry, RedisLink, RedisTrouble, ScriptCall, Spawn, load_script

_BLOCK_S = 0.5
_PACE_S = 0.02
"""Pause after entries came: what comes meanwhile is read in one go."""
_COUNT = 64
_SILENCE_S, _LOOK_AGAIN_S = 2.0, 0.3
_RETRY_S, _RETRY_MAX_S = 0.1, 1.0
_CHUNK_ROWS = 32
_SLICE_S = 0.001
"""How long the event loop is kept before others get their turn; who waits for a timer may wait for two of these."""
_AGAIN_S = 0.5
"""Before an engine is read whose log could not be followed."""
_MAX_WAITING = 4096
"""Entries of an engine that wait while it is read; beyond that it is read once more."""
_WRITE_AGAIN_BYTES = 1 << 20
"""What may be queued before rows that are written anew wait."""
_STRANGE_S = 1.0
"""Before what could not be understood is read anew: it may still be there."""
_ALL = 1 << 62
_log = logging.getLogger("pdgate.ownership")

Now = Callable[[], float]


class _Slices:
    """Gives the event loop away whenever it was kept for long."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + _SLICE_S

    async def breathe(self) -> None:
        if self._loop.time() > self._until_s:
            await asyncio.sleep(0)
            self._until_s = self._loop.time() + _SLICE_S


def _coming(ops: Iterable[log.Op]) -> set[Field]:
    """The rows that these operations make."""
    return {(op.place, op.tail) for op in ops if op.kind in (log.HOLD, log.PROMOTE, log.CLAIM)}


class _Faults:
    """Logs exceptions that nobody expected, each with where it came from; the last one is not told again."""

    def __init__(self) -> None:
        self._last = ""

    def note(self, what: str, problem: Exception) -> None:
        if repr(problem) != self._last:
            _log.error("%s: read anew", what, exc_info=problem)
        self._last = repr(problem)


class Reader:
    """Reads engines anew, one after the other. `wake` makes the writer look at what was queued."""

    def __init__(
        self, link: RedisLink, keys: Keys, mirror: OwnershipMirror, outbox: Outbox, clock: Now, wake: Callable[[], None]
    ) -> None:
        self._link = link
        self._keys = keys
        self._mirror = mirror
        self._outbox = outbox
        self._clock = clock
        self._wake_writer = wake
        self._snapshot_script = load_script("routing", "snapshot")
        self._wanted: dict[EngineId, bool] = {}
        self._not_before_s: dict[EngineId, float] = {}
        self.reading: EngineId | None = None
        self._waiting: list[log.LogEntry] = []
        self._faults = _Faults()
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def read(self, engine_id: EngineId, *, write: bool = False) -> None:
        """Read this engine anew; `write`: what Redis lacks of it is written there, rather than forgotten here."""
        self._wanted[engine_id] = self._wanted.get(engine_id, False) or write
        self._not_before_s.pop(engine_id, None)
        self.idle.clear()
        self._wake.set()

    def read_later(self, engine_id: EngineId) -> None:
        """Its log could not be followed: read it anew, now and then, when what is under way has arrived."""
        if engine_id not in self._wanted:
            self.read(engine_id)
            self._not_before_s[engine_id] = asyncio.get_running_loop().time() + _AGAIN_S

    def keeps(self, entry: log.LogEntry) -> bool:
        """Whether an entry has to wait, as its engine is being read."""
        if entry.engine_id != self.reading:
            return False
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(entry)
        else:
            self.read(entry.engine_id)
        return True

    async def run(self, entries: Entries) -> None:
        """Read whatever is wanted, for ever."""
        loop = asyncio.get_running_loop()
        retry_s = _RETRY_S
        while True:
            self._wake.clear()
            now_s = loop.time()
            due = next((each for each in self._wanted if now_s >= self._not_before_s.get(each, 0.0)), None)
            if due is None:
                if not self._wanted:
                    self.idle.set()
                try:
                    async with asyncio.timeout(_AGAIN_S / 4 if self._wanted else None):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            write = self._wanted.pop(due)
            self._not_before_s.pop(due, None)
            try:
                await self._read(self._outbox.lane(due), write, entries)
                retry_s = _RETRY_S
            except RedisTrouble:
                self.read(due, write=write)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            except Exception as problem:  # of what others wrote: the other engines are not to suffer for it
                self._faults.note(f"the rows of {due}", problem)
                self.read(due, write=write)
                self._not_before_s[due] = loop.time() + _STRANGE_S

    async def _read(self, lane: Lane, write: bool, entries: Entries) -> None:
        self.reading, self._waiting = lane.engine_id, []
        try:
            epochs = self._keys.epochs(shard_of(lane.engine_id))
            number = int(await self._link.command("HGET", epochs, lane.engine_id) or 0)
            if self._is_numbered(lane, number, write, entries):
                ages, fields = await self._rows(lane.engine_id, number)
                if lane.number == number and not lane.unsettled:
                    await self._merge(lane, ages, fields, write or lane.again)
            slices = _Slices()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    entries.take(lane, each, self._clock())
                    await slices.breathe()
        finally:
            self.reading, self._waiting = None, []

    def _is_numbered(self, lane: Lane, number: int, write: bool, entries: Entries) -> bool:
        """Whether Redis knows a boot of this engine that is not older than ours."""
        if lane.unsettled:
            return False  # comes again when it is settled
        if number >= lane.number:
            return entries.see_number(lane, number) and number > 0
        if lane.settled:  # it has lost our boot: tell it again
            lane.again = lane.again or write
            entries.ask_again(lane)
            return False
        self._mirror.outdate(lane.engine_id)
        lane.number = number
        return number > 0

    async def _rows(self, engine_id: EngineId, number: int) -> tuple[dict[int, list[SharedRow]], set[Field]]:
        """All rows of one boot by the second they end in, and their names."""
        names = (
            self._keys.runs(engine_id, number),
            self._keys.expiry(engine_id, number),
            self._keys.pending(engine_id, number),
        )
        ages: dict[int, list[SharedRow]] = {}
        fields: set[Field] = set()
        cursor = b"0"
        while True:
            reply = await self._link.run(ScriptCall(self._snapshot_script, names, (cursor, _CHUNK_ROWS)))
            cursor, now_ms = reply[0], int(reply[1])
            for field, packed, expires in zip(reply[2::3], reply[3::3], reply[4::3], strict=True):
                if (name := (field[:1], field[1:])) not in fields:
                    fields.add(name)
                    row = SharedRow(name[0], packed, int(expires) - now_ms, int(expires))
                    ages.setdefault(row.expires_ms // 1000, []).append(row)
            if cursor == b"0":
                return ages, fields
            await asyncio.sleep(0)

    async def _merge(self, lane: Lane, ages: Mapping[int, list[SharedRow]], fields: set[Field], write: bool) -> None:
        """Take over what Redis has, with what of ours is still on its way, and end or write the rest."""
        slices = _Slices()
        for age in sorted(ages):
            for row in oldest_first(ages[age]):
                if self._mirror.has_longer(lane.engine_id, row):
                    if write:
                        fields.discard(row.field)
                    elif row.field not in _coming(lane.outstanding()):
                        self._mirror.forget_row(lane.engine_id, *row.field)
                self._mirror.merge(lane.engine_id, (row,), self._clock())
                await slices.breathe()
        outstanding = tuple(lane.outstanding())
        fields |= _coming(outstanding)
        self._mirror.forget_beyond(lane.engine_id, fields, promises_only=write)
        lane.applied += 1
        if not self._mirror.apply(lane.engine_id, outstanding, self._clock(), own=True):
            self.read_later(lane.engine_id)
        if write and lane.settled and lane.epoch is not None:
            lane.again = False
            for op in self._mirror.beyond(lane.engine_id, fields, self._clock()):
                self._outbox.add(lane.engine_id, lane.epoch, op)
                self._wake_writer()
                while self._outbox.queued_bytes > _WRITE_AGAIN_BYTES and lane.settled:  # noqa: ASYNC110 it is no event
                    await asyncio.sleep(_PACE_S)
                await slices.breathe()


class Follower:
    """Keeps the mirror as the logs say. `positions` by shard; `resyncs` of shards, `losses` those after lost data."""

    def __init__(
        self,
        link: RedisLink,
        keys: Keys,
        spawn: Spawn,
        clock: Now,
        wanted: Callable[[EngineId], bool],
        outbox: Outbox,
        entries: Entries,
        reader: Reader,
    ) -> None:
        self._link = link
        self._keys = keys
        self._spawn = spawn
        self._clock = clock
        self._wanted = wanted
        self._outbox = outbox
        self._entries = entries
        self._reader = reader
        self._heads_script = load_script("routing", "heads")
        self._tasks: list[asyncio.Task[None]] = []
        self._faults = _Faults()
        self._not_before_s = [0.0] * SHARDS
        self.positions = [Position() for _ in range(SHARDS)]
        self.resyncs = self.losses = 0

    def start(self) -> None:
        self._tasks = [
            self._spawn(self._follow_all(), "ownership-follow"),
            self._spawn(self._reader.run(self._entries), "ownership-read"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for position in self.positions:
            position.current = False

    @property
    def current(self) -> bool:
        """Whether everything was read that there was."""
        return self._reader.idle.is_set() and all(position.current for position in self.positions)

    async def _follow_all(self) -> None:
        """One task for all shards; in a Cluster, where they lie on different servers, one a shard."""
        while True:
            cluster = self._link.is_cluster
            groups = [[shard] for shard in range(SHARDS)] if cluster else [list(range(SHARDS))]
            tasks = [self._spawn(self._follow(group, cluster), f"ownership-follow-{group[0]}") for group in groups]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, shards: Sequence[int], cluster: bool) -> None:
        by_key = {self._keys.log(shard): shard for shard in shards}
        retry_s = _RETRY_S
        while self._link.is_cluster == cluster:
            try:
                await self._resync(self._due(shards))
                followed = {key: self.positions[shard] for key, shard in by_key.items()}
                after = {key: position.last or b"0-0" for key, position in followed.items() if position.current}
                if not after:
                    await asyncio.sleep(_RETRY_S)
                    continue
                streams = await self._link.read(after, _BLOCK_S, _COUNT)
                if streams:
                    await self._take(by_key, streams)
                    await asyncio.sleep(_PACE_S)
                await self._check_silent(shards)
                retry_s = _RETRY_S
            except RedisTrouble:
                for shard in shards:
                    self.positions[shard].heard_s = -_SILENCE_S  # ask where it stands first when it is back
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            except Exception as problem:  # of what others wrote
                self._faults.note("the logs of ownership", problem)
                for shard in shards:
                    self._set_aside(shard)

    def _due(self, shards: Sequence[int]) -> list[int]:
        """The shards to read anew now."""
        now_s = asyncio.get_running_loop().time()
        return [each for each in shards if not self.positions[each].current and now_s >= self._not_before_s[each]]

    def _set_aside(self, shard: int) -> None:
        """Something was there that cannot be read: the rows themselves may say more, in a moment."""
        self.positions[shard].current = False
        self._not_before_s[shard] = asyncio.get_running_loop().time() + _STRANGE_S

    async def _take(self, by_key: Mapping[bytes, int], streams: Mapping[bytes, list[Entry]]) -> None:
        slices = _Slices()
        for key, entries in streams.items():
            shard = by_key[key]
            position = self.positions[shard]
            position.heard_s = asyncio.get_running_loop().time()
            for entry_id, fields in entries:
                try:
                    entry = log.unpack_entry(fields)
                except log.BadOps:  # of another version of pdgate
                    self._set_aside(shard)
                    break
                if not position.advance(entry_id, entry):
                    break
                try:
                    lane = self._entries.lane_of(entry.engine_id)
                    if lane is not None and not self._reader.keeps(entry):
                        self._entries.take(lane, entry, self._clock())
                except Exception as problem:
                    self._faults.note(f"entry {entry_id!r} of {entry.engine_id}", problem)
                    self._set_aside(shard)
                    break
                await slices.breathe()
        for lane in self._outbox.lanes.values():
            if lane.unread and lane.engine_id != self._reader.reading:
                self.positions[shard_of(lane.engine_id)].miss(lane)

    async def _check_silent(self, shards: Sequence[int]) -> None:
        """Streams give no error for a position that was trimmed or flushed: ask where shards stand that say nothing."""
        now_s = asyncio.get_running_loop().time()
        silent = [shard for shard in shards if now_s - self.positions[shard].heard_s >= _SILENCE_S]
        if not silent:
            return
        wrote = [self.positions[shard].wrote_seq for shard in silent]
        for shard, wrote_seq, head in zip(silent, wrote, await self._heads(silent, boots=False), strict=True):
            if isinstance(head, RedisTrouble):
                raise head
            again = self.positions[shard].compare(head[0], head[1], wrote_seq)
            self.positions[shard].heard_s = now_s - (_SILENCE_S - _LOOK_AGAIN_S if again else 0)

    async def _heads(self, shards: Sequence[int], *, boots: bool) -> list[Any]:
        calls = [
            ScriptCall(self._heads_script, (self._keys.head(shard), self._keys.epochs(shard)), (int(boots),))
            for shard in shards
        ]
        return await self._link.run_all(calls)

    async def _resync(self, shards: Sequence[int]) -> None:
        """Note where the shards stand, go on from there, and have all their engines read."""
        if not shards:
            return
        now_s = asyncio.get_running_loop().time()
        wrote = [self.positions[shard].wrote_seq for shard in shards]
        for shard, wrote_seq, head in zip(shards, wrote, await self._heads(shards, boots=True), strict=True):
            if isinstance(head, RedisTrouble):
                raise head
            seq, db_epoch, last = head[:3]
            known = self.positions[shard]
            known.compare(seq, db_epoch, wrote_seq)
            lost = known.lost
            self.losses += lost
            self.resyncs += bool(known.db_epoch)
            self.positions[shard] = Position(seq, db_epoch, last, current=True, heard_s=now_s)
            numbered = {EngineId(engine.decode(errors="replace")) for engine in head[3::2]}
            for engine_id in {*filter(self._wanted, numbered), *self._outbox.lanes}:
                if shard_of(engine_id) == shard:
                    self._outbox.lane(engine_id).forget_passed(_ALL if lost else seq)
                    self._reader.read(engine_id, write=lost)
