"""The quarantine matrix: total, closed by what speaks against a pair alone, opened by proof alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from engines.emulator.core import Timeouts
from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from failover.pair_health import (
    BLIND_TRIES,
    CANARY,
    FIRST_PAUSE_S,
    FORGOTTEN_AFTER_S,
    HEARTBEAT_S,
    LONGEST_PAUSE_S,
    SETTLED_AFTER_S,
    TRANSITIONS,
    Against,
    PairEvent,
    PairHealth,
    PairState,
    against_the_pair,
    told,
    worst,
)

P0, P1, D0, D1 = (EngineId(name) for name in ("p0", "p1", "d0", "d1"))
PAIR = (P0, D0)
LOST = "Decode transfer failed for request r with exception KVTransferError(bootstrap_room=1): Failed to send kv chunk"


def health(seed: int = 7) -> PairHealth:
    return PairHealth(Random(seed))


def quarantined(now_s: float = 0.0) -> PairHealth:
    at = health()
    at.transfer_failed(PAIR, Against(LOST), now_s, now_s)
    at.transfer_failed(PAIR, Against(LOST), now_s, now_s)
    assert at.state(PAIR) is PairState.QUARANTINED
    return at


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(PairState, PairEvent))


def test_only_proof_opens_what_is_closed() -> None:
    proof = {PairEvent.HANDED_OVER, PairEvent.CANARY_PASSED, PairEvent.SETTLED}
    for state in (PairState.QUARANTINED, PairState.PROVING):
        opens = {event for event in PairEvent if TRANSITIONS[state, event] in (PairState.OK, PairState.SUSPECTED)}
        assert opens == proof


def test_one_failure_suspects_and_a_second_closes() -> None:
    for event in (PairEvent.TRANSFER_FAILED, PairEvent.CANARY_FAILED):
        assert TRANSITIONS[PairState.OK, event] is PairState.SUSPECTED
        assert TRANSITIONS[PairState.SUSPECTED, event] is PairState.QUARANTINED


# ---- what speaks against a pair --------------------------------------------------------------------------------------


def outcome(
    kind: FailureKind, message: str = "", stage: Stage = Stage.DISPATCHED, status: int | None = None
) -> Outcome:
    return Outcome(P0, Leg.PREFILL, kind, stage, message, status)


BY_TRANSFER = outcome(FailureKind.STATUS, LOST, status=500)


@pytest.mark.parametrize(
    ("outcomes", "speaks"),
    [
        ([BY_TRANSFER], True),
        ([outcome(FailureKind.STATUS, "Prefill bootstrap failed for request", status=500)], True),
        ([outcome(FailureKind.STREAM_ERROR, "Decode handshake failed for request", status=500)], True),
        ([outcome(FailureKind.TIMEOUT, "silence")], True),
        ([outcome(FailureKind.TIMEOUT, "silence", Stage.HANDED_OVER)], False),
        ([outcome(FailureKind.TIMEOUT, "silence", Stage.STREAMING)], False),
        ([outcome(FailureKind.STATUS, "some assertion", status=500)], False),
        ([outcome(FailureKind.STATUS, "KVTransferError(1): bootstrap_room mismatch", status=500)], False),
        ([outcome(FailureKind.STATUS, "prompt too long", status=400)], False),
        ([outcome(FailureKind.ABORTED, "Aborted")], False),
        *[
            ([outcome(kind, "gone"), BY_TRANSFER], False)
            for kind in (FailureKind.CONNECT, FailureKind.RESET, FailureKind.TRUNCATED)
        ],
        ([BY_TRANSFER, outcome(FailureKind.RESET, "gone")], False),
        ([replace(outcome(FailureKind.TIMEOUT, "no connection in time"), definite=True), BY_TRANSFER], False),
        ([], False),
    ],
)
def test_a_failure_counts_where_neither_server_explains_it(outcomes: list[Outcome], speaks: bool) -> None:
    assert (against_the_pair(outcomes) is not None) is speaks


def test_silence_is_told_from_words() -> None:
    silent = outcome(FailureKind.TIMEOUT, "silence")
    assert against_the_pair([silent]) == Against("silence", silence=True)
    assert against_the_pair([silent, BY_TRANSFER]) == against_the_pair([BY_TRANSFER, silent]) == Against(LOST[-200:])


def test_the_times_fit_those_of_sglang() -> None:
    """The emulator's are held to its wheel."""
    limits = Timeouts()
    assert limits.heartbeat_s == HEARTBEAT_S
    assert limits.heartbeat_failures * limits.heartbeat_s < FORGOTTEN_AFTER_S


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_healthy_pair_is_not_kept() -> None:
    at = health()
    at.handed_over(PAIR, 0.0, 1.0)
    at.trial_began(PAIR, CANARY, 1.0)
    at.canary_passed(PAIR, 1.0, 2.0)
    at.decode_restarted(D0, 3.0)
    assert (dict(at.records), at.version) == ({}, 0)


def test_a_suspected_pair_is_used_on_and_tried_at_once() -> None:
    at = health()
    at.transfer_failed(PAIR, Against(LOST), 4.0, 5.0)
    assert at.state(PAIR) is PairState.SUSPECTED
    assert at.closed() == set()
    assert at.records[PAIR].due_s == 5.0
    at.handed_over(PAIR, 4.9, 6.0)
    assert at.state(PAIR) is PairState.SUSPECTED, "it had begun before"
    at.handed_over(PAIR, 5.0, 6.0)
    assert at.state(PAIR) is PairState.OK


def test_what_began_before_a_restart_says_nothing_of_the_pair_after_it() -> None:
    at = health()
    at.prefill_restarted(P0, [D0], None, 10.0)
    at.handed_over(PAIR, 9.9, 11.0)
    at.canary_passed(PAIR, 9.9, 11.0)
    at.canary_failed(PAIR, Against("old"), 9.9, 11.0)
    at.transfer_failed(PAIR, Against("old"), 9.9, 11.0)
    assert at.state(PAIR) is PairState.QUARANTINED
    assert (at.records[PAIR].failures, at.records[PAIR].due_s) == (0, 10.0)


def test_a_burst_of_failures_is_one_reason_for_a_pause() -> None:
    at = health()
    for _ in range(50):
        at.transfer_failed(PAIR, Against(LOST), 1.0, 2.0)
    assert at.records[PAIR].due_s <= 2.0 + 1.5 * FIRST_PAUSE_S
    at.trial_began(PAIR, "rid", 3.0)
    at.transfer_failed(PAIR, Against(LOST), 3.0, 4.0)
    assert at.state(PAIR) is PairState.QUARANTINED
    assert at.records[PAIR].due_s >= 4.0 + 2 * FIRST_PAUSE_S


# ---- trials ----------------------------------------------------------------------------------------------------------


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    at = quarantined()
    pauses = []
    for turn in range(10):
        now_s = 100.0 * turn + 1.0
        at.trial_began(PAIR, CANARY, now_s)
        assert at.state(PAIR) is PairState.PROVING
        at.canary_failed(PAIR, Against("no answer"), now_s, now_s)
        pauses.append(at.records[PAIR].due_s - now_s)
    assert all(later >= 1.3 * sooner for sooner, later in pairwise(pauses[:3]))
    assert all(pause <= 1.5 * LONGEST_PAUSE_S for pause in pauses)
    assert pauses[-1] >= LONGEST_PAUSE_S
    assert len(set(pauses[-4:])) == 4, "no two gateways in step"


def test_a_trial_that_says_nothing_leaves_the_pair_closed_until_a_request_may_look() -> None:
    at = quarantined()
    for turn in range(BLIND_TRIES):
        now_s = 100.0 * (turn + 1)
        at.tick(lambda _: None, now_s)
        assert at.closed() == {PAIR}
        at.trial_began(PAIR, CANARY, now_s)
        at.trial_void(PAIR, "another", now_s)
        assert at.state(PAIR) is PairState.PROVING, "that was not the one under way"
        at.trial_void(PAIR, CANARY, now_s)
    at.tick(lambda _: None, at.records[PAIR].due_s - 0.1)
    assert at.closed() == {PAIR}
    version = at.version
    at.tick(lambda _: None, at.records[PAIR].due_s)
    assert at.closed() == set()
    assert at.version > version
    at.trial_began(PAIR, "rid", 900.0)
    assert at.closed() == {PAIR}, "one at a time"
    at.handed_over(PAIR, 900.0, 901.0)
    assert at.state(PAIR) is PairState.OK


def test_other_text_closes_a_pair_and_only_text_that_agrees_opens_it() -> None:
    at = health()
    at.canary_differed(PAIR, "other text", 1.0)
    assert at.state(PAIR) is PairState.QUARANTINED
    at.handed_over(PAIR, 2.0, 3.0)
    at.canary_passed(PAIR, 2.0, 3.0)
    at.decode_restarted(D0, 4.0)
    at.prefill_restarted(P0, [D0], FORGOTTEN_AFTER_S, 5.0)
    at.tick(lambda _: 5.0, 5.0 + SETTLED_AFTER_S)
    assert at.closed() == {PAIR}
    at.canary_passed(PAIR, 20.0, 21.0, text_agrees=True)
    assert at.state(PAIR) is PairState.OK


# ---- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent_s", [None, 0.0, FORGOTTEN_AFTER_S - 0.1])
def test_a_prefill_that_was_away_too_short_a_time_needs_a_canary_for_each_decode(silent_s: float | None) -> None:
    at = health()
    at.prefill_restarted(P0, [D0, D1], silent_s, 1.0)
    at.tick(lambda _: 1.0, 1000.0)
    assert at.closed() == {(P0, D0), (P0, D1)}
    assert "old addresses" in at.records[PAIR].reason
    at.canary_passed(PAIR, 1000.0, 1001.0)
    assert at.closed() == {(P0, D1)}


def test_a_prefill_that_all_have_forgotten_opens_when_it_was_ready_for_long_enough() -> None:
    at = health()
    at.prefill_restarted(P0, [D0], FORGOTTEN_AFTER_S, 1.0)
    at.tick(lambda _: None, 1000.0)
    at.tick({P0: 995.0}.get, 995.0 + SETTLED_AFTER_S - 0.1)
    assert at.closed() == {PAIR}, "it was not ready for so long without a break"
    at.tick({P0: 995.0}.get, 995.0 + SETTLED_AFTER_S)
    assert at.closed() == set()


def test_readiness_opens_nothing_that_has_failed_since() -> None:
    at = health()
    at.prefill_restarted(P0, [D0], FORGOTTEN_AFTER_S, 1.0)
    at.canary_failed(PAIR, Against("no answer"), 2.0, 5.0)
    at.tick(lambda _: 1.0, 1000.0)
    assert at.closed() == {PAIR}


def test_a_new_decode_is_tried_at_once_and_trusted_on_proof() -> None:
    at = quarantined()
    at.transfer_failed((P0, D1), Against(LOST), 0.0, 0.0)
    at.canary_failed(PAIR, Against("no answer"), 1.0, 1.0)
    assert at.records[PAIR].due_s > 1.0
    at.decode_restarted(D0, 1.5)
    assert (at.state(PAIR), at.records[PAIR].due_s, at.records[PAIR].failures) == (PairState.QUARANTINED, 1.5, 0)
    assert at.records[P0, D1].due_s == 0.0, "not a pair of that decode"


def test_servers_that_leave_take_their_pairs_with_them() -> None:
    at = health()
    at.prefill_restarted(P0, [D0, D1], None, 1.0)
    at.forget_all_but([P0, P1, D1])
    assert set(at.records) == {(P0, D1)}


# ---- when it may be load ---------------------------------------------------------------------------------------------


SILENCE = Against("no answer", silence=True)


def test_a_pair_is_silent_while_nothing_else_speaks_against_it() -> None:
    at = health()
    at.transfer_failed(PAIR, SILENCE, 0.0, 0.0)
    assert at.silent([PAIR]) == set(), "it is open"
    at.canary_failed(PAIR, SILENCE, 0.0, 1.0)
    assert at.silent([PAIR, (P1, D1)]) == {PAIR}
    at.trial_began(PAIR, CANARY, 2.0)
    assert at.silent([PAIR]) == {PAIR}
    at.canary_failed(PAIR, Against(LOST), 2.0, 3.0)
    at.canary_failed(PAIR, SILENCE, 3.0, 4.0)
    assert at.silent([PAIR]) == set()


def test_after_a_restart_silence_is_what_old_addresses_look_like() -> None:
    at = health()
    at.transfer_failed(PAIR, SILENCE, 0.0, 0.0)
    at.prefill_restarted(P0, [D0, D1], None, 1.0)
    for pair in ((P0, D0), (P0, D1)):
        at.canary_failed(pair, SILENCE, 1.0, 2.0)
    assert at.silent([(P0, D0), (P0, D1)]) == set()


# ---- when all are closed ---------------------------------------------------------------------------------------------


def test_the_least_bad_pair_is_the_one_that_failed_least() -> None:
    at = health()
    pairs = [(P0, D0), (P0, D1), (P1, D0)]
    at.prefill_restarted(P0, [D0, D1], None, 0.0)
    at.prefill_restarted(P1, [D0], None, 0.0)
    assert at.least_bad(pairs) is None, "their canaries come first"
    for turn, pair in enumerate(pairs):
        for _ in range(3 - turn):
            at.canary_failed(pair, Against("no answer"), 1.0, 2.0)
    assert at.least_bad(pairs) == (P1, D0)
    at.canary_differed((P1, D0), "other text", 3.0)
    assert at.least_bad(pairs) == (P0, D1), "wrong text is worse than none"


def test_one_request_at_a_time_tries_the_least_bad_pair() -> None:
    at = health()
    pairs = [(P0, D0), (P0, D1)]
    at.prefill_restarted(P0, [D0, D1], None, 0.0)
    for pair in pairs:
        at.canary_failed(pair, Against("no answer"), 1.0, 2.0)
    at.trial_began((P0, D0), CANARY, 3.0)
    assert at.least_bad(pairs) == (P0, D1), "the other is being tried"
    at.trial_began((P0, D1), "rid", 3.0)
    at.canary_failed((P0, D0), Against("no answer"), 3.0, 4.0)
    assert at.least_bad(pairs) is None
    assert at.least_bad([(P1, D1)]) is None


# ---- words -----------------------------------------------------------------------------------------------------------


def test_a_line_says_since_when_why_and_what_comes() -> None:
    at = quarantined(10.0)
    at.records[PAIR].due_s = 14.0
    line = told(PAIR, at.records[PAIR], 12.0)
    assert line.startswith("pair p0, d0 is quarantined since 2.0 s: ")
    assert LOST in line
    assert line.endswith("next canary in 2.0 s")
    at.trial_began(PAIR, CANARY, 12.0)
    assert told(PAIR, at.records[PAIR], 12.0).endswith("a canary is under way")
    at.trial_began(PAIR, "abc", 12.0)
    assert told(PAIR, at.records[PAIR], 12.0).endswith("request abc tries it")


def test_the_worst_come_first() -> None:
    at = quarantined()
    at.transfer_failed((P1, D1), Against(LOST), 0.0, 0.0)
    at.transfer_failed((P1, D0), Against(LOST), 0.0, 0.0)
    assert worst(at.records, 2) == [PAIR, (P1, D0)]
