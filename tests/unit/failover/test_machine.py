"""The health table: total, suspicious at once, forgiving on proof only."""

from itertools import product

import pytest

from engines.types import EngineId, EngineLoad, FailureKind, Health, Leg, Outcome, Stage
from failover.machine import (
    TRANSITIONS,
    HealthEvent,
    breaks,
    fails_trial,
    fallen_counter,
    is_news,
    pause_s,
    step,
)

E = HealthEvent
ENDS_WITH_ITS_PROCESS = (Health.WEDGED, Health.LEAKING)
OTHERS = tuple(health for health in Health if health not in ENDS_WITH_ITS_PROCESS)


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(Health, HealthEvent))


@pytest.mark.parametrize("health", OTHERS)
@pytest.mark.parametrize("event", [E.LEG_BROKE, E.KEEPS_FAILING, E.LEG_REFUSED])
def test_what_broke_under_requests_is_tried_before_it_is_trusted(health: Health, event: HealthEvent) -> None:
    broken = step(health, event)
    assert broken is Health.BROKEN
    assert step(broken, E.PROBE_READY) is Health.PROBATION
    assert step(Health.PROBATION, E.PROBE_READY) is Health.PROBATION, "another probe proves nothing more"
    assert step(Health.PROBATION, E.PROVED) is Health.READY
    assert step(Health.PROBATION, event) is Health.BROKEN


@pytest.mark.parametrize("event", [E.PROBE_NOT_READY, E.PROBE_FAILED, E.COUNTER_FELL, E.RESTARTED, E.PROBE_TIMED_OUT])
def test_nothing_but_a_request_lets_a_broken_server_skip_its_trial(event: HealthEvent) -> None:
    assert step(Health.BROKEN, event) is Health.BROKEN
    assert step(step(Health.PROBATION, event), E.PROBE_READY) is Health.PROBATION


@pytest.mark.parametrize("event", [E.PROBE_FAILED, E.COUNTER_FELL, E.SUSPECTED_ELSEWHERE, E.SILENT])
def test_what_no_request_met_is_cleared_by_a_probe(event: HealthEvent) -> None:
    for health in (Health.UNKNOWN, Health.READY, Health.SLOW, Health.SUSPECTED, Health.NOT_READY):
        assert step(health, event) is Health.SUSPECTED
    assert step(Health.SUSPECTED, E.PROBE_READY) is Health.READY


def test_late_answers_make_it_slow_at_most() -> None:
    assert step(Health.READY, E.PROBE_TIMED_OUT) is Health.SLOW
    assert step(Health.SLOW, E.PROBE_TIMED_OUT) is Health.SLOW
    assert step(Health.READY, E.LEG_TIMED_OUT) is Health.SLOW
    for event in (E.PROBE_READY, E.PROBE_UNREAD, E.PROGRESSED):
        assert step(Health.SLOW, event) is Health.READY
    assert step(Health.SLOW, E.SILENT) is Health.SUSPECTED


def test_who_was_in_doubt_must_say_which_boot_it_is() -> None:
    for health in (Health.SUSPECTED, Health.BROKEN):
        assert step(health, E.PROBE_UNREAD) is health
    assert step(Health.NOT_READY, E.PROBE_UNREAD) is Health.SUSPECTED
    assert step(Health.READY, E.PROBE_UNREAD) is Health.READY, "a busy server may not get round to it"


@pytest.mark.parametrize("before", Health)
def test_probation_begins_only_where_something_broke_or_was_stuck(before: Health) -> None:
    for event in HealthEvent:
        if step(before, event) is Health.PROBATION:
            assert before in (Health.BROKEN, Health.WEDGED, Health.PROBATION)


def test_what_is_stuck_ends_with_its_process_or_moves_again() -> None:
    for event in HealthEvent:
        expected = {E.RESTARTED: Health.SUSPECTED, E.PROGRESSED: Health.PROBATION, E.LEAK_FOUND: Health.LEAKING}
        assert step(Health.WEDGED, event) is expected.get(event, Health.WEDGED)


def test_a_leak_ends_with_its_process_only() -> None:
    for event in HealthEvent:
        expected = Health.SUSPECTED if event is E.RESTARTED else Health.LEAKING
        assert step(Health.LEAKING, event) is expected


def test_only_two_states_take_rooms() -> None:
    assert [health for health in Health if health.takes_rooms] == [Health.READY, Health.PROBATION]


@pytest.mark.parametrize(
    ("health", "event", "expected"),
    [
        (Health.READY, E.LEG_BROKE, True),
        (Health.READY, E.LEG_TIMED_OUT, True),
        (Health.READY, E.PROBE_FAILED, True),
        (Health.READY, E.COUNTER_FELL, True),
        (Health.SLOW, E.SILENT, True),
        (Health.PROBATION, E.LEG_BROKE, True),
        (Health.SLOW, E.LEG_TIMED_OUT, False),
        (Health.READY, E.SUSPECTED_ELSEWHERE, False),
        (Health.SLOW, E.SUSPECTED_ELSEWHERE, False),
        (Health.READY, E.PROBE_TIMED_OUT, False),
        (Health.PROBATION, E.PROBE_TIMED_OUT, False),
        (Health.READY, E.PROBE_NOT_READY, False),
        (Health.READY, E.LEAK_FOUND, False),
        (Health.SUSPECTED, E.LEG_BROKE, False),
        (Health.NOT_READY, E.LEG_BROKE, False),
        (Health.UNKNOWN, E.PROBE_FAILED, False),
        (Health.LEAKING, E.RESTARTED, False),
    ],
)
def test_news_is_what_we_saw_ourselves_of_a_server_that_took_rooms(
    health: Health, event: HealthEvent, expected: bool
) -> None:
    assert is_news(health, event, step(health, event)) is expected


def test_a_trial_fails_by_requests_only() -> None:
    failed = {event for event in HealthEvent if fails_trial(Health.PROBATION, event)}
    assert failed == {E.LEG_BROKE, E.LEG_TIMED_OUT, E.KEEPS_FAILING, E.LEG_REFUSED, E.WEDGE_FOUND}
    assert not any(fails_trial(health, E.LEG_BROKE) for health in Health if health is not Health.PROBATION)


def test_pauses_double_up_to_half_a_minute_and_are_spread() -> None:
    assert pause_s(0, 0.5) == 0.0
    assert [pause_s(failed, 0.5) for failed in (1, 2, 3, 4, 6, 7, 8, 1000)] == [0.5, 1, 2, 4, 16, 30, 30, 30]
    assert (pause_s(2, 0.0), pause_s(2, 1.0)) == (0.75, 1.25)


def load(uncached_tokens: int, busy_us: int, used_tokens: int = 5) -> EngineLoad:
    return EngineLoad(1.0, 1, 0, 0, used_tokens, 5, 100, uncached_tokens, busy_us)


def test_only_a_counter_that_fell_is_a_sign() -> None:
    assert fallen_counter(load(5, 5), load(5, 5, used_tokens=0)) == ""
    assert fallen_counter(load(5, 5), load(6, 50)) == ""
    assert fallen_counter(load(5, 5), load(4, 50)) == "prefill_uncached_tokens_total fell from 5 to 4"
    assert fallen_counter(load(5, 5), load(6, 0)) == "prefill_busy_us_total fell from 5 to 0"


@pytest.mark.parametrize("kind", FailureKind)
def test_answers_are_no_sign_of_death(kind: FailureKind) -> None:
    outcome = Outcome(EngineId("http://p"), Leg.PREFILL, kind, Stage.DISPATCHED, "")
    answered = {FailureKind.STATUS, FailureKind.STREAM_ERROR, FailureKind.ABORTED, FailureKind.GARBLED}
    assert breaks(outcome) is (kind not in answered)
