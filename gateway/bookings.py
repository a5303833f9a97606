"""What has been promised on each server and is not over: predicted prefill seconds and tokens, decode KV tokens.

A booking is made with the decision and released exactly once, its prefill half at hand-over and the rest at the end.
What other gateways have promised comes as totals (how late: `routing/bookings_log.py`) and is added to what is read. No
I/O; the time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from engines.types import EngineId, PrefillTiming, PrefillWork
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


@dataclass(slots=True)
class _Prefill:
    """Sums over what is promised to one prefill and not handed over. `busy_since_s`: since when its head computes."""

    works: dict[str, Booking] = field(default_factory=dict)
    new_tokens: int = 0
    prompt_tokens: int = 0
    attention: int = 0
    busy_since_s: float = 0.0


@dataclass(slots=True)
class _Decode:
    works: dict[str, Booking] = field(default_factory=dict)
    kv_tokens: int = 0


def _nobody() -> None:
    """Nobody wants to know."""


class Bookings:
    """The table of one gateway, and the totals of the others.

    What is read of an engine is the sum over all gateways, save where a name says `own`.
    """

    def __init__(self) -> None:
        self._prefills: dict[EngineId, _Prefill] = {}
        self._decodes: dict[EngineId, _Decode] = {}
        self._others: Mapping[EngineId, Totals] = {}
        self.version = 0
        self.own_changed: Callable[[], None] = _nobody
        """Called after every change of one's own."""

    def set_others(self, totals: Mapping[EngineId, Totals]) -> None:
        """What all other gateways together have promised now; engines left out have nothing of them."""
        if totals != self._others:
            self._others = totals
            self.version += 1

    def book(self, booking: Booking) -> None:
        prefill = self._prefills.setdefault(booking.prefill, _Prefill())
        if not prefill.works:
            prefill.busy_since_s = booking.booked_s
        prefill.works[booking.rid] = booking
        prefill.new_tokens += booking.work.new_tokens
        prefill.prompt_tokens += booking.work.prompt_tokens
        prefill.attention += _attention(booking.work)
        decode = self._decodes.setdefault(booking.decode, _Decode())
        decode.works[booking.rid] = booking
        decode.kv_tokens += booking.kv_tokens
        self._own_changed()

    def prefill_done(self, booking: Booking, now_s: float) -> float | None:
        """Release the prefill half; the seconds this prefill took, or None when it was released before.

        Prefills work in order, so one took from the end of the one before it (or from its own dispatch) until now.
        """
        prefill = self._prefills.get(booking.prefill)
        if prefill is None or prefill.works.pop(booking.rid, None) is None:
            return None
        took_s = now_s - max(prefill.busy_since_s, booking.booked_s)
        prefill.busy_since_s = now_s
        prefill.new_tokens -= booking.work.new_tokens
        prefill.prompt_tokens -= booking.work.prompt_tokens
        prefill.attention -= _attention(booking.work)
        self._own_changed()
        return took_s

    def release(self, booking: Booking, now_s: float) -> bool:
        """Release all of it; whether any of it was still held."""
        held = self.prefill_done(booking, now_s) is not None
        decode = self._decodes.get(booking.decode)
        if decode is not None and decode.works.pop(booking.rid, None) is not None:
            decode.kv_tokens -= booking.kv_tokens
            self._own_changed()
            held = True
        return held

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

    def _of_others(self, engine_id: EngineId) -> Totals:
        return self._others.get(engine_id, NOTHING)

    # ---- what this one has promised --------------------------------------------------------------------------------

    def own_queue_s(self, engine_id: EngineId, timing: PrefillTiming, now_s: float) -> float:
        """`queue_s` over this gateway's bookings alone."""
        prefill = self._prefills.get(engine_id)
        if prefill is None or not prefill.works:
            return 0.0
        forwards = -(-prefill.new_tokens // timing.chunk_tokens) if prefill.new_tokens else 0
        total_s = (
            forwards * timing.base_s + prefill.new_tokens * timing.per_token_s + prefill.attention * timing.per_token2_s
        )
        head_s = next(iter(prefill.works.values())).predicted_prefill_s
        return max(0.0, total_s - min(head_s, now_s - prefill.busy_since_s))

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

    def own_engines(self) -> Iterator[EngineId]:
        """The engines on which this gateway has promised anything."""
        yield from (engine_id for engine_id, prefill in self._prefills.items() if prefill.works)
        yield from (engine_id for engine_id, decode in self._decodes.items() if decode.works)

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
