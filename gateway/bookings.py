"""What has been promised on each server and is not over: predicted prefill seconds and tokens, decode KV tokens.

A booking is made with the decision and released exactly once, its prefill half at hand-over and the rest at the end.
No I/O; the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.types import EngineId, PrefillTiming, PrefillWork


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
    attention: int = 0
    busy_since_s: float = 0.0


@dataclass(slots=True)
class _Decode:
    works: dict[str, Booking] = field(default_factory=dict)
    kv_tokens: int = 0


class Bookings:
    """The table of one gateway."""

    def __init__(self) -> None:
        self._prefills: dict[EngineId, _Prefill] = {}
        self._decodes: dict[EngineId, _Decode] = {}
        self.version = 0

    def book(self, booking: Booking) -> None:
        prefill = self._prefills.setdefault(booking.prefill, _Prefill())
        if not prefill.works:
            prefill.busy_since_s = booking.booked_s
        prefill.works[booking.rid] = booking
        prefill.new_tokens += booking.work.new_tokens
        prefill.attention += _attention(booking.work)
        decode = self._decodes.setdefault(booking.decode, _Decode())
        decode.works[booking.rid] = booking
        decode.kv_tokens += booking.kv_tokens
        self.version += 1

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
        prefill.attention -= _attention(booking.work)
        self.version += 1
        return took_s

    def release(self, booking: Booking, now_s: float) -> bool:
        """Release all of it; whether any of it was still held."""
        held = self.prefill_done(booking, now_s) is not None
        decode = self._decodes.get(booking.decode)
        if decode is not None and decode.works.pop(booking.rid, None) is not None:
            decode.kv_tokens -= booking.kv_tokens
            self.version += 1
            held = True
        return held

    def queue_s(self, engine_id: EngineId, timing: PrefillTiming, now_s: float) -> float:
        """Seconds until a prefill has worked off what is promised to it, in forwards of `chunk_tokens`."""
        prefill = self._prefills.get(engine_id)
        if prefill is None or not prefill.works:
            return 0.0
        forwards = -(-prefill.new_tokens // timing.chunk_tokens) if prefill.new_tokens else 0
        total_s = (
            forwards * timing.base_s + prefill.new_tokens * timing.per_token_s + prefill.attention * timing.per_token2_s
        )
        head_s = next(iter(prefill.works.values())).predicted_prefill_s
        return max(0.0, total_s - min(head_s, now_s - prefill.busy_since_s))

    def uncached_tokens(self, engine_id: EngineId) -> int:
        prefill = self._prefills.get(engine_id)
        return prefill.new_tokens if prefill is not None else 0

    def prefill_requests(self, engine_id: EngineId) -> int:
        prefill = self._prefills.get(engine_id)
        return len(prefill.works) if prefill is not None else 0

    def prefill_kv_tokens(self, engine_id: EngineId) -> int:
        """KV that attempts in their prefill phase may hold on a prefill: their whole prompts."""
        prefill = self._prefills.get(engine_id)
        return sum(booking.work.prompt_tokens for booking in prefill.works.values()) if prefill is not None else 0

    def decode_kv_tokens(self, engine_id: EngineId) -> int:
        decode = self._decodes.get(engine_id)
        return decode.kv_tokens if decode is not None else 0

    def decode_requests(self, engine_id: EngineId) -> int:
        decode = self._decodes.get(engine_id)
        return len(decode.works) if decode is not None else 0

    def live(self) -> int:
        """Bookings not yet released on either side."""
        rids: set[str] = set()
        for prefill in self._prefills.values():
            rids.update(prefill.works)
        for decode in self._decodes.values():
            rids.update(decode.works)
        return len(rids)


def _attention(work: PrefillWork) -> int:
    return max(0, work.prompt_tokens**2 - work.cached_tokens**2)
