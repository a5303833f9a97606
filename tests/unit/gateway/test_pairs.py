"""Pairs that must not be formed: one look for each state of the fleet, and one word for each new reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.fleet import Fleet
from engines.types import EngineId, EngineLoad
from gateway.pairs import Pairs
from tests.fakes import FACTS, up

P0, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "d0", "d1"))
OTHER = replace(FACTS, model="other")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def unlike() -> Fleet:
    fleet = up("p0", "d0", "d1")
    fleet.set_facts(D1, OTHER)
    return fleet


def test_a_uniform_fleet_forbids_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pairs, fleet = Pairs(), up("p0", "p1", "d0")
    assert (pairs.apart(fleet.snapshot()), pairs.forbidden(fleet.snapshot())) == ((), frozenset())
    assert pairs.why_none(fleet.snapshot()) == ""
    assert not told(caplog)


def test_each_reason_is_told_when_it_is_new(caplog: pytest.LogCaptureFixture) -> None:
    pairs, fleet = Pairs(), unlike()
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
    pairs, fleet = Pairs(), unlike()
    assert pairs.forbidden(fleet.snapshot())
    fleet.set_facts(D1, FACTS)
    assert not pairs.forbidden(fleet.snapshot())
    fleet.set_facts(D1, OTHER)
    assert pairs.forbidden(fleet.snapshot())
    assert len(told(caplog)) == 2
