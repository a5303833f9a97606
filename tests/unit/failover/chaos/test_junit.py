"""JUnit XML, read back as a CI does."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failover.chaos.history import Error, Event
from failover.chaos.invariants import judge
from failover.chaos.junit import case, document
from failover.chaos.record import Record
from failover.chaos.verdict import Broken, Judgement, Verdict
from tests.unit.failover.chaos.histories import PATIENT
from tests.unit.failover.chaos.records import BROKEN, REFUSED, WHOLE, record


def read(*records: Record) -> ElementTree.Element:
    text = document([case(each, judge(each), "pdgate chaos run calm.toml --seed 3") for each in records])
    return ElementTree.fromstring(text)


def test_a_test_case_for_each_run() -> None:
    root = read(record(), record(seed=4, long=True, settled_s=None), record(WHOLE, BROKEN, REFUSED))
    [suite] = root
    counts = [suite.get(name) for name in ("name", "tests", "failures", "errors")]
    assert (root.tag, counts) == ("testsuites", ["pdgate chaos", "3", "2", "0"])
    cases = suite.findall("testcase")
    assert [each.get("name") for each in cases] == ["calm, seed 3", "calm, seed 4, long", "calm, seed 3"]
    assert {each.get("classname") for each in cases} == {"chaos"}
    assert [each.get("time") for each in cases] == ["10.200", "10.000", "10.200"]
    assert suite.get("time") == "30.400"


def test_a_failure_has_its_broken_cases_and_what_runs_it_again() -> None:
    [found] = read(record(WHOLE, BROKEN, REFUSED)).iter("failure")
    assert (found.get("type"), found.get("message")) == ("invariant", "refused, broken")
    assert found.text is not None
    for words in (
        "r-refused: refused, status 503: no room",
        "r-broken, attempt r-broken.0.0: broken, status 200: the engine has died",
        "fault 0: kill on prefill0, from 0.01 s to 0.60 s",
        "again: pdgate chaos run calm.toml --seed 3",
    ):
        assert words in found.text


def test_a_run_in_which_all_held_has_no_failure_and_its_figures() -> None:
    root = read(record(unseen={"deaths": "a real fleet"}))
    assert not list(root.iter("failure"))
    [out] = root.iter("system-out")
    assert "requests: 2\n" in (out.text or "")
    assert "not seen: deaths: a real fleet" in (out.text or "")


@PATIENT
@given(st.text(), st.text(alphabet=st.characters()))
def test_it_can_be_read_whatever_an_engine_has_said(message: str, name: str) -> None:
    said = replace(REFUSED, name=name or "r", events=(Event(0.5, error=Error(message or "x")),))
    assert len(list(read(record(WHOLE, said)).iter("failure"))) == 1


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\ufffe", "\ud800"])
def test_what_xml_cannot_have_is_replaced(character: str) -> None:
    bad = Judgement((Verdict("a", "b", (Broken("c"),), f"<&{character}>"),), judge(record()).figures)
    root = ElementTree.fromstring(document([case(record(), bad, f"again{character}")]))
    [out], [found] = root.iter("system-out"), root.iter("failure")
    assert (out.text or "").endswith("not seen: a: <&\ufffd>")
    assert (found.text or "").endswith("again: again\ufffd")
