"""Whose fault a failure is, and whether the request may be tried again. Pure: one table, one rule.

The table is read top to bottom, the first row that fits wins. Rows name SGLang's own words where a status alone says
too little; they are held to recorded replies in `tests/unit/failover/test_retry.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from engines.types import EngineId, FailureKind, Leg, Outcome


class Fault(Enum):
    """Whose fault a failed leg is."""

    CALLER = "caller"
    """The request is wrong: the engine's words go to the client, nothing is retried."""
    INSTANCE_LIMIT = "instance_limit"
    """This server is too small for it; another may do."""
    OURS = "ours"
    """The gateway sent what it should not have: once more with new ids, and a bug counter."""
    OPERATOR = "operator"
    """Keys, roles, routes: the engine's words stay inside, the client gets 502."""
    SATURATION = "saturation"
    """The server is full: backpressure, not failure."""
    ENGINE = "engine"
    """The server, or the way to it, failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: None and "" fit everything."""

    fault: Fault
    status: int | None = None
    kind: FailureKind | None = None
    pattern: str = ""


_TRANSFER = r"KVTransferError|(Prefill|Decode) (bootstrap|handshake|transfer) failed"

CLASSIFICATION: tuple[Row, ...] = (
    Row(Fault.OURS, pattern=r"Duplicate request ID"),
    Row(Fault.OURS, pattern=r"without bootstrap room id"),
    Row(Fault.OURS, pattern=r"follow_bootstrap_room conflict"),
    Row(Fault.OURS, pattern=r"bootstrap_room mismatch"),
    Row(Fault.ENGINE, pattern=_TRANSFER),
    Row(Fault.INSTANCE_LIMIT, 400, pattern=r"exceeds the maximum number of tokens|KV (cache )?(pool|capacity)"),
    Row(Fault.CALLER, 400),
    Row(Fault.OPERATOR, 401),
    Row(Fault.OPERATOR, 403),
    Row(Fault.OPERATOR, 404),
    Row(Fault.OPERATOR, 405),
    Row(Fault.CALLER, 413),
    Row(Fault.CALLER, 422),
    Row(Fault.SATURATION, 429),
    Row(Fault.SATURATION, 503, pattern=r"queue is full|waiting timeout|running timeout|overload"),
    Row(Fault.ENGINE),
)


def classify(outcome: Outcome) -> Fault:
    """Whose fault a failed leg is, by the first row that fits."""
    for row in CLASSIFICATION:
        if (
            (row.status is None or row.status == outcome.status)
            and (row.kind is None or row.kind is outcome.kind)
            and (not row.pattern or re.search(row.pattern, outcome.message, re.IGNORECASE))
        ):
            return row.fault
    raise AssertionError("the last row fits everything")


_AGAINST_THE_PEER = re.compile(
    r"Lost connection with prefill instance|Decode handshake failed|in KVPoll\.(WaitingForInput|Bootstrapping)"
    r"|Failed to send kv chunk|unknown reason from another rank",
    re.IGNORECASE,
)


def culprit(outcome: Outcome, pair: tuple[EngineId, EngineId]) -> EngineId:
    """The server that a failure speaks against: a leg that lost its peer, or waited for it in vain, names the other."""
    if not _AGAINST_THE_PEER.search(outcome.message):
        return outcome.engine_id
    prefill, decode = pair
    return prefill if outcome.leg is Leg.DECODE else decode


def lost_between(outcome: Outcome) -> bool:
    """Whether KV was lost between two servers: each may be what broke it, whichever of them its words name."""
    return re.search(_TRANSFER, outcome.message, re.IGNORECASE) is not None


def may_be_a_death(outcome: Outcome) -> bool:
    """Whether a leg's failure looks like the end of its server while it worked on this request.

    A refused connection does not: that server was gone before.
    """
    return outcome.kind in (FailureKind.RESET, FailureKind.TRUNCATED)


class Verdict(Enum):
    """What happens to the request after a failed attempt."""

    RETRY = "retry"
    """Nothing was sent yet: another attempt, from the start."""
    CONTINUE = "continue"
    """The client has the beginning: another attempt goes on from there, where `failover/recovery.py` lets it."""
    TO_CLIENT = "to_client"
    """Answer with the engine's own status and words."""
    GIVE_UP = "give_up"
    """Answer 502, or end the stream with an error event."""
    POISON_SUSPECTED = "poison_suspected"
    OUT_OF_TIME = "out_of_time"
    OVER_BUDGET = "over_budget"
    """It might be tried again, but too many others were: 503, and when to ask again."""


@dataclass(frozen=True, slots=True)
class History:
    """What has happened to one request so far. `deaths`: attempts during which the failed instance died.

    `attempts` are those since its client last got something new, `continuations` how often a broken stream went on.
    """

    attempts: int
    max_attempts: int
    committed: bool
    deaths: int
    own_faults: int
    remaining_s: float
    continuations: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and what the next attempt must avoid. `delay_s` smooths storms."""

    verdict: Verdict
    fault: Fault
    excluded_engine: EngineId | None = None
    excluded_pair: tuple[EngineId, EngineId] | None = None
    delay_s: float = 0.0


MAX_DEATHS = 2
"""A request gets one more attempt after an instance died under it; a second death ends it."""
MAX_CONTINUATIONS = 16
"""A stream that breaks again and again, each time after some tokens, is given up after so many."""

_BACKOFF_S = (0.0, 0.05, 0.2, 0.5)


def decide(outcome: Outcome, pair: tuple[EngineId, EngineId], history: History) -> Decision:
    """Whether the request of a failed attempt on `pair` is tried again, and where not.

    Once the client has a byte it is not: it may be continued. Neither happens after a caller's fault, or with less
    than 50 ms left. `outcome` is of the leg that is at fault. Where KV was lost on the way the pair is excluded, and
    both its members are avoided as far as there are others (`routing/filters.py`).
    """
    fault = classify(outcome)
    if fault is Fault.CALLER:
        return Decision(Verdict.TO_CLIENT, fault)
    if history.deaths >= MAX_DEATHS:
        return Decision(Verdict.POISON_SUSPECTED, fault)
    if history.remaining_s < 0.05:
        return Decision(Verdict.OUT_OF_TIME, fault)
    exhausted = history.attempts >= history.max_attempts or history.continuations >= MAX_CONTINUATIONS
    if exhausted or (fault is Fault.OURS and history.own_faults > 1):
        return last_word(fault)
    verdict = Verdict.CONTINUE if history.committed else Verdict.RETRY
    delay_s = _BACKOFF_S[min(history.attempts, len(_BACKOFF_S)) - 1]
    if fault is Fault.OURS:
        return Decision(verdict, fault, delay_s=delay_s)
    if lost_between(outcome):
        return Decision(verdict, fault, excluded_pair=pair, delay_s=delay_s)
    return Decision(verdict, fault, excluded_engine=culprit(outcome, pair), delay_s=delay_s)


def last_word(fault: Fault) -> Decision:
    """What is left where no further attempt may be made, or none can be: no pair is up that has not failed."""
    return Decision(Verdict.TO_CLIENT if fault is Fault.INSTANCE_LIMIT else Verdict.GIVE_UP, fault)


def first_definite_caller_fault(outcomes: list[Outcome]) -> Outcome | None:
    """The outcome whose words the client gets when both legs refuse: the first that is the caller's fault."""
    return next((outcome for outcome in outcomes if classify(outcome) is Fault.CALLER), None)


def blamed(outcomes: list[Outcome], preferred: Leg) -> Outcome:
    """The outcome an attempt is judged by: a caller's fault first, else the leg the attempt table blames."""
    if (refused := first_definite_caller_fault(outcomes)) is not None:
        return refused
    return next((outcome for outcome in outcomes if outcome.leg is preferred), outcomes[0])
