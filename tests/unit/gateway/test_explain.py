"""The ring of explained requests: bounded, found by any of its names, every term and outcome kept."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from engines.types import EngineId, FailureKind, Leg, Outcome, Stage
from gateway.explain import AttemptRecord, ExplainRing, Record
from tests.fakes import FACTS, decider, request, timeless, up


def record(name: str, *aliases: str) -> Record:
    return Record(name, "/generate", "tiny", "cost", 0.0, aliases)


def test_a_ring_keeps_the_newest() -> None:
    ring = ExplainRing(3)
    for number in range(10):
        ring.add(record(f"r{number}"))
    assert len(ring) == 3
    assert ring.find("r6") is None
    assert ring.find("r7") is not None
    newest = ring.newest()
    assert newest is not None
    assert newest.request_id == "r9"


def test_an_empty_ring_knows_nothing() -> None:
    assert ExplainRing(3).newest() is None
    assert ExplainRing(3).find("x") is None


def test_a_request_is_found_by_the_rid_its_client_wished_for() -> None:
    ring = ExplainRing(3)
    ring.add(record("r1", "mine"))
    assert ring.find("mine") is ring.find("r1") is not None


def test_an_alias_goes_with_its_request() -> None:
    ring = ExplainRing(2)
    for number in range(3):
        ring.add(record(f"r{number}", f"mine{number}"))
    assert ring.find("mine0") is None
    assert len(ring._aliases) == 2


def test_an_alias_used_again_is_the_newer_requests() -> None:
    ring = ExplainRing(2)
    ring.add(record("r0", "mine"))
    ring.add(record("r1", "mine"))
    ring.add(record("r2"))
    found = ring.find("mine")
    assert found is not None
    assert found.request_id == "r1"


def test_no_alias_hides_another_request() -> None:
    ring = ExplainRing(5)
    ring.add(record("r0"))
    ring.add(record("r1", "r0"))
    found = ring.find("r0")
    assert found is not None
    assert found.request_id == "r0"


@timeless
async def test_a_record_keeps_every_term_and_outcome() -> None:
    at = decider(up("p0", "d0", "d1"))
    one = record("r1")
    decision = await at.submit(request(prompt_tokens=1000))
    note = AttemptRecord(decision, 2**62, 0, 0.25, handed_over_s=0.5)
    failed = Outcome(EngineId("http://d0"), Leg.DECODE, FailureKind.RESET, Stage.STREAMING, "x" * 9999, 500)
    note.note(failed)
    one.add(note)
    shown = orjson.loads(orjson.dumps(one.as_json()))
    (attempt,) = shown["attempts"]
    assert attempt["rid"] == decision.rid
    assert attempt["room"] == str(2**62), "as text: a browser's numbers end at 2**53"
    assert (attempt["prefill"], attempt["decode"]) == decision.pair
    assert attempt["total_s"] == pytest.approx(sum(attempt["terms"].values()))
    assert {each["decode"] for each in attempt["considered"]} == {"http://d0", "http://d1"}
    assert attempt["outcomes"][0]["kind"] == "reset"
    assert len(attempt["outcomes"][0]["message"]) == 500
    assert set(attempt["versions"]) == {"fleet", "index", "bookings", "estimates"}
    assert (attempt["decided_s"], attempt["handed_over_s"], attempt["ended_s"]) == (0.25, 0.5, None)


@timeless
async def test_a_record_of_a_request_that_is_over_keeps_no_prompt_and_no_long_texts() -> None:
    at = decider(up("p0", "d0"))
    one = Record("r1", "/generate", "m" * 10**6, "cost", 0.0, error="e" * 10**6)
    decision = await at.submit(request(blocks=tuple(bytes([n]) * 16 for n in range(10))))
    one.add(AttemptRecord(decision, 1, 0, 0.0))
    before = one.attempts[0].as_json()
    one.close()
    assert one.attempts[0].decision.request.blocks == ()
    assert one.attempts[0].as_json() == before
    assert (len(one.model), len(one.error)) == (1000, 1000)
    assert len(decision.request.blocks) == 10, "the decider releases by them"
    at.finished(decision)
    assert not at.owners.index.pending_blocks()


@timeless
async def test_what_was_left_out_says_why() -> None:
    at = decider(up("p0", "d0", "d1"))
    decision = await at.submit(request().avoiding(EngineId("http://d1"), None))
    shown = AttemptRecord(decision, 1, 0, 0.0).as_json()
    assert shown["dropped"] == [{"engine": "http://d1", "reason": "this request has failed on it before"}]


@timeless
async def test_what_was_not_paired_says_why() -> None:
    fleet = up("p0", "d0", "d1")
    fleet.set_facts(EngineId("http://d1"), replace(FACTS, weight_version="2"))
    shown = AttemptRecord(await decider(fleet).submit(request()), 1, 0, 0.0).as_json()
    assert (shown["decode"], shown["pair_note"]) == ("http://d0", None)
    assert shown["apart"] == [
        "one pair is not formed (refused), such as http://p0 and http://d1: "
        "weight_version differs: default / 2 (/update_weight_version)"
    ]


@timeless
async def test_a_pair_that_fits_with_a_word_has_it() -> None:
    fleet = up("p0", "d0")
    fleet.set_facts(EngineId("http://d0"), replace(FACTS, sampling_defaults="openai"))
    shown = AttemptRecord(await decider(fleet).submit(request()), 1, 0, 0.0).as_json()
    assert "sampling_defaults differs:  / openai" in shown["pair_note"]
    assert shown["apart"] == []


@timeless
async def test_attempts_are_counted_per_choice_and_shown_up_to_a_bound() -> None:
    at = decider(up("p0", "d0"))
    one = record("r1")
    decision = await at.submit(request())
    assert one.total_attempts == 0
    for choice in (0, 1, 1, 2):
        one.add(AttemptRecord(decision, 1, choice, 0.0))
    assert one.total_attempts == 2
    for _ in range(300):
        one.add(AttemptRecord(decision, 1, 0, 0.0))
    shown = one.as_json()
    assert (len(shown["attempts"]), shown["attempts_not_shown"]) == (256, 48)
