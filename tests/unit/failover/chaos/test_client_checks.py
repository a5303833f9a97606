"""Answers of real models: a good one has nothing wrong, and each spoiled one exactly what was spoiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from failover.chaos.client_checks import BY_PDGATE, UNSEEN, check
from failover.chaos.history import Attempt, Choice, Ending, Error, Event, History, Limits, Request, Usage
from failover.chaos.invariants import INVARIANTS, judge
from failover.chaos.real_fleet import RealFleet
from tests.unit.failover.chaos.records import record

USAGE = Event(0.9, usage=Usage(7, 4, 11, 2))
DONE = Event(1.0, done=True)
FINISH = Event(0.8, finish="length")
ERROR = Event(0.8, error=Error("the decode server failed"))
ROLE = Event(0.1, role=True)
WORDS = tuple(Event(0.2 + number / 10, text=f"w{number} ") for number in range(4))
TEXT = "w0 w1 w2 w3 "
GOOD = Request(
    "request 0 (stream)",
    0.0,
    (Choice((), ()),),
    Limits(4, ignore_eos=True),
    (ROLE, *WORDS, FINISH, USAGE, DONE),
    200,
    Ending.WHOLE,
    wants_usage=True,
)
BROKEN = replace(GOOD, events=(ROLE, *WORDS[:2], ERROR))
REFUSED = replace(GOOD, events=(Event(0.1, error=Error("no room")),), status=503)
BODY = replace(GOOD, events=(Event(0.5, text=TEXT, finish="length"), USAGE), stream=False)
IDS = replace(
    GOOD, ids_shown=True, events=(ROLE, *(replace(e, ids=(n,)) for n, e in enumerate(WORDS)), *GOOD.events[5:])
)


def rules(request: Request, reference: str | None = None) -> list[str]:
    """What is wrong, but for the times of events, which are mixed up here."""
    references = {} if reference is None else {request.name: reference}
    return [each.rule for each in check(History((request,)), references) if each.rule != "time"]


@pytest.mark.parametrize(
    "request_", [GOOD, BROKEN, REFUSED, BODY, IDS], ids=["whole", "broken", "refused", "body", "ids"]
)
def test_a_good_answer(request_: Request) -> None:
    assert rules(request_) == []
    assert rules(request_, TEXT) == []


def test_what_a_client_left_may_be_any_beginning() -> None:
    for count in range(len(GOOD.events)):
        assert rules(replace(GOOD, events=GOOD.events[:count], ending=Ending.LEFT), TEXT) == []


def test_done_may_follow_an_error_once() -> None:
    assert rules(replace(BROKEN, events=(*BROKEN.events, DONE))) == []
    assert rules(replace(BROKEN, events=(*BROKEN.events, DONE, WORDS[3]))) == ["after the error"]
    two = (*BROKEN.events, ERROR, DONE)
    expected = ["broken: errors", "broken: terminators", "after the error", "after the error"]
    assert rules(replace(BROKEN, events=two)) == expected


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((ROLE, *WORDS, FINISH, USAGE), ["whole: terminators"]),
        ((ROLE, *WORDS, FINISH, USAGE, DONE, DONE), ["whole: terminators", "after the terminator"]),
        ((ROLE, *WORDS, USAGE, DONE), ["whole: ends of choice 0"]),
        (
            (ROLE, *WORDS, FINISH, FINISH, USAGE, DONE),
            ["whole: ends of choice 0", "whole: at most one end of choice 0"],
        ),
        ((ROLE, *WORDS, FINISH, USAGE, DONE, WORDS[0]), ["after the terminator", "after the finish"]),
        ((ROLE, *WORDS[:3], FINISH, WORDS[3], USAGE, DONE), ["after the finish"]),
        ((ROLE, *WORDS, FINISH, ERROR), ["broken: an error behind the end"]),
        ((ROLE, *WORDS[:1], ROLE, *WORDS[1:], FINISH, USAGE, DONE), ["role"]),
        ((*WORDS[:1], ROLE, *WORDS[1:], FINISH, USAGE, DONE), ["role"]),
        ((ROLE, *WORDS, replace(FINISH, finish="abort"), USAGE, DONE), ["finish of choice 0"]),
        ((ROLE, Event(0.2, junk="event: x"), *WORDS, FINISH, USAGE, DONE), ["form"]),
        ((ROLE, *WORDS, replace(WORDS[0], index=1), FINISH, USAGE, DONE), ["index"]),
        ((ROLE, *WORDS, *WORDS[:2], FINISH, USAGE, DONE), ["pieces of choice 0"]),
        ((ROLE, *WORDS, FINISH, DONE), ["usage events"]),
        ((ROLE, *WORDS, FINISH, USAGE, USAGE, DONE), ["usage events"]),
        ((ROLE, Event(0.2, error=Error(""))), ["clear error"]),
    ],
)
def test_a_stream_that_is_wrong(events: Sequence[Event], found: list[str]) -> None:
    assert rules(replace(GOOD, events=tuple(events))) == found


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        (Usage(7, 5, 12), "completion tokens"),
        (Usage(7, 3, 10), "completion tokens"),
        (Usage(7, 4, 12), "usage"),
        (Usage(0, 4, 4), "usage"),
        (Usage(7, 4, 11, 8), "cached tokens"),
    ],
)
def test_usage_that_is_wrong(usage: Usage, found: str) -> None:
    events = tuple(Event(0.9, usage=usage) if event.usage else event for event in GOOD.events)
    assert rules(replace(GOOD, events=events)) == [found]


def test_an_answer_may_end_before_all_tokens_are_used() -> None:
    stopped = (ROLE, *WORDS[:2], replace(FINISH, finish="stop"), Event(0.9, usage=Usage(7, 2, 9)), DONE)
    assert rules(replace(GOOD, events=stopped)) == []


def test_ids_are_counted_where_they_are_shown() -> None:
    doubled = (ROLE, IDS.events[1], *IDS.events[1:])
    assert rules(replace(IDS, events=doubled)) == ["tokens of choice 0", "completion tokens"]
    missed = (ROLE, *IDS.events[2:])
    assert rules(replace(IDS, events=missed)) == ["tokens of choice 0", "completion tokens"]
    assert rules(replace(IDS, ids_shown=False)) == []


def test_no_end_at_all() -> None:
    assert rules(replace(GOOD, events=GOOD.events[:3], ending=Ending.CUT)) == ["end"]
    assert rules(replace(GOOD, events=(), status=None, ending=Ending.CUT)) == ["end"]
    assert rules(replace(GOOD, events=(), status=307, ending=Ending.WHOLE))[0] == "whole: status"


def test_a_whole_body_is_no_broken_stream() -> None:
    assert rules(replace(GOOD, stream=False, events=(ERROR,))) == ["broken: stream"]


def test_a_choice_that_is_finished_is_compared_as_a_whole_whatever_became_of_the_others() -> None:
    short = replace(GOOD, events=(ROLE, *WORDS[:2], FINISH), ending=Ending.LEFT)
    assert rules(short) == []
    assert [rule.partition(" is")[0] for rule in rules(short, TEXT)] == ["choice 0"]


def test_a_stop_string_is_not_shown() -> None:
    assert rules(replace(GOOD, limits=Limits(4, stop=("w2",)))) == ["stop string in choice 0"]
    assert rules(replace(GOOD, limits=Limits(4, stop=("w9",)))) == []


@pytest.mark.parametrize(
    ("request_", "reference", "at"),
    [
        (GOOD, "w0 w1 w2 w3 w4", 12),
        (GOOD, "w0 w1", 5),
        (GOOD, "w0 x1 w2 w3 ", 3),
        (BROKEN, "w0 x1 w2 w3 ", 3),
        (BROKEN, "w0 w", 4),
        (BODY, "w0 w1 w2 w3", 11),
    ],
)
def test_another_answer_than_before(request_: Request, reference: str, at: int) -> None:
    [wrong] = check(History((request_,)), {request_.name: reference})
    assert wrong.position == at
    assert wrong.rule.startswith(f"choice 0 is not what was answered before the faults, from character {at} on (")


def test_every_choice_is_compared() -> None:
    other = tuple(replace(each, index=1) for each in (ROLE, *WORDS[:3], FINISH))
    usage = Event(0.9, usage=Usage(7, 8, 15))
    two = replace(GOOD, choices=GOOD.choices * 2, events=(ROLE, *WORDS, FINISH, *other, usage, DONE), samples=2)
    assert [rule.partition(" is")[0] for rule in rules(two, TEXT)] == ["choice 1"]


def test_attempts_that_are_told_are_judged() -> None:
    first = Attempt("a", 1, "prefill0", "decode0", 0.0, 0.5)
    again = replace(GOOD, choices=(Choice((), (first, replace(first, rid="b", began_s=0.4, room=2))),))
    assert rules(again) == ["a second live attempt beside a"]


# -- in a record ------------------------------------------------------------------------------------------------------


def test_a_record_of_a_real_fleet_is_judged_by_its_answers_alone() -> None:
    fleet = RealFleet("lab", ("http://127.0.0.1:1",))
    made = record(GOOD, fleet=fleet, unseen={**UNSEEN, **BY_PDGATE}, references={GOOD.name: TEXT})
    verdicts = {each.invariant: each for each in judge(made).verdicts}
    assert verdicts["whole_or_one_error"].held
    assert [name for name, each in verdicts.items() if each.unseen] == [
        name for name in INVARIANTS if name in {**UNSEEN, **BY_PDGATE}
    ]
    spoiled = judge(replace(made, references={GOOD.name: "something else"}))
    [wrong] = next(each for each in spoiled.verdicts if each.invariant == "whole_or_one_error").broken
    assert wrong.request == GOOD.name
    assert {*UNSEEN, *BY_PDGATE} <= INVARIANTS.keys()
