"""Runs as one HTML file that needs nothing else: timelines, invariants with their evidence, every request. Pure.

The page is `report/` beside this file. What it shows is in it as JSON, one script tag for each run, so that a file of
many runs parses only what is looked at. Times are whole milliseconds from the start of the load.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from importlib import resources
from typing import Any

from failover.chaos.checker import outcome
from failover.chaos.history import Choice, Event, Limits, Request
from failover.chaos.record import FaultRun, Planned, Record
from failover.chaos.verdict import Judgement

_SCRIPTS = ("dom.js", "model.js", "scale.js", "lanes.js", "requests.js", "detail.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(runs: Sequence[tuple[Record, Judgement]]) -> str:
    """The whole file, ASCII in its data; the same for the same runs. It opens at the first run that did not pass."""
    parts = {
        "title": escape(_title(runs)).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "style": _file("report.css"),
        "runs": _script("runs", [_summary(*run) for run in runs]),
        "data": "\n".join(_script(f"run-{at}", _run(*run)) for at, run in enumerate(runs)),
        "script": "\n".join(_file(name) for name in _SCRIPTS),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _file("report.html"))


def _file(name: str) -> str:
    return resources.files("failover.chaos").joinpath("report", name).read_text(encoding="utf-8")


def _script(name: str, value: Any) -> str:
    """JSON that no HTML parser takes for an end of its tag or for a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _title(runs: Sequence[tuple[Record, Judgement]]) -> str:
    names = list(dict.fromkeys(record.scenario.name for record, _ in runs))
    broken = sum(len(verdict.broken) for _, judgement in runs for verdict in judgement.verdicts)
    what = names[0] if len(names) == 1 else f"{len(names)} scenarios"
    return f"{what}: {broken} violation{'' if broken == 1 else 's'}"


def _summary(record: Record, judgement: Judgement) -> dict[str, Any]:
    """What the choice between runs shows of one."""
    return {
        "name": record.scenario.name,
        "seed": record.seed,
        "long": record.long,
        "passed": judgement.passed,
        "broken": sum(len(verdict.broken) for verdict in judgement.verdicts),
    }


def _run(record: Record, judgement: Judgement) -> dict[str, Any]:
    judged = {verdict.invariant for verdict in judgement.verdicts}
    verdicts = [asdict(verdict) for verdict in judgement.verdicts]
    verdicts += [
        {"invariant": name, "evidence": "", "broken": [], "unseen": why}
        for name, why in record.unseen.items()
        if name not in judged
    ]
    history = record.history
    return {
        "scenario": _finite(asdict(record.scenario)),
        "seed": record.seed,
        "long": record.long,
        "version": record.version,
        "stopped": record.stopped,
        "passed": judgement.passed,
        "load": _ms(record.load_s),
        "settled": _ms(record.settled_s),
        "figures": _finite(judgement.figures),
        "verdicts": verdicts,
        "instances": [asdict(instance) for instance in record.instances],
        "marks": [[_ms(mark.at_s), mark.instance, mark.what] for mark in record.marks],
        "samples": _samples(record),
        "faults": _faults(record.planned, record.faults),
        "deaths": [[_ms(death.at_s), death.gateway] for death in history.deaths],
        "held": {ledger.engine: sum(ledger.by_room.values()) for ledger in history.ledgers},
        "left_over": dict(history.left_over),
        "requests": [_request(request) for request in history.requests],
    }


def _samples(record: Record) -> dict[str, list[list[int | None]]]:
    """Of each engine: when, tokens held, cached, of how many."""
    found: dict[str, list[list[int | None]]] = {}
    for each in record.samples:
        row = [_ms(each.at_s), each.used_tokens, each.cached_tokens, each.total_tokens]
        found.setdefault(each.instance, []).append(row)
    return found


def _faults(planned: Iterable[Planned], ran: Iterable[FaultRun]) -> list[dict[str, Any]]:
    became = {each.number: each for each in ran}
    return [_fault(each, became.get(each.number)) for each in planned]


def _fault(planned: Planned, ran: FaultRun | None) -> dict[str, Any]:
    return {
        "number": planned.number,
        "fault": planned.fault,
        "target": planned.target,
        "at": _ms(planned.at_s),
        "for": _ms(planned.for_s),
        "phase": planned.phase,
        "params": _finite(planned.params),
        "applied": _ms(ran.applied_s) if ran else None,
        "lifted": _ms(ran.lifted_s) if ran else None,
        "note": ran.note if ran else "",
        "problem": ran.problem if ran else "it never began",
    }


def _request(request: Request) -> dict[str, Any]:
    """`times`: of the events, each from the one before, the first from `asked`; `extra`: all but time and text."""
    asked = _ms(request.asked_s) or 0
    at = [_ms(event.at_s) or 0 for event in request.events]
    return {
        "name": request.name,
        "asked": asked,
        "gateway": request.gateway,
        "status": request.status,
        "ending": request.ending.value,
        "outcome": outcome(request).value,
        "kinds": _kinds(request),
        "limits": _changed(request.limits),
        "ids_shown": request.ids_shown,
        "wants_usage": request.wants_usage,
        "samples": request.samples,
        "prompts": [len(choice.prompt_ids) for choice in request.choices],
        "attempts": [row for at, choice in enumerate(request.choices) for row in _attempts(at, choice)],
        "times": [now - before for before, now in zip([asked, *at], at, strict=False)],
        "texts": [event.text for event in request.events],
        "extra": {at: extra for at, event in enumerate(request.events) if (extra := _extra(event))},
    }


def _kinds(request: Request) -> list[str]:
    """The words by which requests of one kind are found."""
    sampled = any(attempt.decode_key for choice in request.choices for attempt in choice.attempts)
    many = ["n > 1"] if request.samples > 1 else []
    many += ["list of prompts"] if len(request.choices) > request.samples else []
    words = ["stream" if request.stream else "whole body", "sampled" if sampled else "greedy", *many]
    return [*words, *([request.kind] if request.kind and request.kind not in words else [])]


def _changed(limits: Limits) -> dict[str, Any]:
    """The limits that were asked for: those that are no defaults."""
    asked = {each.name: getattr(limits, each.name) for each in fields(limits)}
    return {name: value for name, value in asked.items() if name == "max_tokens" or value}


def _attempts(index: int, choice: Choice) -> list[list[Any]]:
    """Rooms are strings: they have more bits than a JavaScript number."""
    return [
        [index, each.rid, str(each.room), each.prefill, each.decode, _ms(each.began_s), _ms(each.ended_s)]
        for each in choice.attempts
    ]


def _extra(event: Event) -> dict[str, Any]:
    told = {
        "index": event.index,
        "ids": len(event.ids),
        "finish": event.finish,
        "matched": event.matched,
        "usage": asdict(event.usage) if event.usage else None,
        "error": asdict(event.error) if event.error else None,
        "done": event.done,
        "junk": event.junk,
    }
    return {name: value for name, value in told.items() if value or (name == "matched" and value is not None)}


def _ms(seconds: float | None) -> int | None:
    return round(seconds * 1000) if seconds is not None and math.isfinite(seconds) else None


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes a word."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
