"""Runs as JUnit XML: a test case for each scenario and seed, a failure with every case that is broken. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from failover.chaos.record import Record
from failover.chaos.report_text import failure, heading
from failover.chaos.verdict import Judgement

_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def case(record: Record, judgement: Judgement, again: str) -> ElementTree.Element:
    """The test case of one run. `again`: what runs it again. `time`: of load and settling, in seconds."""
    seconds = record.load_s + (record.settled_s or 0.0)
    name = heading(record.scenario.name, record.seed, record.long)
    element = ElementTree.Element("testcase", classname="chaos", name=_clean(name), time=f"{seconds:.3f}")
    wrong = [verdict for verdict in judgement.verdicts if not verdict.held]
    if wrong:
        names = ", ".join(verdict.invariant for verdict in wrong)
        found = ElementTree.SubElement(element, "failure", type="invariant", message=_clean(names))
        found.text = _clean("\n".join([*(line for each in wrong for line in failure(record, each)), f"again: {again}"]))
    told = [f"{name}: {value:g}" for name, value in judgement.figures.items()]
    told += [f"not seen: {each.invariant}: {each.unseen}" for each in judgement.verdicts if each.unseen]
    ElementTree.SubElement(element, "system-out").text = _clean("\n".join(told))
    return element


def document(cases: Sequence[ElementTree.Element]) -> str:
    """The file of all of them."""
    failures = sum(element.find("failure") is not None for element in cases)
    seconds = sum(float(element.get("time", "0")) for element in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "time": f"{seconds:.3f}"}
    suite = ElementTree.Element("testsuite", {"name": "pdgate chaos", **counts})
    suite.extend(cases)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    text: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text.decode() + "\n"


def _clean(text: str) -> str:
    """What an engine has said may have characters that XML cannot have at all."""
    return _NOT_IN_XML.sub("\ufffd", text)
