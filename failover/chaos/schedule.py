"""When which fault befalls whom: fixed by scenario, seed and form. Pure.

Also the names that a run's processes and links have, and which of them a target means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from random import Random

from failover.chaos.record import Planned
from failover.chaos.scenario import FaultPlan, FleetPlan, Scenario

LINK = "link"
"""The role of a link, beside those of processes: prefill, decode, gateway, redis."""
_ALL = "all "
_DIGITS = 3
"""Milliseconds are all that a schedule can keep to."""


def planned(scenario: Scenario, seed: int, *, long: bool, usable: Collection[str] | None = None) -> tuple[Planned, ...]:
    """Every fault of a run in order of time, numbered in it from 0.

    Each fault of the scenario draws from its own chance, so that another one beside it changes nothing about it.
    `usable`: the only names that can be befallen, of which each target must mean one; by default all.
    """
    load_s = scenario.load.duration_s[long]
    every = [
        each
        for index, fault in enumerate(scenario.faults)
        for each in _planned(fault, scenario.fleet, Random(f"{scenario.name} {seed} {index}"), load_s, long, usable)
    ]
    every.sort(key=lambda each: each.at_s)  # stable: at the same moment in the order of the file
    return tuple(replace(each, number=number) for number, each in enumerate(every))


def _planned(
    fault: FaultPlan, fleet: FleetPlan, chance: Random, load_s: float, long: bool, usable: Collection[str] | None
) -> Iterator[Planned]:
    fitting = [each for each in matching(fault.target, fleet) if usable is None or each in usable]
    for_s = fault.for_s[long] if fault.for_s is not None else None
    for base_s in _times(fault, load_s):
        at_s = round(base_s + chance.uniform(0, fault.jitter_s), _DIGITS)
        befallen = fitting if fault.target.startswith(_ALL) else [chance.choice(fitting)]
        if at_s < load_s:
            for target in befallen:
                yield Planned(0, fault.fault, target, at_s, for_s, fault.phase, dict(fault.params))


def _times(fault: FaultPlan, load_s: float) -> Iterator[float]:
    number, at_s = 0, fault.at_s
    while at_s < load_s:
        yield at_s
        if fault.every_s is None:
            return
        number += 1
        at_s = fault.at_s + number * fault.every_s


def proxied(scenario: Scenario, faults: tuple[Planned, ...]) -> tuple[str, ...]:
    """The links that need a proxy: those that the fleet names, and those that faults befall."""
    asked = {name for pattern in scenario.fleet.links for name in matching(pattern, scenario.fleet)}
    befallen = {fault.target for fault in faults if ">" in fault.target}
    return tuple(name for name in names(scenario.fleet) if name in asked | befallen)


def names(fleet: FleetPlan) -> Mapping[str, str]:
    """Every process of a run and every link between two of them or from the clients, with its role."""
    counts = (("gateway", fleet.gateways), ("prefill", fleet.prefills), ("decode", fleet.decodes))
    of = {role: [f"{role}{number}" for number in range(count)] for role, count in counts}
    of["redis"] = ["redis"] if fleet.redis or fleet.gateways > 1 else []
    processes = {name: role for role, members in of.items() for name in members}
    links = [f"client>{gateway}" for gateway in of["gateway"]]
    links += [f"{one}>{other}" for one in of["gateway"] for other in processes if other not in of["gateway"]]
    links += [f"{one}>{other}" for one in of["prefill"] for other in of["decode"]]
    return {**processes, **dict.fromkeys(links, LINK)}


def matching(target: str, fleet: FleetPlan) -> tuple[str, ...]:
    """The names that `target` means: one name, a pattern (`prefill*`, `gateway*>redis`), or `all` and either or a role.

    Empty where the fleet has none. A pattern without `>` means processes only.
    """
    known = names(fleet)
    pattern = target.removeprefix(_ALL)
    if pattern != target and pattern in known.values():
        return tuple(name for name, role in known.items() if role == pattern)
    ends = pattern.split(">")
    return tuple(name for name in known if _fits(name.split(">"), ends))


def _fits(ends: list[str], patterns: list[str]) -> bool:
    return len(ends) == len(patterns) and all(map(fnmatchcase, ends, patterns))
