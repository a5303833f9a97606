"""The health table: total, suspicious at once, forgiving on proof only."""

from itertools import product

import pytest

from engines.types import EngineId, EngineLoad, FailureKind, Health, Leg, Outcome, Stage
from failover.machine import TRANSITIONS, HealthEvent, breaks, fallen_counter, is_news, step


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(Health, HealthEvent))


@pytest.mark.parametrize("health", [h for h in Health if h is not Health.LEAKING])
def test_one_broken_leg_is_enough_and_one_good_probe_too(health: Health) -> None:
    assert step(health, HealthEvent.LEG_BROKE) is Health.SUSPECTED
    assert step(health, HealthEvent.PROBE_READY) is Health.READY


@pytest.mark.parametrize("health", [h for h in Health if h is not Health.LEAKING])
@pytest.mark.parametrize("event", [HealthEvent.COUNTER_FELL, HealthEvent.SUSPECTED_ELSEWHERE])
def test_a_fallen_counter_and_anothers_word_count_as_a_broken_leg(health: Health, event: HealthEvent) -> None:
    assert step(health, event) is step(health, HealthEvent.LEG_BROKE)


@pytest.mark.parametrize(
    ("health", "event", "expected"),
    [
        (Health.READY, HealthEvent.LEG_BROKE, True),
        (Health.READY, HealthEvent.PROBE_FAILED, True),
        (Health.READY, HealthEvent.COUNTER_FELL, True),
        (Health.SLOW, HealthEvent.PROBE_TIMED_OUT, True),
        (Health.READY, HealthEvent.SUSPECTED_ELSEWHERE, False),
        (Health.SLOW, HealthEvent.SUSPECTED_ELSEWHERE, False),
        (Health.READY, HealthEvent.PROBE_TIMED_OUT, False),
        (Health.READY, HealthEvent.PROBE_NOT_READY, False),
        (Health.READY, HealthEvent.LEAK_FOUND, False),
        (Health.SUSPECTED, HealthEvent.LEG_BROKE, False),
        (Health.NOT_READY, HealthEvent.LEG_BROKE, False),
        (Health.UNKNOWN, HealthEvent.PROBE_FAILED, False),
        (Health.LEAKING, HealthEvent.RESTARTED, False),
    ],
)
def test_news_is_what_we_saw_ourselves_of_a_server_that_took_rooms(
    health: Health, event: HealthEvent, expected: bool
) -> None:
    assert is_news(health, event, step(health, event)) is expected


def load(uncached_tokens: int, busy_us: int, used_tokens: int = 5) -> EngineLoad:
    return EngineLoad(1.0, 1, 0, 0, used_tokens, 5, 100, uncached_tokens, busy_us)


def test_only_a_counter_that_fell_is_a_sign() -> None:
    assert fallen_counter(load(5, 5), load(5, 5, used_tokens=0)) == ""
    assert fallen_counter(load(5, 5), load(6, 50)) == ""
    assert fallen_counter(load(5, 5), load(4, 50)) == "prefill_uncached_tokens_total fell from 5 to 4"
    assert fallen_counter(load(5, 5), load(6, 0)) == "prefill_busy_us_total fell from 5 to 0"


def test_a_leak_ends_with_its_process_only() -> None:
    for event in HealthEvent:
        expected = Health.SUSPECTED if event is HealthEvent.RESTARTED else Health.LEAKING
        assert step(Health.LEAKING, event) is expected


@pytest.mark.parametrize("kind", FailureKind)
def test_answers_are_no_sign_of_death(kind: FailureKind) -> None:
    outcome = Outcome(EngineId("http://p"), Leg.PREFILL, kind, Stage.DISPATCHED, "")
    answered = {FailureKind.STATUS, FailureKind.STREAM_ERROR, FailureKind.ABORTED, FailureKind.GARBLED}
    assert breaks(outcome) is (kind not in answered)
