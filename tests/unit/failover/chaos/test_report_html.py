"""The report holds all of a run, in a file that loads nothing and that no string of a run can break out of."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from failover.chaos.checker import outcome
from failover.chaos.history import Attempt, Choice, Ending, Error, Event, History, Limits, Request, Usage
from failover.chaos.record import Planned, Record
from failover.chaos.report_html import render
from failover.chaos.verdict import Broken, Judgement, Verdict
from tests.chaos_records import Shape, empty, run

ROOT = Path(__file__).parents[4]
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
HOSTILE = "</script><script>alert(1)</script><!--<script>\"'&{{script}}\u2028\u202eevil\ud800🚀"


class Page(HTMLParser):
    """What an HTML parser makes of the file: scripts by id, the tags that there are, the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str | None, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""
        self._within: tuple[str, str | None] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = (tag, dict(attrs).get("id"))

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def handle_data(self, data: str) -> None:
        if self._within and self._within[0] == "script":
            self.scripts[self._within[1]] = self.scripts.get(self._within[1], "") + data
        if self._within and self._within[0] == "title":
            self.title += data


def data(*runs: tuple[Record, Judgement]) -> list[dict[str, Any]]:
    page = Page(render(runs))
    return [json.loads(page.scripts[f"run-{at}"]) for at in range(len(runs))]


def one_request(**changes: Any) -> tuple[Record, Judgement]:
    record, judgement = empty()
    made = Request("r", 1.0, (), Limits(5), (), 200, Ending.WHOLE)
    return replace(record, history=History((replace(made, **changes),))), judgement


def test_it_loads_nothing() -> None:
    text = render([run(passed=False)])
    assert re.findall(r"https?:[^\"' ]*", text) == [SVG_NAMESPACE]
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch", "#inside"}
    page = Page(text)
    sources = [attributes.get("src") or attributes.get("href") for _, attributes in page.tags]
    assert [source for source in sources if source] == ["data:,"]
    policies = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [POLICY]


def test_there_is_one_script_of_code_and_one_of_data_for_each_run() -> None:
    page = Page(render([run(1, Shape(5)), run(2, Shape(5), passed=False)]))
    assert [a.get("id") for tag, a in page.tags if tag == "script"] == ["runs", "run-0", "run-1", None]
    assert [a.get("type") for tag, a in page.tags if tag == "script"] == ["application/json"] * 3 + [None]
    summaries = json.loads(page.scripts["runs"])
    assert [(each["seed"], each["passed"], each["broken"]) for each in summaries] == [(1, True, 0), (2, False, 4)]
    assert page.title == "kill-decode-streaming: 4 violations"


def test_no_run_is_no_error() -> None:
    page = Page(render([]))
    assert json.loads(page.scripts["runs"]) == []
    assert page.title == "0 scenarios: 0 violations"


def test_the_same_runs_give_the_same_file() -> None:
    assert render([run(3, Shape(30))]) == render([run(3, Shape(30))])


def test_all_that_a_request_is_can_be_read_back() -> None:
    record, judgement = run(5, Shape(60, attempts=2))
    shown = data((record, judgement))[0]["requests"]
    assert len(shown) == len(record.history.requests)
    for request, told in zip(record.history.requests, shown, strict=True):
        assert (told["name"], told["status"], told["gateway"]) == (request.name, request.status, request.gateway)
        assert told["outcome"] == outcome(request).value
        assert told["asked"] == round(request.asked_s * 1000)
        at = [told["asked"] + sum(told["times"][: number + 1]) for number in range(len(told["times"]))]
        assert at == [round(event.at_s * 1000) for event in request.events]
        assert told["texts"] == [event.text for event in request.events]
        attempts = [attempt for choice in request.choices for attempt in choice.attempts]
        assert [row[1:5] for row in told["attempts"]] == [[a.rid, str(a.room), a.prefill, a.decode] for a in attempts]
        assert [row[5] for row in told["attempts"]] == [round(attempt.began_s * 1000) for attempt in attempts]
        assert told["prompts"] == [len(choice.prompt_ids) for choice in request.choices]


def test_what_is_no_text_of_an_event_is_kept_beside_it() -> None:
    usage, error = Usage(1, 2, 3), Error("gone", "server_error", "broken", definite=False)
    events = (
        Event(1.5, text="a"),
        Event(1.6, 1, ids=(4, 5), finish="stop", matched=0),
        Event(1.7, usage=usage),
        Event(1.8, error=error),
        Event(1.9, junk="%"),
        Event(2.0, done=True),
    )
    told = data(one_request(events=events))[0]["requests"][0]
    assert told["times"] == [500, 100, 100, 100, 100, 100]
    assert told["extra"]["1"] == {"index": 1, "ids": 2, "finish": "stop", "matched": 0}
    assert told["extra"]["2"]["usage"]["total_tokens"] == 3
    assert told["extra"]["3"]["error"] == {
        "message": "gone",
        "kind": "server_error",
        "code": "broken",
        "definite": False,
    }
    assert told["extra"]["4"] == {"junk": "%"}
    assert told["extra"]["5"] == {"done": True}
    assert "0" not in told["extra"]


def test_an_attempt_without_an_end_has_none_and_rooms_keep_all_their_bits() -> None:
    attempt = Attempt("rid", 2**63 - 1, "p", "d", 1.25, None)
    told = data(one_request(choices=(Choice((1, 2), (attempt,)),)))[0]["requests"][0]
    assert told["attempts"] == [[0, "rid", str(2**63 - 1), "p", "d", 1250, None]]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["stream", "greedy"]),
        ({"stream": False}, ["whole body", "greedy"]),
        ({"kind": "tools"}, ["stream", "greedy", "tools"]),
        ({"kind": "stream"}, ["stream", "greedy"]),
        ({"samples": 2, "choices": (Choice((1,), ()),) * 2}, ["stream", "greedy", "n > 1"]),
        ({"choices": (Choice((1,), ()),) * 2}, ["stream", "greedy", "list of prompts"]),
        (
            {"choices": (Choice((1,), (Attempt("a", 1, "p", "d", 1.0, 2.0, b"k", b"k"),)),)},
            ["stream", "sampled"],
        ),
    ],
)
def test_kinds(changes: dict[str, Any], kinds: list[str]) -> None:
    assert data(one_request(**changes))[0]["requests"][0]["kinds"] == kinds


def test_faults_are_told_with_what_became_of_them() -> None:
    record, judgement = run(shape=Shape(5))
    never = Planned(9, "reset", "redis", 3.0, None)
    told = data((replace(record, planned=(*record.planned, never)), judgement))[0]["faults"]
    assert [(each["number"], each["applied"], each["lifted"]) for each in told] == [
        (0, 2460, 5460),
        (1, 4260, 6060),
        (2, 5260, 7860),
        (3, None, None),
        (4, 8360, 9260),
        (9, None, None),
    ]
    assert told[0]["phase"] == "decode_step:3"
    assert told[2]["params"] == {"delay_s": 0.05, "jitter_s": 0.02}
    assert told[3]["problem"] == "Redis did not answer within 1 s"
    assert told[5]["problem"] == "it never began"


def test_instances_marks_and_samples_are_all_there() -> None:
    record, judgement = run(shape=Shape(20))
    told = data((record, judgement))[0]
    assert [each["name"] for each in told["instances"]] == [instance.name for instance in record.instances]
    assert told["marks"] == [[round(mark.at_s * 1000), mark.instance, mark.what] for mark in record.marks]
    assert sum(len(rows) for rows in told["samples"].values()) == len(record.samples)
    first = record.samples[0]
    assert told["samples"][first.instance][0] == [0, first.used_tokens, first.cached_tokens, first.total_tokens]


def test_every_invariant_is_told_once_and_those_that_were_not_seen_say_why() -> None:
    record, _ = empty()
    broken = Broken("it did not", "r", "a", 0)
    verdicts = (Verdict("seen", "1 of 1", (broken,)), Verdict("half", "", unseen="its own words"))
    record = replace(record, unseen={"half": "other words", "not seen": "no engine of ours"})
    told = data((record, Judgement(verdicts, {})))[0]["verdicts"]
    assert [(each["invariant"], each["unseen"]) for each in told] == [
        ("seen", ""),
        ("half", "its own words"),
        ("not seen", "no engine of ours"),
    ]
    assert told[0]["broken"] == [{"what": "it did not", "request": "r", "attempt": "a", "fault": 0}]


def test_what_json_has_no_number_for_is_a_word() -> None:
    record, _ = empty()
    record = replace(record, load_s=float("inf"), planned=(Planned(0, "slow", "redis", 0.0, None, "", {"x": 1e999}),))
    told = data((record, Judgement((), {"ratio": float("nan")})))[0]
    assert told["figures"] == {"ratio": "nan"}
    assert told["load"] is None
    assert told["faults"][0]["params"] == {"x": "inf"}


def test_hostile_words_stay_data() -> None:
    record, _ = one_request(name=HOSTILE, events=(Event(1.0, text=HOSTILE, junk=HOSTILE),))
    record = replace(record, scenario=replace(record.scenario, name=HOSTILE, proves=HOSTILE))
    text = render([(record, Judgement((Verdict(HOSTILE, HOSTILE, (Broken(HOSTILE),)),), {HOSTILE: 1.0}))])
    text.encode("utf-8")  # it can be written to a file
    page = Page(text)
    assert [a.get("id") for tag, a in page.tags if tag == "script"] == ["runs", "run-0", None]
    assert page.scripts[None] == Page(render([])).scripts[None]
    told = json.loads(page.scripts["run-0"])
    assert told["scenario"]["name"] == told["requests"][0]["name"] == HOSTILE
    assert told["requests"][0]["texts"] == [HOSTILE]
    assert told["verdicts"][0]["broken"][0]["what"] == HOSTILE
    assert told["figures"] == {HOSTILE: 1.0}
    assert page.title.startswith("</script><script>alert(1)")


def test_the_page_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["failover"]
    package = ROOT / "failover"
    files = [file.relative_to(package).as_posix() for file in (package / "chaos" / "report").iterdir()]
    assert len(files) >= 3
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
