"""The words of the emulator's scheduler core: jobs, stages, what a node reports. Pure: the time is an argument.

A node (`prefill_node`, `decode_node`, `plain_node`) is a state machine: inputs are method calls with `now_s`,
`advance(now_s)` lets time pass, `next_s()` says when time matters next, and `events` collects what happened for the
shell (sockets) or the simulator to act on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from engines.emulator.kv_pool import KvPool
from engines.emulator.radix import SHARED, CacheNamespace, RadixNode
from engines.timing import EngineProfile

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"
ABORTED_BY_REQUEST = "Aborted by AbortReq."
LOST_PEER_ROOM = "Failed due to an unknown reason from another rank"


class JobStage(StrEnum):
    """How far a job has come; SGLang's queues."""

    BOOTSTRAP = "bootstrap"
    PREALLOC = "prealloc"
    RESERVED = "reserved"
    TRANSFER = "transfer"
    WAITING = "waiting"
    RUNNING = "running"
    INFLIGHT = "inflight"
    DONE = "done"


class TokenSource(Protocol):
    """Decides a job's tokens; the core only asks how far it goes."""

    def step(self) -> bool:
        """Draw the next token; True when it was the last."""


@dataclass(slots=True, eq=False)
class Job:
    """One request on one node. `prompt` is packed ids; `peer` is the bootstrap address (D) or the destination (P)."""

    rid: str
    room: int | None
    prompt: bytes
    prompt_tokens: int
    max_new_tokens: int
    source: TokenSource
    peer: str = ""
    namespace: CacheNamespace = SHARED
    prefill_rank: int | None = None
    """The DP rank of P that has the job's KV: as the request says; D works it out where it does not."""
    reusable_tokens: int | None = None
    """How much of the prompt may come from a cache; None: all but the last token."""
    serial: int = 0
    stage: JobStage = JobStage.WAITING
    arrived_s: float = 0.0
    started_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens that P did not compute, as reported to the client on both sides."""
    shared_tokens: int = 0
    """Prompt tokens whose pages here belong to the prefix cache."""
    capacity_tokens: int = 0
    """Tokens that fit in the pages the job owns and shares."""
    computed_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    retractions: int = 0
    admitted: bool = False
    held: bool = False
    aborted: bool = False
    failure: str = ""
    """Set when the transfer must fail as soon as the job comes to it."""
    deadline_s: float = 0.0
    lock: RadixNode | None = None

    @property
    def room_label(self) -> str:
        return str(self.room) if self.room is not None else self.rid


class EndKind(StrEnum):
    """How a job ended: by itself, by an abort the client sees as such, or by a failure with a status."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a job; `status` is the HTTP status of a failure."""

    kind: EndKind
    message: str = ""
    status: int | None = None
    err_type: str | None = None


FINISHED = End(EndKind.FINISHED)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Each of `jobs` got one token."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Ended:
    """`job` left the node."""

    job: Job
    end: End


@dataclass(frozen=True, slots=True)
class SendKv:
    """P: the KV of prompt tokens `start..stop` has left for the job's destination; `last` closes the transfer."""

    job: Job
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class AckAbort:
    """P: nothing of `room` is on its way any more."""

    room: int


@dataclass(frozen=True, slots=True)
class PushAddresses:
    """D: pages are reserved, and P must learn where they are."""

    job: Job


@dataclass(frozen=True, slots=True)
class TellAbort:
    """D: P must drop the job's room."""

    job: Job


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """D: what is cached about the prefill at bootstrap address `peer` is not to be trusted."""

    peer: str


Event = Stepped | Ended | SendKv | AckAbort | PushAddresses | TellAbort | ForgetPeer


_VARIABLES = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "bootstrap_s",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "waiting_s",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "deferred_release_s",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "heartbeat_s",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "heartbeat_failures",
}
_LEAST_HEARTBEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """SGLang's own time limits (environment defaults of 0.5.23), in seconds."""

    bootstrap_s: float = 300.0
    waiting_s: float = 300.0
    deferred_release_s: float = 30.0
    heartbeat_s: float = 5.0
    heartbeat_failures: int = 2
    lookup_interval_s: float = 1.0
    lookup_attempts: int = 15
    lookup_timeout_s: float = 5.0
    disconnect_poll_s: float = 4.0
    second_abort_s: float = 2.0
    health_s: float = 1.0
    drain_poll_s: float = 5.0
    register_s: float = 0.002

    def set_by(self, environment: Mapping[str, str]) -> Timeouts:
        """The limits that SGLang's own variables set; ValueError for one that is no number."""
        given = {field: environment[name] for name, field in _VARIABLES.items() if name in environment}
        values = {field: (int if field == "heartbeat_failures" else float)(value) for field, value in given.items()}
        limits = replace(self, **values)  # type: ignore[arg-type]
        return replace(limits, heartbeat_s=max(limits.heartbeat_s, _LEAST_HEARTBEAT_S))

    def faster(self, speed: float) -> Timeouts:
        """The same limits at `speed` times real time."""
        return replace(
            self,
            **{name: getattr(self, name) / speed for name in self.__dataclass_fields__ if name.endswith("_s")},
        )


def faster_profile(profile: EngineProfile, speed: float) -> EngineProfile:
    """The same server at `speed` times real time."""
    prefill, decode, link = profile.prefill, profile.decode, profile.link
    return replace(
        profile,
        prefill=replace(
            prefill,
            base_s=prefill.base_s / speed,
            per_token_s=prefill.per_token_s / speed,
            per_token2_s=prefill.per_token2_s / speed,
        ),
        decode=replace(
            decode,
            base_s=decode.base_s / speed,
            per_request_s=decode.per_request_s / speed,
            per_kv_token_s=decode.per_kv_token_s / speed,
        ),
        link=replace(link, bytes_per_s=link.bytes_per_s * speed, fixed_s=link.fixed_s / speed),
    )


HoldCheck = Callable[[Job, str, int], bool]
"""Asks whether a job must stop at a stage (and count k) until it is released; see `faults.Holds`."""


def never_hold(job: Job, stage: str, count: int) -> bool:
    """The hold check of a node that nobody holds."""
    return False


@dataclass(slots=True)
class NodeLoad:
    """What `/v1/loads` says of one node; token counts as `load_inquirer.py` sums them."""

    running: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    used_tokens: int = 0
    queued_tokens: int = 0
    coming_tokens: int = 0
    bootstrap: int = 0
    inflight: int = 0
    prealloc: int = 0
    transfer: int = 0
    retracted: int = 0
    queue: int = 0


@dataclass(slots=True)
class Counters:
    """Monotone sums over a node's life."""

    prefill_uncached_tokens: int = 0
    prefill_cached_tokens: int = 0
    prefill_busy_us: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    bootstrap_failures: int = 0
    transfer_failures: int = 0


@dataclass(slots=True)
class Node:
    """What all nodes share: the pool, the live jobs, the events."""

    profile: EngineProfile
    pool: KvPool
    timeouts: Timeouts
    hold: HoldCheck = never_hold
    events: list[Event] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    _serial: int = 0

    def _enter(self, job: Job, stage: JobStage, now_s: float) -> None:
        self._serial += 1
        job.serial, job.stage, job.arrived_s = self._serial, stage, now_s
        self.jobs[job.serial] = job

    def _end(self, job: Job, end: End) -> None:
        job.stage = JobStage.DONE
        del self.jobs[job.serial]
        self.events.append(Ended(job, end))

    def _unlock(self, job: Job) -> None:
        if job.lock is not None and self.pool.cache is not None:
            self.pool.cache.unlock(job.lock)
            job.lock = None

    def _matching(self, rid_prefix: str) -> list[Job]:
        """Jobs an abort of `rid_prefix` means: SGLang's scheduler matches by prefix."""
        return [job for job in self.jobs.values() if job.rid.startswith(rid_prefix)]

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self.events = self.events, []
        return events


def failure_text(what: str, request: str, job: Job, reason: str) -> str:
    """SGLang's message for a failed room; `request` is how that side's code spells the request in its f-string."""
    return (
        f"{what} failed for request rank=0 {request}.rid={job.rid!r} {request}.bootstrap_room={job.room}"
        f" with exception KVTransferError(bootstrap_room={job.room}): {reason}"
    )
