"""Whose health a failed leg speaks against: recorded words of SGLang, statuses, broken connections."""

import pytest

from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from failover.blame import Sign, sign_of
from failover.machine import HealthEvent

P, D = EngineId("http://p"), EngineId("http://d")
PAIR = (P, D)


def failed(leg: Leg, kind: FailureKind, message: str = "", status: int | None = None) -> Outcome:
    return Outcome(PAIR[leg is Leg.DECODE], leg, kind, Stage.DISPATCHED, message, status)


@pytest.mark.parametrize("leg", Leg)
@pytest.mark.parametrize("kind", [FailureKind.CONNECT, FailureKind.RESET, FailureKind.TRUNCATED])
def test_a_broken_leg_speaks_against_its_own_server(leg: Leg, kind: FailureKind) -> None:
    own = PAIR[leg is Leg.DECODE]
    assert sign_of(failed(leg, kind, "lost"), PAIR) == Sign(own, HealthEvent.LEG_BROKE, look=True)


@pytest.mark.parametrize("leg", Leg)
def test_a_silent_leg_is_late_and_counts(leg: Leg) -> None:
    own = PAIR[leg is Leg.DECODE]
    late = sign_of(failed(leg, FailureKind.TIMEOUT, "no sign of it in time"), PAIR)
    assert late == Sign(own, HealthEvent.LEG_TIMED_OUT, look=True, counts=True)


@pytest.mark.parametrize("status", [400, 413, 422, 429])
def test_client_errors_and_saturation_speak_against_nobody(status: int) -> None:
    for leg in Leg:
        assert sign_of(failed(leg, FailureKind.STATUS, "no", status), PAIR) == Sign(PAIR[leg is Leg.DECODE])


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("The request queue is full", 503),
        ("Duplicate request ID", 500),
        ("Input exceeds the maximum number of tokens", 400),
    ],
)
def test_nor_do_full_queues_small_instances_and_our_own_faults(message: str, status: int) -> None:
    assert sign_of(failed(Leg.PREFILL, FailureKind.STATUS, message, status), PAIR) == Sign(P)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_wrong_keys_and_routes_are_the_operators_fault_on_that_server(status: int) -> None:
    sign = sign_of(failed(Leg.DECODE, FailureKind.STATUS, "no", status), PAIR)
    assert sign == Sign(D, HealthEvent.LEG_REFUSED)


@pytest.mark.parametrize("kind", [FailureKind.STATUS, FailureKind.ABORTED, FailureKind.STREAM_ERROR])
def test_a_failed_answer_is_only_counted(kind: FailureKind) -> None:
    assert sign_of(failed(Leg.DECODE, kind, "CUDA error", 500), PAIR) == Sign(D, counts=True)


@pytest.mark.parametrize(
    ("leg", "message", "named"),
    [
        (Leg.DECODE, "KVTransferError: Lost connection with prefill instance (bootstrap_addr: 1.2.3.4:8998)", P),
        (Leg.PREFILL, "Decode handshake failed", D),
    ],
)
def test_a_word_against_the_peer_is_a_reason_to_look_at_it_and_no_more(leg: Leg, message: str, named: EngineId) -> None:
    outcome = failed(leg, FailureKind.STREAM_ERROR, message, 500)
    assert sign_of(outcome, PAIR) == Sign(named, look=True)
    assert sign_of(outcome) == Sign(outcome.engine_id, counts=True), "without a pair its own server is all there is"
