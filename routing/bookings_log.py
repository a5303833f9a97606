"""What replicas tell each other of their bookings: absolute totals per engine, as entries of one stream. Pure.

An entry names its replica and holds totals of the engines that changed, or (`whole`) of all engines on which anything
is booked. Absolute totals need no history: a lost entry is made good by the next whole one.

How wrong a reader can be: a change is sent at most `APART_S` after the one before it and is then on its way through
Redis. For that long (20 ms + delivery) others do not know what a replica has just booked or released. Two replicas may
then choose the same engine on the same free room, so a total is short by at most what the others booked in that time:
their request rate × 20 ms, each with its prompt. Predicted seconds left are sent with changes and every `AGAIN_S`, and
are not counted down in between: up to 0.25 s too high for each replica. Each replica rounds up to whole forwards of its
own: up to one forward's fixed time too high for each. After its death a replica counts for `FORGOTTEN_S` more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

import orjson

from engines.types import EngineId

APART_S = 0.02
"""Between two entries of one replica, at least."""
AGAIN_S = 0.25
"""A replica on which anything is booked says all of it at least this often."""
FORGOTTEN_S = 1.0
"""What a replica has booked counts for nothing when it was not heard for this long."""
MAX_ENTRIES = 1000
"""Entries kept in the stream, about: readers want the newest only."""

_MAX = 2**53
"""Beyond this no total is believed."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What is promised on one engine and not over. `queue_s`: predicted prefill seconds that are left."""

    queue_s: float = 0.0
    uncached_tokens: int = 0
    prefill_requests: int = 0
    prefill_kv_tokens: int = 0
    decode_kv_tokens: int = 0
    decode_requests: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.queue_s + other.queue_s,
            self.uncached_tokens + other.uncached_tokens,
            self.prefill_requests + other.prefill_requests,
            self.prefill_kv_tokens + other.prefill_kv_tokens,
            self.decode_kv_tokens + other.decode_kv_tokens,
            self.decode_requests + other.decode_requests,
        )


NOTHING = Totals()


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the stream. `number` grows with every entry of one replica; those missing in a whole one have 0."""

    replica: str
    number: int
    whole: bool
    totals: Mapping[EngineId, Totals]


def pack(entry: Entry) -> dict[bytes, bytes]:
    """The fields of an entry."""
    rows = {
        engine_id: (
            round(each.queue_s, 6),
            each.uncached_tokens,
            each.prefill_requests,
            each.prefill_kv_tokens,
            each.decode_kv_tokens,
            each.decode_requests,
        )
        for engine_id, each in entry.totals.items()
    }
    return {
        b"replica": entry.replica.encode(),
        b"number": b"%d" % entry.number,
        b"whole": b"%d" % entry.whole,
        b"totals": orjson.dumps(rows),
    }


def unpack(fields: Mapping[bytes, bytes]) -> Entry | None:
    """An entry as it was packed; None for anything else, so that a stranger's entry harms nobody."""
    try:
        rows = orjson.loads(fields[b"totals"])
        totals = {EngineId(name): _totals(*row) for name, row in rows.items()}
        return Entry(fields[b"replica"].decode(), int(fields[b"number"]), fields[b"whole"] == b"1", totals)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _totals(queue_s: float, *counts: int) -> Totals:
    fits = isinstance(queue_s, float | int) and isfinite(queue_s) and 0 <= queue_s < _MAX
    if not fits or len(counts) != 5 or not all(type(each) is int and 0 <= each < _MAX for each in counts):
        raise ValueError("no totals")
    return Totals(float(queue_s), *counts)


class Publication:
    """What one replica has said, and what it has to say next."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._number = 0
        self._said: Mapping[EngineId, Totals] | None = {}
        """As others know it; None when that is not certain."""
        self._whole_s = float("-inf")

    def next(self, totals: Mapping[EngineId, Totals], now_s: float) -> Entry | None:
        """The entry to send now, given all totals that are not zero; None when others know all of it.

        To be followed by `lost` when it could not be sent.
        """
        said = self._said
        whole = said is None or not totals or now_s >= self._whole_s + AGAIN_S
        if whole:
            if said is not None and not totals and not said:
                return None
            changed = totals
            self._whole_s = now_s
        else:
            assert said is not None
            gone = dict.fromkeys(said.keys() - totals.keys(), NOTHING)
            changed = {name: each for name, each in totals.items() if said.get(name) != each} | gone
            if not changed:
                return None
        self._said = dict(totals)
        self._number += 1
        return Entry(self._replica, self._number, whole, changed)

    def lost(self) -> None:
        """The last entry may not have arrived: the next one tells everything."""
        self._said = None

    def again_in_s(self, now_s: float) -> float | None:
        """When something must be said even if nothing changes; None while all others need to know is said."""
        if self._said is None:
            return AGAIN_S
        return max(0.0, self._whole_s + AGAIN_S - now_s) if self._said else None


@dataclass(slots=True)
class _Heard:
    number: int
    heard_s: float
    totals: dict[EngineId, Totals]


class Others:
    """What other replicas have booked, as far as it was heard."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._heard: dict[str, _Heard] = {}

    def hear(self, entries: Iterable[Entry], now_s: float) -> bool:
        """Take entries in the order of the stream; whether any total changed. One's own are skipped."""
        changed = False
        for entry in entries:
            if entry.replica == self._replica:
                continue
            known = self._heard.get(entry.replica)
            if known is None:
                known = self._heard[entry.replica] = _Heard(entry.number, now_s, {})
            elif entry.number <= known.number and now_s < known.heard_s + FORGOTTEN_S:
                continue  # it was delayed on its way and has been overtaken
            before = known.totals
            totals = {} if entry.whole else dict(before)
            totals.update(entry.totals)
            known.totals = {name: each for name, each in totals.items() if each != NOTHING}
            known.number, known.heard_s = entry.number, now_s
            changed = changed or known.totals != before
        return changed

    def forget(self, now_s: float) -> bool:
        """Drop replicas that were not heard lately; whether any total changed."""
        silent = [name for name, each in self._heard.items() if now_s >= each.heard_s + FORGOTTEN_S]
        gone = [self._heard.pop(name) for name in silent]
        return any(each.totals for each in gone)

    def forget_at_s(self) -> float | None:
        """When the first of them will have been silent for too long."""
        return min((each.heard_s + FORGOTTEN_S for each in self._heard.values()), default=None)

    def sums(self) -> dict[EngineId, Totals]:
        """What all of them have booked on each engine; engines without any are left out."""
        sums: dict[EngineId, Totals] = {}
        for heard in self._heard.values():
            for name, each in heard.totals.items():
                sums[name] = sums[name] + each if name in sums else each
        return sums

    def __len__(self) -> int:
        """Replicas that count at the moment: those on which anything was booked lately."""
        return len(self._heard)
