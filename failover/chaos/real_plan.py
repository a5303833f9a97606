"""A scenario as it can be played on a real fleet, and what clients then ask. Pure.

What cannot be done there is refused before anything is sent, all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from failover.chaos import load, schedule
from failover.chaos.faults import FAULTS
from failover.chaos.load import COMPLETIONS, Asked
from failover.chaos.real_fleet import RealFleet
from failover.chaos.record import Planned
from failover.chaos.scenario import FaultPlan, LoadPlan, Scenario, ScenarioError

MAPPED: Mapping[str, str] = {"generate": "completion"}
"""Kinds of request that only SGLang has, and what is asked instead."""
REFUSED: Mapping[str, str] = {"poison": "its word is deadly to emulated engines only, and with their own fault only"}
"""Kinds of request that mean nothing to a real model."""


def fitted(scenario: Scenario, fleet: RealFleet) -> Scenario:
    """The scenario with the fleet's own processes and bounds; ScenarioError with everything that cannot be done on it.

    What was fitted once is not changed by doing it again.
    """
    problems = [each for n, fault in enumerate(scenario.faults) for each in _problems(fault, f"faults[{n}]", fleet)]
    problems += [f"load.mix.{kind}: {REFUSED[kind]}" for kind in scenario.load.mix if kind in REFUSED]
    if problems:
        raise ScenarioError(f"on the real fleet {fleet.name}", "; ".join(problems))
    return replace(scenario, fleet=fleet.plan, load=_bounded(scenario.load, fleet))


def _problems(fault: FaultPlan, path: str, fleet: RealFleet) -> Iterator[str]:
    if not FAULTS[fault.fault].real:
        yield f"{path}: {fault.fault} needs processes that are ours; only faults of links can be"
    elif fault.phase:
        yield f"{path}.phase: only emulated engines can be held at {fault.phase}; leave it out"
    elif not set(schedule.matching(fault.target, fleet.plan)) & set(fleet.links):
        known = f"it has {', '.join(fleet.links)}" if fleet.links else "it has none"
        yield f"{path}.target: there is no proxy in {fault.target}; {known}"


def _bounded(plan: LoadPlan, fleet: RealFleet) -> LoadPlan:
    mix: dict[str, float] = {}
    for kind, weight in plan.mix.items():
        mix[MAPPED.get(kind, kind)] = mix.get(MAPPED.get(kind, kind), 0.0) + weight
    prompt = min(plan.prompt_tokens[0], fleet.max_prompt_words), min(plan.prompt_tokens[1], fleet.max_prompt_words)
    output = min(plan.output_tokens[0], fleet.max_output_tokens), min(plan.output_tokens[1], fleet.max_output_tokens)
    rate_per_s = min(plan.rate_per_s, fleet.max_rate_per_s)
    return replace(plan, mix=mix, prompt_tokens=prompt, output_tokens=output, rate_per_s=rate_per_s)


def planned(scenario: Scenario, fleet: RealFleet, seed: int, *, long: bool) -> tuple[Planned, ...]:
    """The schedule of a fitted scenario, on links with a proxy only."""
    return schedule.planned(scenario, seed, long=long, usable=fleet.links)


def asked(scenario: Scenario, fleet: RealFleet, seed: int, *, long: bool, trace: str, model: str) -> tuple[Asked, ...]:
    """What clients ask in a run of a fitted scenario; ScenarioError for a trace that is too much for the fleet."""
    load_s, fill = scenario.load.duration_s[long], load.by_words(fleet.max_prompt_words)
    every = load.requests(scenario.load, seed, long=long, trace=trace, model=model, fill=fill)
    if scenario.load.trace and len(every) > fleet.max_rate_per_s * load_s:
        problem = f"{len(every)} requests in {load_s:g} s; the fleet's max_rate_per_s is {fleet.max_rate_per_s:g}"
        raise ScenarioError("load.trace_speed", problem)
    return every


def for_pdgate(each: Asked, run: str) -> Asked:
    """A request under a name of its own, by which pdgate can be asked about it; half of those that can show ids.

    `run` tells the requests of one run from those of all others.
    """
    body = {**each.body, "rid": f"chaos-{run}-{each.number:06d}"}
    can_show_ids = each.path == COMPLETIONS or not body["stream"]  # streamed chats have none
    return replace(each, body={**body, "return_token_ids": True} if can_show_ids and each.number % 2 else body)


def references(every: tuple[Asked, ...], run: str, with_rid: bool) -> tuple[Asked, ...]:
    """The same prompts for one whole answer each, at the same pace: of those whose answer is always the same."""
    found = []
    for each in every:
        body = {name: value for name, value in each.body.items() if name not in ("n", "stream_options")}
        if body.get("temperature") == 0 and not body.get("tools"):  # a parser takes a call of a tool out of the text
            rid = {"rid": f"chaos-{run}-before-{each.number:06d}"} if with_rid else {}
            found.append(replace(each, body={**body, "stream": False, **rid}, leaves_after=None))
    return tuple(found)
