"""The scheduler of a prefill server: bootstrap queue, waiting queue, chunked forwards, KV on its way. Pure.

A request waits until a decode server has pushed its page addresses under the same room, is computed chunk by chunk
(several requests in one forward), and ends only when its last chunk was acknowledged.
"""

from __future__ import annotations

import heapq

from engines.emulator.batching import PrefillQueue, Work
from engines.emulator.core import (
    ABORTED,
    ABORTED_BY_REQUEST,
    ABORTED_WAITING,
    FINISHED,
    LOST_PEER_ROOM,
    AckAbort,
    End,
    EndKind,
    HoldCheck,
    Job,
    JobStage,
    Node,
    NodeLoad,
    SendKv,
    Stepped,
    Timeouts,
    failure_text,
    never_hold,
)
from engines.emulator.kv_pool import KvPool
from engines.timing import EngineProfile

_ABORTED_ROOMS = 10_000
"""How many rooms that a decode gave up are remembered; SGLang remembers all."""


class PrefillNode(Node):
    """A prefill server's scheduler."""

    def __init__(self, profile: EngineProfile, pool: KvPool, timeouts: Timeouts, hold: HoldCheck = never_hold) -> None:
        super().__init__(profile, pool, timeouts, hold)
        self._queue = PrefillQueue(pool, profile.prefill, self.counters, hold)
        self._bootstrap: dict[int, Job] = {}
        self._destinations: dict[int, str] = {}
        self._aborted_rooms: dict[int, None] = {}
        self._acked: list[Job] = []
        self._link: list[tuple[float, int, SendKv]] = []
        self._link_free_s = 0.0
        self._sends = 0
        self._kept_back: dict[int, list[SendKv]] = {}

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request with a room; it fails at once if a decode already gave the room up."""
        self._enter(job, JobStage.BOOTSTRAP, now_s)
        assert job.room is not None
        if job.room in self._aborted_rooms:
            del self._aborted_rooms[job.room]
            self._fail(job, LOST_PEER_ROOM)
            return
        if job.failure:
            self._fail(job, job.failure)
            return
        self._bootstrap[job.serial] = job
        job.deadline_s = now_s + self.timeouts.bootstrap_s
        job.held = self.hold(job, "bootstrap", 0)
        self._match_rooms(now_s)

    def addresses(self, room: int, destination: str, now_s: float) -> None:
        """A decode at `destination` has reserved pages for `room`."""
        self._destinations[room] = destination
        self._match_rooms(now_s)

    def peer_abort(self, room: int, now_s: float) -> None:
        """The decode of `room` gave it up."""
        self._destinations.pop(room, None)
        jobs = [job for job in self.jobs.values() if job.room == room]
        for job in jobs:
            job.failure = LOST_PEER_ROOM
            if job.stage in (JobStage.BOOTSTRAP, JobStage.INFLIGHT):
                self._fail(job, LOST_PEER_ROOM)
        if not jobs:
            self._aborted_rooms[room] = None
            if len(self._aborted_rooms) > _ABORTED_ROOMS:
                del self._aborted_rooms[next(iter(self._aborted_rooms))]
        self.events.append(AckAbort(room))

    def abort(self, rid_prefix: str, now_s: float) -> None:
        """Abort every request whose rid starts with `rid_prefix`."""
        for job in self._matching(rid_prefix):
            if job.stage in (JobStage.BOOTSTRAP, JobStage.INFLIGHT):
                self._fail(job, ABORTED_BY_REQUEST)
            elif job.stage is JobStage.WAITING:
                self._leave(job, End(EndKind.ABORTED, ABORTED_WAITING))
            elif self._computing(job):
                job.aborted = True
            else:
                self._leave(job, End(EndKind.ABORTED, ABORTED))

    def transfer_acked(self, job: Job, now_s: float) -> None:
        """The decode has all of the job's KV. As SGLang does, the scheduler notices between two forwards only."""
        self._acked.append(job)
        if self._queue.done_s is None:
            self._notice_acked()

    def transfer_failed(self, job: Job, reason: str, now_s: float) -> None:
        """A chunk of the job could not be sent."""
        job.failure = reason
        if job.stage is JobStage.INFLIGHT:
            self._fail(job, reason)

    def release_hold(self, job: Job, now_s: float) -> None:
        """Let a held job go on."""
        job.held = False
        for send in self._kept_back.pop(job.serial, []):
            self.events.append(send)
        self._match_rooms(now_s)

    def next_s(self) -> float | None:
        """When `advance` has something to do, if no input comes before."""
        due = []
        if self._queue.done_s is not None:
            due.append(self._queue.done_s)
        if self._bootstrap:
            due.append(next(iter(self._bootstrap.values())).deadline_s)
        if self._link:
            due.append(self._link[0][0])
        return min(due, default=None)

    def advance(self, now_s: float) -> None:
        """Let time pass: end what is due, begin the next forward."""
        while self._bootstrap:
            job = next(iter(self._bootstrap.values()))
            if job.deadline_s > now_s:
                break
            self._fail(job, f"Request {job.room} timed out after {self.timeouts.bootstrap_s}s in KVPoll.Bootstrapping")
        if self._queue.done_s is not None and self._queue.done_s <= now_s:
            ended_s = self._queue.done_s
            for work in self._queue.finish():
                self._computed(work, ended_s)
            self._notice_acked()
        while self._link and self._link[0][0] <= now_s:
            self._sent(heapq.heappop(self._link)[2])
        if self._queue.done_s is None and self._queue.waiting:
            self._queue.start(now_s, len(self._queue.waiting))

    def load(self) -> NodeLoad:
        """Queue lengths and token sums at this moment."""
        inflight = sum(job.stage is JobStage.INFLIGHT for job in self.jobs.values())
        queued = [job for job in (*self._bootstrap.values(), *self._queue.waiting.values()) if not job.admitted]
        uncomputed = sum(job.prompt_tokens - job.computed_tokens for job in self._queue.waiting.values())
        computing = sum(work.stop - work.start for work in self._queue.forward)
        return NodeLoad(
            running=len(self._queue.forward),
            waiting=len(queued),
            waiting_uncached_tokens=uncomputed - computing,
            used_tokens=self.pool.used_tokens,
            queued_tokens=sum(job.prompt_tokens for job in queued),
            bootstrap=len(self._bootstrap),
            inflight=inflight,
            queue=len(queued) - len(self._bootstrap),
        )

    def _notice_acked(self) -> None:
        """Requests whose transfer has ended are done, and their prompts are cached."""
        acked, self._acked = self._acked, []
        for job in acked:
            if job.stage is JobStage.INFLIGHT:
                self._cache(job)
                self._leave(job, FINISHED)

    def _match_rooms(self, now_s: float) -> None:
        for job in list(self._bootstrap.values()):
            if not job.held and job.room in self._destinations:
                job.peer = self._destinations[job.room]
                del self._bootstrap[job.serial]
                self._queue.add(job)

    def _computing(self, job: Job) -> bool:
        return any(work.job is job for work in self._queue.forward)

    def _computed(self, work: Work, now_s: float) -> None:
        job = work.job
        if job.aborted:
            self._leave(job, End(EndKind.ABORTED, ABORTED))
            return
        last = work.stop == job.prompt_tokens
        if last:
            job.stage = JobStage.INFLIGHT
            job.output_tokens = 1
            job.source.step()
            self.events.append(Stepped([job]))
            if job.failure:
                self._fail(job, job.failure)
                return
        start = 0 if job.chunks == 1 else work.start
        self._send_later(SendKv(job, start, work.stop, last), now_s)

    def _send_later(self, send: SendKv, now_s: float) -> None:
        """Put a chunk on the link, which moves one at a time; the first carries the cached prefix too."""
        link = self.profile.link
        size_bytes = (send.stop - send.start) * self.profile.kv_bytes_per_token
        self._link_free_s = max(self._link_free_s, now_s) + size_bytes / link.bytes_per_s
        due_s = self._link_free_s + (link.fixed_s if send.last else 0.0)
        self._sends += 1
        heapq.heappush(self._link, (due_s, self._sends, send))

    def _sent(self, send: SendKv) -> None:
        job = send.job
        if job.stage is JobStage.DONE:
            return
        if job.serial in self._kept_back or self.hold(job, "transfer", 0):
            job.held = True
            self._kept_back.setdefault(job.serial, []).append(send)
            return
        self.events.append(send)

    def _fail(self, job: Job, reason: str) -> None:
        if job.stage is JobStage.BOOTSTRAP:
            self.counters.bootstrap_failures += 1
            what = "Prefill bootstrap"
        else:
            self.counters.transfer_failures += 1
            what = "Prefill transfer"
        self._leave(job, End(EndKind.FAILED, failure_text(what, "req", job, reason), 500))

    def _cache(self, job: Job) -> None:
        self.pool.release_into_cache(job.serial, job.prompt, job.namespace)

    def _leave(self, job: Job, end: End) -> None:
        self._bootstrap.pop(job.serial, None)
        self._queue.waiting.pop(job.serial, None)
        self._kept_back.pop(job.serial, None)
        if job.room is not None:
            self._destinations.pop(job.room, None)
        self.pool.release(job.serial)
        self._unlock(job)
        self._end(job, end)
