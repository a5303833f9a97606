"""What the invariants look at: a record with its outcomes, pauses and deaths, and which fault was on when. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from engines.emulator.tokens import decode
from failover.chaos import client_checks
from failover.chaos.checker import Outcome, Violation, check, outcome
from failover.chaos.history import Attempt, History, Request
from failover.chaos.record import Mark, Record
from failover.chaos.verdict import Broken
from failover.reaper import LEASE_S, WATCHED_S

ENGINES = frozenset({"prefill", "decode"})
_BY_A_SIGNAL = frozenset({"killed", "told to end"})
"""Marks of a process whose end is no surprise."""
_RENEWED_S = 1.0
"""How often a gateway renews its lease."""
_FOUND_OUT_S = 5.0
"""A gateway that was declared dead knows it so long after it thaws, at the latest."""
_BY_A_FAULT = frozenset({"die_at_token"})
"""Faults of which one process dies by itself, while they are on."""

_HINDERS_NOBODY = frozenset(
    {
        *("error_500", "error_400", "abort_in_200", "error_mid_stream", "leak", "drain"),
        *("reset", "cut", "disk_full"),
    }
)
"""Faults after and under which an engine hears what it is told, and does it."""
_UNANSWERED_S = 30.0
"""How long a decode of SGLang keeps pages of an aborted transfer whose prefill does not answer."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The time between two outputs of one choice of a stream."""

    request: Request
    choice: int
    began_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Run:
    """A record, and what several invariants want to know of it."""

    record: Record
    outcomes: tuple[tuple[Request, Outcome], ...]
    violations: tuple[Violation, ...]
    """What the checker found, but for what was left over."""
    pauses: tuple[Pause, ...]
    """Those that ended after the first fault."""
    deaths: tuple[Mark, ...]
    """Of processes that no fault had killed."""

    def ended(self, how: Outcome) -> list[Request]:
        """The requests that ended so."""
        return [request for request, ended in self.outcomes if ended is how]


def look_at(record: Record) -> Run:
    """All that is worked out once; of an emulated run it replays the token rule over every answer."""
    history, first_s = record.history, min(applied(record).values(), default=math.inf)
    outcomes = tuple((request, outcome(request)) for request in history.requests)
    if record.fleet is not None:
        violations = client_checks.check(history, record.references)
    else:
        violations = check(History(history.requests, deaths=history.deaths), decode)
    after = tuple(each for request in history.requests for each in _pauses(request) if each.ended_s >= first_s)
    return Run(record, outcomes, tuple(violations), after, tuple(_deaths(record)))


def applied(record: Record) -> dict[int, float]:
    """When each fault was applied, by number; of those that were."""
    return {each.number: each.applied_s for each in record.faults if each.applied_s is not None}


def _lifted(record: Record) -> dict[int, float]:
    return {each.number: math.inf if each.lifted_s is None else each.lifted_s for each in record.faults}


def fault_at(record: Record, from_s: float, to_s: float) -> int | None:
    """The number of the fault that came last of those that were on within that time, else of those before."""
    before = sorted((at_s, number) for number, at_s in applied(record).items() if at_s <= to_s)
    until_s = _lifted(record)
    on = [number for _, number in before if until_s[number] >= from_s]
    last = on or [number for _, number in before]
    return last[-1] if last else None


def tries(request: Request) -> Iterator[Attempt]:
    """All attempts of a request."""
    return (attempt for choice in request.choices for attempt in choice.attempts)


def alive(record: Record) -> set[str]:
    """The names of the processes that ran when the run was over."""
    last = {mark.instance: mark.what for mark in record.marks if mark.what in ("started", "killed", "ended")}
    return {each.name for each in record.instances if last.get(each.name, "started") == "started"}


def may_be_declared_dead(record: Record, gateway: str, from_s: float, to_s: float) -> bool:
    """Whether a gateway has stood still, at some moment from then till then, for so long that others may think so.

    Its lease ends `LEASE_S` after its last renewal, which was up to a second before; they watch that for `WATCHED_S`.
    """
    frozen_s = None
    for mark in (*record.marks, Mark(math.inf, gateway, "thawed")):
        if mark.instance != gateway:
            continue
        if mark.what == "frozen":
            frozen_s = mark.at_s
        elif mark.what in ("thawed", "killed") and frozen_s is not None:
            long = mark.at_s - frozen_s >= LEASE_S + WATCHED_S - _RENEWED_S
            if long and frozen_s <= to_s and mark.at_s + _FOUND_OUT_S >= from_s:
                return True
            frozen_s = None
    return False


def heard_of_s(record: Record, gateway: str, attempt: Attempt, ended_s: float, seen_s: float) -> float:
    """From when on both engines of an attempt could know of its end, and could act: after the faults on their way.

    What faults lasted meanwhile, on its gateway, its engines, or a link from or to these. Clients have no part in it.
    A decode keeps pages that its prefill may still write to until that has answered, or for SGLang's own time.
    """
    engines = {attempt.prefill, attempt.decode}
    until_s, heard_s = _lifted(record), ended_s
    unanswered_s = _UNANSWERED_S / record.scenario.fleet.speed
    for fault in record.planned:
        at_s = applied(record).get(fault.number, math.inf)
        ends = fault.target.split(">")
        on_the_way = bool(engines & set(ends)) or ends == [gateway]
        if on_the_way and fault.fault not in _HINDERS_NOBODY and at_s <= seen_s:
            of_prefill = attempt.prefill in ends
            heard_s = max(heard_s, until_s[fault.number] + (unanswered_s if of_prefill else 0.0))
    return heard_s


def case_of(record: Record, what: str, request: Request, attempt: Attempt | None = None) -> Broken:
    """A broken case of a request, with the fault that was on in its time, or that of its attempt.

    Of a request that came to no end this is the time from its last sign of life to the next fault.
    """
    last_s = max((event.at_s for event in request.events), default=request.asked_s)
    from_s, to_s = request.asked_s, last_s
    if attempt is not None:
        from_s, to_s = attempt.began_s, max(last_s, attempt.began_s) if attempt.ended_s is None else attempt.ended_s
    if outcome(request) is Outcome.LOST:
        from_s = last_s
        to_s = min((at_s for at_s in applied(record).values() if at_s >= last_s), default=last_s)
    return Broken(what, request.name, attempt.rid if attempt else "", fault_at(record, from_s, to_s))


def violated(run: Run, violation: Violation) -> Broken:
    """What the checker found as a broken case: of the attempt that it names, else of the request's last."""
    where = f" at {violation.position}" if violation.position is not None else ""
    what = f"{violation.rule}{where}: {violation.got} instead of {violation.expected}"
    request = next(each for each, _ in run.outcomes if each.name == violation.request)
    known = list(tries(request))
    named = [each for each in known if each.rid == violation.attempt] or known[-1:]
    return case_of(run.record, what, request, *named[:1])


def _pauses(request: Request) -> Iterator[Pause]:
    for choice in range(len(request.choices) if request.stream else 0):
        outputs = [each for each in request.events if each.index == choice and (each.text or each.ids or each.finish)]
        yield from (Pause(request, choice, one.at_s, other.at_s) for one, other in pairwise(outputs))


def _deaths(record: Record) -> Iterator[Mark]:
    """The ends of processes but for those that a signal had asked for, or one of a fault that is deadly."""
    surprising, asked = [], set[str]()
    for mark in record.marks:
        if mark.what == "ended" and mark.instance not in asked:
            surprising.append(mark)
        elif mark.what in _BY_A_SIGNAL:
            asked.add(mark.instance)
        elif mark.what == "started":
            asked.discard(mark.instance)
    at_s, until_s = applied(record), _lifted(record)
    for fault in record.planned:
        if fault.fault in _BY_A_FAULT and fault.number in at_s:
            of_it = (each for each in surprising if each.instance == fault.target)
            died = next((each for each in of_it if at_s[fault.number] <= each.at_s <= until_s[fault.number]), None)
            surprising = [each for each in surprising if each is not died]
    yield from surprising
