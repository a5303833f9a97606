"""The health table: total, suspicious at once, forgiving on proof only."""

from itertools import product

import pytest

from engines.types import EngineId, FailureKind, Health, Leg, Outcome, Stage
from failover.machine import TRANSITIONS, HealthEvent, breaks, step


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(Health, HealthEvent))


@pytest.mark.parametrize("health", [h for h in Health if h is not Health.LEAKING])
def test_one_broken_leg_is_enough_and_one_good_probe_too(health: Health) -> None:
    assert step(health, HealthEvent.LEG_BROKE) is Health.SUSPECTED
    assert step(health, HealthEvent.PROBE_READY) is Health.READY


def test_a_leak_ends_with_its_process_only() -> None:
    for event in HealthEvent:
        expected = Health.SUSPECTED if event is HealthEvent.RESTARTED else Health.LEAKING
        assert step(Health.LEAKING, event) is expected


@pytest.mark.parametrize("kind", FailureKind)
def test_answers_are_no_sign_of_death(kind: FailureKind) -> None:
    outcome = Outcome(EngineId("http://p"), Leg.PREFILL, kind, Stage.DISPATCHED, "")
    answered = {FailureKind.STATUS, FailureKind.STREAM_ERROR, FailureKind.ABORTED, FailureKind.GARBLED}
    assert breaks(outcome) is (kind not in answered)
