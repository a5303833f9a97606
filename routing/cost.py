"""What a pair costs a request, in seconds, term by term. Pure.

Every term is monotone: a longer queue, more uncached tokens or more booked tokens never lower the total, a longer hit
never raises it. The terms come in parts of one side (`prefill_side`, `decode_side`) and of both (`pair_wait_s`,
`pair_transfer_s`), so that `pairing` can bound a pair from its sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.timing import LinkTiming, PrefillTiming, PrefillWork, decode_step_s, prefill_s
from routing.types import CostTerms, DecodeState, PrefillState, RequestView, RoutingSnapshot


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Weights of the decode side; the defaults are a simulation study's, where changing them moved goodput by ±2 %."""

    decode_weight_ratio: float = 0.1
    """What a second spread over the whole stream weighs against one before the first token."""
    kv_use_s: float = 0.15
    """Scale of `k / (1 - k)`, k the KV use: how retraction and waiting grow as a pool fills."""
    kv_use_bend_ratio: float = 0.98
    """Where that hyperbola goes on as its tangent, before its pole, so that overfull decodes still compare."""
    tpot_target_s: float = 0.05
    tpot_onset_ratio: float = 0.9
    """From this share of the target on, one more request endangers those already running."""
    tpot_overrun_s: float = 10.0
    """Slope beyond the onset, seconds per unit of step time over target."""
    resident_output_tokens: int = 350
    """Mean output still to come of the requests a decode holds, when nothing better is known."""
    resident_lag_s: float = 3.0
    """Mean time a reservation lies idle before its first step: its prefill and its transfer."""


DEFAULT_COST = CostConfig()


class PrefillSide(NamedTuple):
    """What a prefill adds to any pair. `compute_s` is from its start to its end, `first_chunk_s` until KV can leave.

    A tuple, since one is made for every engine in every decision.
    """

    state: PrefillState
    hit_tokens: int
    queue_s: float
    prefill_s: float
    prefix_gain_s: float
    compute_s: float
    first_chunk_s: float


class DecodeSide(NamedTuple):
    """What a decode adds to any pair; `own_s` is `decode_s + capacity_s`."""

    state: DecodeState
    wait_s: float
    decode_s: float
    capacity_s: float
    own_s: float


def queue_s(timing: PrefillTiming, works: Iterable[PrefillWork]) -> float:
    """Time until a prefill has worked off `works`: full forwards of `chunk_tokens`, shared between requests."""
    new_tokens = 0
    attention = 0
    for work in works:
        new_tokens += work.new_tokens
        attention += max(0, work.prompt_tokens**2 - work.cached_tokens**2)
    forwards = -(-new_tokens // timing.chunk_tokens)
    return timing.base_s * forwards + timing.per_token_s * new_tokens + timing.per_token2_s * attention


def prefill_side(request: RequestView, state: PrefillState) -> PrefillSide:
    """The terms of `state` alone. A pending prefix counts, since this request would start behind it.

    The last prompt token is computed always: engines need its logits. A hit whose loading takes longer than computing
    it gains nothing, but costs nothing either.
    """
    timing = state.timing
    prompt_tokens = request.prompt_tokens
    cold_s = compute_s = first_chunk_s = prefill_s(timing, prompt_tokens)
    hit_tokens = 0
    if state.hit_tokens or state.pending_hit_tokens:
        hit_tokens = max(0, min(max(state.hit_tokens, state.pending_hit_tokens), prompt_tokens - 1))
        compute_s = first_chunk_s = min(cold_s, prefill_s(timing, prompt_tokens, hit_tokens) + state.load_s)
    if prompt_tokens > timing.chunk_tokens:
        first_chunk_s = min(compute_s, prefill_s(timing, timing.chunk_tokens))
    return PrefillSide(state, hit_tokens, state.booked_s, cold_s, compute_s - cold_s, compute_s, first_chunk_s)


def idle_step_s(decodes: Iterable[DecodeState]) -> float:
    """The fastest idle decode step of a fleet: what a slower decode is measured against."""
    return min((state.timing.base_s for state in decodes), default=0.0)


def decode_side(
    request: RequestView, state: DecodeState, idle_s: float, config: CostConfig = DEFAULT_COST
) -> DecodeSide:
    """The terms of `state` alone; `idle_s` is `idle_step_s` of all decodes it competes with."""
    kv_tokens = request.prompt_tokens + request.expected_output_tokens
    step_s = decode_step_s(state.timing, state.booked_requests + 1, state.booked_tokens + kv_tokens)
    full_tokens = state.booked_tokens + (kv_tokens - state.reuse_tokens if kv_tokens > state.reuse_tokens else 0)
    wait_s = 0.0
    if full_tokens > state.capacity_tokens or state.booked_requests >= state.max_running_requests:
        wait_s = _decode_wait_s(state, full_tokens, step_s, config)
    slower_s = step_s - idle_s if step_s > idle_s else 0.0
    decode_s = config.decode_weight_ratio * request.expected_output_tokens * slower_s
    capacity_s = _capacity_s(state, full_tokens, step_s, config)
    return DecodeSide(state, wait_s, decode_s, capacity_s, decode_s + capacity_s)


def _decode_wait_s(state: DecodeState, full_tokens: int, step_s: float, config: CostConfig) -> float:
    """Time until KV and a running slot are free: the share of what is held that must end first, times its stay."""
    missing_tokens = full_tokens - state.capacity_tokens
    missing_slots = state.booked_requests + 1 - state.max_running_requests
    share = max(missing_tokens / max(1, state.booked_tokens), missing_slots / max(1, state.booked_requests))
    return min(1.0, share) * (config.resident_output_tokens * step_s + config.resident_lag_s)


def _capacity_s(state: DecodeState, full_tokens: int, step_s: float, config: CostConfig) -> float:
    """What taking this KV costs those already there: convex in KV use, and in step time near its target."""
    use_ratio = full_tokens / (state.capacity_tokens or 1)
    if use_ratio <= config.kv_use_bend_ratio:
        fill_s = config.kv_use_s * use_ratio / (1.0 - use_ratio)
    else:
        free_ratio = 1.0 - config.kv_use_bend_ratio
        over_ratio = use_ratio - config.kv_use_bend_ratio
        fill_s = config.kv_use_s / free_ratio * (config.kv_use_bend_ratio + over_ratio / free_ratio)
    overrun_ratio = step_s / config.tpot_target_s - config.tpot_onset_ratio
    return fill_s + config.tpot_overrun_s * overrun_ratio if overrun_ratio > 0.0 else fill_s


def pair_wait_s(prefill: PrefillSide, decode: DecodeSide) -> float:
    """The waits overlap: a prefill computes only after the decode has reserved the KV."""
    return max(prefill.queue_s, decode.wait_s)


def transfer_s(
    prefill: PrefillSide, sent_tokens: int, link: LinkTiming, kv_bytes_per_token: float, nic_s: float = 0.0
) -> float:
    """What is left of the KV transfer when the last chunk is computed; the NICs are busy `nic_s` after the start.

    KV leaves chunk by chunk from the end of the first chunk (or when the NICs are free). A link faster than the
    compute leaves one chunk, a slower one leaves the excess.
    """
    token_s = kv_bytes_per_token / link.bytes_per_s
    chunk_tokens = prefill.state.timing.chunk_tokens
    start_s = nic_s if nic_s > prefill.first_chunk_s else prefill.first_chunk_s
    last_chunk_s = token_s * (sent_tokens if sent_tokens < chunk_tokens else chunk_tokens)
    excess_s = start_s + sent_tokens * token_s - prefill.compute_s
    return (last_chunk_s if last_chunk_s > excess_s else excess_s) + link.fixed_s


def pair_transfer_s(request: RequestView, prefill: PrefillSide, decode: DecodeSide, snapshot: RoutingSnapshot) -> float:
    """`transfer_s` between two engines of `snapshot`, without what the decode itself can reuse."""
    prefill_id, decode_id = prefill.state.view.engine_id, decode.state.view.engine_id
    sent_tokens = max(0, request.prompt_tokens - decode.state.reuse_tokens)
    link = snapshot.link(prefill_id, decode_id)
    nic_s = 0.0
    if snapshot.nic_free_s:
        nic_s = max(snapshot.nic_free_s.get(prefill_id, 0.0), snapshot.nic_free_s.get(decode_id, 0.0))
        nic_s -= pair_wait_s(prefill, decode)
    return transfer_s(prefill, sent_tokens, link, snapshot.kv_bytes_per_token, nic_s)


def pair_terms(prefill: PrefillSide, decode: DecodeSide, moving_s: float) -> CostTerms:
    """All terms of a pair whose sides are known, and its `pair_transfer_s`."""
    return CostTerms(
        wait_s=pair_wait_s(prefill, decode),
        prefill_s=prefill.prefill_s,
        prefix_gain_s=prefill.prefix_gain_s,
        transfer_s=moving_s,
        decode_s=decode.decode_s,
        capacity_s=decode.capacity_s,
    )


def prefill_sides(request: RequestView, snapshot: RoutingSnapshot) -> list[PrefillSide]:
    """`prefill_side` of every prefill, in the order of the snapshot."""
    return [prefill_side(request, state) for state in snapshot.prefills]


def decode_sides(
    request: RequestView, decodes: Sequence[DecodeState], config: CostConfig = DEFAULT_COST
) -> list[DecodeSide]:
    """`decode_side` of every decode, in the given order."""
    idle_s = idle_step_s(decodes)
    return [decode_side(request, state, idle_s, config) for state in decodes]


def cost_terms(
    request: RequestView,
    prefill: PrefillState,
    decode: DecodeState,
    snapshot: RoutingSnapshot,
    config: CostConfig = DEFAULT_COST,
) -> CostTerms:
    """The cost of one pair of `snapshot`."""
    ours = prefill_side(request, prefill)
    theirs = decode_side(request, decode, idle_step_s(snapshot.decodes), config)
    return pair_terms(ours, theirs, pair_transfer_s(request, ours, theirs, snapshot))
