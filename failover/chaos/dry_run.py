"""What a run will do, in words, before it does anything. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from failover.chaos import load, real_plan, report_text, schedule
from failover.chaos.client_checks import BY_PDGATE, NO_REFERENCE, TRUE_ANSWERS, UNSEEN
from failover.chaos.invariants import INVARIANTS
from failover.chaos.load import Asked
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Planned
from failover.chaos.scenario import LoadPlan, Scenario

_INDENT = "    "
_NO_MODEL = "the first that gateway0 names at /v1/models"


def on_emulated(scenario: Scenario, seed: int, *, long: bool, trace: str) -> Iterator[str]:
    """Of a run on a fleet of its own."""
    planned, fleet = schedule.planned(scenario, seed, long=long), scenario.fleet
    asked = load.requests(scenario.load, seed, long=long, trace=trace)
    yield f"{report_text.heading(scenario.name, seed, long)}: nothing is started or sent"
    counts = Counter(role for role in schedule.names(fleet).values() if role != schedule.LINK)
    yield f"starts {', '.join(report_text.count(n, role) for role, n in counts.items())} on this machine"
    if links := schedule.proxied(scenario, planned):
        yield f"proxies in {', '.join(links)}"
    yield from _load(asked, scenario.load, long, "bytes")
    yield from _faults(planned)
    yield f"judged: {', '.join(INVARIANTS)}"


def on_real(scenario: Scenario, fleet: RealFleet, seed: int, *, long: bool, trace: str) -> Iterator[str]:
    """Of a run on a real fleet. ScenarioError where the scenario cannot be done on it."""
    fitted = real_plan.fitted(scenario, fleet)
    planned = real_plan.planned(fitted, fleet, seed, long=long)
    asked = real_plan.asked(fitted, fleet, seed, long=long, trace=trace, model=fleet.model or _NO_MODEL)
    yield f"{report_text.heading(scenario.name, seed, long)}, on the fleet {fleet.name}: nothing is sent"
    yield "connects to these, and to nothing else:"
    befallen = {fault.target for fault in planned}
    for name, at in fleet.connected.items():
        asked_by = "asked by a proxy" if f"client>{name}" in befallen else "asked"
        yield f"{_INDENT}{name:<10}{at}, {asked_by if name.startswith('gateway') else 'for whoever comes to its proxy'}"
    for link, at in fleet.proxies.items():
        gateway, _, target = link.partition(">")
        broken = "" if link in befallen else "; this scenario leaves it alone"
        yield f"{_INDENT}listens on {at} for {link}: tell {gateway} that {target} is there{broken}"
    yield f"waits {fleet.ready_s:g} s at most until the gateways are ready"
    if fleet.reference:
        count = len(real_plan.references(asked, "", with_rid=False))
        yield f"asks {report_text.count(count, 'prompt')} once before the faults, to compare with"
    yield f"asks the model {fleet.model or _NO_MODEL}"
    yield from _load(asked, fitted.load, long, "words")
    yield f"{_INDENT}at most {fleet.max_rate_per_s:g} per second in the mean, and {fleet.max_concurrent} at once"
    yield from _faults(planned)
    yield from _judged(fleet)


def _load(asked: Sequence[Asked], plan: LoadPlan, long: bool, unit: str) -> Iterator[str]:
    """How many requests of which kinds, and how much they ask for."""
    yield f"sends {report_text.count(len(asked), 'request')} in {plan.duration_s[long]:g} s:"
    for kind in plan.mix:
        of_kind = [each for each in asked if each.kind == kind]
        prompts, tokens = sum(_length(each.body, unit) for each in of_kind), sum(_tokens(each.body) for each in of_kind)
        requests = report_text.count(len(of_kind), "request")
        yield f"{_INDENT}{kind:<12}{requests}, {prompts:,} {unit} of prompts, {tokens:,} tokens of answers at most"


def _length(body: Mapping[str, object], unit: str) -> int:
    messages = body.get("messages")
    text = str(messages[0]["content"] if isinstance(messages, list) else body.get("prompt") or body.get("text"))
    return len(text) if unit == "bytes" else len(text.split())


def _tokens(body: Mapping[str, object]) -> int:
    params = body.get("sampling_params")
    most = params["max_new_tokens"] if isinstance(params, Mapping) else body["max_tokens"]
    return int(str(most)) * int(str(body.get("n", 1)))


def _faults(planned: Sequence[Planned]) -> Iterator[str]:
    yield f"breaks {report_text.count(len(planned), 'time')}:" if planned else "breaks nothing"
    yield from (f"{_INDENT}{report_text.planned_line(fault)}" for fault in planned)


def _judged(fleet: RealFleet) -> Iterator[str]:
    always = [name for name in INVARIANTS if name not in UNSEEN and name not in BY_PDGATE]
    yield f"judged: {', '.join(always)}"
    yield f"judged where every gateway is pdgate: {', '.join(BY_PDGATE)}"
    unseen = UNSEEN if fleet.reference else {**UNSEEN, TRUE_ANSWERS: NO_REFERENCE}
    yield from (f"not seen: {name}: {why}" for name, why in unseen.items())
