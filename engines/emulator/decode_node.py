"""The scheduler of a decode server: reserve, wait for KV, decode in one continuous batch. Pure.

Pages are reserved in order of arrival once the prefill's topology is known; the addresses go to the prefill; the
request runs from the first token that came with the KV. Pages of a failed transfer stay owned until the prefill has
acknowledged the abort, or SGLang's deferred release.
"""

from __future__ import annotations

import math

from engines.emulator.batching import RunningBatch
from engines.emulator.core import (
    ABORTED,
    ABORTED_BY_REQUEST,
    ABORTED_WAITING,
    FINISHED,
    End,
    EndKind,
    ForgetPeer,
    HoldCheck,
    Job,
    JobStage,
    Node,
    NodeLoad,
    PushAddresses,
    Stepped,
    TellAbort,
    Timeouts,
    failure_text,
    never_hold,
)
from engines.emulator.kv_pool import KvPool
from engines.timing import EngineProfile

RESERVED_DECODE_TOKENS = 512
"""SGLang's `--num-reserved-decode-tokens`: what admission keeps free for each request's answer."""


ROOM_MISMATCH = "Metadata corruption detected - bootstrap_room mismatch"
"""What becomes of a negative room: the metadata row cannot hold it."""


class DecodeNode(Node):
    """A decode server's scheduler. Duplicate live rooms: the first gets the KV, the others wait for their timeout."""

    def __init__(self, profile: EngineProfile, pool: KvPool, timeouts: Timeouts, hold: HoldCheck = never_hold) -> None:
        super().__init__(profile, pool, timeouts, hold)
        self._batch = RunningBatch(pool, profile.decode, self.counters, hold)
        self._prealloc: dict[int, Job] = {}
        self._transfer: dict[int, Job] = {}
        self._waiting: dict[int, Job] = {}
        self._by_room: dict[int, Job] = {}
        self._deferred: dict[int, tuple[float, Job]] = {}
        self._peers: dict[str, int] = {}
        """The DP size of every known prefill."""

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request whose prefill's bootstrap server is `job.peer`."""
        self._enter(job, JobStage.PREALLOC, now_s)
        self._prealloc[job.serial] = job
        if job.peer in self._peers:
            self._find_rank(job)

    def peer_known(self, peer: str, dp_size: int = 1) -> None:
        """The topology of the prefill at `peer` is known: its rooms can be reserved."""
        self._peers[peer] = dp_size
        for job in [job for job in self._prealloc.values() if job.peer == peer]:
            self._find_rank(job)

    def peer_unreachable(self, peer: str, now_s: float) -> None:
        """The handshake with `peer` was given up; so are the requests that waited for it."""
        for job in [job for job in self._prealloc.values() if job.peer == peer]:
            self._fail(job, "Decode handshake", ABORTED_BY_REQUEST)

    def peer_incompatible(self, peer: str, reason: str, now_s: float) -> None:
        """`peer` answered, and cannot serve this decode."""
        for job in [job for job in self._prealloc.values() if job.peer == peer]:
            self._fail(job, "Decode handshake", reason)

    def peer_lost(self, peer: str, now_s: float) -> None:
        """Heartbeats of `peer` failed: every unfinished room with it fails."""
        self._peers.pop(peer, None)
        self.events.append(ForgetPeer(peer))
        reason = f"Lost connection with prefill instance (bootstrap_addr: {peer})"
        for job in [job for job in self.jobs.values() if job.peer == peer]:
            if job.stage is JobStage.TRANSFER:
                self._fail_transfer(job, reason, now_s, tell=False)
            elif job.stage in (JobStage.PREALLOC, JobStage.RESERVED):
                self._fail(job, "Decode handshake", reason)

    def wants(self, peer: str) -> bool:
        """Whether a request waits for the topology of `peer`."""
        return any(job.peer == peer for job in self._prealloc.values())

    def kv_arrived(self, room: int, cached_tokens: int, now_s: float) -> Job | None:
        """All KV of `room` is here; the job that gets it (its source must now know the context), if any."""
        job = self._by_room.pop(room, None)
        if job is None:
            return None
        if room == 0:
            # The metadata row's room cell reads as not written yet, for ever.
            job.deadline_s = math.inf
            return None
        del self._transfer[job.serial]
        if room < 0:
            self.counters.transfer_failures += 1
            self._leave(job, End(EndKind.FAILED, ROOM_MISMATCH, 500))
            return None
        job.stage, job.cached_tokens = JobStage.WAITING, cached_tokens
        self._waiting[job.serial] = job
        job.held = self.hold(job, "handed_over", 0)
        return job

    def awaiting(self, room: int) -> Job | None:
        """The job that KV of `room` would go to."""
        return self._by_room.get(room)

    def abort_acked(self, room: int) -> None:
        """The prefill has nothing of `room` on its way: pages kept back for it are free."""
        for serial, (_, job) in list(self._deferred.items()):
            if job.room == room:
                del self._deferred[serial]
                self.pool.release(serial)

    def abort(self, rid_prefix: str, now_s: float) -> None:
        """Abort every request whose rid starts with `rid_prefix`."""
        for job in self._matching(rid_prefix):
            if job.stage in (JobStage.PREALLOC, JobStage.RESERVED):
                self.events.append(TellAbort(job))
                self._fail(job, "Decode handshake", ABORTED_BY_REQUEST)
            elif job.stage is JobStage.TRANSFER:
                self._fail_transfer(job, ABORTED_BY_REQUEST, now_s, tell=True)
            elif job.stage is JobStage.RUNNING and not job.held:
                job.aborted = True
            else:
                text = ABORTED if job.stage is JobStage.RUNNING else ABORTED_WAITING
                self._leave(job, End(EndKind.ABORTED, text))

    def release_hold(self, job: Job, now_s: float) -> None:
        """Let a held job go on."""
        job.held = False
        if job.stage is JobStage.RESERVED:
            self._push(job, now_s)

    def next_s(self) -> float | None:
        """When `advance` has something to do, if no input comes before."""
        due = []
        if self._batch.done_s is not None:
            due.append(self._batch.done_s)
        if (first := self._first_due()) is not None:
            due.append(first.deadline_s)
        if self._deferred:
            due.append(next(iter(self._deferred.values()))[0])
        return min(due, default=None)

    def advance(self, now_s: float) -> None:
        """Let time pass: end what is due, reserve, admit, begin the next step."""
        self._expire(now_s)
        batch = self._batch
        if batch.done_s is not None and batch.done_s <= now_s:
            stepped, done = batch.finish(now_s)
            self.events.append(Stepped(stepped))
            for job in done:
                self._leave(job, End(EndKind.ABORTED, ABORTED) if job.aborted else FINISHED)
        self._reserve(now_s)
        if batch.done_s is None:
            batch.resume_retracted()
            self._admit(now_s)
            batch.start(now_s)

    def load(self) -> NodeLoad:
        """Queue lengths and token sums at this moment."""
        coming = sum(self.pool.owned_tokens(serial) for serial in self._transfer)
        queued = (*self._prealloc.values(), *self._batch.retracted)
        reserved = sum(job.stage is JobStage.RESERVED for job in self.jobs.values())
        in_transfer = len(self._transfer) + reserved
        return NodeLoad(
            running=len(self._batch.jobs),
            waiting=len(self._waiting) + len(queued) + in_transfer,
            used_tokens=self.pool.used_tokens,
            queued_tokens=sum(job.prompt_tokens for job in queued),
            coming_tokens=coming,
            prealloc=len(self._prealloc),
            transfer=in_transfer,
            retracted=len(self._batch.retracted),
            queue=len(self._waiting),
        )

    def _expire(self, now_s: float) -> None:
        while (job := self._first_due()) is not None and job.deadline_s <= now_s:
            reason = f"Request {job.room} timed out after {self.timeouts.waiting_s}s in KVPoll.WaitingForInput"
            self._fail_transfer(job, reason, now_s, tell=True)
            self.events.append(ForgetPeer(job.peer))
            self._peers.pop(job.peer, None)
        while self._deferred:
            serial, (due_s, _) = next(iter(self._deferred.items()))
            if due_s > now_s:
                break
            del self._deferred[serial]
            self.pool.release(serial)

    def _first_due(self) -> Job | None:
        """The job whose time limit is next. Those behind another of their room have none: SGLang forgets them."""
        return next((job for job in self._transfer.values() if job.deadline_s < math.inf), None)

    def _reserve(self, now_s: float) -> None:
        """Reserve pages for requests whose prefill is known, in order, while the keep reserve stays free."""
        if not self._prealloc:
            return
        holding = len(self._batch.jobs) + len(self._transfer) + len(self._waiting)
        keep_tokens = RESERVED_DECODE_TOKENS * holding if holding else 0
        for job in list(self._prealloc.values()):
            if job.peer not in self._peers:
                continue
            answer_tokens = min(job.max_new_tokens, RESERVED_DECODE_TOKENS)
            if job.prompt_tokens + answer_tokens + keep_tokens > self.pool.available_tokens:
                return
            pages = self.pool.pages_for(job.prompt_tokens)
            if not self.pool.reserve(job.serial, job.room_label, pages):
                return
            job.capacity_tokens = pages * self.pool.page_size_tokens
            keep_tokens += answer_tokens
            del self._prealloc[job.serial]
            job.stage = JobStage.RESERVED
            job.held = self.hold(job, "reserved", 0)
            if not job.held:
                self._push(job, now_s)

    def _find_rank(self, job: Job) -> None:
        """The prefill's rank that a job's KV comes from: the one that the request names, else the room's."""
        dp_size = self._peers[job.peer]
        if job.prefill_rank is None:
            job.prefill_rank = (job.room or 0) % dp_size
        if not 0 <= job.prefill_rank < dp_size:
            self._fail(job, "Decode handshake", _unknown_rank(job.prefill_rank))

    def _push(self, job: Job, now_s: float) -> None:
        assert job.room is not None
        job.stage, job.deadline_s = JobStage.TRANSFER, now_s + self.timeouts.waiting_s
        self._transfer[job.serial] = job
        if self._by_room.setdefault(job.room, job) is not job:
            job.deadline_s = math.inf
        self.events.append(PushAddresses(job))

    def _admit(self, now_s: float) -> None:
        """Move jobs whose KV is here into the batch; their first token is out at once."""
        fresh = []
        for job in list(self._waiting.values()):
            if len(self._batch.jobs) >= self.profile.max_running_requests:
                break
            if job.held:
                continue
            del self._waiting[job.serial]
            job.started_s = now_s
            job.output_tokens = 1
            fresh.append(job)
        if not fresh:
            return
        ended = []
        for job in fresh:
            if job.source.step():
                ended.append(job)
                continue
            self._batch.add(job)
            job.held = self.hold(job, "token", 1)
        self.counters.generated_tokens += len(fresh)
        self.events.append(Stepped(fresh))
        for job in ended:
            self._leave(job, FINISHED)

    def _fail_transfer(self, job: Job, reason: str, now_s: float, tell: bool) -> None:
        """Fail a job whose pages P may still write to: they are kept until P acknowledges, or the deferred release."""
        if tell:
            self.events.append(TellAbort(job))
        self._deferred[job.serial] = (now_s + self.timeouts.deferred_release_s, job)
        self._fail(job, "Decode transfer", reason)

    def _fail(self, job: Job, what: str, reason: str) -> None:
        self.counters.transfer_failures += 1
        self._leave(job, End(EndKind.FAILED, failure_text(what, "decode_req.req", job, reason), 500))

    def _leave(self, job: Job, end: End) -> None:
        for queue in (self._prealloc, self._transfer, self._waiting, self._batch.jobs):
            queue.pop(job.serial, None)
        if job in self._batch.retracted:
            self._batch.retracted.remove(job)
        if job.room is not None and self._by_room.get(job.room) is job:
            del self._by_room[job.room]
        if job.serial not in self._deferred:
            self.pool.release(job.serial)
        self._end(job, end)


def _unknown_rank(rank: int) -> str:
    return (
        f"Could not fetch bootstrap info for: prefill_dp_rank: {rank} prefill_cp_rank: 0 target_tp_rank: 0"
        " and target_pp_rank 0"
    )
