"""The servers that may serve a request as the cost sees them: health and facts joined with bookings and estimates.

Pure over what it is given. `routing/types.py` says what the states mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.timing import PrefillTiming, prefill_s
from engines.types import EngineView
from gateway.bookings import Bookings, DecodePromise, PrefillPromise
from gateway.errors import GatewayError, bad_request, no_pair
from gateway.learned import Learned
from routing.index import NO_HIT, Hit, Match
from routing.prefix import reusable_tokens
from routing.ranks import cheapest, hits_of_ranks, home
from routing.types import DecodeState, Dropped, PrefillState, RequestView

BLOCK_BYTES = 256
"""Bytes of canonical prompt in one block of the `text` index (design: about 64 tokens)."""

_REASONS_TOLD = 8


def prefill_state(
    view: EngineView, request: RequestView, match: Match, learned: Learned, bookings: Bookings, now_s: float
) -> PrefillState:
    """One prefill that passed the filters, with what is promised to it and what of this prompt it holds.

    One of several DP ranks is as its best rank for this request.
    """
    facts, engine_id = view.facts, view.engine_id
    assert facts is not None  # the filters dropped views without facts
    timing = learned.prefill_timing(engine_id, facts.chunk_tokens)
    hit = match.get(engine_id, NO_HIT) if facts.radix_cache else NO_HIT
    rank: int | None = None
    if facts.dp_size == 1:
        queue_s, booked_tokens = bookings.queue_s(engine_id, timing, now_s), bookings.uncached_tokens(engine_id)
        booked_requests = bookings.prefill_requests(engine_id)
    else:
        hits = hits_of_ranks(engine_id, facts.dp_size, hit, match)
        promised = bookings.on_prefill_ranks(engine_id, facts.dp_size, timing, now_s)
        rank = _prefill_rank(view, request, timing, hits, promised, turn=bookings.version)
        hit, (queue_s, booked_tokens, booked_requests) = hits[rank], promised[rank]
    page_tokens = facts.cache_format.page_size_tokens
    unbooked_tokens = _unbooked_tokens(view, rank, booked_tokens)
    return PrefillState(
        view,
        timing,
        booked_s=queue_s + unbooked_tokens * timing.per_token_s,
        booked_uncached_tokens=booked_tokens + unbooked_tokens,
        booked_requests=booked_requests,
        hit_tokens=hit_tokens(hit.held_blocks, request, page_tokens),
        pending_hit_tokens=hit_tokens(hit.pending_blocks, request, page_tokens),
        rank=rank,
    )


def _prefill_rank(
    view: EngineView,
    request: RequestView,
    timing: PrefillTiming,
    hits: Sequence[Hit],
    promised: Sequence[PrefillPromise],
    turn: int,
) -> int:
    """The rank that would end this prefill first: what it still has to do, and what it lacks of the prompt."""
    cold_s = prefill_s(timing, request.prompt_tokens)
    costs = []
    for rank, (hit, on) in enumerate(zip(hits, promised, strict=True)):
        own_s = cold_s
        if hit.pending_blocks:
            own_s = prefill_s(timing, request.prompt_tokens, hit_tokens(hit.pending_blocks, request, 1))
        before_s = on.queue_s + _unbooked_tokens(view, rank, on.uncached_tokens) * timing.per_token_s
        costs.append((before_s + own_s, on.requests))
    return cheapest(costs, home(request.blocks, turn))


def _unbooked_tokens(view: EngineView, rank: int | None, booked_tokens: int) -> int:
    """What others than this fleet's gateways brought, as it reports itself."""
    reported_tokens = view.load.of_rank(rank).waiting_uncached_tokens if view.load is not None else 0
    return max(0, reported_tokens - booked_tokens)


def decode_state(view: EngineView, learned: Learned, bookings: Bookings) -> DecodeState:
    """One decode that passed the filters, as full as bookings or its own report say, whichever is more.

    One of several DP ranks is as its emptiest rank.
    """
    facts, engine_id = view.facts, view.engine_id
    assert facts is not None  # the filters dropped views without facts
    rank: int | None = None
    if facts.dp_size == 1:
        booked_tokens, booked_requests = bookings.decode_kv_tokens(engine_id), bookings.decode_requests(engine_id)
    else:
        promised = bookings.on_decode_ranks(engine_id, facts.dp_size)
        rank = _decode_rank(view, promised, facts.max_running_requests, turn=bookings.version)
        booked_tokens, booked_requests = promised[rank]
    return DecodeState(
        view,
        learned.decode_timing(engine_id),
        facts.max_total_tokens,
        booked_tokens=max(booked_tokens, _reported_tokens(view, rank)),
        booked_requests=booked_requests,
        max_running_requests=facts.max_running_requests,
        rank=rank,
    )


def _decode_rank(view: EngineView, promised: Sequence[DecodePromise], max_running_requests: int, turn: int) -> int:
    """The emptiest rank; one whose batch is full comes last."""
    costs = [
        (on.requests >= max_running_requests, max(on.kv_tokens, _reported_tokens(view, rank)), on.requests)
        for rank, on in enumerate(promised)
    ]
    return cheapest(costs, turn)


def _reported_tokens(view: EngineView, rank: int | None) -> int:
    return view.load.of_rank(rank).total_tokens if view.load is not None else 0


def hit_tokens(blocks: int, request: RequestView, page_tokens: int) -> int:
    """Tokens that so many blocks of a request stand for, in whole pages and short of its last token.

    The last token is always computed: its output is what the prefill is for.
    """
    tokens = min(int(blocks * request.block_tokens), max(0, request.prompt_tokens - 1))
    return reusable_tokens([tokens], [max(1, page_tokens)])


def no_pair_error(
    prefills: Sequence[EngineView], decodes: Sequence[EngineView], dropped: Iterable[Dropped]
) -> GatewayError:
    """Why nobody can serve this request: 400 when it fits nowhere, else 503 with the reasons."""
    reasons = list(dropped)
    missing = "prefill" if not prefills else "decode"
    if reasons and all("not fit" in each.reason for each in reasons):
        return bad_request(reasons[0].reason, param="prompt", code="context_length_exceeded")
    told = "; ".join(f"{each.engine_id}: {each.reason}" for each in reasons[:_REASONS_TOLD])
    return no_pair(f"no {missing} can serve this request" + (f" ({told})" if told else ""))
