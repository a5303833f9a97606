"""Every invariant holds in a good run, is broken by its own fault alone, and names who, in which attempt, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from failover.chaos import invariants
from failover.chaos.evidence import fault_at
from failover.chaos.history import Choice, Death, Ending, Error, Event, Ledger, Request
from failover.chaos.invariants import INVARIANTS, Finding, judge
from failover.chaos.record import FaultRun, Held, Instance, Mark, Orphan, Planned, Record, Sample
from failover.chaos.verdict import Broken, Verdict
from failover.reaper import LEASE_S, WATCHED_S
from tests.unit.failover.chaos.records import (
    BROKEN,
    LEFT,
    LOST,
    REFUSED,
    RESUMED,
    WHOLE,
    expecting,
    history,
    record,
)


def verdicts(judged: Record) -> Mapping[str, Verdict]:
    return {each.invariant: each for each in judge(judged).verdicts}


def spliced(request: Request, where: int = 5) -> Request:
    events = [replace(each, text="!") if at == where else each for at, each in enumerate(request.events)]
    return replace(request, events=tuple(events))


def late(request: Request, seconds: float) -> Request:
    """What the second attempt wrote comes later."""
    events = [replace(each, at_s=each.at_s + seconds) if at >= 4 else each for at, each in enumerate(request.events)]
    return replace(request, events=tuple(events))


def tried(request: Request, times: int) -> Request:
    first = request.choices[0].attempts[0]
    made = [replace(first, rid=f"{at}", room=50 + at, began_s=at, ended_s=at + 0.5) for at in range(times)]
    return replace(request, choices=(Choice(request.choices[0].prompt_ids, (*made, replace(first, began_s=times))),))


ROOM = str(RESUMED.choices[0].attempts[1].room)
HELD = (Ledger("prefill0", {}), Ledger("decode0", {ROOM: 7}))
DIED = (Mark(1.0, "decode0", "ended"), Mark(1.5, "decode0", "started"))
KILLED = (Death("gateway0", 1.0),)
LOOKS = tuple(Sample(at_s / 4, name, 0, 0, 9) for at_s in range(80) for name in ("prefill0", "decode0"))


def orphaned(seen_s: float, **others: Any) -> Record:
    """A gateway died at 1 s, and the KV of an attempt was seen on a decode until `seen_s`."""
    orphan = Orphan("gateway0", 1.0, "decode0", ROOM, seen_s)
    return record(history=history(WHOLE, RESUMED, deaths=KILLED), samples=LOOKS, orphans=(orphan,), **others)


def kept(seen_s: float, request: Request = RESUMED, since_s: float = 1.0, **others: Any) -> Record:
    """A decode was seen to hold KV of the second attempt, which lasted from 1 s to 2 s, until `seen_s`."""
    held = (Held("decode0", ROOM, since_s, seen_s),)
    return record(WHOLE, request, **{"held": held, "samples": LOOKS, **others})


def elsewhere(*pairs: tuple[str, str], failed_on: str = "d0", had_output: bool = False) -> Request:
    """A request that was tried on these pairs, one after another; `failed_on` failed the first, and gave it output."""
    request = tried(WHOLE, len(pairs) - 1)
    [choice] = request.choices
    made = [
        replace(each, prefill=prefill, decode=decode, failed_on="" if at else failed_on, had_output=had_output)
        for at, (each, (prefill, decode)) in enumerate(zip(choice.attempts, pairs, strict=True))
    ]
    return replace(request, choices=(replace(choice, attempts=tuple(made)),))


def aborted(request: Request) -> Request:
    """Its first attempt was aborted by somebody else."""
    [choice] = request.choices
    first, *rest = choice.attempts
    made = (replace(first, aborted=True), *rest)
    return replace(request, gateway="gateway0", choices=(replace(choice, attempts=made),))


SPOILED: Mapping[str, tuple[Record, list[Broken]]] = {
    "whole_or_one_error": (
        record(WHOLE, spliced(RESUMED)),
        [Broken("", "r-resumed", "r-resumed.0.1", 0)],
    ),
    "one_end": (record(WHOLE, LOST), [Broken("a connection that broke", "r-lost", "r-lost.0.0", 0)]),
    "nothing_left_on_engines": (
        record(history=history(WHOLE, RESUMED, ledgers=HELD)),
        [Broken("decode0 holds 7 tokens", "r-resumed", "r-resumed.0.1", 0)],
    ),
    "nothing_left_in_gateways": (
        record(history=history(WHOLE, left_over={"bookings": 2, "tasks": 0})),
        [Broken("2 left of bookings")],
    ),
    "dead_gateways_attempts_released": (
        orphaned(15.0),
        [Broken("decode0 holds KV for room", "r-resumed", "r-resumed.0.1", 0)],
    ),
    "no_live_attempt_aborted": (
        record(WHOLE, aborted(RESUMED)),
        [Broken("aborted, not by its own gateway", "r-resumed", "r-resumed.0.0", 0)],
    ),
    "let_go": (
        kept(6.25),
        [Broken("decode0 holds KV for room", "r-resumed", "r-resumed.0.1", 0)],
    ),
    "not_again": (
        record(elsewhere(("p0", "d0"), ("p1", "d1"), ("p1", "d0"))),
        [Broken("d0 has failed it, and is asked again", "r-whole", "r-whole.0.0", 0)],
    ),
    "safe_to_ask_again": (
        record(WHOLE, replace(REFUSED, again_s=None), scenario=expecting(refused_ratio=0.5)),
        [Broken("refused, and not told when", "r-refused", "", 0)],
    ),
    "errors": (
        record(scenario=expecting(errors=("overloaded",))),
        [Broken("nobody was told overloaded")],
    ),
    "settled": (record(settled_s=None), [Broken("not everything came back, not within 15 s", fault=0)]),
    "refused": (record(WHOLE, REFUSED), [Broken("refused, status 503: no room", "r-refused", "", 0)]),
    "broken": (
        record(WHOLE, BROKEN),
        [Broken("broken, status 200: the engine has died", "r-broken", "r-broken.0.0", 0)],
    ),
    "recovery": (
        record(WHOLE, late(RESUMED, 11)),
        [Broken("choice 0 paused for 11.0 s at 0.0 s", "r-resumed", "r-resumed.0.1", 0)],
    ),
    "attempts": (
        record(tried(WHOLE, 4), scenario=expecting(attempts_ratio=4.5)),
        [Broken("5 attempts", "r-whole", "r-whole.0.0", 0)],
    ),
    "deaths": (
        replace(record(), marks=(*record().marks, *DIED)),
        [Broken("decode0 ended by itself at 1.0 s", fault=0)],
    ),
    "faults_applied": (
        record(faults=(FaultRun(0, None, None, problem="prefill0 does not run"),)),
        [Broken("not applied: prefill0 does not run", fault=0)],
    ),
    "load_done": (record(stopped=True), [Broken("the run was stopped before its end")]),
}


PAUSE_S = judge(record(late(RESUMED, 11))).figures["longest_pause_s"]


def test_all_hold_in_a_good_run() -> None:
    judged = judge(record())
    assert judged.passed
    assert [each.invariant for each in judged.verdicts] == list(INVARIANTS)
    assert all(each.evidence and not each.unseen for each in judged.verdicts)


def test_each_is_spoiled_below() -> None:
    assert SPOILED.keys() == INVARIANTS.keys()


@pytest.mark.parametrize("name", SPOILED)
def test_one_thing_wrong_breaks_one_invariant(name: str) -> None:
    spoiled, cases = SPOILED[name]
    judged = verdicts(spoiled)
    assert [each for each, verdict in judged.items() if not verdict.held] == [name]
    for found, case in zip(judged[name].broken, cases, strict=True):
        assert case.what in found.what
        assert (found.request, found.attempt, found.fault) == (case.request, case.attempt, case.fault)


@pytest.mark.parametrize("name", SPOILED)
def test_it_is_that_rule_which_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off = {**INVARIANTS, name: lambda run: Finding("not looked at")}
    monkeypatch.setattr(invariants, "INVARIANTS", off)
    assert judge(SPOILED[name][0]).passed


@pytest.mark.parametrize("rule", INVARIANTS.values(), ids=INVARIANTS)
def test_each_says_what_it_holds_in_a_sentence(rule: Any) -> None:
    assert rule.__doc__.endswith(".")
    assert "\n" not in rule.__doc__


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bounds", "at_its_bound"),
    [
        ("settled", {"settle_s": 0.2}, record()),
        ("refused", {"refused_ratio": 0.5}, record(WHOLE, REFUSED)),
        ("broken", {"broken_ratio": 0.5}, record(WHOLE, BROKEN)),
        ("recovery", {"recovery_s": (PAUSE_S, PAUSE_S)}, record(late(RESUMED, 11))),
        ("attempts", {"attempts_ratio": 1.5}, record()),
        ("dead_gateways_attempts_released", {"reaped_s": 14.0}, orphaned(15.0)),
        ("deaths", {"deaths": 1}, replace(record(), marks=(*record().marks, *DIED))),
        ("let_go", {"released_s": 4.0}, kept(6.0)),
    ],
)
def test_what_is_at_its_bound_holds_and_what_is_above_does_not(
    name: str, bounds: dict[str, Any], at_its_bound: Record
) -> None:
    assert verdicts(replace(at_its_bound, scenario=expecting(**bounds)))[name].held
    tight = {bound: _tighter(value) for bound, value in bounds.items()}
    found = verdicts(replace(at_its_bound, scenario=expecting(**tight)))[name]
    assert not found.held


def _tighter(bound: Any) -> Any:
    if isinstance(bound, tuple):
        return tuple(map(_tighter, bound))
    return bound - 1 if isinstance(bound, int) else bound - 0.1


def test_the_long_form_has_a_bound_of_its_own() -> None:
    paused = replace(record(late(RESUMED, 11)), scenario=expecting(recovery_s=(PAUSE_S - 0.1, PAUSE_S)))
    assert [verdicts(replace(paused, long=long))["recovery"].held for long in (False, True)] == [False, True]


def test_a_run_in_which_nothing_was_asked_proves_nothing() -> None:
    empty = record(history=history())
    assert not verdicts(empty)["load_done"].held


# -- ends and ledgers -------------------------------------------------------------------------------------------------


def test_who_had_asked_a_killed_gateway_may_lack_an_end() -> None:
    killed = history(WHOLE, LOST, deaths=(Death("g0", 5.0),))
    assert judge(record(history=killed)).passed
    assert judge(record(history=killed)).figures["lost"] == 1


def test_kv_of_a_room_that_nobody_has_is_found() -> None:
    found = verdicts(record(history=history(WHOLE, ledgers=(Ledger("prefill0", {"9": 4}), Ledger("decode0", {})))))
    [case] = found["nothing_left_on_engines"].broken
    assert case == Broken("prefill0 holds 4 tokens of KV for room 9, which is nobody's")


def test_the_ledger_of_an_engine_that_lives_is_missed() -> None:
    only = history(WHOLE, ledgers=(Ledger("prefill0", {}),))
    [case] = verdicts(record(history=only))["nothing_left_on_engines"].broken
    assert case == Broken("the ledger of decode0 was not read")
    gone = replace(record(history=only), marks=(Mark(3.0, "decode0", "killed"),))
    assert verdicts(gone)["nothing_left_on_engines"].held
    ended = replace(record(history=only), marks=(Mark(3.0, "decode0", "ended"),))
    assert verdicts(ended)["nothing_left_on_engines"].held
    back = replace(gone, marks=(*gone.marks, Mark(4.0, "decode0", "started"), Mark(5.0, "decode0", "frozen")))
    assert not verdicts(back)["nothing_left_on_engines"].held


# -- gateways that die, and that do not -------------------------------------------------------------------------------


def test_what_a_dead_gateway_left_is_told_with_when_it_was_seen_last() -> None:
    told = verdicts(orphaned(9.0))["dead_gateways_attempts_released"]
    assert told.held
    assert told.evidence == (
        "1 dead gateways left 1 attempts' KV on engines, the last was seen 8.0 s after, at most 12.75 s"
    )
    assert verdicts(record())["dead_gateways_attempts_released"].evidence == "no gateway died"


def test_the_bound_is_that_of_the_reapers_own_times() -> None:
    assert expecting().expect.reaped_s == 10 + LEASE_S


FENCED = Event(0.08, error=Error("others took over", code="gateway_fenced"))
LONG_S = LEASE_S + WATCHED_S - 1.0


def fenced(request: Request = BROKEN) -> Request:
    return replace(request, gateway="gateway0", events=(*request.events[:4], FENCED))


@pytest.mark.parametrize(
    ("stood_still", "held"),
    [
        ((), False),
        ((("frozen", 0.0), ("thawed", LONG_S - 0.1)), False),
        ((("frozen", 0.0), ("thawed", LONG_S)), True),
        ((("frozen", -LONG_S), ("thawed", 0.0)), True),
        ((("frozen", -LONG_S - 6.0), ("thawed", -6.0)), False),
        ((("frozen", 100.0), ("thawed", 130.0)), False),
        ((("frozen", 0.0), ("killed", 2.0), ("started", 3.0)), False),
        ((("frozen", 0.0),), True),
    ],
)
@pytest.mark.parametrize("request_", [fenced(), aborted(RESUMED)], ids=["fenced", "aborted"])
def test_only_who_stood_still_for_long_may_be_declared_dead(
    request_: Request, stood_still: tuple[tuple[str, float], ...], held: bool
) -> None:
    marks = tuple(Mark(at_s, "gateway0", what) for what, at_s in stood_still)
    others = (Mark(0.0, "gateway1", "frozen"), Mark(50.0, "gateway1", "thawed"))
    spoiled = record(request_, marks=(*record().marks, *marks, *others))
    assert verdicts(spoiled)["no_live_attempt_aborted"].held is held


def test_a_gateway_that_was_declared_dead_is_told_with_its_request() -> None:
    [case] = verdicts(record(WHOLE, fenced()))["no_live_attempt_aborted"].broken
    assert case == Broken("gateway0 was declared dead", "r-broken", "r-broken.0.0", 0)


# -- what attempts leave, and where they go ---------------------------------------------------------------------------


def hindered(fault: str, target: str, from_s: float, to_s: float | None) -> Record:
    """KV was held for 6 s after the end of an attempt on p1 and d1, whose client had asked g0, and a fault was on."""
    return kept(8.0, planned=(Planned(0, fault, target, from_s, None),), faults=(FaultRun(0, from_s, to_s),))


@pytest.mark.parametrize(
    ("fault", "target", "from_s", "to_s", "held"),
    [
        ("freeze", "d1", 0.0, 4.0, True),
        ("freeze", "d1", 0.0, 3.9, False),
        ("freeze", "d1", 0.0, None, True),
        ("freeze", "d1", 8.1, 9.0, False),
        ("freeze", "d0", 0.0, 4.0, False),
        ("kill", "p1", 0.0, 2.5, True),
        ("kill", "p1", 0.0, 2.4, False),
        ("partial_kv", "p1", 0.0, 4.0, True),
        ("freeze", "g0", 0.0, 4.0, True),
        ("freeze", "g1", 0.0, 4.0, False),
        ("silent", "g0>d1", 0.0, 4.0, True),
        ("silent", "g0>p1", 0.0, 2.5, True),
        ("silent", "p1>d0", 0.0, 2.5, True),
        ("silent", "g0>redis", 0.0, 4.0, False),
        ("silent", "client>g0", 0.0, 4.0, False),
        ("reset", "g0>d1", 0.0, None, False),
        ("error_500", "d1", 0.0, None, False),
    ],
)
def test_time_counts_from_when_its_engines_could_hear_of_its_end(
    fault: str, target: str, from_s: float, to_s: float | None, held: bool
) -> None:
    assert verdicts(hindered(fault, target, from_s, to_s))["let_go"].held is held


def test_a_fault_that_was_never_applied_has_hindered_nobody() -> None:
    never = replace(hindered("freeze", "d1", 0.0, 4.0), faults=(FaultRun(0, None, None),))
    assert not verdicts(never)["let_go"].held


def test_what_dead_gateways_had_is_not_judged_with_what_was_let_go() -> None:
    def died(gateway: str, at_s: float) -> bool:
        return verdicts(kept(8.0, history=history(WHOLE, RESUMED, deaths=(Death(gateway, at_s),))))["let_go"].held

    assert died("g0", 1.0)
    assert not died("g0", 0.9), "that was before the attempt"
    assert not died("g1", 1.0)
    attempts = RESUMED.choices[0].attempts
    open_ = replace(RESUMED, choices=(replace(RESUMED.choices[0], attempts=(replace(attempts[1], ended_s=None),)),))
    assert verdicts(kept(8.0, open_))["let_go"].held


@pytest.mark.parametrize(("since_s", "held"), [(11.0, True), (10.7, False)])
def test_what_was_taken_late_by_its_gateway_counts_from_then(since_s: float, held: bool) -> None:
    """The attempt lasted for a second, by the gateway's clock; nobody else knows when that began."""
    assert verdicts(kept(16.0, since_s=since_s))["let_go"].held is held


@pytest.mark.parametrize(("seen", "held"), [(16, True), (17, False)])
def test_time_in_which_nobody_looked_does_not_count(seen: int, held: bool) -> None:
    """As when the whole machine stands still: it was there in so many looks after its end."""
    before = tuple(Sample(0.25 * at, "decode0", 0, 0, 9) for at in range(9))
    after = tuple(Sample(19.0 - 0.25 * at, "decode0", 0, 0, 9) for at in reversed(range(seen)))
    others = tuple(Sample(2.0 + 0.25 * at, "prefill0", 0, 0, 9) for at in range(60))
    assert verdicts(kept(19.0, samples=(*before, *after, *others)))["let_go"].held is held


def test_the_last_that_was_let_go_is_told() -> None:
    assert verdicts(kept(5.25))["let_go"].evidence == "3 attempts, the last was let go after 3.2 s, at most 4 s"


@pytest.mark.parametrize(
    ("request_", "asked_again"),
    [
        (elsewhere(("p0", "d0"), ("p0", "d1")), ""),
        (elsewhere(("p0", "d0"), ("p0", "d1"), failed_on="p0"), "p0"),
        (elsewhere(("p0", "d0"), ("p0", "d0"), failed_on=""), ""),
        (elsewhere(("p0", "d0"), ("p1", "d0")), "d0"),
        (elsewhere(("p0", "d0"), ("p1", "d0"), had_output=True), "d0"),
        (elsewhere(("p0", "d0"), ("p1", "d1"), ("p1", "d0"), had_output=True), ""),
    ],
)
def test_nobody_goes_again_to_who_has_failed_it_before_it_got_on(request_: Request, asked_again: str) -> None:
    found = verdicts(record(request_))["not_again"].broken
    assert [each.what for each in found] == [f"{asked_again} has failed it, and is asked again"] * bool(asked_again)


def test_each_sample_may_try_what_has_failed_another() -> None:
    failed, other = elsewhere(("p0", "d0"), ("p0", "d1")), elsewhere(("p1", "d0"), ("p0", "d1"), failed_on="p1")
    both = replace(failed, choices=(*failed.choices, *other.choices))
    assert verdicts(record(both))["not_again"].held


@pytest.mark.parametrize(("status", "held"), [(503, False), (429, False), (400, True), (502, True)])
def test_only_who_is_refused_for_now_must_be_told_when_to_ask_again(status: int, held: bool) -> None:
    assert verdicts(record(WHOLE, replace(REFUSED, status=status, again_s=None)))["safe_to_ask_again"].held is held


def test_errors_that_are_wanted_may_end_streams_too() -> None:
    wanted = record(BROKEN, REFUSED, scenario=expecting(errors=("stream_broken", "overloaded")))
    assert verdicts(wanted)["errors"].evidence == "1 told stream_broken, 1 told overloaded"
    assert verdicts(wanted)["errors"].held
    assert verdicts(replace(wanted, history=history(WHOLE), stopped=True))["errors"].unseen


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["killed", "told to end"])
def test_who_was_told_to_end_has_not_died(told: str) -> None:
    asked = (Mark(1.0, "decode0", told), Mark(1.1, "decode0", "ended"))
    assert verdicts(replace(record(), marks=asked))["deaths"].held
    again = (*asked, Mark(2.0, "decode0", "started"), Mark(3.0, "decode0", "ended"))
    assert [each.what for each in verdicts(replace(record(), marks=again))["deaths"].broken] == [
        "decode0 ended by itself at 3.0 s"
    ]


@pytest.mark.parametrize("name", ["gateway0", "redis"])
def test_a_gateway_and_redis_may_never_end_by_themselves(name: str) -> None:
    good = record()
    instances = (*good.instances, Instance("redis", "redis", "redis://r"))
    ended = replace(good, instances=instances, marks=(Mark(1.0, name, "ended"),), scenario=expecting(deaths=5))
    [case] = verdicts(ended)["deaths"].broken
    assert case.what == f"{name} ended by itself at 1.0 s"
    told = replace(ended, marks=(Mark(0.9, name, "told to end"), *ended.marks))
    assert verdicts(told)["deaths"].held


def test_a_deadly_fault_explains_one_death_of_its_target_while_it_is_on() -> None:
    deadly = replace(
        record(), planned=(Planned(0, "die_at_token", "decode0", 0.5, None),), faults=(FaultRun(0, 0.5, 2.0),)
    )
    ends = [Mark(1.0, "decode0", "ended"), Mark(1.1, "decode0", "started"), Mark(1.2, "decode0", "ended")]

    def died(*marks: Mark) -> list[str]:
        return [each.what for each in verdicts(replace(deadly, marks=marks))["deaths"].broken]

    assert died(ends[0]) == []
    assert died(*ends) == ["decode0 ended by itself at 1.2 s"]
    assert died() == []
    early = replace(deadly, marks=(ends[0],), faults=(FaultRun(0, None, None),))
    assert not verdicts(early)["deaths"].held
    for other in (Mark(2.1, "decode0", "ended"), Mark(0.4, "decode0", "ended"), Mark(1.0, "prefill0", "ended")):
        assert died(other) == [f"{other.instance} ended by itself at {other.at_s} s"]


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [(), (FaultRun(0, None, None),), (FaultRun(0, 1.0, 2.0, problem="half of it"),)])
def test_a_fault_that_was_not_wholly_done_is_a_violation(faults: tuple[FaultRun, ...]) -> None:
    assert not verdicts(record(faults=faults))["faults_applied"].held


def test_a_stopped_run_may_lack_faults_and_is_no_success() -> None:
    stopped = verdicts(record(faults=(), stopped=True, settled_s=None))
    assert stopped["faults_applied"].held
    assert not stopped["load_done"].held
    unseen = {name for name, each in stopped.items() if each.unseen}
    assert unseen == {"nothing_left_on_engines", "nothing_left_in_gateways", "settled", "errors"}


FAULTS = (FaultRun(0, 1.0, 2.0), FaultRun(1, 3.0, None), FaultRun(2, 4.0, 5.0), FaultRun(3, None, None))


@pytest.mark.parametrize(
    ("from_s", "to_s", "number"),
    [
        (0.0, 0.5, None),
        (0.0, 1.0, 0),
        (2.5, 2.6, 0),
        (3.5, 3.6, 1),
        (4.5, 4.6, 2),
        (0.0, 9.0, 2),
        (5.5, 6.0, 1),
        (5.0, 6.0, 2),
    ],
)
def test_the_fault_that_was_on_or_last_before(from_s: float, to_s: float, number: int | None) -> None:
    assert fault_at(record(faults=FAULTS), from_s, to_s) == number


def test_who_hangs_is_told_with_the_fault_after_its_last_sign_of_life() -> None:
    hung = replace(RESUMED, events=RESUMED.events[:6], ending=Ending.CUT)
    assert hung.events[-1].at_s == 0.06
    plans = tuple(Planned(number, "kill", "prefill0", 0.0, None) for number in range(3))
    for from_s in (4.0, 0.06):
        faults = (FaultRun(0, 0.01, 0.02), FaultRun(1, from_s, 5.0), FaultRun(2, 6.0, 7.0))
        [case] = verdicts(record(hung, faults=faults, planned=plans))["one_end"].broken
        assert (case.request, case.attempt, case.fault) == ("r-resumed", "r-resumed.0.1", 1)


@pytest.mark.parametrize(("at", "attempt", "fault"), [(2, "r-resumed.0.0", 0), (5, "r-resumed.0.1", 1)])
def test_the_fault_is_that_of_the_attempt(at: int, attempt: str, fault: int) -> None:
    faults = (FaultRun(0, 0.5, 0.6), FaultRun(1, 1.5, 1.6))
    plans = tuple(Planned(number, "kill", "prefill0", 0.0, None) for number in range(2))
    spoiled = record(WHOLE, spliced(RESUMED, at), faults=faults, planned=plans)
    [case] = verdicts(spoiled)["whole_or_one_error"].broken
    assert (case.attempt, case.fault) == (attempt, fault)


def test_only_those_are_named_that_were_tried_too_often() -> None:
    found = verdicts(record(tried(WHOLE, 4), RESUMED, scenario=expecting(attempts_ratio=2)))["attempts"]
    assert [case.request for case in found.broken] == ["r-whole"]


# -- pauses -----------------------------------------------------------------------------------------------------------


def pause_s(request: Request, **others: Any) -> float:
    return judge(record(request, **others)).figures["longest_pause_s"]


def test_pauses_are_those_of_streams_that_go_on_after_a_fault() -> None:
    assert pause_s(late(RESUMED, 5)) == pytest.approx(5.01)
    assert pause_s(late(replace(RESUMED, stream=False), 5)) == 0
    assert pause_s(late(RESUMED, 5), faults=(FaultRun(0, 95.0, None),)) == 0
    ended = (*WHOLE.events[:3], Event(60.0, error=Error("gone")))
    assert pause_s(replace(WHOLE, events=ended)) == pytest.approx(0.01)


def test_pauses_are_those_of_each_choice() -> None:
    events = (Event(0.0, 0, "a"), Event(0.0, 1, "a"), Event(3.0, 0, "b"), Event(4.0, 1, "b"), Event(9.0, 0, done=True))
    two = replace(RESUMED, choices=RESUMED.choices * 2, samples=2, events=events)
    assert pause_s(two) == 4.0


# -- what cannot be seen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPOILED)
def test_what_cannot_be_seen_is_said_and_not_judged(name: str) -> None:
    blind = verdicts(replace(SPOILED[name][0], unseen={name: "a real fleet"}))[name]
    assert blind == Verdict(name, "", unseen="a real fleet")


def test_what_is_unseen_and_unknown_here_is_said_too() -> None:
    assert judge(record(unseen={"colour": "it is dark"})).verdicts[-1] == Verdict("colour", "", unseen="it is dark")


@pytest.mark.parametrize(
    ("name", "blind"),
    [
        ("nothing_left_in_gateways", record(history=history(WHOLE, left_over={}))),
        ("nothing_left_on_engines", record(history=history(WHOLE, ledgers=()), instances=())),
        ("attempts", record(REFUSED)),
        ("dead_gateways_attempts_released", replace(orphaned(3.0), samples=LOOKS[:26])),
        ("dead_gateways_attempts_released", replace(orphaned(3.0), samples=LOOKS[:8], orphans=())),
        ("dead_gateways_attempts_released", replace(orphaned(3.0), samples=())),
    ],
)
def test_silence_is_not_success(name: str, blind: Record) -> None:
    assert verdicts(blind)[name].unseen


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run() -> None:
    died = (Mark(1.0, "decode0", "ended"),)
    figures = judge(record(WHOLE, RESUMED, BROKEN, REFUSED, LOST, LEFT, marks=died)).figures
    assert figures == {
        "requests": 6,
        "whole": 2,
        "refused": 1,
        "broken": 1,
        "left": 1,
        "lost": 1,
        "attempts": 6,
        "faults": 1,
        "deaths": 1,
        "longest_pause_s": pytest.approx(0.04),
        "load_s": 10.0,
        "settle_s": 0.2,
    }
    assert "settle_s" not in judge(record(settled_s=None)).figures
