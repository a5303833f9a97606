"""What has been promised on each server and is not over: predicted prefill seconds and tokens, decode KV tokens.

A booking is made with the decision and released exactly once, its prefill half at hand-over and the rest at the end.
What other gateways have promised comes as totals (how late: `routing/bookings_log.py`) and is added to what is read. No
I/O; the time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engines.timing import PrefillTiming, PrefillWork
from engines.types import EngineId
from failover.wedge import Owed
from routing.bookings_log import NOTHING, Totals


@dataclass(frozen=True, slots=True)
class Booking:
    """One attempt's promise. `predicted_prefill_s` is by the estimators at the time of the decision."""

    rid: str
    prefill: EngineId
    decode: EngineId
    work: PrefillWork
    kv_tokens: int
    predicted_prefill_s: float
    booked_s: float
    prefill_rank: int | None = None
    """The DP rank of the prefill, where it has several; so for the decode."""
    decode_rank: int | None = None


class PrefillPromise(NamedTuple):
    """What one DP rank of a prefill has to do. A tuple, since one is made for every rank in every decision."""

    queue_s: float
    uncached_tokens: int
    requests: int


class DecodePromise(NamedTuple):
    """What one DP rank of a decode has to hold."""

    kv_tokens: int
    requests: int


@dataclass(slots=True)
class _Prefill:
    """Sums over what is promised to one prefill and not handed over. `busy_since_s`: since when its head computes."""

    works: dict[str, Booking] = field(default_factory=dict)
    new_tokens: int = 0
    prompt_tokens: int = 0
    attention: int = 0
    busy_since_s: float = 0.0

    def add(self, booking: Booking) -> None:
        if not self.works:
            self.busy_since_s = booking.booked_s
        self.works[booking.rid] = booking
        self.new_tokens += booking.work.new_tokens
        self.prompt_tokens += booking.work.prompt_tokens
        self.attention += _attention(booking.work)

    def take(self, booking: Booking, now_s: float) -> float | None:
        """Remove it; the seconds it took since its head's turn came, or None when it is not here."""
        if self.works.pop(booking.rid, None) is None:
            return None
        took_s = now_s - max(self.busy_since_s, booking.booked_s)
        self.busy_since_s = now_s
        self.new_tokens -= booking.work.new_tokens
        self.prompt_tokens -= booking.work.prompt_tokens
        self.attention -= _attention(booking.work)
        return took_s

    def queue_s(self, timing: PrefillTiming, now_s: float) -> float:
        """Seconds until all of it is worked off, in forwards of `chunk_tokens`."""
        if not self.works:
            return 0.0
        forwards = -(-self.new_tokens // timing.chunk_tokens) if self.new_tokens else 0
        total_s = forwards * timing.base_s + self.new_tokens * timing.per_token_s + self.attention * timing.per_token2_s
        head_s = next(iter(self.works.values())).predicted_prefill_s
        return max(0.0, total_s - min(head_s, now_s - self.busy_since_s))


@dataclass(slots=True)
class _Decode:
    works: dict[str, Booking] = field(default_factory=dict)
    kv_tokens: int = 0

    def add(self, booking: Booking) -> None:
        self.works[booking.rid] = booking
        self.kv_tokens += booking.kv_tokens

    def take(self, booking: Booking) -> bool:
        if self.works.pop(booking.rid, None) is None:
            return False
        self.kv_tokens -= booking.kv_tokens
        return True


_NO_PREFILL, _NO_DECODE = _Prefill(), _Decode()


def _nobody(_: object = None) -> None:
    """Nobody wants to know."""


class Bookings:
    """The table of one gateway, and the totals of the others.

    What is read of an engine is the sum over all gateways, save where a name says `own`.
    """

    def __init__(self) -> None:
        self._prefills: dict[EngineId, _Prefill] = {}
        self._decodes: dict[EngineId, _Decode] = {}
        self._prefill_ranks: dict[tuple[EngineId, int], _Prefill] = {}
        self._decode_ranks: dict[tuple[EngineId, int], _Decode] = {}
        self._others: Mapping[EngineId, Totals] = {}
        self.version = 0
        self.own_changed: Callable[[], None] = _nobody
        """Called after every change of one's own."""
        self.on_booked: Callable[[Booking], None] = _nobody
        self.on_released: Callable[[Booking], None] = _nobody
        """Called for each booking, when all of it is released."""

    def set_others(self, totals: Mapping[EngineId, Totals]) -> None:
        """What all other gateways together have promised now; engines left out have nothing of them."""
        if totals != self._others:
            self._others = totals
            self.version += 1

    def book(self, booking: Booking) -> None:
        for prefill in self._prefills_of(booking):
            prefill.add(booking)
        for decode in self._decodes_of(booking):
            decode.add(booking)
        self._own_changed()
        self.on_booked(booking)

    def prefill_done(self, booking: Booking, now_s: float) -> float | None:
        """Release the prefill half; the seconds this prefill took, or None when it was released before.

        Prefills work in order, so one took from the end of the one before it (or from its own dispatch) until now.
        """
        took_s = [prefill.take(booking, now_s) for prefill in self._prefills_of(booking)][-1]
        if took_s is not None:
            self._own_changed()
        return took_s

    def release(self, booking: Booking, now_s: float) -> bool:
        """Release all of it; whether any of it was still held."""
        held = self.prefill_done(booking, now_s) is not None
        if all(decode.take(booking) for decode in self._decodes_of(booking)):
            self._own_changed()
            held = True
        if held:
            self.on_released(booking)
        return held

    def _prefills_of(self, booking: Booking) -> Iterator[_Prefill]:
        """Where the prefill half is counted: with the server, and with its rank where it has several."""
        yield self._prefills.setdefault(booking.prefill, _Prefill())
        if booking.prefill_rank is not None:
            yield self._prefill_ranks.setdefault((booking.prefill, booking.prefill_rank), _Prefill())

    def _decodes_of(self, booking: Booking) -> Iterator[_Decode]:
        yield self._decodes.setdefault(booking.decode, _Decode())
        if booking.decode_rank is not None:
            yield self._decode_ranks.setdefault((booking.decode, booking.decode_rank), _Decode())

    # ---- what all gateways have promised ---------------------------------------------------------------------------

    def queue_s(self, engine_id: EngineId, timing: PrefillTiming, now_s: float) -> float:
        """Seconds until a prefill has worked off what is promised to it, in forwards of `chunk_tokens`."""
        return self.own_queue_s(engine_id, timing, now_s) + self._of_others(engine_id).queue_s

    def uncached_tokens(self, engine_id: EngineId) -> int:
        prefill = self._prefills.get(engine_id)
        return (prefill.new_tokens if prefill is not None else 0) + self._of_others(engine_id).uncached_tokens

    def prefill_requests(self, engine_id: EngineId) -> int:
        prefill = self._prefills.get(engine_id)
        return (len(prefill.works) if prefill is not None else 0) + self._of_others(engine_id).prefill_requests

    def prefill_kv_tokens(self, engine_id: EngineId) -> int:
        """KV that attempts in their prefill phase may hold on a prefill: their whole prompts."""
        prefill = self._prefills.get(engine_id)
        return (prefill.prompt_tokens if prefill is not None else 0) + self._of_others(engine_id).prefill_kv_tokens

    def decode_kv_tokens(self, engine_id: EngineId) -> int:
        decode = self._decodes.get(engine_id)
        return (decode.kv_tokens if decode is not None else 0) + self._of_others(engine_id).decode_kv_tokens

    def decode_requests(self, engine_id: EngineId) -> int:
        decode = self._decodes.get(engine_id)
        return (len(decode.works) if decode is not None else 0) + self._of_others(engine_id).decode_requests

    def on_prefill_ranks(
        self, engine_id: EngineId, ranks: int, timing: PrefillTiming, now_s: float
    ) -> list[PrefillPromise]:
        """What all gateways have promised on each DP rank of a prefill.

        What others have promised is known of the server alone, and is thought to be spread evenly.
        """
        others = self._of_others(engine_id)
        tokens, requests = -(-others.uncached_tokens // ranks), -(-others.prefill_requests // ranks)
        found = (self._prefill_ranks.get((engine_id, rank), _NO_PREFILL) for rank in range(ranks))
        return [
            PrefillPromise(
                prefill.queue_s(timing, now_s) + others.queue_s / ranks,
                prefill.new_tokens + tokens,
                len(prefill.works) + requests,
            )
            for prefill in found
        ]

    def on_decode_ranks(self, engine_id: EngineId, ranks: int) -> list[DecodePromise]:
        """The same of a decode."""
        others = self._of_others(engine_id)
        tokens, requests = -(-others.decode_kv_tokens // ranks), -(-others.decode_requests // ranks)
        found = (self._decode_ranks.get((engine_id, rank), _NO_DECODE) for rank in range(ranks))
        return [DecodePromise(decode.kv_tokens + tokens, len(decode.works) + requests) for decode in found]

    def beside(self, booking: Booking) -> tuple[int, int]:
        """Requests and KV tokens that one batch of the booking's decode has, itself counted."""
        engine_id, rank = booking.decode, booking.decode_rank
        if rank is None:
            return self.decode_requests(engine_id), self.decode_kv_tokens(engine_id)
        decode = self._decode_ranks.get((engine_id, rank), _NO_DECODE)
        return len(decode.works), decode.kv_tokens

    def _of_others(self, engine_id: EngineId) -> Totals:
        return self._others.get(engine_id, NOTHING)

    # ---- what this one has promised --------------------------------------------------------------------------------

    def own_queue_s(self, engine_id: EngineId, timing: PrefillTiming, now_s: float) -> float:
        """`queue_s` over this gateway's bookings alone."""
        return self._prefills.get(engine_id, _NO_PREFILL).queue_s(timing, now_s)

    def own(self, engine_id: EngineId) -> Totals:
        """This gateway's totals on an engine, without `queue_s`, which takes a timing: see `own_queue_s`."""
        prefill = self._prefills.get(engine_id)
        decode = self._decodes.get(engine_id)
        return Totals(
            uncached_tokens=prefill.new_tokens if prefill is not None else 0,
            prefill_requests=len(prefill.works) if prefill is not None else 0,
            prefill_kv_tokens=prefill.prompt_tokens if prefill is not None else 0,
            decode_kv_tokens=decode.kv_tokens if decode is not None else 0,
            decode_requests=len(decode.works) if decode is not None else 0,
        )

    def owed(self, engine_id: EngineId) -> Owed:
        """What an engine still has to do for this gateway: a prefill all of it, a decode what was handed over to it."""
        if (prefill := self._prefills.get(engine_id)) is not None and prefill.works:
            works = prefill.works.values()
            return Owed(len(works), max(booking.predicted_prefill_s for booking in works))
        decode = self._decodes.get(engine_id, _NO_DECODE)
        return Owed(sum(not self._is_in_prefill(booking) for booking in decode.works.values()))

    def _is_in_prefill(self, booking: Booking) -> bool:
        prefill = self._prefills.get(booking.prefill)
        return prefill is not None and booking.rid in prefill.works

    def own_engines(self) -> Iterator[EngineId]:
        """The engines on which this gateway has promised anything."""
        yield from (engine_id for engine_id, prefill in self._prefills.items() if prefill.works)
        yield from (engine_id for engine_id, decode in self._decodes.items() if decode.works)

    def has(self, booking: Booking) -> bool:
        """Whether any of it is not released."""
        sides = (self._prefills.get(booking.prefill), self._decodes.get(booking.decode))
        return any(side is not None and booking.rid in side.works for side in sides)

    def live(self) -> int:
        """Bookings of this gateway not yet released on either side."""
        rids: set[str] = set()
        for prefill in self._prefills.values():
            rids.update(prefill.works)
        for decode in self._decodes.values():
            rids.update(decode.works)
        return len(rids)

    def _own_changed(self) -> None:
        self.version += 1
        self.own_changed()


def _attention(work: PrefillWork) -> int:
    return max(0, work.prompt_tokens**2 - work.cached_tokens**2)
