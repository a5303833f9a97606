"""What pdgate needs of a kind of server: how to probe it, and how one request runs on a pair of them.

`Engine` is the shell towards single servers; `PairStrategy` is pure and tells `pair.py` how the two legs go together.
A new kind of server implements both and touches no file of `gateway/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, FailureKind, Leg


class Order(StrEnum):
    """When the decode leg may start."""

    PARALLEL = "parallel"
    """Both legs at once; the prefill's answer is a completion signal."""
    SEQUENTIAL = "sequential"
    """Prefill first; the decode's body is built from its answer."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one request on one pair.

    `rid` is unique over all attempts, of fixed width; `room` likewise (0 < room < 2**63). `body` is the request of the
    client for one sample of one prompt, without any routing field.
    """

    rid: str
    room: int
    prefill: EngineView
    decode: EngineView
    path: str
    stream: bool
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    prefill_rank: int | None = None
    """The DP rank of the prefill, where it has several; `room` belongs to it. So for the decode."""
    decode_rank: int | None = None

    def view(self, leg: Leg) -> EngineView:
        return self.prefill if leg is Leg.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to a server."""

    url: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with an answer that came whole."""

    kind: FailureKind
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """What one look at a server found. `facts` are None where it did not answer them.

    `reachable`: it answered at all; `timed_out`: it did not within the time given. `ready`: it takes new rooms (a
    prefill: its bootstrap server answers too).
    """

    engine_id: EngineId
    reachable: bool
    ready: bool
    reason: str = ""
    timed_out: bool = False
    facts: EngineFacts | None = None


class Merge(Protocol):
    """What only the prefill's answer holds, put into the output of the decode of one attempt."""

    def frame(self, frame: bytes) -> bytes:
        """The next event of the decode's stream, with it."""

    def answer(self, body: bytes) -> bytes:
        """The decode's whole answer, with it."""


class PairStrategy(Protocol):
    """How one request runs on a prefill and a decode. Pure: it builds calls and judges answers."""

    order: Order

    def prefill_call(self, attempt: Attempt) -> Call:
        """The prefill leg's request."""

    def decode_call(self, attempt: Attempt, prefill_answer: bytes | None) -> Call:
        """The decode leg's request; `prefill_answer` is given where `order` is SEQUENTIAL."""

    def abort_call(self, view: EngineView, rid: str) -> Call:
        """The request that asks a server to drop `rid`; its answer is no proof that it did."""

    def judge(self, leg: Leg, status: int, body: bytes) -> Fault | None:
        """What is wrong with a whole answer; None when it is a good one."""

    def needs_prefill_answer(self, attempt: Attempt) -> bool:
        """Whether the client is to get something that only the prefill's answer holds: none of the decode's output may
        be passed on before that answer, nor without it."""

    def merge(self, attempt: Attempt, prefill_answer: bytes) -> Merge | Fault:
        """How such an attempt's output becomes whole; a Fault where the prefill's answer lacks what it should hold."""

    def cached_tokens(self, prefill_answer: bytes) -> int | None:
        """How much of the prompt a prefill says it found cached; None where it does not say."""

    def frame_fault(self, frame: bytes) -> Fault:
        """What an ERROR or ABORT event of a stream says."""


class Engine(Protocol):
    """The shell towards single servers. Every method raises nothing: what went wrong is in what it returns."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> Probe:
        """Look at a server: readiness, facts and boot fingerprint."""

    async def load(self, spec: EngineSpec, timeout_s: float) -> EngineLoad | None:
        """Its newest load snapshot; None when it gave none."""

    async def rouse(self, spec: EngineSpec) -> None:
        """Let a server that has long not been ready find out whether it is: slow, and work for it. No answer."""

    async def post(self, view: EngineView, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Relay a call that needs one server only (tokenize, detokenize). Raises UpstreamError."""
