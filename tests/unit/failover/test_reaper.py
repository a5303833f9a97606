"""The rule of death: its whole table, and what an observer remembers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from failover.reaper import FAILED_PROBES, GAP_S, LEASE_S, WATCHED_S, Evidence, Look, ReplicaName, Verdict, Watch, judge

A, B, C = "a", "b", "c"
ADDRESSES = {A: "http://a", B: "http://b", C: "http://c"}


def look(at_s: float, live: str = "bc", agree: str = "bc", data_set: str = "1 x") -> Look:
    return Look(at_s, at_s, data_set, frozenset(live), ADDRESSES, {A: frozenset(agree)})


def watched(until_s: float = WATCHED_S, failed: int = FAILED_PROBES) -> Watch:
    """A is gone from 0 s on, with a look every second, the last one at `until_s`."""
    watch = Watch()
    for at_s in [*range(int(until_s) + 1), until_s]:
        watch = watch.looked(look(at_s))
    for _ in range(failed):
        watch = watch.probed(A, 0.0, None)
    return watch


def verdict(watch: Watch, last: Look) -> Verdict:
    return judge(watch.evidence(last, A))


@pytest.mark.parametrize("conditions", list(product((False, True), repeat=4)))
def test_the_table_is_total_and_death_needs_all_four(conditions: tuple[bool, ...]) -> None:
    found = judge(Evidence(*conditions))
    assert (found is Verdict.DEAD) == all(conditions)
    first_missing = conditions.index(False) if False in conditions else 4
    assert found is [Verdict.PRESENT, Verdict.ABSENT, Verdict.CUT_OFF, Verdict.SUSPECTED, Verdict.DEAD][first_missing]


def test_who_is_gone_for_two_leases_and_silent_is_dead() -> None:
    assert WATCHED_S == 2 * LEASE_S
    assert verdict(watched(), look(WATCHED_S)) is Verdict.DEAD
    assert dict(watched().verdicts(look(WATCHED_S))) == {A: Verdict.DEAD}


@pytest.mark.parametrize(
    ("watch", "last", "found"),
    [
        (watched(), look(WATCHED_S, live="abc"), Verdict.PRESENT),
        (watched(WATCHED_S - 0.01), look(WATCHED_S - 0.01), Verdict.ABSENT),
        (watched(failed=FAILED_PROBES - 1), look(WATCHED_S), Verdict.CUT_OFF),
        (watched(), look(WATCHED_S, agree="b"), Verdict.SUSPECTED),
        (watched(), look(WATCHED_S, agree="bx"), Verdict.SUSPECTED),
        (watched(), look(WATCHED_S, live="b", agree="b"), Verdict.DEAD),
        (watched(), look(WATCHED_S, live="bcde", agree="bc"), Verdict.SUSPECTED),
        (watched(), look(WATCHED_S, live="bcde", agree="bcd"), Verdict.DEAD),
    ],
    ids=["there", "too short", "one probe", "minority", "gone voter", "two replicas", "half", "most"],
)
def test_one_condition_less_is_no_death(watch: Watch, last: Look, found: Verdict) -> None:
    assert verdict(watch, last) is found


@pytest.mark.parametrize(
    "interruption",
    [
        look(WATCHED_S, data_set="2 x"),
        look(WATCHED_S, data_set="1 y"),
        look(WATCHED_S + GAP_S + 0.01),
        look(WATCHED_S, live="abc"),
    ],
    ids=["flushed", "another server", "the observer was away", "it was there"],
)
def test_an_interruption_begins_anew(interruption: Look) -> None:
    watch = watched().looked(interruption)
    after = replace(
        interruption, sent_s=interruption.sent_s + 1, answered_s=interruption.sent_s + 1, live=frozenset("bc")
    )
    watch = watch.looked(after)
    assert verdict(watch, after) is Verdict.ABSENT
    assert watch.absences[A].failed_probes == 0


def test_a_look_that_took_long_counts_from_when_it_was_sent() -> None:
    watch = Watch().looked(Look(0.0, 1.0, "1 x", frozenset("b"), ADDRESSES))
    assert watch.absences[A].since_s == 1.0
    for at_s in (2.0, 3.0, 4.0, 5.0, 6.0):
        watch = watch.looked(look(at_s))
    late = Look(1.0 + WATCHED_S - 0.1, 1.0 + WATCHED_S + 0.5, "1 x", frozenset("b"), ADDRESSES)
    assert not watch.looked(late).evidence(late, A).watched


def test_a_break_counts_from_when_the_look_before_it_was_sent() -> None:
    watch = watched().looked(Look(WATCHED_S, WATCHED_S + 0.5, "1 x", frozenset("bc"), ADDRESSES))
    assert watch.looked(look(WATCHED_S + GAP_S)).absences[A].since_s == 0.0
    assert watch.looked(look(WATCHED_S + GAP_S + 0.1)).absences[A].since_s == WATCHED_S + GAP_S + 0.1


@pytest.mark.parametrize("answered", [None, B, C])
def test_probes_that_fail_or_find_another_count(answered: str | None) -> None:
    watch = watched(failed=0).probed(A, 0.0, None).probed(A, 0.0, answered)
    assert verdict(watch, look(WATCHED_S)) is Verdict.DEAD


def test_an_answer_of_its_own_undoes_what_failed() -> None:
    watch = watched().probed(A, 0.0, A)
    assert verdict(watch, look(WATCHED_S)) is Verdict.CUT_OFF
    assert verdict(watch.probed(A, 0.0, None), look(WATCHED_S)) is Verdict.CUT_OFF
    assert verdict(watch.probed(A, 0.0, None).probed(A, 0.0, None), look(WATCHED_S)) is Verdict.DEAD


def test_a_probe_of_an_earlier_absence_says_nothing() -> None:
    watch = watched(failed=1)
    assert watch.probed(A, -1.0, None) == watch
    assert watch.probed("nobody", 0.0, None) == watch


def test_a_name_is_another_after_each_death() -> None:
    name = ReplicaName("x")
    names = [name.now]
    for _ in range(3):
        name.renew()
        names.append(name.now)
    assert names == ["x", "x-2", "x-3", "x-4"]
