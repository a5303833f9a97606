"""When a gateway counts as dead: a rule of four conditions over what the others saw of it. Pure.

Each gateway looks into Redis about once a second and remembers in a `Watch` since when whom is gone, by an unbroken row
of looks at one data set: a look that failed or came late, and another data set, begin the row anew. So nobody is dead
who only vanished together with what Redis knew, nor whoever answers, or is missed by a minority.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

LEASE_S = 2.75
"""A replica is there for so long after it has said so; it does about once a second."""
WATCHED_S = 2 * LEASE_S
"""So long must one be seen gone."""
GAP_S = LEASE_S
"""Looks further apart than this are no unbroken row: the observer itself was away."""
FAILED_PROBES = 2
"""So many of the latest direct probes must have failed, all since it is gone."""


class Verdict(StrEnum):
    """What one gateway thinks of another."""

    PRESENT = "present"
    """It has its lease."""
    ABSENT = "absent"
    """It has none, and that for too short a time to mean anything."""
    CUT_OFF = "cut_off"
    """Gone long enough, but it answers when asked directly, or cannot be asked."""
    SUSPECTED = "suspected"
    """This observer takes it for dead; not enough others do yet."""
    DEAD = "dead"
    """What it had may be released."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The four conditions."""

    lease_absent: bool
    watched: bool
    """It was seen gone for `WATCHED_S`, without a break, on one data set."""
    silent: bool
    """The latest `FAILED_PROBES` of its address failed: refused, timed out, or answered by another."""
    majority: bool
    """More than half of those who are there say so."""


def judge(evidence: Evidence) -> Verdict:
    """The rule. Total; DEAD needs all four."""
    if not evidence.lease_absent:
        return Verdict.PRESENT
    if not evidence.watched:
        return Verdict.ABSENT
    if not evidence.silent:
        return Verdict.CUT_OFF
    return Verdict.DEAD if evidence.majority else Verdict.SUSPECTED


@dataclass(frozen=True, slots=True)
class Look:
    """What one look into Redis showed; all of it at one moment between `sent_s` and `answered_s`.

    `live`: who has a lease, the observer included. `addresses`: of everybody who is known; empty where nobody may ask.
    `verdicts`: suspect → who takes it for dead.
    """

    sent_s: float
    answered_s: float
    data_set: str
    live: frozenset[str]
    addresses: Mapping[str, str]
    verdicts: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Absence:
    """One is gone since then. `failed_probes`: how many of the latest failed, one after the other."""

    since_s: float
    failed_probes: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """What one observer remembers of its unbroken row of looks; a new one remembers nothing."""

    looked_s: float = float("-inf")
    data_set: str = ""
    absences: Mapping[str, Absence] = field(default_factory=dict)

    def looked(self, look: Look) -> Watch:
        """The same after one more look."""
        unbroken = look.data_set == self.data_set and look.answered_s - self.looked_s <= GAP_S
        before = self.absences if unbroken else {}
        gone = sorted(look.addresses.keys() - look.live)
        absences = {replica: before.get(replica, Absence(look.answered_s)) for replica in gone}
        return Watch(look.sent_s, look.data_set, absences)

    def probed(self, replica: str, since_s: float, answered: str | None) -> Watch:
        """After a direct probe during the absence that began at `since_s`. `answered`: the replica that did, if any."""
        absence = self.absences.get(replica)
        if absence is None or absence.since_s != since_s:
            return self
        failed = 0 if answered == replica else absence.failed_probes + 1
        return replace(self, absences={**self.absences, replica: replace(absence, failed_probes=failed)})

    def evidence(self, look: Look, replica: str) -> Evidence:
        """What is known of a replica by this row, whose latest look is `look`."""
        absence = self.absences.get(replica)
        agreed = look.verdicts.get(replica, frozenset()) & look.live
        return Evidence(
            lease_absent=replica in look.addresses and replica not in look.live,
            watched=absence is not None and look.sent_s - absence.since_s >= WATCHED_S,
            silent=absence is not None and absence.failed_probes >= FAILED_PROBES,
            majority=2 * len(agreed) > len(look.live),
        )

    def verdicts(self, look: Look) -> Iterator[tuple[str, Verdict]]:
        """Of everybody who is gone."""
        for replica in self.absences:
            yield replica, judge(self.evidence(look, replica))


class ReplicaName:
    """The name that a gateway has among its replicas: another after each time that it was declared dead."""

    def __init__(self, first: str) -> None:
        self._first = first
        self._number = 1
        self.now = first

    def renew(self) -> None:
        self._number += 1
        self.now = f"{self._first}-{self._number}"
