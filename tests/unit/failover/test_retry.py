"""The classification table against recorded replies of SGLang 0.5.23, and the retry rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.sglang import SglangStrategy
from engines.sse_frames import EventKind, FrameDecoder, event_kind
from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from failover.retry import (
    CLASSIFICATION,
    MAX_CONTINUATIONS,
    Fault,
    History,
    Verdict,
    blamed,
    classify,
    decide,
    may_be_a_death,
)

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "failures.json").read_text())
P, D = EngineId("http://p0"), EngineId("http://d0")


def outcome(
    leg: Leg = Leg.DECODE, kind: FailureKind = FailureKind.STATUS, status: int | None = 500, message: str = "boom"
) -> Outcome:
    return Outcome(P if leg is Leg.PREFILL else D, leg, kind, Stage.DISPATCHED, message, status)


def recorded_outcome(row: dict[str, Any]) -> Outcome:
    """The outcome that our own adapter makes of a recorded reply."""
    leg, body = Leg(row["leg"]), row["body"].encode()
    if row["stream"]:
        frames = FrameDecoder().feed(body)
        bad = next(frame for frame in frames if event_kind(frame) in (EventKind.ERROR, EventKind.ABORT))
        fault = SglangStrategy().frame_fault(bad)
    else:
        found = SglangStrategy().judge(leg, row["status"], body)
        assert found is not None, "a recorded failure must be judged as one"
        fault = found
    return outcome(leg, fault.kind, fault.status, fault.message)


@pytest.mark.parametrize("row", RECORDED, ids=[row["name"] for row in RECORDED])
def test_recorded_replies(row: dict[str, Any]) -> None:
    assert classify(recorded_outcome(row)).value == row["fault"]


def test_the_last_row_fits_everything() -> None:
    assert CLASSIFICATION[-1] == type(CLASSIFICATION[-1])(Fault.ENGINE)
    for status in (None, 200, 418, 500, 502, 599):
        assert classify(outcome(status=status)) is Fault.ENGINE


@pytest.mark.parametrize(
    ("status", "message", "fault"),
    [
        (401, "Unauthorized", Fault.OPERATOR),
        (403, "Forbidden", Fault.OPERATOR),
        (404, "Not Found", Fault.OPERATOR),
        (429, "", Fault.SATURATION),
        (503, "The request queue is full.", Fault.SATURATION),
        (503, "starting", Fault.ENGINE),
        (400, "input exceeds the maximum number of tokens in the KV cache", Fault.INSTANCE_LIMIT),
        (413, "too large", Fault.CALLER),
    ],
)
def test_rows_without_a_recording(status: int, message: str, fault: Fault) -> None:
    assert classify(outcome(status=status, message=message)) is fault


def history(**changes: Any) -> History:
    base = {
        "attempts": 1,
        "max_attempts": 3,
        "committed": False,
        "deaths": 0,
        "own_faults": 0,
        "remaining_s": 10.0,
    }
    return History(**{**base, **changes})


def test_an_engines_failure_is_tried_elsewhere() -> None:
    decision = decide(outcome(), (P, D), history())
    assert decision.verdict is Verdict.RETRY
    assert decision.excluded_engine == D
    assert decision.excluded_pair is None, "the prefill may be used again, and has the prefix"


@pytest.mark.parametrize(
    ("message", "between"),
    [
        ("Decode transfer failed for request rank=0: KVTransferError(7): partial", True),
        ("Prefill bootstrap failed for request", True),
        ("KVTransferError(7): Failed to send kv chunk", True),
        ("Decode handshake failed for request", True),
        ("some assertion", False),
    ],
)
def test_kv_that_was_lost_on_the_way_is_computed_again_without_either(message: str, between: bool) -> None:
    decision = decide(outcome(status=500, message=message), (P, D), history())
    assert decision.verdict is Verdict.RETRY
    assert (decision.excluded_engine is None, decision.excluded_pair) == ((True, (P, D)) if between else (False, None))


def test_a_callers_fault_goes_to_the_client_and_is_never_retried() -> None:
    for committed in (False, True):
        decision = decide(outcome(status=400), (P, D), history(committed=committed))
        assert decision.verdict is Verdict.TO_CLIENT


def test_once_the_client_has_a_byte_a_stream_goes_on_but_nothing_begins_anew() -> None:
    for kind in FailureKind:
        decision = decide(outcome(kind=kind), (P, D), history(committed=True))
        assert decision.verdict is Verdict.CONTINUE
        assert decision.excluded_engine == D


def test_a_stream_that_breaks_again_and_again_is_given_up() -> None:
    broken = history(committed=True, continuations=MAX_CONTINUATIONS - 1)
    assert decide(outcome(), (P, D), broken).verdict is Verdict.CONTINUE
    broken = history(committed=True, continuations=MAX_CONTINUATIONS)
    assert decide(outcome(), (P, D), broken).verdict is Verdict.GIVE_UP
    without_progress = history(committed=True, attempts=3)
    assert decide(outcome(), (P, D), without_progress).verdict is Verdict.GIVE_UP


def test_attempts_and_time_are_bounded() -> None:
    assert decide(outcome(), (P, D), history(attempts=3)).verdict is Verdict.GIVE_UP
    assert decide(outcome(), (P, D), history(remaining_s=0.01)).verdict is Verdict.OUT_OF_TIME


def test_a_second_death_ends_the_request() -> None:
    assert decide(outcome(), (P, D), history(deaths=1)).verdict is Verdict.RETRY
    assert decide(outcome(), (P, D), history(deaths=2)).verdict is Verdict.POISON_SUSPECTED
    assert decide(outcome(), (P, D), history(deaths=2, committed=True)).verdict is Verdict.POISON_SUSPECTED


def test_our_own_fault_is_tried_once_more_on_the_same_engines() -> None:
    duplicate = outcome(status=400, message="Duplicate request ID detected: x")
    first = decide(duplicate, (P, D), history(own_faults=1))
    assert first.verdict is Verdict.RETRY
    assert first.excluded_engine is None
    assert first.excluded_pair is None
    assert decide(duplicate, (P, D), history(attempts=2, own_faults=2)).verdict is Verdict.GIVE_UP


def test_an_instances_limit_ends_as_the_engines_own_400() -> None:
    small = outcome(status=400, message="exceeds the maximum number of tokens")
    assert decide(small, (P, D), history()).verdict is Verdict.RETRY
    assert decide(small, (P, D), history(attempts=3)).verdict is Verdict.TO_CLIENT


def test_backoff_grows_and_the_first_retry_is_at_once() -> None:
    delays = [decide(outcome(), (P, D), history(attempts=n, max_attempts=9)).delay_s for n in range(1, 7)]
    assert delays[0] == 0.0
    assert delays == sorted(delays)


def test_the_callers_fault_of_either_leg_is_what_counts() -> None:
    ours = outcome(Leg.PREFILL, status=500)
    callers = outcome(Leg.DECODE, status=400)
    assert blamed([ours, callers], Leg.PREFILL) is callers
    assert blamed([ours], Leg.DECODE) is ours
    assert blamed([outcome(Leg.DECODE), ours], Leg.PREFILL) is ours


def test_a_refused_connection_is_no_death_under_this_request() -> None:
    assert not may_be_a_death(outcome(kind=FailureKind.CONNECT, status=None))
    assert may_be_a_death(outcome(kind=FailureKind.RESET, status=None))
