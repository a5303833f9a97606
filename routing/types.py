"""What routing takes and gives: a request, a snapshot of both sides, a decision with every term.

Pure data. One unit everywhere: seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.timing import DecodeTiming, LinkTiming, PrefillTiming
from engines.types import EngineId, EngineView


@dataclass(frozen=True, slots=True)
class RequestView:
    """What routing may know of a request; the body itself never gets here.

    `blocks` is the chain of whole-block hashes (16 bytes each) of the prompt, `block_tokens` what one block stands
    for in tokens (a learned mean for kind `text`). `prompt_tokens` is an estimate for kind `text`.
    `expected_output_tokens` is a learned quantile capped by `max_output_tokens`, never the true length.
    Times are of the loop's clock. Excluded engines and pairs have already failed this request.
    """

    request_id: str
    model: str
    prompt_tokens: int
    blocks: tuple[bytes, ...]
    block_tokens: float
    expected_output_tokens: int
    max_output_tokens: int
    arrival_s: float
    deadline_s: float
    body_bytes: int
    excluded_engines: frozenset[EngineId] = frozenset()
    excluded_pairs: frozenset[tuple[EngineId, EngineId]] = frozenset()
    goes_on: bool = False
    """Its client has the beginning of the answer: it was let in before."""

    @property
    def kv_tokens(self) -> int:
        """KV a decode must be able to hold for this request."""
        return self.prompt_tokens + self.expected_output_tokens

    def avoiding(self, engine: EngineId | None, pair: tuple[EngineId, EngineId] | None) -> RequestView:
        """The same request, after it has failed on this engine and this pair."""
        return replace(
            self,
            excluded_engines=self.excluded_engines | ({engine} if engine is not None else set()),
            excluded_pairs=self.excluded_pairs | ({pair} if pair is not None else set()),
        )


@dataclass(frozen=True, slots=True)
class PrefillState:
    """One prefill as the cost sees it.

    `booked_s`: predicted seconds of everything promised to it and not yet prefilled, already corrected by load
    reports; `booked_uncached_tokens` the same in tokens. `hit_tokens`: prefix of this request it holds;
    `pending_hit_tokens` >= `hit_tokens` also counts prefixes that will be there once what is queued before is done.
    `load_s`: time to load the hit from a slower tier (0 on device).
    """

    view: EngineView
    timing: PrefillTiming
    booked_s: float = 0.0
    booked_uncached_tokens: int = 0
    booked_requests: int = 0
    hit_tokens: int = 0
    pending_hit_tokens: int = 0
    load_s: float = 0.0
    rank: int | None = None
    """The DP rank that all of this is true of, on a server that has several."""


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One decode as the cost sees it.

    `booked_tokens`: prompt + expected output tokens of everything promised to it and not ended, already corrected by
    load reports; `capacity_tokens` its KV pool. `reuse_tokens`: prefix the decode itself holds (0 with radix off).
    """

    view: EngineView
    timing: DecodeTiming
    capacity_tokens: int
    booked_tokens: int = 0
    booked_requests: int = 0
    max_running_requests: int = 256
    reuse_tokens: int = 0
    rank: int | None = None
    """The DP rank that all of this is true of, on a server that has several."""


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """Both sides at one moment, already filtered, plus links that differ from `default_link`.

    `nic_free_s` says how long from now an engine's NIC is busy. `versions` names the versions of the inputs (fleet,
    index, bookings, estimators), for `explain`.
    """

    now_s: float
    prefills: tuple[PrefillState, ...]
    decodes: tuple[DecodeState, ...]
    default_link: LinkTiming
    kv_bytes_per_token: float
    links: Mapping[tuple[EngineId, EngineId], LinkTiming] = field(default_factory=dict)
    nic_free_s: Mapping[EngineId, float] = field(default_factory=dict)
    incompatible: frozenset[tuple[EngineId, EngineId]] = frozenset()
    versions: Mapping[str, int] = field(default_factory=dict)
    link_bounds: Mapping[EngineId, LinkTiming] = field(default_factory=dict)
    """Per prefill, a link none of its pairs is faster than (`pairing.fastest_links`); worked out anew when empty."""

    def link(self, prefill: EngineId, decode: EngineId) -> LinkTiming:
        return self.links.get((prefill, decode), self.default_link)


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The cost of one pair, term by term, in seconds; `total_s` is their sum."""

    wait_s: float
    prefill_s: float
    prefix_gain_s: float
    transfer_s: float
    decode_s: float
    capacity_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.prefix_gain_s + self.transfer_s + self.decode_s + self.capacity_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pair that could have served the request."""

    prefill: EngineId
    decode: EngineId
    terms: CostTerms
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """One engine that could not, and why, in words for an operator."""

    engine_id: EngineId
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair a policy chose, with the cost of it and of the other pairs it looked at (best first, bounded)."""

    best: Candidate
    considered: tuple[Candidate, ...]
