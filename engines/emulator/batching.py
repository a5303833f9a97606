"""The two batches of a server: prefill forwards cut by chunk, and the running batch of decode steps. Pure.

`PrefillQueue` fills each forward with new tokens of one or several requests, in order of arrival; `RunningBatch`
gives every request in it one token a step. Prefill, decode and plain nodes are built from these.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.emulator.core import Counters, HoldCheck, Job, JobStage
from engines.emulator.kv_pool import KvPool
from engines.timing import DecodeTiming, PrefillTiming, PrefillWork, decode_step_s, prefill_forward_s

CATCH_UP_S = 0.005
"""A step that begins so much late still ends on the beat: timers of event loops tick in milliseconds."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompt tokens `start..stop` of `job`, computed in one forward."""

    job: Job
    start: int
    stop: int


class PrefillQueue:
    """Jobs that wait for prefill, and the forward in progress."""

    def __init__(self, pool: KvPool, timing: PrefillTiming, counters: Counters, hold: HoldCheck) -> None:
        self._pool = pool
        self._timing = timing
        self._counters = counters
        self._hold = hold
        self.waiting: dict[int, Job] = {}
        self.forward: list[Work] = []
        self.done_s: float | None = None

    def add(self, job: Job) -> None:
        job.stage = JobStage.WAITING
        self.waiting[job.serial] = job

    def ready(self) -> bool:
        return any(not job.held for job in self.waiting.values())

    def start(self, now_s: float, room_for: int) -> bool:
        """Begin a forward of at most `room_for` new requests; False when nothing can be computed now."""
        budget = self._timing.chunk_tokens
        for job in self.waiting.values():
            if budget == 0:
                break
            if job.held:
                continue
            if not job.admitted:
                if room_for == 0 or not self._admit(job, now_s):
                    break
                room_for -= 1
            stop = min(job.prompt_tokens, job.computed_tokens + budget)
            budget -= stop - job.computed_tokens
            self.forward.append(Work(job, job.computed_tokens, stop))
        if not self.forward:
            return False
        duration_s = prefill_forward_s(self._timing, [PrefillWork(work.stop, work.start) for work in self.forward])
        self._counters.prefill_busy_us += round(duration_s * 1e6)
        self._counters.prefill_uncached_tokens += sum(work.stop - work.start for work in self.forward)
        self.done_s = now_s + duration_s
        return True

    def finish(self) -> list[Work]:
        """End the forward; jobs whose prompt is whole now leave the queue."""
        works, self.forward, self.done_s = self.forward, [], None
        for work in works:
            job = work.job
            job.computed_tokens = work.stop
            job.chunks += 1
            if work.stop == job.prompt_tokens:
                self.waiting.pop(job.serial, None)
            else:
                job.held = self._hold(job, "prefill_chunk", job.chunks)
        return works

    def _admit(self, job: Job, now_s: float) -> bool:
        """Match the cached prefix (never the last token: it must be computed) and reserve pages for the rest."""
        cache, matched_tokens, node = self._pool.cache, 0, None
        if cache is not None:
            reusable_tokens = job.prompt_tokens - 1 if job.reusable_tokens is None else job.reusable_tokens
            node, matched_tokens = cache.match(job.prompt[: reusable_tokens * 4], job.namespace)
            cache.lock(node)
        pages = self._pool.pages_for(job.prompt_tokens - matched_tokens)
        if not self._pool.reserve(job.serial, job.room_label, pages):
            if cache is not None and node is not None:
                cache.unlock(node)
            return False
        job.lock = node
        job.cached_tokens = job.shared_tokens = job.computed_tokens = matched_tokens
        job.capacity_tokens = matched_tokens + pages * self._pool.page_size_tokens
        job.admitted, job.started_s, job.stage = True, now_s, JobStage.RUNNING
        self._counters.prefill_cached_tokens += matched_tokens
        return True


class RunningBatch:
    """Jobs that decode together, one token each a step."""

    def __init__(self, pool: KvPool, timing: DecodeTiming, counters: Counters, hold: HoldCheck) -> None:
        self._pool = pool
        self._timing = timing
        self._counters = counters
        self._hold = hold
        self.jobs: dict[int, Job] = {}
        self.retracted: list[Job] = []
        self.done_s: float | None = None
        self._last_s = 0.0

    def add(self, job: Job) -> None:
        job.stage = JobStage.RUNNING
        self.jobs[job.serial] = job

    def start(self, now_s: float) -> bool:
        """Begin a step; False when no job may run."""
        active = [job for job in self.jobs.values() if not job.held]
        if not active:
            return False
        kv_tokens = sum([job.prompt_tokens + job.output_tokens for job in active])
        duration_s = decode_step_s(self._timing, len(active), kv_tokens)
        on_beat = 0.0 <= now_s - self._last_s < duration_s + CATCH_UP_S
        self.done_s = max(now_s, self._last_s + duration_s) if on_beat else now_s + duration_s
        return True

    def finish(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """End the step: the jobs that got a token, and those of them that are done (finished or aborted)."""
        self._last_s, self.done_s = self.done_s or now_s, None
        stepped, done = [], []
        for job in list(self.jobs.values()):
            if job.held or not self._grow(job):
                continue
            job.output_tokens += 1
            stepped.append(job)
            if job.source.step() or job.aborted:
                del self.jobs[job.serial]
                done.append(job)
            elif self._hold(job, "token", job.output_tokens):
                job.held = True
        self._counters.decode_steps += 1
        self._counters.generated_tokens += len(stepped)
        return stepped, done

    def _grow(self, job: Job) -> bool:
        """Have a page for the job's next token; retract it (its pages go, its text stays) when there is none."""
        if job.prompt_tokens + job.output_tokens <= job.capacity_tokens:
            return True
        if self._pool.extend(job.serial):
            job.capacity_tokens += self._pool.page_size_tokens
            return True
        self._pool.release(job.serial)
        del self.jobs[job.serial]
        job.retractions += 1
        job.stage = JobStage.WAITING
        self.retracted.append(job)
        return False

    def resume_retracted(self) -> None:
        """Take retracted jobs back, oldest first, while whole contexts fit again."""
        while self.retracted:
            job = self.retracted[0]
            pages = self._pool.pages_for(job.prompt_tokens + job.output_tokens + 1 - job.shared_tokens)
            if not self._pool.reserve(job.serial, job.room_label, pages):
                return
            job.capacity_tokens = job.shared_tokens + pages * self._pool.page_size_tokens
            self.add(self.retracted.pop(0))
