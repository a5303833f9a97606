"""The report of chaos runs in a real browser: drawn without a network, found in, walked through by keys.

Needs Debian's `chromium` and `chromium-driver`; skipped where they are not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from failover.chaos.checker import outcome
from failover.chaos.history import Attempt, Choice, Death, Event, History
from failover.chaos.record import Mark, Planned, Record
from failover.chaos.report_html import render
from failover.chaos.verdict import Judgement
from tests.chaos_records import Shape, empty, run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium to look with: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,1300",
)
Runs = Sequence[tuple[Record, Judgement]]
HOSTILE = "</script><img src=x onerror='window.struck=1'>\"&\u202eتجربة 🚀"
FIRST_DRAWN_MS = 6000.0
"""Half a second on a machine that does nothing else; what would make a reader wait is several times that."""


class Report:
    """One report in the browser; `find` and `all` take CSS selectors."""

    def __init__(self, driver: webdriver.Chrome, file: Path) -> None:
        self.driver, self.file = driver, file

    def open(self, runs: Runs, hash: str = "") -> None:
        self.driver.get("about:blank")
        self.console(), self.requests()
        self.file.write_text(render(runs), encoding="utf-8")
        self.driver.get(f"file://{self.file}{hash}")
        self.js("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Also of what is not in sight."""
        return str(self.find(selector).get_property("textContent"))

    def shown(self) -> list[str]:
        """Names of the requests that the filter leaves."""
        names: list[str] = self.js("return view.shown.map((request) => request.name)")
        return names

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        told = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in told if each["method"] == "Network.requestWillBeSent"]

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def report(driver: webdriver.Chrome, tmp_path: Path) -> Iterator[Report]:
    report = Report(driver, tmp_path / "report.html")
    yield report
    assert report.console() == []


def test_it_is_drawn_without_a_network(report: Report) -> None:
    report.open([run(passed=False)])
    assert set(report.requests()) <= {f"file://{report.file}", "data:,"}
    assert report.text("h1 bdi") == "kill-decode-streaming"
    assert "Failed" in report.text("#verdict")
    assert "seed 7" in report.text(".meta")
    for canvas in ("bars", "strip"):
        ink = "const c = byId(arguments[0]); return c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
        assert any(report.js(f"{ink}.filter(Boolean).slice(0, 9)", canvas))


def test_its_policy_stops_every_load(report: Report) -> None:
    report.open([run(shape=Shape(5))])
    stopped = report.js(
        "return new Promise((done) => {"
        " document.addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));"
        " const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; setTimeout(() => done('none'), 3000); })"
    )
    assert stopped == "img-src"
    assert any("Content Security Policy" in line for line in report.console())


def test_every_instance_fault_and_invariant_is_shown(report: Report) -> None:
    record, judgement = run(passed=False)
    report.open([(record, judgement)])
    assert [lane.get_attribute("data-instance") for lane in report.all("g.lane")] == [
        instance.name for instance in record.instances
    ]
    for planned in record.planned:
        assert planned.target in report.text(f'g.fault[data-fault="{planned.number}"] text')
    shown = [str(each.get_property("textContent")) for each in report.all(".invariant")]
    assert len(shown) == len(judgement.verdicts)
    said = {verdict.invariant: verdict.invariant.replace("_", " ") for verdict in judgement.verdicts}
    broken = [said[verdict.invariant] for verdict in judgement.verdicts if not verdict.held]
    assert all(text.startswith(name) for text, name in zip(shown, broken, strict=False))
    for verdict in judgement.verdicts:
        text = next(text for text in shown if text.startswith(said[verdict.invariant]))
        assert (verdict.unseen or verdict.evidence) in text
        assert all(each.what in text for each in verdict.broken)
    figures = dict(zip(*([str(e.text) for e in report.all(f".figures {tag}")] for tag in ("dt", "dd")), strict=True))
    assert figures["requests"] == "240"
    assert figures["longest pause"] == "0.84 s"


def test_what_befell_an_instance_is_on_its_lane(report: Report) -> None:
    report.open([run()])
    assert len(report.all('[data-instance="decode1"] .down')) >= 1
    assert len(report.all('[data-instance="prefill0"] .frozen')) >= 1
    assert len(report.all('[data-instance="prefill2"] .up.bad')) == 1
    thought = "const i = view.run.instances.find((each) => each.name === 'prefill0');"
    thought += "return i.spans.filter((span) => span.process === 'up').map((span) => span.health)"
    assert report.js(thought) == ["good", "doubt", "doubt", "good"]  # of two gateways, the worse
    assert report.all('[data-instance="decode0"] .down, [data-instance="decode0"] .frozen') == []
    titles = [str(each.get_property("textContent")) for each in report.all('[data-instance="decode1"] .mark title')]
    assert "decode1: killed at 2.460 s" in titles
    assert len(report.all(".kv .used")) == 6
    bands = report.js("return view.run.faults.map((fault) => [...fault.hits])")
    assert bands == [["decode1"], ["prefill0"], ["gateway0", "decode2"], ["redis"], ["prefill2"]]


def test_what_a_dead_gateway_thought_is_forgotten(report: Report) -> None:
    record, judgement = run(shape=Shape(2))
    marks = (
        Mark(1.0, "decode0", "broken for gateway0"),
        Mark(2.0, "decode0", "probation for gateway1"),
        Mark(3.0, "gateway0", "killed"),
        Mark(4.0, "decode0", "ready for gateway1"),
        Mark(5.0, "prefill0", "killed"),
        Mark(6.0, "decode0", "told to end"),
    )
    report.open([(replace(record, marks=marks), judgement)])
    spans = "return view.run.instances.find((each) => each.name === 'decode0').spans"
    assert report.js(f"{spans}.map((span) => [span.from, span.health])") == [
        [0, "good"],
        [1000, "bad"],
        [2000, "bad"],
        [3000, "doubt"],
        [4000, "good"],
    ]
    assert "told to end" in [each.text for each in report.all('[data-instance="decode0"] .mark text')]


@pytest.mark.parametrize(
    ("target", "hit"),
    [
        ("prefill0", ["prefill0"]),
        ("decode*", ["decode0", "decode1", "decode2"]),
        ("all gateway", ["gateway0", "gateway1"]),
        ("client>gateway1", ["gateway1"]),
        ("gateway*>redis", ["gateway0", "gateway1", "redis"]),
        ("prefill", []),
    ],
)
def test_a_target_is_on_the_lanes_that_it_names(report: Report, target: str, hit: list[str]) -> None:
    record, judgement = run(shape=Shape(2))
    report.open([(replace(record, planned=(Planned(0, "freeze", target, 1.0, 1.0),)), judgement)])
    assert report.js("return [...view.run.faults[0].hits]") == hit


def filters(record: Record) -> dict[str, tuple[Callable[[Report], None], set[str]]]:
    """Ways to filter, and which requests each leaves."""
    requests = record.history.requests
    attempts = {r.name: [a for choice in r.choices for a in choice.attempts] for r in requests}
    rid = next(a.rid for own in attempts.values() if len(own) > 1 for a in own[1:])

    def typed(words: str) -> Callable[[Report], None]:
        return lambda report: report.find("#by-text").send_keys(words)

    def chosen(name: str, value: str) -> Callable[[Report], None]:
        return lambda report: report.find(f'#by-{name} option[value="{value}"]').click()

    return {
        "name": (typed("stream-0042"), {r.name for r in requests if "stream-0042" in r.name}),
        "rid": (typed(rid.upper()), {name for name, own in attempts.items() if any(a.rid == rid for a in own)}),
        "error": (
            typed("ended while"),
            {r.name for r in requests if any(e.error and "ended while" in e.error.message for e in r.events)},
        ),
        "outcome": (
            lambda report: report.find("#by-whole").click(),
            {r.name for r in requests if outcome(r).value != "whole"},
        ),
        "instance": (
            chosen("instance", "prefill1"),
            {name for name, own in attempts.items() if any(a.prefill == "prefill1" for a in own)},
        ),
        "gateway": (chosen("instance", "gateway0"), {r.name for r in requests if r.gateway == "gateway0"}),
        "kind": (chosen("kind", "whole body"), {r.name for r in requests if not r.stream}),
        "tried again": (
            lambda report: report.find("#by-tried").click(),
            {name for name, own in attempts.items() if len(own) > 1},
        ),
    }


FILTERED = run(passed=False)


@pytest.mark.parametrize("way", list(filters(FILTERED[0])))
def test_requests_are_filtered(report: Report, way: str) -> None:
    act, left = filters(FILTERED[0])[way]
    assert 0 < len(left) < len(FILTERED[0].history.requests)
    report.open([FILTERED])
    act(report)
    assert set(report.shown()) == left
    assert report.text("#count") == f"{len(left)} of 240 requests"
    report.find("#show-all").click()
    assert len(report.shown()) == 240
    assert report.text("#count") == "240 requests"


def test_time_is_chosen_by_figures_by_keys_and_by_dragging(report: Report) -> None:
    record, judgement = run()
    report.open([(record, judgement)])
    for id, value in (("time-from", "2"), ("time-to", "4")):
        report.find(f"#{id}").send_keys(Keys.CONTROL, "a", Keys.NULL, value, Keys.ENTER)
    assert report.js("return [view.from, view.to]") == [2000, 4000]
    ends = report.js("return Object.fromEntries(view.run.requests.map((r) => [r.name, [r.asked, r.end]]))")
    assert set(report.shown()) == {name for name, (asked, end) in ends.items() if asked <= 4000 and end >= 2000}
    report.js("byId('strip').focus()")
    report.press("+")
    assert report.js("return view.to - view.from") == pytest.approx(1200)
    before = report.js("return view.from")
    report.press(Keys.ARROW_RIGHT)
    assert report.js("return view.from") == pytest.approx(before + 240)
    report.press("0")
    assert len(report.shown()) == 240
    strip = report.find("#strip")
    left, right = (report.js("return wholeX(arguments[0])", at) for at in (3000, 6000))
    middle = strip.size["width"] / 2
    drag = webdriver.ActionChains(report.driver).move_to_element_with_offset(strip, left - middle, 0).click_and_hold()
    drag.move_to_element_with_offset(strip, right - middle, 0).release().perform()
    assert report.js("return [view.from, view.to]") == pytest.approx([3000, 6000], abs=30)


def test_a_broken_case_goes_to_its_request(report: Report) -> None:
    record, judgement = run(passed=False)
    case = judgement.verdicts[1].broken[1]
    report.open([(record, judgement)])
    report.find("#by-whole").click()  # what hides it is lifted
    report.find(f'#invariants [data-request="{case.request}"]').click()
    assert report.text("#detail h2") == case.request
    assert case.what in report.text("#detail .cases")
    assert case.request in report.shown()
    asked = next(request for request in record.history.requests if request.name == case.request)
    detail = report.text("#detail")
    for attempt in asked.choices[0].attempts:
        assert f"{attempt.prefill} → {attempt.decode}" in detail
        assert attempt.rid in detail
        assert str(attempt.room) in detail
    assert report.text(".answer") == "".join(event.text for event in asked.events)
    assert len(report.all(".story .event")) == len(asked.events)
    assert len(report.all(".answer mark")) == 1
    report.find("#detail .close").click()
    assert not report.find("#detail").is_displayed()


def test_an_error_is_told_in_the_words_that_the_client_read(report: Report) -> None:
    record, judgement = run()
    report.open([(record, judgement)])
    failed = next(request for request in record.history.requests if outcome(request).value == "broken")
    report.js("goTo(arguments[0])", failed.name)
    error = failed.events[-1].error
    assert error is not None
    assert error.message in report.text("#detail .error")
    assert "work may have been done" in report.text("#detail .error")
    assert report.text("#detail .chip") == "broken"


def test_a_fault_opens_with_the_requests_that_it_touched(report: Report) -> None:
    record, judgement = run()
    report.open([(record, judgement)])
    report.js("document.querySelector('g.fault[data-fault=\"0\"]').focus()")
    report.press(Keys.ENTER)
    assert report.text("#detail h2") == "kill"
    assert "decode_step:3" in report.text("#detail")
    touched = {
        request.name
        for request in record.history.requests
        if len(request.choices[0].attempts) > 1
        and any(
            a.decode == "decode1" and a.began_s <= 5.46 and (a.ended_s or 99) >= 2.46
            for a in request.choices[0].attempts
        )
    }
    assert touched
    assert {link.text for link in report.all(".hurt button")} == touched
    report.js("openFault(view.run.faults[3])")
    assert "Redis did not answer within 1 s" in report.text("#detail .error")


def test_the_keyboard_is_enough(report: Report) -> None:
    report.open([run()])
    report.find("body").send_keys("/")
    assert report.driver.switch_to.active_element.get_attribute("id") == "by-text"
    report.press("stream")
    names = report.shown()
    assert 0 < len(names) < 240
    report.js("byId('list').focus()")
    report.press(Keys.ARROW_DOWN)
    assert report.text("#detail h2") == names[0]
    report.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert report.text("#detail h2") == names[2]
    assert names[2] in report.text("#said")
    report.press(Keys.END)
    assert report.text("#detail h2") == names[-1]
    report.press(Keys.ESCAPE)
    assert not report.find("#detail").is_displayed()


def test_a_click_on_a_bar_opens_its_request(report: Report) -> None:
    report.open([run()])
    wanted = report.js(
        "const list = byId('list'); list.scrollIntoView({block: 'center'}); const box = list.getBoundingClientRect();"
        "const r = view.shown[30]; const y = (r.row + 0.5) * rowHeight - list.scrollTop;"
        "return [r.name, box.left + x((r.asked + r.end) / 2), box.top + y]"
    )
    action = webdriver.ActionChains(report.driver)
    action.w3c_actions.pointer_action.move_to_location(round(wanted[1]), round(wanted[2]))
    action.click().perform()
    assert report.text("#detail h2") == wanted[0]


def test_an_attempt_without_an_end_goes_on_until_its_gateway_died_or_the_load_ended(report: Report) -> None:
    record, judgement = run(shape=Shape(3))
    first, second, third = (
        replace(
            request, gateway=gateway, events=(), choices=(Choice((1,), (Attempt("a", 1, "p", "d", began_s, None),)),)
        )
        for request, gateway, began_s in zip(
            record.history.requests, ("gateway0", "gateway1", "gateway0"), (1.0, 1.0, 5.0), strict=True
        )
    )
    deaths = (Death("gateway0", 0.5), Death("gateway0", 4.0))
    report.open([(replace(record, history=History((first, second, third), (), deaths)), judgement)])
    untils = "return arguments[0].map((name) => view.run.byName.get(name).attempts[0].until)"
    assert report.js(untils, [first.name, second.name, third.name]) == [4000, 10_000, 10_000]
    report.js("goTo(arguments[0])", first.name)
    assert "no end" in report.text(".attempts")
    untold = Choice((1,), (Attempt("untold-0", 0, "", "", 1.0, None),))
    asked = replace(first, gateway="gateway1", choices=(untold,), events=(Event(3.0, text="a"),))
    report.open([(replace(record, history=History((asked,), (), deaths)), judgement)], f"#request={first.name}")
    assert report.js(untils, [first.name]) == [3000]
    assert "a pair that nobody told" in report.text(".attempts")


def test_no_two_requests_lie_over_one_another(report: Report) -> None:
    report.open([run()])
    rows = report.js("return rows.map((row) => row.map((r) => [r.asked, r.end]))")
    assert sum(map(len, rows)) == 240
    assert len(rows) < 120
    assert all(before[1] < after[0] for row in rows for before, after in pairwise(row))


def test_the_address_opens_what_was_open(report: Report) -> None:
    runs = [run(1, Shape(50)), run(2, Shape(50))]
    name = runs[1][0].history.requests[7].name
    report.open(runs)
    assert report.text(".run[aria-current]") == "✓ 1"
    report.all(".run")[1].click()
    report.js("goTo(arguments[0])", name)
    address = report.driver.current_url
    report.open(runs, "#" + address.partition("#")[2])
    assert report.text(".run[aria-current]") == "✓ 2"
    assert report.text("#detail h2") == name


def test_it_opens_at_the_first_run_that_failed(report: Report) -> None:
    runs = [run(1, Shape(20)), run(2, Shape(60), passed=False), run(3, Shape(60), passed=False)]
    broken = sum(len(verdict.broken) for _, judgement in runs for verdict in judgement.verdicts)
    report.open(runs)
    assert report.text(".run[aria-current]") == "✕ 2"
    assert report.text("nav .overline") == f"1 scenario, 3 seeds: {broken} violations"


@pytest.mark.parametrize(("runs", "said"), [([], "no runs"), ([empty()], "no invariant was judged")])
def test_what_is_empty_is_shown_as_that(report: Report, runs: Runs, said: str) -> None:
    report.open(runs)
    assert said in report.text("main").lower()


def test_a_large_run_is_drawn_at_once(report: Report) -> None:
    report.open([run(3, Shape(5000, 60.0, 3, (4, 8)))])
    assert len(report.shown()) == 5000
    assert report.js("return view.run.requests.reduce((sum, r) => sum + r.attempts.length, 0)") >= 14_500
    drawn_ms = report.js("return performance.getEntriesByName('drawn')[0].startTime")
    assert drawn_ms < FIRST_DRAWN_MS
    assert report.find("#bars").size["height"] <= 500  # what is in sight, not all of it
    report.js("byId('list').scrollTop = 300; openRequest(view.shown[2500])")
    assert report.text("#detail h2") == report.js("return view.shown[2500].name")


def spoiled(value: Any) -> Any:
    """The same with every free word of it hostile."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: spoiled(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, str) and not isinstance(value, Enum):
        return value + HOSTILE
    if isinstance(value, tuple):
        return tuple(spoiled(each) for each in value)
    return {spoiled(name): spoiled(each) for name, each in value.items()} if isinstance(value, dict) else value


def test_hostile_words_are_inert(report: Report) -> None:
    record, judgement = run(shape=Shape(8), passed=False)
    first = record.history.requests[0]
    odd = replace(first, name="odd", events=(*first.events, Event(9.0, junk="junk")), choices=(Choice((1,), ()),))
    record = replace(record, history=replace(record.history, requests=(*record.history.requests, odd)))
    record, judgement = spoiled(record), spoiled(judgement)
    report.open([(record, judgement), (record, judgement)])
    for request in record.history.requests:
        report.js("openRequest(view.run.byName.get(arguments[0]))", request.name)
        assert report.text("#detail h2") == request.name
    report.js("view.run.faults.forEach(openFault)")
    report.js("document.querySelector('details').open = true; hover(view.shown[0], {clientX: 9, clientY: 9})")
    assert report.text("h1 bdi") == f"kill-decode-streaming{HOSTILE}"
    assert report.js("return window.struck") is None
    assert report.all("img, iframe, object, embed, link[rel=stylesheet]") == []
    assert len(report.all("script")) == 4
    assert set(report.requests()) <= {f"file://{report.file}", "data:,"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(report: Report, scheme: str) -> None:
    """Contrast by WCAG 2: 4.5 for text; 3 for what is drawn (the grey of those who left, 2.5)."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    report.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    try:
        report.open([run(shape=Shape(5))])
        ink = report.js("readInk(); return ink")
    finally:
        report.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    least = {"text": 7.0, "muted": 4.5, "whole": 3.0, "broken": 3.0, "lost": 7.0, "fault": 3.0, "left": 2.5}
    assert (ink["ground"] == "#ffffff") == (scheme == "light")
    for name, ratio in least.items():
        assert contrast(ink[name], ink["ground"]) >= ratio, name


def contrast(one: str, other: str) -> float:
    lights = sorted(luminance(colour) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_on_paper_all_requests_are_drawn(report: Report) -> None:
    report.open([run(3, Shape(800, 5.0, 1, (10, 20)))])
    rows = report.js("return rows.length")
    in_sight = report.find("#list").size["height"]
    assert rows * report.js("return rowHeight") > 700 > in_sight
    report.js("window.dispatchEvent(new Event('beforeprint'))")
    assert report.js("return byId('bars').height / devicePixelRatio") == pytest.approx(700, abs=1)
    assert report.js("return document.documentElement.classList.contains('paper')")
    report.js("window.dispatchEvent(new Event('afterprint'))")
    assert not report.js("return document.documentElement.classList.contains('paper')")
