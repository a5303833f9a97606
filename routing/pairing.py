"""The best pair of a snapshot: an exact minimum that looks at few pairs. Pure, given a seeded rng.

Each prefill gets a lower bound over all its pairs, from its own terms, its fastest link and the best decode. Prefills
are visited by that bound, and for each the decodes by their own terms, until no bound is below the best pair found.
The waits of both sides overlap (the longer counts), so a pair is bounded twice: by the prefill's wait and by the
decode's; each prefill walks the decodes in the order whose bound is the tighter.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple, Protocol

from engines.timing import LinkTiming
from engines.types import EngineId
from routing.cost import (
    CostConfig,
    DecodeSide,
    PrefillSide,
    decode_sides,
    pair_terms,
    pair_transfer_s,
    pair_wait_s,
    prefill_sides,
    transfer_s,
)
from routing.types import Candidate, Choice, RequestView, RoutingSnapshot

CONSIDERED = 16
"""Candidates a decision keeps for `explain`."""

_Pair = tuple[PrefillSide, DecodeSide]


class SideLoad(NamedTuple):
    """One engine to a policy that chooses sides separately: its own cost, and what is booked on it."""

    engine_id: EngineId
    own_cost_s: float
    booked_tokens: int
    booked_requests: int


class SidePolicy(Protocol):
    """Chooses among the engines of one side, without a look at the other."""

    def pick(self, loads: Sequence[SideLoad], rng: Random) -> int:
        """The index of the chosen engine in `loads`, which is never empty."""
        ...


def best_pair(
    request: RequestView, snapshot: RoutingSnapshot, config: CostConfig, rng: Random, limit: int = CONSIDERED
) -> Choice | None:
    """The pair with the least total cost, or None when no pair is allowed.

    `rng` chooses among equal pairs. `considered` holds up to `limit` candidates, best first: all pairs where they are
    no more, else those visited and the neighbours of the best (same prefill or same decode).
    """
    search = _Search(request, snapshot)
    decodes = _Decodes(decode_sides(request, snapshot.decodes, config), rng)
    prefills = _reaches(request, snapshot, decodes, rng)
    best: _Pair | None = None
    best_s = math.inf
    for reach in prefills:
        if reach.bound_s >= best_s:
            break
        base_s, ranked = decodes.tightest(reach)
        for key_s, _, _, decode in ranked:
            if base_s + key_s >= best_s:
                break
            total_s = search.visit(reach.side, decode)
            if total_s < best_s:
                best_s, best = total_s, (reach.side, decode)
    if best is None:
        return None
    _visit_for_the_record(search, [reach.side for reach in prefills], [row[3] for row in decodes.by_own], best, limit)
    return search.choice(best, limit)


def _visit_for_the_record(
    search: _Search, prefills: Sequence[PrefillSide], decodes: Sequence[DecodeSide], best: _Pair, limit: int
) -> None:
    """Price what a reader of the decision asks for next: all pairs of a small fleet, else the best one's neighbours."""
    if len(prefills) * len(decodes) <= limit:
        pairs = [(prefill, decode) for prefill in prefills for decode in decodes]
    else:
        pairs = [(prefill, best[1]) for prefill in prefills[: 1 + limit // 2]]
        pairs += [(best[0], decode) for decode in decodes[: 1 + limit // 2]]
    for prefill, decode in pairs:
        search.visit(prefill, decode)


def separate_choice(
    request: RequestView,
    snapshot: RoutingSnapshot,
    config: CostConfig,
    rng: Random,
    prefill_policy: SidePolicy,
    decode_policy: SidePolicy,
) -> Choice | None:
    """A prefill by one policy, then a decode allowed with it by another; None when no pair is allowed.

    The cost is still told, of the chosen pair alone.
    """
    search = _Search(request, snapshot)
    decodes = decode_sides(request, snapshot.decodes, config)
    prefills = [
        side for side in prefill_sides(request, snapshot) if any(search.allows(side, decode) for decode in decodes)
    ]
    if not prefills:
        return None
    prefill = prefills[prefill_policy.pick([_prefill_load(side) for side in prefills], rng)]
    decodes = [decode for decode in decodes if search.allows(prefill, decode)]
    decode = decodes[decode_policy.pick([_decode_load(side) for side in decodes], rng)]
    search.visit(prefill, decode)
    return search.choice((prefill, decode), 1)


def fastest_links(snapshot: RoutingSnapshot) -> Mapping[EngineId, LinkTiming]:
    """For each prefill with links of its own, a link that none of its pairs is faster than.

    Linear in the links: a caller with thousands keeps it as `RoutingSnapshot.link_bounds`.
    """
    decode_ids = {state.view.engine_id for state in snapshot.decodes}
    fastest: dict[EngineId, LinkTiming] = {}
    counts: Counter[EngineId] = Counter()
    for (prefill, decode), link in snapshot.links.items():
        if decode in decode_ids:
            counts[prefill] += 1
            known = fastest.get(prefill)
            fastest[prefill] = link if known is None else _faster(known, link)
    for prefill, known in fastest.items():
        if counts[prefill] < len(decode_ids):
            fastest[prefill] = _faster(known, snapshot.default_link)
    return fastest


class _Reach(NamedTuple):
    """A prefill, and what any pair of it costs at least; sorts by that, equals at random.

    A pair costs at least `early_s` plus the decode's own terms, and at least `late_s` plus its wait and own terms.
    """

    bound_s: float
    tie: float
    order: int
    side: PrefillSide
    early_s: float
    late_s: float


_Ranked = list[tuple[float, float, int, DecodeSide]]
"""Decodes by a key in seconds; equals at random, and never compared further than their order."""


class _Decodes:
    """The decodes in two orders: by their own terms, and by their wait plus own terms."""

    def __init__(self, sides: Sequence[DecodeSide], rng: Random) -> None:
        self.by_own: _Ranked = sorted((side.own_s, rng.random(), index, side) for index, side in enumerate(sides))
        self.by_wait = self.by_own
        if any(side.wait_s for side in sides):
            self.by_wait = sorted((side.wait_s + own_s, tie, index, side) for own_s, tie, index, side in self.by_own)
        self.own_s = self.by_own[0][0] if sides else math.inf
        self.wait_s = self.by_wait[0][0] if sides else math.inf

    def tightest(self, reach: _Reach) -> tuple[float, _Ranked]:
        """The order whose bound is the higher for this prefill, and what to add to its keys."""
        if reach.early_s + self.own_s >= reach.late_s + self.wait_s:
            return reach.early_s, self.by_own
        return reach.late_s, self.by_wait


class _Search:
    """The pairs visited for one request, each priced once."""

    def __init__(self, request: RequestView, snapshot: RoutingSnapshot) -> None:
        self._request = request
        self._snapshot = snapshot
        self._visited: dict[tuple[EngineId, EngineId], _Priced] = {}

    def allows(self, prefill: PrefillSide, decode: DecodeSide) -> bool:
        pair = (prefill.state.view.engine_id, decode.state.view.engine_id)
        return pair not in self._request.excluded_pairs and pair not in self._snapshot.incompatible

    def visit(self, prefill: PrefillSide, decode: DecodeSide) -> float:
        """The total cost of this pair; infinite when it is not allowed."""
        pair = (prefill.state.view.engine_id, decode.state.view.engine_id)
        if (known := self._visited.get(pair)) is not None:
            return known.total_s
        if not self.allows(prefill, decode):
            return math.inf
        moving_s = pair_transfer_s(self._request, prefill, decode, self._snapshot)
        total_s = pair_wait_s(prefill, decode) + prefill.compute_s + moving_s + decode.own_s
        self._visited[pair] = _Priced(total_s, moving_s, prefill, decode)
        return total_s

    def choice(self, best: _Pair, limit: int) -> Choice:
        """The chosen pair first, then the best others visited."""
        prefill, decode = best
        chosen = self._visited.pop((prefill.state.view.engine_id, decode.state.view.engine_id)).candidate()
        others = heapq.nsmallest(limit - 1, self._visited.values(), key=itemgetter(0))
        return Choice(chosen, (chosen, *(priced.candidate() for priced in others)))


class _Priced(NamedTuple):
    total_s: float
    moving_s: float
    prefill: PrefillSide
    decode: DecodeSide

    def candidate(self) -> Candidate:
        terms = pair_terms(self.prefill, self.decode, self.moving_s)
        ids = self.prefill.state.view.engine_id, self.decode.state.view.engine_id
        return Candidate(*ids, terms, self.prefill.hit_tokens)


def _reaches(request: RequestView, snapshot: RoutingSnapshot, decodes: _Decodes, rng: Random) -> list[_Reach]:
    """Every prefill with its bounds, the lowest first."""
    bounds = snapshot.link_bounds or (fastest_links(snapshot) if snapshot.links else {})
    reused_tokens = max([state.reuse_tokens for state in snapshot.decodes], default=0)
    sent_tokens = max(0, request.prompt_tokens - reused_tokens)
    link, nic_s = snapshot.default_link, 0.0
    reaches = []
    for index, side in enumerate(prefill_sides(request, snapshot)):
        if bounds:
            link = bounds.get(side.state.view.engine_id, snapshot.default_link)
        moving_s = least_moving_s = transfer_s(side, sent_tokens, link, snapshot.kv_bytes_per_token)
        if snapshot.nic_free_s:
            nic_s = snapshot.nic_free_s.get(side.state.view.engine_id, 0.0) - side.queue_s
            moving_s = transfer_s(side, sent_tokens, link, snapshot.kv_bytes_per_token, nic_s)
        early_s = side.queue_s + side.compute_s + moving_s
        late_s = side.compute_s + least_moving_s
        by_own_s, by_wait_s = early_s + decodes.own_s, late_s + decodes.wait_s
        bound_s = by_own_s if by_own_s > by_wait_s else by_wait_s
        reaches.append(_Reach(bound_s, rng.random(), index, side, early_s, late_s))
    reaches.sort()
    return reaches


def _faster(one: LinkTiming, other: LinkTiming) -> LinkTiming:
    return LinkTiming(max(one.bytes_per_s, other.bytes_per_s), min(one.fixed_s, other.fixed_s))


def _prefill_load(side: PrefillSide) -> SideLoad:
    state = side.state
    own_cost_s = side.queue_s + side.compute_s
    return SideLoad(state.view.engine_id, own_cost_s, state.booked_uncached_tokens, state.booked_requests)


def _decode_load(side: DecodeSide) -> SideLoad:
    state = side.state
    return SideLoad(state.view.engine_id, side.wait_s + side.own_s, state.booked_tokens, state.booked_requests)
