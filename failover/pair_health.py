"""The quarantine matrix: whether KV gets from one prefill to one decode, which no server can say of itself. Pure.

Both servers of a pair may be healthy and the way between them broken, or a decode may still know the ports of a prefill
that has restarted. Only pairs about which there is something to say are kept, so a healthy fleet costs nothing. What is
quarantined opens on proof alone: KV that has arrived since, or a downtime after which the decode must have forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from engines.types import EngineId, FailureKind, Outcome, Stage
from failover.retry import Fault, classify

Pair = tuple[EngineId, EngineId]
"""A prefill and a decode."""

HEARTBEAT_S = 5.0
"""How often a decode asks each prefill it knows (`SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`); after two misses in a
row it forgets the prefill's addresses (`_HEARTBEAT_MAX_FAILURE`)."""
FORGOTTEN_AFTER_S = 3 * HEARTBEAT_S
"""A prefill whose bootstrap server was silent for so long is forgotten by every decode that knew it."""
SETTLED_AFTER_S = 2 * HEARTBEAT_S
"""After that long a silence its pairs open when it has been ready for so long."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Between two tries of one pair: doubled with each that failed, and up to half as much again by chance."""
BLIND_TRIES = 3
"""After so many canaries in a row that say nothing, a real request may try."""


class PairState(StrEnum):
    """Whether requests go to a pair."""

    OK = "ok"
    SUSPECTED = "suspected"
    """It failed once: requests still go to it, and a canary does at once."""
    QUARANTINED = "quarantined"
    PROVING = "proving"
    """Quarantined, and one canary or one request is under way on it."""


class PairEvent(Enum):
    """What was seen of a pair."""

    HANDED_OVER = "handed_over"
    """A request's KV has arrived."""
    TRANSFER_FAILED = "transfer_failed"
    """A request's has not, and neither server alone is to blame."""
    TRIAL_BEGAN = "trial_began"
    TRIAL_VOID = "trial_void"
    """A canary, or a request that tried the pair, ended without saying anything of it."""
    CANARY_PASSED = "canary_passed"
    CANARY_FAILED = "canary_failed"
    CANARY_DIFFERED = "canary_differed"
    """It was answered, and with other text than on other pairs: KV arrives, and is not what was sent."""
    PREFILL_RESTARTED = "prefill_restarted"
    DECODE_RESTARTED = "decode_restarted"
    """A new decode knows no old ports, and has a transfer session that its prefills have never failed on."""
    SETTLED = "settled"
    """Its prefill came back after FORGOTTEN_AFTER_S, and has been ready for SETTLED_AFTER_S."""


_S, _E = PairState, PairEvent

TRANSITIONS: dict[tuple[PairState, PairEvent], PairState] = {
    (_S.OK, _E.HANDED_OVER): _S.OK,
    (_S.OK, _E.TRANSFER_FAILED): _S.SUSPECTED,
    (_S.OK, _E.TRIAL_BEGAN): _S.OK,
    (_S.OK, _E.TRIAL_VOID): _S.OK,
    (_S.OK, _E.CANARY_PASSED): _S.OK,
    (_S.OK, _E.CANARY_FAILED): _S.SUSPECTED,
    (_S.OK, _E.CANARY_DIFFERED): _S.QUARANTINED,
    (_S.OK, _E.PREFILL_RESTARTED): _S.QUARANTINED,
    (_S.OK, _E.DECODE_RESTARTED): _S.OK,
    (_S.OK, _E.SETTLED): _S.OK,
    #
    (_S.SUSPECTED, _E.HANDED_OVER): _S.OK,
    (_S.SUSPECTED, _E.TRANSFER_FAILED): _S.QUARANTINED,
    (_S.SUSPECTED, _E.TRIAL_BEGAN): _S.SUSPECTED,
    (_S.SUSPECTED, _E.TRIAL_VOID): _S.SUSPECTED,
    (_S.SUSPECTED, _E.CANARY_PASSED): _S.OK,
    (_S.SUSPECTED, _E.CANARY_FAILED): _S.QUARANTINED,
    (_S.SUSPECTED, _E.CANARY_DIFFERED): _S.QUARANTINED,
    (_S.SUSPECTED, _E.PREFILL_RESTARTED): _S.QUARANTINED,
    (_S.SUSPECTED, _E.DECODE_RESTARTED): _S.SUSPECTED,
    (_S.SUSPECTED, _E.SETTLED): _S.SUSPECTED,
    #
    (_S.QUARANTINED, _E.HANDED_OVER): _S.OK,
    (_S.QUARANTINED, _E.TRANSFER_FAILED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.TRIAL_BEGAN): _S.PROVING,
    (_S.QUARANTINED, _E.TRIAL_VOID): _S.QUARANTINED,
    (_S.QUARANTINED, _E.CANARY_PASSED): _S.OK,
    (_S.QUARANTINED, _E.CANARY_FAILED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.CANARY_DIFFERED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.PREFILL_RESTARTED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.DECODE_RESTARTED): _S.QUARANTINED,
    (_S.QUARANTINED, _E.SETTLED): _S.OK,
    #
    (_S.PROVING, _E.HANDED_OVER): _S.OK,
    (_S.PROVING, _E.TRANSFER_FAILED): _S.QUARANTINED,
    (_S.PROVING, _E.TRIAL_BEGAN): _S.PROVING,
    (_S.PROVING, _E.TRIAL_VOID): _S.QUARANTINED,
    (_S.PROVING, _E.CANARY_PASSED): _S.OK,
    (_S.PROVING, _E.CANARY_FAILED): _S.QUARANTINED,
    (_S.PROVING, _E.CANARY_DIFFERED): _S.QUARANTINED,
    (_S.PROVING, _E.PREFILL_RESTARTED): _S.QUARANTINED,
    (_S.PROVING, _E.DECODE_RESTARTED): _S.QUARANTINED,
    (_S.PROVING, _E.SETTLED): _S.OK,
}

_ON_THE_WAY = re.compile(r"KVTransferError|(Prefill|Decode) (bootstrap|handshake|transfer) failed", re.IGNORECASE)
_ITS_SERVER_IS_GONE = frozenset({FailureKind.CONNECT, FailureKind.RESET, FailureKind.TRUNCATED})


class Against(NamedTuple):
    """What speaks against a pair: in words, and whether it is silence alone, as busy servers are silent too."""

    words: str
    silence: bool = False


def against_the_pair(outcomes: Iterable[Outcome]) -> Against | None:
    """What of a failed attempt speaks against its pair; None where one of the servers explains it.

    A connection of ours that broke says that its server is gone, whatever the other then says of it. Silence before
    hand-over names nobody: the one waits for the other.
    """
    found: Against | None = None
    for outcome in outcomes:
        if outcome.kind in _ITS_SERVER_IS_GONE or (outcome.kind is FailureKind.TIMEOUT and outcome.definite):
            return None
        if classify(outcome) is Fault.ENGINE and _ON_THE_WAY.search(outcome.message):
            found = Against(outcome.message[-200:])
        elif found is None and outcome.kind is FailureKind.TIMEOUT and outcome.stage is Stage.DISPATCHED:
            found = Against(outcome.message[-200:], silence=True)
    return found


@dataclass(slots=True)
class PairRecord:
    """What is known of a pair that is not OK. Times are of the loop's clock.

    `since_s`: when the trouble began; what began before that proves nothing. `failures`, `voids`: tries in a row, since
    it is closed, that failed or said nothing. `due_s`: when it is tried next. `trial`: who tries it now: "canary", or
    the rid of a request. `settles`: it opens by its prefill's readiness alone. `garbles`: its canary's text differed,
    so only text that agrees clears it. `silence`: silence alone speaks against it. `half_open`: a request may try it.
    """

    state: PairState
    since_s: float
    due_s: float
    reason: str = ""
    failures: int = 0
    voids: int = 0
    trial: str = ""
    settles: bool = False
    garbles: bool = False
    silence: bool = False
    half_open: bool = False

    @property
    def badness(self) -> tuple[bool, int, float]:
        """Less is less bad."""
        return self.garbles, self.failures, self.due_s


CANARY = "canary"


class PairHealth:
    """The matrix of one gateway. `version` grows with every change that a decision could see."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._records: dict[Pair, PairRecord] = {}
        self.version = 0

    @property
    def records(self) -> Mapping[Pair, PairRecord]:
        """All pairs that are not OK."""
        return self._records

    def state(self, pair: Pair) -> PairState:
        record = self._records.get(pair)
        return record.state if record is not None else PairState.OK

    def closed(self) -> set[Pair]:
        """The pairs that no request may go to."""
        return {
            pair
            for pair, record in self._records.items()
            if record.state is PairState.PROVING or (record.state is PairState.QUARANTINED and not record.half_open)
        }

    # ---- requests --------------------------------------------------------------------------------------------------

    def handed_over(self, pair: Pair, began_s: float, now_s: float) -> None:
        """A request that began at `began_s` has brought its KV over."""
        record = self._records.get(pair)
        if record is not None and began_s >= record.since_s and not record.garbles:
            self._step(pair, PairEvent.HANDED_OVER, now_s)

    def transfer_failed(self, pair: Pair, against: Against, began_s: float, now_s: float) -> None:
        """A request that began at `began_s` has not. Of a closed pair only that of its trial is news."""
        record = self._records.get(pair)
        tries = record is not None and record.state is PairState.PROVING and began_s >= record.since_s
        if record is None or record.state is PairState.SUSPECTED or tries:
            self._step(pair, PairEvent.TRANSFER_FAILED, now_s, against.words, silence=against.silence)

    # ---- trials ----------------------------------------------------------------------------------------------------

    def trial_began(self, pair: Pair, trial: str, now_s: float) -> None:
        """A canary is sent, or a request (its rid) to a pair that is half open."""
        self._step(pair, PairEvent.TRIAL_BEGAN, now_s)
        if (record := self._records.get(pair)) is not None:
            record.trial = trial

    def trial_void(self, pair: Pair, trial: str, now_s: float) -> None:
        """It ended without saying anything; of a trial that is over already this is no news."""
        record = self._records.get(pair)
        if record is not None and record.trial == trial:
            self._step(pair, PairEvent.TRIAL_VOID, now_s)

    def canary_passed(self, pair: Pair, began_s: float, now_s: float, *, text_agrees: bool = False) -> None:
        """KV arrived. `text_agrees`: and at least one other pair answered the same."""
        record = self._records.get(pair)
        if record is None or began_s < record.since_s:
            return
        if record.garbles and not text_agrees:
            self._step(pair, PairEvent.TRIAL_VOID, now_s)
        else:
            self._step(pair, PairEvent.CANARY_PASSED, now_s)

    def canary_failed(self, pair: Pair, against: Against, began_s: float, now_s: float) -> None:
        record = self._records.get(pair)
        if record is None or began_s >= record.since_s:
            self._step(pair, PairEvent.CANARY_FAILED, now_s, against.words, silence=against.silence)

    def canary_differed(self, pair: Pair, reason: str, now_s: float) -> None:
        self._step(pair, PairEvent.CANARY_DIFFERED, now_s, reason)

    def try_now(self, pair: Pair, now_s: float) -> None:
        """Something that was in the way is over: the next try is due."""
        if (record := self._records.get(pair)) is not None:
            record.due_s = min(record.due_s, now_s)

    # ---- restarts and time -----------------------------------------------------------------------------------------

    def prefill_restarted(
        self, prefill: EngineId, decodes: Iterable[EngineId], silent_s: float | None, now_s: float
    ) -> None:
        """A prefill is another process now. `silent_s`: how long its bootstrap server was seen to be silent."""
        settles = silent_s is not None and silent_s >= FORGOTTEN_AFTER_S
        reason = (
            f"its prefill restarted after {silent_s:.0f} s"
            if settles
            else "its prefill restarted, and the decode may still have its old addresses"
        )
        for decode in decodes:
            self._step((prefill, decode), PairEvent.PREFILL_RESTARTED, now_s, reason, settles=settles)

    def decode_restarted(self, decode: EngineId, now_s: float) -> None:
        """A decode is another process now."""
        for pair in [pair for pair in self._records if pair[1] == decode]:
            self._step(pair, PairEvent.DECODE_RESTARTED, now_s)

    def tick(self, ready_since_s: Callable[[EngineId], float | None], now_s: float) -> None:
        """Let time pass. `ready_since_s`: since when a server has been ready without a break."""
        for pair, record in list(self._records.items()):
            since_s = ready_since_s(pair[0])
            if record.settles and since_s is not None and now_s - since_s >= SETTLED_AFTER_S:
                self._step(pair, PairEvent.SETTLED, now_s)
                continue
            half_open = record.state is PairState.QUARANTINED and record.voids >= BLIND_TRIES and now_s >= record.due_s
            if half_open is not record.half_open:
                record.half_open = half_open
                self.version += 1

    def forget_all_but(self, engine_ids: Iterable[EngineId]) -> None:
        """Pairs with a server that has left the fleet are no pairs."""
        known = set(engine_ids)
        for pair in [pair for pair in self._records if not known.issuperset(pair)]:
            del self._records[pair]
            self.version += 1

    def least_bad(self, pairs: Iterable[Pair]) -> Pair | None:
        """Of pairs that are all closed, the one that a request may try; None while a try is under way or comes first.

        One request at a time tries one pair; a pair that nothing has tried yet is left to its canary.
        """
        inside = {pair: record for pair in pairs if (record := self._records.get(pair)) is not None}
        if any(record.state is PairState.PROVING and record.trial != CANARY for record in inside.values()):
            return None
        tried = [
            pair
            for pair, record in inside.items()
            if record.state is PairState.QUARANTINED and record.failures + record.voids > 0
        ]
        return min(tried, key=lambda pair: inside[pair].badness, default=None)

    def silent(self, pairs: Iterable[Pair]) -> set[Pair]:
        """Those of these that are closed for silence alone, and that no request tries."""
        return {
            pair
            for pair in pairs
            if (record := self._records.get(pair)) is not None
            and record.silence
            and record.state is not PairState.SUSPECTED
            and record.trial in ("", CANARY)
        }

    # ---- the step --------------------------------------------------------------------------------------------------

    def _step(
        self,
        pair: Pair,
        event: PairEvent,
        now_s: float,
        reason: str = "",
        *,
        settles: bool = False,
        silence: bool = False,
    ) -> None:
        record = self._records.get(pair)
        before = record.state if record is not None else PairState.OK
        after = TRANSITIONS[before, event]
        if after is PairState.OK:
            if self._records.pop(pair, None) is not None:
                self.version += 1
            return
        if record is None:
            record = self._records[pair] = PairRecord(after, now_s, now_s, silence=silence)
        self.version += 1
        record.state, record.half_open = after, False
        record.reason = reason or record.reason
        if event is not PairEvent.TRIAL_BEGAN:
            record.trial = ""
        match event:
            case PairEvent.PREFILL_RESTARTED:
                record.since_s = record.due_s = now_s
                record.failures = record.voids = 0
                record.settles, record.silence = settles and not record.garbles, False
            case PairEvent.DECODE_RESTARTED:
                record.due_s = now_s
                record.failures = record.voids = 0
            case PairEvent.TRANSFER_FAILED | PairEvent.CANARY_FAILED | PairEvent.CANARY_DIFFERED:
                if event is PairEvent.CANARY_DIFFERED:
                    record.garbles, record.since_s = True, now_s
                record.failures, record.voids = (record.failures if before is not PairState.SUSPECTED else 0) + 1, 0
                record.settles, record.silence = False, record.silence and silence
                first = event is PairEvent.TRANSFER_FAILED and after is PairState.SUSPECTED
                record.due_s = now_s if first else now_s + self._pause_s(record.failures)
            case PairEvent.TRIAL_VOID:
                record.voids += 1
                record.due_s = now_s + self._pause_s(record.voids)
            case _:
                pass

    def _pause_s(self, tries: int) -> float:
        """How long after so many failed tries in a row the next comes."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 16)) * self._rng.uniform(1.0, 1.5)


def told(pair: Pair, record: PairRecord, now_s: float) -> str:
    """One line on a pair that is not OK: since when, why, and what comes next."""
    if record.trial:
        comes = "a canary is under way" if record.trial == CANARY else f"request {record.trial} tries it"
    else:
        comes = f"next canary in {max(0.0, record.due_s - now_s):.1f} s"
    since_s = now_s - record.since_s
    return f"pair {pair[0]}, {pair[1]} is {record.state} since {since_s:.1f} s: {record.reason or 'unknown'}; {comes}"


def worst(records: Mapping[Pair, PairRecord], count: int) -> Sequence[Pair]:
    """At most `count` pairs, those that have failed most first."""
    return nsmallest(count, records, key=lambda pair: (-records[pair].failures, pair))
