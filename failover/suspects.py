"""How many servers may be risked on one content: of requests that are under way together, not of each for itself. Pure.

A server that ended while it worked on a request makes the content of that request a suspect. From then on one attempt
at it runs at a time, and others with the same content wait; when it has shown that it ends nobody, all go on. Whoever
was at work on it elsewhere when the first server ended may end there too: so at most `MAX_DEATHS` servers of one role
end of one content, or as many as had it at that moment.

A fingerprint is any bytes that name the content of a request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from engines.types import EngineId, Leg
from failover.poison import MAX_ENTRIES, REFUSED_S
from failover.retry import MAX_DEATHS


class May(Enum):
    """Whether one more attempt at a content may begin now."""

    GO = "go"
    WAIT = "wait"
    """Not before others have come to something."""
    NEVER = "never"
    """It has ended as many servers as it may."""


def may_try(ended: int, in_doubt: int, at_risk: int) -> May:
    """The rule. `ended`: servers that one content has ended, `in_doubt`: that may have, `at_risk`: attempts under way
    that have not shown yet that they end nobody."""
    if ended >= MAX_DEATHS:
        return May.NEVER
    lost = ended + in_doubt
    return May.GO if not lost or lost + at_risk < MAX_DEATHS else May.WAIT


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that broke off its part of an attempt: the same one is counted once."""

    leg: Leg
    engine_id: EngineId
    epoch: int


@dataclass(slots=True)
class _Suspicion:
    until_s: float
    """It is forgotten then."""
    ended: set[Victim]
    in_doubt: Counter[Victim]

    def most(self, victims: Iterable[Victim]) -> int:
        """Of one role."""
        return max(Counter(victim.leg for victim in set(victims)).values(), default=0)


def _nobody(fingerprint: bytes) -> None:
    """Nobody wants to know."""


class Suspects:
    """The contents that are under way, and those that are suspects. Bounded: suspects in number and time."""

    def __init__(self, remembered_s: float = REFUSED_S, max_entries: int = MAX_ENTRIES) -> None:
        self._remembered_s = remembered_s
        self._max_entries = max_entries
        self._at_risk: Counter[bytes] = Counter()
        self._suspicions: OrderedDict[bytes, _Suspicion] = OrderedDict()
        self.on_change: Callable[[bytes], None] = _nobody
        """Called with a content of which more may be tried now, or nothing any more."""

    def may_try(self, fingerprint: bytes, now_s: float) -> May:
        """Whether one more attempt at it may begin now."""
        if (suspicion := self._suspicion(fingerprint, now_s)) is None:
            return May.GO
        ended, lost = suspicion.most(suspicion.ended), suspicion.most({*suspicion.ended, *suspicion.in_doubt})
        return may_try(ended, lost - ended, self._at_risk[fingerprint])

    def deaths(self, fingerprint: bytes, now_s: float) -> int:
        """How many servers of one role it has ended."""
        suspicion = self._suspicion(fingerprint, now_s)
        return 0 if suspicion is None else suspicion.most(suspicion.ended)

    def begins(self, fingerprint: bytes) -> None:
        """An attempt at it begins; `ends` follows, once."""
        self._at_risk[fingerprint] += 1

    def ends(self, fingerprint: bytes) -> None:
        """An attempt is over, or has shown that it ends nobody."""
        self._at_risk[fingerprint] -= 1
        if not self._at_risk[fingerprint]:
            del self._at_risk[fingerprint]
        if fingerprint in self._suspicions:
            self.on_change(fingerprint)

    def harmless(self, fingerprint: bytes) -> None:
        """An attempt at it ended nobody: it is no suspect any more."""
        if self._suspicions.pop(fingerprint, None) is not None:
            self.on_change(fingerprint)

    def broke(self, fingerprint: bytes, victims: Iterable[Victim], now_s: float) -> None:
        """These broke off their parts of one attempt; `found` follows, once, with those of them that have ended."""
        suspicion = self._suspicion(fingerprint, now_s) or _Suspicion(0.0, set(), Counter())
        suspicion.until_s = now_s + self._remembered_s
        suspicion.in_doubt.update(set(victims))
        self._suspicions[fingerprint] = suspicion
        self._suspicions.move_to_end(fingerprint)
        while len(self._suspicions) > self._max_entries:
            self._suspicions.popitem(last=False)

    def found(self, fingerprint: bytes, victims: Iterable[Victim], ended: Iterable[Victim]) -> None:
        """What has become of those that broke off."""
        if (suspicion := self._suspicions.get(fingerprint)) is None:
            return
        suspicion.in_doubt.subtract(set(victims))
        suspicion.in_doubt = +suspicion.in_doubt
        suspicion.ended.update(ended)
        if not suspicion.ended and not suspicion.in_doubt:
            del self._suspicions[fingerprint]
        self.on_change(fingerprint)

    def _suspicion(self, fingerprint: bytes, now_s: float) -> _Suspicion | None:
        suspicion = self._suspicions.get(fingerprint)
        if suspicion is not None and suspicion.until_s <= now_s:
            del self._suspicions[fingerprint]
            return None
        return suspicion

    def __len__(self) -> int:
        """Contents that anything is known of."""
        return len(self._at_risk.keys() | self._suspicions.keys())
