"""The scheduler of a server that prefills and decodes by itself. Pure.

As SGLang does, it prefers a prefill forward to a decode step whenever a waiting request fits.
"""

from __future__ import annotations

from engines.emulator.batching import PrefillQueue, RunningBatch
from engines.emulator.core import (
    ABORTED,
    ABORTED_WAITING,
    FINISHED,
    End,
    EndKind,
    HoldCheck,
    Job,
    JobStage,
    Node,
    NodeLoad,
    Stepped,
    Timeouts,
    never_hold,
)
from engines.emulator.kv_pool import KvPool
from engines.emulator.output import Output
from engines.timing import EngineProfile
from engines.token_rule import pack


class PlainNode(Node):
    """A plain server's scheduler."""

    def __init__(self, profile: EngineProfile, pool: KvPool, timeouts: Timeouts, hold: HoldCheck = never_hold) -> None:
        super().__init__(profile, pool, timeouts, hold)
        self._queue = PrefillQueue(pool, profile.prefill, self.counters, hold)
        self._batch = RunningBatch(pool, profile.decode, self.counters, hold)

    def submit(self, job: Job, now_s: float) -> None:
        """Take a request."""
        self._enter(job, JobStage.WAITING, now_s)
        self._queue.add(job)

    def abort(self, rid_prefix: str, now_s: float) -> None:
        """Abort every request whose rid starts with `rid_prefix`."""
        for job in self._matching(rid_prefix):
            if job.stage is JobStage.WAITING:
                self._leave(job, End(EndKind.ABORTED, ABORTED_WAITING))
            elif job.held:
                self._leave(job, End(EndKind.ABORTED, ABORTED))
            else:
                job.aborted = True

    def release_hold(self, job: Job, now_s: float) -> None:
        """Let a held job go on."""
        job.held = False

    def next_s(self) -> float | None:
        """When `advance` has something to do, if no input comes before."""
        due = [at_s for at_s in (self._queue.done_s, self._batch.done_s) if at_s is not None]
        return min(due, default=None)

    def advance(self, now_s: float) -> None:
        """Let time pass: end the forward or step that is due, begin the next."""
        if self._queue.done_s is not None and self._queue.done_s <= now_s:
            self._end_forward()
        if self._batch.done_s is not None and self._batch.done_s <= now_s:
            stepped, done = self._batch.finish(now_s)
            self.events.append(Stepped(stepped))
            for job in done:
                self._leave(job, End(EndKind.ABORTED, ABORTED) if job.aborted else FINISHED)
        if self._queue.done_s is None and self._batch.done_s is None:
            self._batch.resume_retracted()
            room_for = self.profile.max_running_requests - len(self._batch.jobs)
            if not self._queue.start(now_s, room_for):
                self._batch.start(now_s)

    def load(self) -> NodeLoad:
        """Queue lengths and token sums at this moment."""
        queued = [job for job in self._queue.waiting.values() if not job.admitted]
        uncomputed = sum(job.prompt_tokens - job.computed_tokens for job in self._queue.waiting.values())
        return NodeLoad(
            running=len(self._batch.jobs) + len(self._queue.forward),
            waiting=len(queued) + len(self._batch.retracted),
            waiting_uncached_tokens=uncomputed - sum(work.stop - work.start for work in self._queue.forward),
            used_tokens=self.pool.used_tokens,
            queued_tokens=sum(job.prompt_tokens for job in (*queued, *self._batch.retracted)),
            retracted=len(self._batch.retracted),
            queue=len(queued),
        )

    def _end_forward(self) -> None:
        fresh = []
        for work in self._queue.finish():
            job = work.job
            if job.aborted:
                self._leave(job, End(EndKind.ABORTED, ABORTED))
            elif work.stop == job.prompt_tokens:
                job.output_tokens = 1
                fresh.append((job, job.source.step()))
        self.counters.generated_tokens += len(fresh)
        self.events.append(Stepped([job for job, _ in fresh]))
        for job, ended in fresh:
            if ended:
                self._leave(job, FINISHED)
            else:
                self._batch.add(job)
                job.held = self.hold(job, "token", 1)

    def _leave(self, job: Job, end: End) -> None:
        self._queue.waiting.pop(job.serial, None)
        self._batch.jobs.pop(job.serial, None)
        if job in self._batch.retracted:
            self._batch.retracted.remove(job)
        if end is FINISHED and job.admitted:
            self.pool.release_into_cache(job.serial, self._context(job), job.namespace)
        self.pool.release(job.serial)
        self._unlock(job)
        self._end(job, end)

    def _context(self, job: Job) -> bytes:
        """Prompt and answer, without the last token: its KV was never computed."""
        if isinstance(job.source, Output):
            return job.prompt + pack(job.source.ids[:-1])
        return job.prompt
