"""The words that every part of pdgate shares: instances, what is known of them, outcomes, timing.

A leaf: standard library only, no I/O, no clock. Everything here is frozen data, or a pure function over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

EngineId = NewType("EngineId", str)
"""Names one server of the fleet; stable over its restarts (pdgate uses the base URL)."""


class Role(StrEnum):
    """What a server does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


class Leg(StrEnum):
    """The half of an attempt that runs on one server."""

    PREFILL = "prefill"
    DECODE = "decode"


class Health(StrEnum):
    """What is thought of a server; new rooms go to READY and PROBATION only. `failover/machine.py`: how it changes."""

    UNKNOWN = "unknown"
    """It has not been looked at yet."""
    READY = "ready"
    """New rooms may go to it."""
    SLOW = "slow"
    """It gave no answer in time, as one under full load may: no new rooms, but requests wait for it."""
    SUSPECTED = "suspected"
    """It may be gone, or another process: no new rooms until a probe succeeds."""
    BROKEN = "broken"
    """Requests broke on it: no new rooms until a probe succeeds, and then few until one of them does."""
    PROBATION = "probation"
    """Half-open: a few requests at a time, until one has succeeded."""
    NOT_READY = "not_ready"
    """It says itself that it takes no new rooms: it starts, ends, or has another role."""
    WEDGED = "wedged"
    """It says that it is ready, has work, and does none of it."""
    LEAKING = "leaking"
    """It holds what it was told to drop."""

    @property
    def takes_rooms(self) -> bool:
        return self is Health.READY or self is Health.PROBATION


class FailureKind(StrEnum):
    """How the exchange of one leg went wrong, as seen on the wire."""

    CONNECT = "connect"
    """No connection, hence no work was done."""
    RESET = "reset"
    """The connection was lost before a whole answer had come."""
    TIMEOUT = "timeout"
    """A deadline of ours passed."""
    STATUS = "status"
    """An HTTP status of 400 or more."""
    STREAM_ERROR = "stream_error"
    """An error event inside a stream that had begun with 200."""
    ABORTED = "aborted"
    """A 200 answer, or a stream, that ended with finish_reason abort."""
    TRUNCATED = "truncated"
    """End of the stream without its terminator."""
    GARBLED = "garbled"
    """An answer that is not what the protocol says."""


class Stage(StrEnum):
    """How far a request had come when something happened to it."""

    ADMISSION = "admission"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    HANDED_OVER = "handed_over"
    STREAMING = "streaming"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one leg failed: one outcome a leg, never one for both.

    `definite` says that the engine surely did no work for it. `status` is the HTTP status or the `code` of an
    error event; `message` is the engine's own text, for logs and for the classification table.
    """

    engine_id: EngineId
    leg: Leg
    kind: FailureKind
    stage: Stage
    message: str
    status: int | None = None
    definite: bool = False


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What two servers must share for KV to move between them; compared field by field."""

    page_size_tokens: int
    kv_cache_dtype: str
    allocation_policy: str
    transfer_backend: str
    kv_layout: str = ""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Over how many ranks a server splits attention (tensor, context), its layers, the context of its decode."""

    attn_tp: int = 1
    attn_cp: int = 1
    pp: int = 1
    dcp: int = 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where a server is, as the operator said it. `bootstrap_*` belong to prefills only."""

    engine_id: EngineId
    url: str
    role: Role
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    zone: str = ""


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Where a server publishes what its prefix cache stores and evicts: addresses of DP rank 0, as it was told them.

    Each further rank adds its number to the ports. The server binds wildcard addresses and connects to concrete ones,
    unless `bind` says otherwise; it always binds `replay_endpoint` ("" when it replays nothing).
    """

    endpoint: str
    block_tokens: int
    topic: str = ""
    bind: bool | None = None
    replay_endpoint: str = ""
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What a server does to chats beyond rendering them: whatever makes one differ from a completion of its ids.

    `chat_template` is one that it was told to use, `model_kind` the model's type and architecture. `tells_ids`: its
    chats end with all token ids. `template_kwargs`: it adds some to a chat's. Without a `tokenizer` it takes ids only.
    """

    reasoning_parser: str = ""
    tool_call_parser: str = ""
    chat_template: str = ""
    completion_template: str = ""
    model_kind: str = ""
    multimodal: bool = False
    tokenizer: bool = True
    tells_ids: bool = False
    template_kwargs: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a probe read from a server; it changes only when the server restarts.

    `max_total_tokens` and `max_running_requests` are those of one DP rank.
    """

    model: str
    weight_version: str
    cache_format: CacheFormat
    max_total_tokens: int
    context_tokens: int
    chunk_tokens: int
    dp_size: int
    boot_fingerprint: str
    version: str = ""
    max_running_requests: int = 256
    radix_cache: bool = True
    kv_events: KvEventSource | None = None
    """Where its KV events come from; None when it publishes none."""
    parallelism: Parallelism = Parallelism()
    auto_kv_dtype: bool = False
    """It resolves its KV dtype itself: FP8 where its checkpoint's quantization says so, else `model_dtype`."""
    model_dtype: str = ""
    quantization: str = ""
    device: str = ""
    handshake_fields: frozenset[str] = frozenset()
    """What a prefill tells decodes of itself, or a decode can read of it; empty where that is not known."""
    version_known: bool = True
    frontend: str = ""
    sampling_defaults: str = ""
    deterministic: bool = False
    cache_report: bool = False
    incremental_streaming: bool = False
    """Events of its `/generate` streams hold what is new only, not all so far."""
    chat: ChatFacts = ChatFacts()


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one DP rank of a server says of itself."""

    waiting_uncached_tokens: int
    used_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One load snapshot of a server, summed over its DP ranks. `taken_s` is the server's own wall clock."""

    taken_s: float
    running_requests: int
    waiting_requests: int
    waiting_uncached_tokens: int
    used_tokens: int
    total_tokens: int
    max_total_tokens: int
    prefill_uncached_tokens_total: int = 0
    prefill_busy_us_total: int = 0
    ranks: tuple[RankLoad, ...] = ()
    """The same by DP rank, of a server that has several."""
    decode_steps_total: float = 0.0
    waiting_for_peer_requests: int = 0
    """Of `waiting_requests`, those whose next step is not this server's, but the other's of their pair."""

    def of_rank(self, rank: int | None) -> EngineLoad | RankLoad:
        """The part of one DP rank; the whole where it is not known."""
        return self.ranks[rank] if rank is not None and rank < len(self.ranks) else self


@dataclass(frozen=True, slots=True)
class EngineView:
    """One server in an immutable snapshot of the fleet.

    `epoch` grows by one at every noticed restart. `facts` and `load` are None until the first probe.
    """

    spec: EngineSpec
    health: Health
    epoch: int
    facts: EngineFacts | None = None
    load: EngineLoad | None = None
    reason: str = ""
    """Why `health` is not READY, in words for an operator."""
    draining: bool = False
    """An operator wants no new rooms on it, whatever its health."""

    @property
    def takes_rooms(self) -> bool:
        return self.health.takes_rooms and not self.draining

    @property
    def engine_id(self) -> EngineId:
        return self.spec.engine_id


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The live set at one moment; `version` grows with every change, `shape` with all but those of loads."""

    version: int
    engines: tuple[EngineView, ...] = ()
    shape: int = 0

    def with_role(self, role: Role) -> tuple[EngineView, ...]:
        return tuple(view for view in self.engines if view.spec.role is role)
