"""Follows the logs of all shards in Redis, and reads anew what it missed. A shell.

While this process writes, logs are read with its writes (`ownership_writing`); else they are waited on.
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
from routing.ownership_mirror import OwnershipMirror, ReadRows
from routing.ownership_outbox import Lane, Outbox
from routing.ownership_writing import READ_COUNT, row_keys
from routing.redis_link import Entry, RedisLink, RedisTrouble, ScriptCall, Spawn, load_script
from routing.redis_orders import entries as entries_of

_BLOCK_S = 0.5
_PACE_S = 0.02
"""Pause after entries came: what comes meanwhile is read in one go."""
_QUIET_S = 0.03
"""After logs were read with a write, before they are waited on: our own next write would end that wait."""
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
            if entries.read_number(lane, number, write=write):
                rows = await self._rows(lane.engine_id, number)
                if lane.number == number and not lane.unsettled:
                    await self._merge(lane, rows, write or lane.again)
            slices = _Slices()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    entries.take(lane, each, self._clock())
                    await slices.breathe()
        finally:
            self.reading, self._waiting = None, []

    async def _rows(self, engine_id: EngineId, number: int) -> ReadRows:
        names = row_keys(self._keys, engine_id, number)
        rows = ReadRows()
        cursor = b"0"
        while True:
            reply = await self._link.run(ScriptCall(self._snapshot_script, names, (cursor, _CHUNK_ROWS)))
            cursor = reply[0]
            rows.add(int(reply[1]), reply[2:])
            if cursor == b"0":
                return rows
            await asyncio.sleep(0)

    async def _merge(self, lane: Lane, rows: ReadRows, write: bool) -> None:
        """Take over what Redis has, with what of ours is still on its way, and end or write the rest."""
        slices = _Slices()
        fields = rows.fields
        for row in rows.oldest_first():
            if self._mirror.has_longer(lane.engine_id, row):
                if write:
                    fields.discard(row.field)
                elif row.field not in log.rows_made(lane.outstanding()):
                    self._mirror.forget_row(lane.engine_id, *row.field)
            self._mirror.merge(lane.engine_id, (row,), self._clock())
            await slices.breathe()
        outstanding = tuple(lane.outstanding())
        fields |= log.rows_made(outstanding)
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
        outbox: Outbox,
        entries: Entries,
        reader: Reader,
    ) -> None:
        self._link = link
        self._keys = keys
        self._spawn = spawn
        self._clock = clock
        self._outbox = outbox
        self._entries = entries
        self._reader = reader
        self._heads_script = load_script("routing", "heads")
        self._tasks: list[asyncio.Task[None]] = []
        self._faults = _Faults()
        self._logs = [keys.log(shard) for shard in range(SHARDS)]
        self._shards = {key: shard for shard, key in enumerate(self._logs)}
        self._read_s = [-_SILENCE_S] * SHARDS
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
        retry_s = _RETRY_S
        while self._link.is_cluster == cluster:
            try:
                await self._resync([shard for shard in shards if not self.positions[shard].current])
                after = self.after(shards)
                if not after:
                    await asyncio.sleep(_RETRY_S)
                    continue
                soon_s = min(self._read_s[shard] for shard in shards) + _QUIET_S - asyncio.get_running_loop().time()
                if soon_s > 0:
                    await asyncio.sleep(soon_s)
                elif streams := await self._link.read(after, _BLOCK_S, READ_COUNT):
                    await self._take(streams)
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

    def _set_aside(self, shard: int) -> None:
        """Something was there that cannot be read: the rows themselves may say more, in a moment."""
        self.positions[shard].current = False
        self.positions[shard].not_before_s = asyncio.get_running_loop().time() + _STRANGE_S

    def wrote(self, lane: Lane, entry_id: bytes, entry: log.LogEntry) -> None:
        """Our batch became this entry. If nothing was in between, it is taken now, and not read back from the log."""
        shard = shard_of(lane.engine_id)
        position = self.positions[shard]
        position.wrote(lane, entry.seq, entry.db_epoch)
        if position.current and position.continues(entry):
            self._take_next(shard, entry_id, entry)
            position.heard_s = asyncio.get_running_loop().time()

    def after(self, shards: Iterable[int]) -> dict[bytes, bytes]:
        """The logs of those shards that can be followed, and the entry of each that was taken last."""
        followed = [shard for shard in shards if self.positions[shard].current]
        return {self._logs[shard]: self.positions[shard].last or b"0-0" for shard in followed}

    async def take_read(self, after: Iterable[bytes], reply: Any) -> None:
        """Take what was read `after` there, with a write."""
        try:
            streams = entries_of(reply)
        except RedisTrouble:
            return  # they are read by themselves
        now_s = asyncio.get_running_loop().time()
        for key in after:
            self._read_s[self._shards[key]] = now_s
        await self._take(streams)

    def _take_next(self, shard: int, entry_id: bytes, entry: log.LogEntry) -> bool:
        """Take the entry that is next in the log of a shard; whether it was that, and nothing went wrong."""
        if not self.positions[shard].advance(entry_id, entry):
            return False
        try:
            lane = self._entries.lane_of(entry.engine_id)
            if lane is not None and not self._reader.keeps(entry):
                self._entries.take(lane, entry, self._clock())
        except Exception as problem:
            self._faults.note(f"entry {entry_id!r} of {entry.engine_id}", problem)
            self._set_aside(shard)
            return False
        return True

    async def _take(self, streams: Mapping[bytes, list[Entry]]) -> None:
        slices = _Slices()
        for key, entries in streams.items():
            shard = self._shards[key]
            self.positions[shard].heard_s = asyncio.get_running_loop().time()
            for entry_id, fields in entries:
                try:
                    entry = log.unpack_entry(fields)
                except log.BadOps:  # of another version of pdgate
                    self._set_aside(shard)
                    break
                if self.positions[shard].has_passed(entry_id, entry):
                    continue
                if not self.positions[shard].current or not self._take_next(shard, entry_id, entry):
                    break
                await slices.breathe()
        for lane in self._outbox.lanes.values():
            if lane.unread and lane.engine_id != self._reader.reading:
                self.positions[shard_of(lane.engine_id)].miss(lane)

    async def _check_silent(self, shards: Sequence[int]) -> None:
        """Streams give no error for a position that was trimmed or flushed: ask where shards stand that say nothing."""
        now_s = asyncio.get_running_loop().time()
        silent = [shard for shard in shards if now_s - self.positions[shard].heard_s >= _SILENCE_S]
        asked = [self.positions[shard].known for shard in silent]
        for shard, known, head in zip(silent, asked, await self._heads(silent, boots=False), strict=True):
            if isinstance(head, RedisTrouble):
                raise head
            again = self.positions[shard].compare(head[0], head[1], known)
            self.positions[shard].heard_s = now_s - (_SILENCE_S - _LOOK_AGAIN_S if again else 0)

    async def _heads(self, shards: Sequence[int], *, boots: bool) -> list[Any]:
        calls = [
            ScriptCall(self._heads_script, (self._keys.head(shard), self._keys.epochs(shard)), (int(boots),))
            for shard in shards
        ]
        return await self._link.run_all(calls)

    async def _resync(self, shards: Sequence[int]) -> None:
        """Note where the shards stand, go on from there, and have all their engines read."""
        now_s = asyncio.get_running_loop().time()
        shards = [shard for shard in shards if now_s >= self.positions[shard].not_before_s]
        asked = [self.positions[shard].known for shard in shards]
        for shard, known, head in zip(shards, asked, await self._heads(shards, boots=True), strict=True):
            if isinstance(head, RedisTrouble):
                raise head
            seq, db_epoch, last = head[:3]
            old = self.positions[shard]
            old.compare(seq, db_epoch, known)
            lost = old.lost
            self.losses += lost
            self.resyncs += bool(old.db_epoch)
            self.positions[shard] = Position(seq, db_epoch, last, current=True, heard_s=now_s)
            numbered = {EngineId(engine.decode(errors="replace")) for engine in head[3::2]}
            for engine_id in {*numbered, *self._outbox.lanes}:
                if shard_of(engine_id) == shard and (lane := self._entries.lane_of(engine_id)) is not None:
                    lane.forget_passed(_ALL if lost else seq)
                    self._reader.read(engine_id, write=lost)
