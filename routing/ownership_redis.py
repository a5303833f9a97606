"""Ownership in Redis, shared by replicas: reads and writes are answered by a mirror, and Redis follows. A shell.

No caller waits for Redis and none fails for it. What changes here goes into the mirror at once and into a bounded
outbox, which one task writes out every 20 ms; what others change comes back through the logs (`ownership_follower`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import (
    SHARDS,
    ClaimId,
    Keys,
    OwnerRow,
    OwnershipConfig,
    OwnershipListener,
    StoreState,
    StoreStatus,
    Tier,
    shard_of,
)
from routing.ownership_entries import Entries
from routing.ownership_follower import Follower, Reader
from routing.ownership_mirror import OwnershipMirror
from routing.ownership_outbox import Lane, Outbox, fingerprint_name
from routing.ownership_writing import Sent, Writing, row_keys
from routing.redis_link import RedisLink, RedisTrouble, ScriptCall, Spawn, Trouble, load_script

_FLUSH_S = 0.02
_RETRY_S, _RETRY_MAX_S = 0.1, 1.0
_LAST_FLUSH_S = 0.5
"""How long a stop may take to write what is queued."""
_QUEUE_BYTES, _FLUSH_BYTES, _BATCH_BYTES = 4 << 20, 1 << 20, 128 << 10
_REFUSALS = 5
"""So often a batch that Redis has an error for is tried again."""
_CLAIM_TOLD_AFTER_S = 0.1
"""Claims that end sooner are never told: what was dispatched is then written once, as held."""
_REPORT_S, _REPORT_KEEP_MS = 1.0, 10_000


class RedisOwnership:
    """An `OwnershipStore` that all replicas with the same `keys` share.

    `replica` names this process among them, and is new at every start; `wanted` says which engines are of this fleet.
    The link is started and stopped by whoever made it.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: Keys,
        spawn: Spawn,
        clock: Callable[[], float],
        replica: str,
        wanted: Callable[[EngineId], bool],
        config: OwnershipConfig | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`tell` is given one line whenever something is wrong that the link cannot know, and when it is over."""
        self._tell = tell
        self._link = link
        self._keys = keys
        self._spawn = spawn
        self._clock = clock
        self._replica = replica
        self._config = config or OwnershipConfig()
        self._listener: OwnershipListener | None = None
        self._outbox = Outbox(_QUEUE_BYTES, _BATCH_BYTES)
        self._mirror = OwnershipMirror(self._config, self._changed)
        self._reader = Reader(link, keys, self._mirror, self._outbox, clock, self._wake_flusher)
        self._entries = Entries(
            replica, wanted, self._mirror, self._outbox, self._reader.read_later, self._wake_flusher
        )
        self._follower = Follower(link, keys, spawn, clock, self._outbox, self._entries, self._reader)
        self._boot_script = load_script("routing", "boot")
        self._report_script = load_script("routing", "report")
        rows_ms = int(2000 * max(self._config.held_s, self._config.pending_s))
        self._writing = Writing(keys, replica, rows_ms, _BATCH_BYTES)
        self._refusals: dict[EngineId, str] = {}
        """Engines whose latest batch Redis had an error for, and which."""
        self._saying: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to follow and to write; what others know comes in the background (`wait_current`)."""
        self._follower.start()
        self._tasks = [
            self._spawn(self._flush_forever(), "ownership-write"),
            self._spawn(self._report_forever(), "ownership-report"),
        ]

    async def stop(self) -> None:
        """Write out what is queued, if that can be done shortly, and end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks and self._link.state.trouble is None:
            try:
                async with asyncio.timeout(_LAST_FLUSH_S):
                    while self._outbox.has_work() and await self._flush():
                        pass
            except TimeoutError:
                pass
        self._tasks = []
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        await self._follower.stop()
        with contextlib.suppress(RedisTrouble):  # it is forgotten by itself then
            if self._link.state.trouble is None:
                await self._link.command("HDEL", self._keys.replicas(), self._replica)

    async def wait_current(self, timeout_s: float) -> bool:
        """Wait until everything was read that others have written; whether that is so now."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while not self._follower.current and asyncio.get_running_loop().time() < until_s:  # noqa: ASYNC110 of many parts
            await asyncio.sleep(_FLUSH_S)
        return self._follower.current

    def listen(self, listener: OwnershipListener) -> None:
        self._listener = self._entries.listener = listener
        self._mirror.listen(listener)

    def status(self) -> StoreStatus:
        trouble = self._link.state.trouble
        told = f"{trouble}: {self._link.state.message}" if trouble is not None else ""
        if trouble is not None:
            state = StoreState.CUT_OFF
        elif self._refusals:
            state, told = StoreState.BEHIND, f"it refuses what is written: {next(iter(self._refusals.values()))}"
        else:
            state = StoreState.SHARED if self._follower.current else StoreState.BEHIND
        return StoreStatus(
            kind="redis",
            state=state,
            where=self._link.where,
            trouble=told,
            blocks=self._mirror.status().blocks,
            queued_bytes=self._outbox.queued_bytes,
            dropped=self._outbox.dropped,
            refused=self.refused,
            resyncs=self._follower.resyncs,
        )

    @property
    def refused(self) -> int:
        """Writes refused for their epoch: here, or by Redis."""
        return self._mirror.refused + self._outbox.refused

    # ---- boots ---------------------------------------------------------------------------------------------------

    def begin(self, engine_id: EngineId, epoch: int, fingerprint: str) -> None:
        lane = self._outbox.lane(engine_id)
        name = fingerprint_name(fingerprint)
        if (lane.epoch, lane.fingerprint) == (epoch, name):
            if lane.outdated:  # looked at again, and it is the current boot after all
                self._mirror.reopen(engine_id, epoch)
                lane.begin(epoch, name)
                lane.force = True
                self._wake.set()
        elif lane.epoch is None or epoch >= lane.epoch:
            self._mirror.begin(engine_id, epoch, fingerprint)
            lane.begin(epoch, name)
            self._wake.set()
        else:
            self._mirror.begin(engine_id, epoch, fingerprint)  # refused and counted

    # ---- the mirror answers --------------------------------------------------------------------------------------

    def claim_pending(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> ClaimId:
        claim = self._mirror.claim_pending(engine_id, epoch, blocks, now_s)
        if self._saying is None and self._tasks:
            self._saying = asyncio.get_running_loop().call_later(_CLAIM_TOLD_AFTER_S, self._say_claims)
        return claim

    def _say_claims(self) -> None:
        now_s = self._clock()
        next_s = self._mirror.say_claims(now_s - _CLAIM_TOLD_AFTER_S)
        self._saying = None
        if next_s is not None:
            wait_s = max(_FLUSH_S, next_s + _CLAIM_TOLD_AFTER_S - now_s)
            self._saying = asyncio.get_running_loop().call_later(wait_s, self._say_claims)

    def confirm(self, claim: ClaimId, now_s: float, tier: Tier = Tier.DEVICE) -> None:
        self._mirror.confirm(claim, now_s, tier)

    def drop(self, claim: ClaimId) -> None:
        self._mirror.drop(claim)

    def hold(
        self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float, tier: Tier = Tier.DEVICE
    ) -> None:
        self._mirror.hold(engine_id, epoch, blocks, now_s, tier)

    def evict(self, engine_id: EngineId, epoch: int, blocks: Iterable[bytes], tier: Tier | None = None) -> None:
        lost = frozenset(blocks)
        self._mirror.evict(engine_id, epoch, lost, tier)
        if self._mirror.begun(engine_id, epoch):
            self._entries.evicted(self._outbox.lane(engine_id), Tier if tier is None else (tier,), lost)

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        self._mirror.drop_engine(engine_id, epoch)

    def refresh(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> None:
        self._mirror.refresh(engine_id, epoch, blocks, now_s)

    def owners(self, blocks: Sequence[bytes], now_s: float) -> Mapping[EngineId, int]:
        return self._mirror.owners(blocks, now_s)

    def snapshot(self, now_s: float) -> Iterator[OwnerRow]:
        """As the mirror has it; rows of an engine that this process has not seen itself have epoch -1."""
        return self._mirror.snapshot(now_s)

    def expire(self, now_s: float) -> int:
        return self._mirror.expire(now_s)

    def _changed(self, engine_id: EngineId, epoch: int, op: log.Op) -> None:
        self._outbox.add(engine_id, epoch, op)
        self._wake.set()

    # ---- writing -------------------------------------------------------------------------------------------------

    def _wake_flusher(self) -> None:
        self._wake.set()

    async def _flush_forever(self) -> None:
        retry_s = _RETRY_S
        while True:
            await self._wake.wait()
            await asyncio.sleep(_FLUSH_S)
            self._wake.clear()
            if await self._flush():
                retry_s = _RETRY_S
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            if self._outbox.has_work():
                self._wake.set()

    async def _flush(self) -> bool:
        """Ask for the numbers of new boots, then write one batch an engine; whether Redis took everything."""
        fine = await self._settle()
        batches = self._outbox.next_batches(_FLUSH_BYTES)
        groups = list(self._writing.groups(batches, one_each=self._link.is_cluster))
        now_s = self._clock()
        logs = [self._logs_to_read(group, first=group is groups[0]) for group in groups]
        calls = [self._writing.call(group, now_s, after) for group, after in zip(groups, logs, strict=True)]
        replies = await self._link.run_all(calls)
        for group, after, reply in zip(groups, logs, replies, strict=True):
            if not isinstance(reply, RedisTrouble):
                await self._follower.take_read(after, reply[0])
                for sent, each in zip(group, reply[1:], strict=True):
                    if sent.is_current:
                        self._answered(sent, each)
            else:
                fine = False
                if reply.kind is Trouble.REFUSED:
                    self._were_refused(group, reply.message)
        return fine

    def _logs_to_read(self, group: Sequence[Sent], *, first: bool) -> dict[bytes, bytes]:
        """With the first call all logs are read; in a Cluster, with each, its own."""
        if self._link.is_cluster:
            return self._follower.after([shard_of(group[0].lane.engine_id)])
        return self._follower.after(range(SHARDS)) if first else {}

    def _were_refused(self, group: Sequence[Sent], message: str) -> None:
        """Redis has an error for one of these: try each alone, a few times, before its rows are written anew."""
        for lane, batch, *_ in filter(lambda sent: sent.is_current, group):
            batch.refusals += 1
            if len(group) > 1:
                continue  # it may be of another
            if not self._refusals:
                self._tell(f"refuses what is written of {lane.engine_id}: {message}")
            self._refusals[lane.engine_id] = message
            if batch.refusals >= _REFUSALS:
                self._outbox.abandon(lane, batch)
                self._reader.read(lane.engine_id, write=True)

    def _answered(self, sent: Sent, reply: Sequence[Any]) -> None:
        lane, batch = sent.lane, sent.batch
        if self._refusals.pop(lane.engine_id, None) is not None and not self._refusals:
            self._tell("takes what is written again")
        if reply[0] <= 0:  # it knows a newer boot, or ours by another number, or it has lost it
            lane.again = lane.again or reply[0] < 0
            self._entries.ask_again(lane)
            return
        written = self._writing.written(sent, reply)
        self._outbox.written(lane, batch, written.entry.seq)
        if written.lost_cuts:
            self._reader.read_later(lane.engine_id)
        if b"" in written.missing:  # there were more of them than it tells
            self._reader.read(lane.engine_id, write=True)
        for tail in filter(None, written.missing):
            assert lane.epoch is not None, "it was settled"
            for op in self._mirror.missing_rows(lane.engine_id, tail, self._clock()):
                self._outbox.add(lane.engine_id, lane.epoch, op)
        self._follower.wrote(lane, written.entry_id, written.entry)

    async def _settle(self) -> bool:
        """Have the boots numbered that Redis was not told of yet."""
        lanes = [lane for lane in self._outbox.lanes.values() if lane.unsettled]
        if not lanes:
            return True
        asked = [(lane, lane.epoch, lane.fingerprint) for lane in lanes]
        calls = [
            ScriptCall(
                self._boot_script,
                (self._keys.epochs(shard_of(lane.engine_id)),),
                (lane.engine_id, lane.fingerprint, lane.begun_before, int(lane.force)),
            )
            for lane in lanes
        ]
        fine = True
        for (lane, epoch, fingerprint), reply in zip(asked, await self._link.run_all(calls), strict=True):
            if isinstance(reply, RedisTrouble):
                fine = False
            elif lane.unsettled and (lane.epoch, lane.fingerprint) == (epoch, fingerprint):
                fine &= await self._numbered(lane, *map(int, reply))
        return fine

    async def _numbered(self, lane: Lane, code: int, number: int, before: int = 0) -> bool:
        lane.force = False
        if number != lane.number:
            lane.applied += 1
        if code:
            # The same boot under another number: what was written under the old one is lost.
            lane.again = lane.again or lane.begun_before not in (0, number)
            lane.number = number
            lane.settled, lane.begun_before = True, 0
            lane.announce = before > 0
        else:
            self._entries.outdate(lane, number)
        self._reader.read(lane.engine_id, write=lane.again)
        if before and before != number:
            try:
                await self._link.command("UNLINK", *row_keys(self._keys, lane.engine_id, before))
            except RedisTrouble:
                return False  # they go by themselves when their time is over
        return True

    # ---- being seen ----------------------------------------------------------------------------------------------

    async def _report_forever(self) -> None:
        """Say every second that this replica is there and how far it has read, for `ownership_inspect`.

        And say it here when data were lost meanwhile.
        """
        losses = 0
        while True:
            if self._follower.losses > losses:
                losses = self._follower.losses
                self._tell("has lost data, or gone back to older ones: what is known here is written again")
            seqs = " ".join(str(position.seq) for position in self._follower.positions)
            call = ScriptCall(self._report_script, (self._keys.replicas(),), (self._replica, seqs, _REPORT_KEEP_MS))
            with contextlib.suppress(RedisTrouble):  # it is seen that nothing was said
                await self._link.run(call)
            await asyncio.sleep(_REPORT_S)
