"""Pairs that must not be formed: one look for each state of the fleet, one word for each new reason; the quarantine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import pytest

from engines.fleet import Fleet
from engines.types import EngineId, EngineLoad, EngineView, FailureKind, Health, Leg, Outcome, Stage
from failover.deadlines import Deadline
from failover.pair_health import FORGOTTEN_AFTER_S, SETTLED_AFTER_S, Against, PairState
from gateway.attempt import AttemptFailed
from gateway.pairs import Pairs
from tests.fakes import FACTS, up

P0, P1, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "p1", "d0", "d1"))
OTHER = replace(FACTS, model="other")


@dataclass
class Clock:
    """The loop's clock, moved by hand."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def made(clock: Clock | None = None) -> Pairs:
    return Pairs(clock or Clock(), Random(5))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def unlike() -> Fleet:
    fleet = up("p0", "d0", "d1")
    fleet.set_facts(D1, OTHER)
    return fleet


def test_a_uniform_fleet_forbids_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pairs, fleet = made(), up("p0", "p1", "d0")
    assert (pairs.apart(fleet.snapshot()), pairs.forbidden(fleet.snapshot())) == ((), frozenset())
    assert pairs.why_none(fleet.snapshot()) == ""
    assert not told(caplog)


def test_each_reason_is_told_when_it_is_new(caplog: pytest.LogCaptureFixture) -> None:
    pairs, fleet = made(), unlike()
    assert pairs.forbidden(fleet.snapshot()) == {(P0, D1)}
    assert told(caplog) == [
        "one pair is not formed (refused), such as http://p0 and http://d1: "
        "model differs: tiny / other (--served-model-name)"
    ]
    fleet.set_load(P0, EngineLoad(1.0, 0, 0, 0, 0, 0, 10))
    assert pairs.forbidden(fleet.snapshot()) == {(P0, D1)}
    assert not told(caplog), "nothing new"
    fleet.set_facts(D0, OTHER)
    assert pairs.forbidden(fleet.snapshot()) == {(P0, D0), (P0, D1)}
    assert not told(caplog), "the same reason"
    fleet.set_facts(D0, replace(FACTS, weight_version="2"))
    assert pairs.forbidden(fleet.snapshot()) == {(P0, D0), (P0, D1)}
    assert len(told(caplog)) == 1
    assert "weight_version differs: default / 2" in pairs.why_none(fleet.snapshot())
    assert "model differs" in pairs.why_none(fleet.snapshot())


def test_what_is_mended_is_allowed_and_told_anew_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    pairs, fleet = made(), unlike()
    assert pairs.forbidden(fleet.snapshot())
    fleet.set_facts(D1, FACTS)
    assert not pairs.forbidden(fleet.snapshot())
    fleet.set_facts(D1, OTHER)
    assert pairs.forbidden(fleet.snapshot())
    assert len(told(caplog)) == 2


# ---- the quarantine ------------------------------------------------------------------------------------------------


_rids = count()
LOST = "Prefill transfer failed for request r with exception KVTransferError(1): Failed to send kv chunk"


@dataclass
class Tried:
    """One attempt on a pair of a fleet as it is."""

    prefill: EngineView
    decode: EngineView
    decided_s: float
    rid: str = field(default_factory=lambda: f"rid{next(_rids)}")


@dataclass
class Stage4:
    """Two prefills, two decodes, all up and known."""

    clock: Clock
    fleet: Fleet
    pairs: Pairs

    def forbidden(self) -> frozenset[tuple[EngineId, EngineId]]:
        return self.pairs.forbidden(self.fleet.snapshot())

    def attempt(self, prefill: EngineId = P0, decode: EngineId = D0) -> Tried:
        tried = Tried(self.fleet.view(prefill), self.fleet.view(decode), self.clock.now_s)
        self.pairs.booked(tried)
        return tried

    def fails(self, prefill: EngineId = P0, decode: EngineId = D0, deadline: Deadline | None = None) -> None:
        tried = self.attempt(prefill, decode)
        self.pairs.failed(tried, failure(deadline))
        self.pairs.finished(tried)

    def restart(self, engine_id: EngineId, boot: str = "second") -> None:
        self.fleet.set_facts(engine_id, replace(FACTS, boot_fingerprint=boot))
        self.pairs.forbidden(self.fleet.snapshot())


def failure(deadline: Deadline | None = None) -> AttemptFailed:
    kind = FailureKind.STATUS if deadline is None else FailureKind.TIMEOUT
    outcome = Outcome(P0, Leg.PREFILL, kind, Stage.DISPATCHED, LOST, 500)
    return AttemptFailed(outcome, (outcome,), deadline)


@pytest.fixture
def at() -> Stage4:
    clock = Clock()
    stage = Stage4(clock, up("p0", "p1", "d0", "d1"), made(clock))
    assert stage.forbidden() == frozenset()
    return stage


def test_two_failures_that_name_neither_server_close_a_pair(at: Stage4, caplog: pytest.LogCaptureFixture) -> None:
    at.fails()
    assert at.forbidden() == frozenset()
    assert not told(caplog), "a suspicion is not worth a word"
    at.fails()
    assert at.forbidden() == {(P0, D0)}
    assert [line.split(":")[-1].split(";")[0] for line in told(caplog)] == [" Failed to send kv chunk"]
    at.fails(P1, D1)
    at.pairs.handed_over(at.attempt(P1, D1))
    at.fails(P1, D1)
    assert at.forbidden() == {(P0, D0)}, "KV has arrived between the failures of that one"


def test_the_end_of_a_requests_own_time_is_nobodys_fault(at: Stage4) -> None:
    for _ in range(3):
        at.fails(deadline=Deadline.TOTAL)
    assert at.forbidden() == frozenset()
    for _ in range(2):
        at.fails(deadline=Deadline.FIRST_TOKEN)
    assert at.forbidden() == {(P0, D0)}


def test_a_first_boot_needs_no_proof_and_a_second_one_does(at: Stage4) -> None:
    at.restart(P0)
    assert at.forbidden() == {(P0, D0), (P0, D1)}
    at.restart(D1)
    assert at.forbidden() == {(P0, D0), (P0, D1)}, "a new decode knows no old addresses"


@pytest.mark.parametrize("restarted", [P0, D0])
def test_an_attempt_on_the_process_before_says_nothing(at: Stage4, restarted: EngineId) -> None:
    attempts = [at.attempt() for _ in range(3)]
    at.restart(restarted)
    before = at.pairs.health.state((P0, D0))
    for old in attempts[:2]:
        at.pairs.failed(old, failure())
        at.pairs.finished(old)
    at.pairs.handed_over(attempts[2])
    assert at.pairs.health.state((P0, D0)) is before
    assert all(record.failures == 0 for record in at.pairs.health.records.values())
    assert at.pairs.proved_s((P0, D0)) is None


def test_a_prefill_that_all_decodes_have_forgotten_opens_by_its_readiness(at: Stage4) -> None:
    at.fleet.set_health(P0, Health.SUSPECTED)
    for _ in range(int(FORGOTTEN_AFTER_S) + 1):
        at.pairs.heartbeat(P0, answered=False)
        at.clock.now_s += 1.0
    at.restart(P0)
    at.fleet.set_health(P0, Health.READY)
    assert (P0, D0) in at.forbidden()
    at.clock.now_s += SETTLED_AFTER_S - 0.1
    at.pairs.tick()
    assert (P0, D0) in at.forbidden()
    at.clock.now_s += 0.1
    at.pairs.tick()
    assert at.forbidden() == frozenset()


def test_an_answer_in_between_means_that_nobody_has_forgotten_it(at: Stage4) -> None:
    at.fleet.set_health(P0, Health.SUSPECTED)
    for answered in (False, True, False):
        at.pairs.heartbeat(P0, answered=answered)
        at.clock.now_s += FORGOTTEN_AFTER_S
    at.restart(P0)
    assert not any(record.settles for record in at.pairs.health.records.values())


def test_a_silence_that_was_over_is_not_part_of_the_next(at: Stage4) -> None:
    for health in (Health.SUSPECTED, Health.READY, Health.SUSPECTED):
        at.fleet.set_health(P0, health)
        at.forbidden()
        if health is not Health.READY:
            at.pairs.heartbeat(P0, answered=False)
        at.clock.now_s += FORGOTTEN_AFTER_S
    at.pairs.heartbeat(P0, answered=False)
    at.clock.now_s += 0.1
    at.restart(P0)
    assert at.pairs.health.records[P0, D0].settles, "15 s of it were in one piece"
    at.fleet.set_health(P0, Health.READY)
    at.forbidden()
    at.fleet.set_health(P0, Health.SUSPECTED)
    at.forbidden()
    at.pairs.heartbeat(P0, answered=False)
    at.restart(P0, "third")
    assert not at.pairs.health.records[P0, D0].settles


def test_the_silence_of_a_server_that_is_seen_back_at_once_still_counts(at: Stage4) -> None:
    """Its new boot and its readiness may come with one probe."""
    at.fleet.set_health(P0, Health.SUSPECTED)
    for _ in range(2):
        at.pairs.heartbeat(P0, answered=False)
        at.clock.now_s += FORGOTTEN_AFTER_S
    at.fleet.set_facts(P0, replace(FACTS, boot_fingerprint="second"))
    at.fleet.set_health(P0, Health.READY)
    assert at.forbidden() == {(P0, D0), (P0, D1)}
    assert at.pairs.health.records[P0, D0].settles


def test_a_request_on_a_closed_pair_is_its_trial(at: Stage4) -> None:
    for _ in range(2):
        at.fails()
    tried = at.attempt()
    assert at.pairs.health.state((P0, D0)) is PairState.PROVING
    at.pairs.finished(tried)
    assert at.pairs.health.state((P0, D0)) is PairState.QUARANTINED
    tried = at.attempt()
    at.pairs.handed_over(tried)
    at.pairs.finished(tried)
    assert at.forbidden() == frozenset()


def test_the_fleet_is_never_left_without_a_pair(at: Stage4) -> None:
    for prefill in (P0, P1):
        at.restart(prefill)
    assert len(at.forbidden()) == 4, "first the canaries"
    assert at.pairs.shut("tiny", at.fleet.snapshot())
    for pair in ((P0, D0), (P0, D1), (P1, D0), (P1, D1)):
        at.pairs.health.canary_failed(pair, Against("no answer"), at.clock.now_s, at.clock.now_s + len(pair[1]))
    at.pairs.health.canary_failed((P0, D0), Against("no answer"), at.clock.now_s, at.clock.now_s)
    (opened,) = {(p, d) for p in (P0, P1) for d in (D0, D1)} - at.forbidden()
    assert opened != (P0, D0), "it has failed most"
    at.attempt(*opened)
    assert len(at.forbidden()) == 4, "one request at a time"


def test_a_model_whose_servers_are_down_is_not_in_quarantine(at: Stage4) -> None:
    at.restart(P0)
    for engine_id in (P0, P1):
        at.fleet.set_health(engine_id, Health.SUSPECTED)
    assert not at.pairs.shut("tiny", at.fleet.snapshot())


def test_the_only_pair_is_shut_while_one_request_may_try_it() -> None:
    clock = Clock()
    at = Stage4(clock, up("p0", "d0"), made(clock))
    assert not at.pairs.shut("tiny", at.fleet.snapshot())
    at.fails()
    at.fails()
    assert at.forbidden() == frozenset()
    assert at.pairs.shut("tiny", at.fleet.snapshot())


SILENCE = Against("no answer", silence=True)


def silence(at: Stage4, *pairs: tuple[EngineId, EngineId]) -> None:
    for pair in pairs:
        for _ in range(2):
            at.pairs.health.transfer_failed(pair, SILENCE, at.clock.now_s, at.clock.now_s)


def test_silence_nearly_everywhere_is_load_and_closes_nothing(at: Stage4) -> None:
    silence(at, (P0, D0), (P1, D1))
    assert at.forbidden() == {(P0, D0), (P1, D1)}, "half of them"
    silence(at, (P0, D1))
    assert at.forbidden() == frozenset()
    assert not at.pairs.shut("tiny", at.fleet.snapshot())
    tried = at.attempt()
    assert at.forbidden() == frozenset(), "no trial: all of them are open to all"
    at.pairs.finished(tried)
    at.pairs.health.trial_began((P0, D0), "canary", at.clock.now_s)
    assert at.forbidden() == frozenset()
    silence(at, (P1, D0))
    assert at.forbidden() == frozenset()
    at.pairs.handed_over(at.attempt())
    assert at.pairs.health.state((P0, D0)) is PairState.OK


def test_silence_around_one_server_is_no_load() -> None:
    clock = Clock()
    at = Stage4(clock, up("p0", "p1", "d0"), made(clock))
    assert at.forbidden() == frozenset()
    silence(at, (P0, D0), (P1, D0))
    assert at.forbidden(), "one decode is behind all of it"


def test_a_model_of_its_own_is_a_fleet_of_its_own(at: Stage4) -> None:
    at.fleet.set_facts(P1, OTHER)
    at.fleet.set_facts(D1, OTHER)
    at.fails()
    at.fails()
    assert at.forbidden() == {(P0, D1), (P1, D0)}, "the only pair of its model is opened again"
    assert at.pairs.shut("tiny", at.fleet.snapshot())
    assert not at.pairs.shut("other", at.fleet.snapshot())


def test_who_finds_no_pair_waits_for_one_that_may_open(at: Stage4) -> None:
    at.restart(P0)
    views = {engine_id: at.fleet.view(engine_id) for engine_id in (P0, P1, D0, D1)}
    assert at.pairs.may_open([views[P0]], [views[D0]])
    assert not at.pairs.may_open([views[P1]], [views[D0]])
    assert not at.pairs.may_open([views[P0]], [views[D0]], frozenset({(P0, D0)})), "it has failed there already"
    at.fleet.set_facts(D0, OTHER)
    at.forbidden()
    assert not at.pairs.may_open([views[P0]], [views[D0]]), "it never will"


def test_states_are_counted_over_pairs_that_can_be(at: Stage4) -> None:
    at.restart(P0)
    at.fails(P1, D0)
    at.fleet.set_facts(D1, OTHER)
    counts = at.pairs.states(at.fleet.snapshot())
    assert counts == {PairState.OK: 0, PairState.SUSPECTED: 1, PairState.QUARANTINED: 1, PairState.PROVING: 0}


def test_what_is_shown_is_bounded_and_in_words(at: Stage4) -> None:
    at.restart(P0)
    at.clock.now_s += 2.0
    first, second = at.pairs.as_json()
    assert (first["prefill"], first["decode"], first["state"], first["since_s"]) == (P0, D0, "quarantined", 2.0)
    assert (second["decode"], second["tried_by"], second["half_open"]) == (D1, None, False)
    assert [
        line.startswith(f"pair {P0}, {d} is quarantined since 2.0 s")
        for line, d in zip(at.pairs.lines(), (D0, D1), strict=True)
    ] == [True, True]
    assert at.pairs.lines()[0] in at.pairs.why_none(at.fleet.snapshot())


def test_when_kv_last_arrived_is_remembered(at: Stage4) -> None:
    assert at.pairs.proved_s((P0, D0)) is None
    at.pairs.handed_over(at.attempt())
    assert at.pairs.proved_s((P0, D0)) == at.clock.now_s
