"""The servers that may serve a request as the cost sees them: health and facts joined with bookings and estimates.

Pure over what it is given. `routing/types.py` says what the states mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engines.types import EngineView
from gateway.bookings import Bookings
from gateway.errors import GatewayError, bad_request, no_pair
from gateway.learned import Learned
from routing.index import NO_HIT, Match
from routing.prefix import reusable_tokens
from routing.types import DecodeState, Dropped, PrefillState, RequestView

BLOCK_BYTES = 256
"""Bytes of canonical prompt in one block of the `text` index (design: about 64 tokens)."""

_REASONS_TOLD = 8


def prefill_state(
    view: EngineView, request: RequestView, match: Match, learned: Learned, bookings: Bookings, now_s: float
) -> PrefillState:
    """One prefill that passed the filters, with what is promised to it and what of this prompt it holds."""
    facts = view.facts
    assert facts is not None  # the filters dropped views without facts
    timing = learned.prefill_timing(view.engine_id, facts.chunk_tokens)
    hit = match.get(view.engine_id, NO_HIT) if facts.radix_cache else NO_HIT
    page_tokens = facts.cache_format.page_size_tokens
    booked_tokens = bookings.uncached_tokens(view.engine_id)
    reported_tokens = view.load.waiting_uncached_tokens if view.load is not None else 0
    unbooked_tokens = max(0, reported_tokens - booked_tokens)  # what others than this fleet's gateways brought
    return PrefillState(
        view,
        timing,
        booked_s=bookings.queue_s(view.engine_id, timing, now_s) + unbooked_tokens * timing.per_token_s,
        booked_uncached_tokens=booked_tokens + unbooked_tokens,
        booked_requests=bookings.prefill_requests(view.engine_id),
        hit_tokens=hit_tokens(hit.held_blocks, request, page_tokens),
        pending_hit_tokens=hit_tokens(hit.pending_blocks, request, page_tokens),
    )


def decode_state(view: EngineView, learned: Learned, bookings: Bookings) -> DecodeState:
    """One decode that passed the filters, as full as bookings or its own report say, whichever is more."""
    facts = view.facts
    assert facts is not None  # the filters dropped views without facts
    reported_tokens = view.load.total_tokens if view.load is not None else 0
    return DecodeState(
        view,
        learned.decode_timing(view.engine_id),
        facts.max_total_tokens,
        booked_tokens=max(bookings.decode_kv_tokens(view.engine_id), reported_tokens),
        booked_requests=bookings.decode_requests(view.engine_id),
        max_running_requests=facts.max_running_requests,
    )


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
