"""The waiting line: bounded, first come first served, and when its head may leave. Pure: the time is an argument.

The order is decided in `ready` alone, so that deadlines and fairness can replace it without touching the bounds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from engines.types import EngineId
from routing.types import DecodeState, RequestView

FILL_RATIO = 0.95
"""How full bookings may make a decode: at 0.95 late binding was worth 11 % on a decode-bound fleet (simulated)."""


class Offer(StrEnum):
    """What became of a request offered to the queue."""

    ACCEPTED = "accepted"
    FULL_REQUESTS = "full_requests"
    FULL_BYTES = "full_bytes"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of one queue; `max_bytes` counts request bodies."""

    max_requests: int = 10_000
    max_bytes: int = 1 << 30


class WaitingQueue:
    """Requests that wait for a pair, each known by its `request_id`."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._waiting: OrderedDict[str, RequestView] = OrderedDict()
        self._bytes = 0
        self._earliest_s = math.inf
        """No deadline in the queue is before this; most looks at `expired` then cost nothing."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def body_bytes(self) -> int:
        """Bytes of the bodies that wait."""
        return self._bytes

    def offer(self, request: RequestView) -> Offer:
        """Let `request` wait at the end, if the bounds allow; ValueError when it waits already.

        One that goes on with a broken stream was let in before, and is not turned away now.
        """
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} waits already")
        if not request.goes_on:
            if len(self._waiting) >= self._limits.max_requests:
                return Offer.FULL_REQUESTS
            if self._bytes + request.body_bytes > self._limits.max_bytes:
                return Offer.FULL_BYTES
        self._waiting[request.request_id] = request
        self._bytes += request.body_bytes
        self._earliest_s = min(self._earliest_s, request.deadline_s)
        return Offer.ACCEPTED

    def take(self, request_id: str) -> RequestView | None:
        """Remove one request (dispatched, or its client has gone); None when it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._bytes -= request.body_bytes
        return request

    def expired(self, now_s: float) -> tuple[RequestView, ...]:
        """Remove and return those whose deadline has passed."""
        if now_s < self._earliest_s:
            return ()
        late = tuple(request for request in self._waiting.values() if request.deadline_s <= now_s)
        for request in late:
            self.take(request.request_id)
        self._earliest_s = min((request.deadline_s for request in self._waiting.values()), default=math.inf)
        return late

    def ready(self, limit: int = 16) -> tuple[RequestView, ...]:
        """The next `limit` requests in the order they should leave; they go on waiting until `take`."""
        return tuple(islice(self._waiting.values(), limit))


def has_room(request: RequestView, decode: DecodeState, fill_ratio: float = FILL_RATIO) -> bool:
    """Whether `decode` can hold prompt and expected output, both by what is booked and by what it reports.

    An empty decode may be filled to the brim: a prompt between `fill_ratio` and 1 would otherwise wait for ever.
    """
    if decode.booked_requests >= decode.max_running_requests:
        return False
    load = decode.view.load
    used_tokens = max(decode.booked_tokens, load.of_rank(decode.rank).used_tokens if load is not None else 0)
    need_tokens = max(0, request.kv_tokens - decode.reuse_tokens)
    limit_ratio = fill_ratio if decode.booked_requests else 1.0
    return used_tokens + need_tokens <= limit_ratio * decode.capacity_tokens


class HeldBack:
    """What requests that must wait keep from those behind them: their turn, and the decodes that they wait for.

    One that waits for other decodes, because of its model or of where it has failed before, is no reason to wait for
    those behind it; whoever is equal in both stays behind it.
    """

    def __init__(self) -> None:
        self._lines: set[_Line] = set()
        self._decodes: set[EngineId] = set()

    def waits(self, request: RequestView, full: Iterable[EngineId]) -> None:
        """`request` must wait until one of the decodes `full` has room for it."""
        self._lines.add(_line(request))
        self._decodes.update(full)

    def has_turn(self, request: RequestView) -> bool:
        """Whether no equal request waits before it."""
        return _line(request) not in self._lines

    def lets_use(self, decode: EngineId) -> bool:
        """Whether nobody waits for room on this decode."""
        return decode not in self._decodes


_Line = tuple[str, frozenset[EngineId], frozenset[tuple[EngineId, EngineId]]]


def _line(request: RequestView) -> _Line:
    """Requests that are equal in this may use the same servers."""
    return request.model, request.excluded_engines, request.excluded_pairs


def retry_after_s(queue: WaitingQueue, drained_rps: float, shortest_s: float = 1.0, longest_s: float = 60.0) -> float:
    """When the queue will have worked off what waits now, at the present rate; `longest_s` when nothing drains."""
    if drained_rps <= 0.0:
        return longest_s
    return min(longest_s, max(shortest_s, len(queue) / drained_rps))
