"""Scenarios from TOML: every field is read by its type in `scenario.py`, and what cannot be run is refused. Pure.

A pair may be given as one value for both: `[short, long]` forms, or a range.
"""

from __future__ import annotations

import math
import tomllib
import types
from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

from engines.timing import PROFILES
from failover.chaos.faults.base import Fault
from failover.chaos.load import KINDS
from failover.chaos.scenario import COUNTED_STAGES, STAGES, FaultPlan, FleetPlan, LoadPlan, Scenario, ScenarioError
from failover.chaos.schedule import matching, names

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "fleet.prefills": (1, 64),
    "fleet.decodes": (1, 64),
    "fleet.gateways": (1, 16),
    "fleet.speed": (0.01, 1000),
    "load.duration_s": (1, 24 * 3600),
    "load.rate_per_s": (0.01, 10_000),
    "load.mix": (0, math.inf),
    "load.prompt_tokens": (20, 1_000_000),
    "load.output_tokens": (1, 1_000_000),
    "load.leave_ratio": (0, 1),
    "load.trace_speed": (0.001, 1_000_000),
    "faults.at_s": (0, math.inf),
    "faults.jitter_s": (0, math.inf),
    "faults.for_s": (0.001, math.inf),
    "faults.every_s": (0.1, math.inf),
    "expect.refused_ratio": (0, 1),
    "expect.broken_ratio": (0, 1),
    "expect.settle_s": (0, 3600),
    "expect.recovery_s": (0, 3600),
    "expect.attempts_ratio": (1, 100),
    "expect.deaths": (0, 64),
    "expect.reaped_s": (0, 3600),
    "expect.released_s": (0, 3600),
}
"""From and to of every number, by its path without positions."""
_CHAT_TOKENS = 1024
"""What templates and tools put around a prompt, at most."""
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def parse(text: str, name: str, kinds: Mapping[str, type[Fault]]) -> Scenario:
    """The scenario of a file's `text`; `name` is that of the file, without folder and ending.

    `kinds` are the faults that there are. ScenarioError names the first field that is wrong, and what it may be.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(name, f"this is not TOML: {error}") from error
    if "name" in table:
        raise ScenarioError("name", "a scenario is called like its file: leave this out")
    scenario: Scenario = read(Scenario, {"name": name, **table}, "")
    for where in ("about", "proves"):
        if not getattr(scenario, where).strip():
            raise ScenarioError(where, "say it in a sentence")
    _check_fleet(scenario.fleet)
    _check_load(scenario.load, scenario.fleet)
    for index, fault in enumerate(scenario.faults):
        _check_fault(fault, scenario, f"faults[{index}]", kinds)
    return scenario


# -- by type --------------------------------------------------------------------------------------------------------


def read(kind: Any, value: Any, path: str) -> Any:
    """`value` as TOML gives it, as a `kind`: a dataclass, a tuple, a mapping of names, a union, or a scalar.

    ScenarioError names the first field that is not of its type; `path` is that of `value` itself.
    """
    if is_dataclass(kind):
        return _read_table(kind, value, path)
    if get_origin(kind) in (Union, types.UnionType):
        return read(_alternative(get_args(kind), value), value, path)
    if get_origin(kind) is tuple:
        return _read_tuple(get_args(kind), value, path)
    if get_origin(kind) is not None:
        value = _mapping(value, path)
        return {name: read(get_args(kind)[1], each, f"{path}.{name}") for name, each in value.items()}
    return _scalar(kind, value, path)


def _read_table(kind: Any, value: Any, path: str) -> Any:
    hints, value = get_type_hints(kind), _mapping(value, path)
    prefix = f"{path}." if path else ""
    for name in value:
        if name not in hints:
            raise ScenarioError(prefix + name, f"there is no such field; {_one_of(name, hints)}")
    for each in fields(kind):
        if each.name not in value and each.default is MISSING and each.default_factory is MISSING:
            raise ScenarioError(prefix + each.name, "is missing")
    return kind(**{name: read(hints[name], each, prefix + name) for name, each in value.items()})


def _read_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    """A list of any length, or a pair in ascending order."""
    if kinds[-1] is Ellipsis:
        if not isinstance(value, list):
            raise ScenarioError(path, f"must be a list, not {_shown(value)}")
        return tuple(read(kinds[0], each, f"{path}[{index}]") for index, each in enumerate(value))
    values = value if isinstance(value, list) else [value, value]
    if len(values) != len(kinds):
        raise ScenarioError(path, f"must be one value or {len(kinds)}, not {_shown(value)}")
    pair = tuple(read(kind, each, path) for kind, each in zip(kinds, values, strict=True))
    if list(pair) != sorted(pair):
        raise ScenarioError(path, f"must not fall, as {_shown(value)} does")
    return pair


def _alternative(kinds: tuple[Any, ...], value: Any) -> Any:
    """Which of a union's types `value` is meant to be: that which it has, else the first."""
    return next((kind for kind in kinds if kind is type(value)), kinds[0])


def _scalar(kind: Any, value: Any, path: str) -> Any:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    fits = is_whole or isinstance(value, float) if kind is float else type(value) is kind
    if not fits:
        raise ScenarioError(path, f"must be {_KINDS[kind]}, not {_shown(value)}")
    low, high = _BOUNDS.get(_general(path), (-math.inf, math.inf))
    if isinstance(value, float) and not math.isfinite(value):
        raise ScenarioError(path, "must be finite")
    if kind in (int, float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ScenarioError(path, f"must be {bounds}, not {value:g}")
    return kind(value)


def _general(path: str) -> str:
    """`faults[2].at_s` as `faults.at_s`, `load.mix.stream` as `load.mix`."""
    return ".".join(part.partition("[")[0] for part in path.split(".")[:2])


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScenarioError(path, f"must be a table, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    words = {True: "true", False: "false"}
    return words[value] if isinstance(value, bool) else repr(value)[:60]


def _one_of(name: str, known: Iterable[str]) -> str:
    """What a name may be; only the one that was surely meant, where one is close."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it may be {', '.join(sorted(known))}"


# -- by meaning -----------------------------------------------------------------------------------------------------


def _check_fleet(fleet: FleetPlan) -> None:
    if fleet.profile not in PROFILES:
        raise ScenarioError("fleet.profile", f"there is no {fleet.profile!r}; {_one_of(fleet.profile, PROFILES)}")
    for index, pattern in enumerate(fleet.links):
        _check_target(pattern, fleet, f"fleet.links[{index}]", {"link"}, "a proxy")


def _check_load(load: LoadPlan, fleet: FleetPlan) -> None:
    for kind in load.mix:
        if kind not in KINDS:
            raise ScenarioError(f"load.mix.{kind}", f"there is no such kind of request; {_one_of(kind, KINDS)}")
    if not sum(load.mix.values()):
        raise ScenarioError("load.mix", "some kind must have a weight above 0")
    context_tokens = PROFILES[fleet.profile].context_tokens - _CHAT_TOKENS
    if load.prompt_tokens[1] + load.output_tokens[1] > context_tokens:
        raise ScenarioError("load.prompt_tokens", f"prompt and output must fit in {context_tokens} tokens together")


def _check_fault(fault: FaultPlan, scenario: Scenario, path: str, kinds: Mapping[str, type[Fault]]) -> None:
    if fault.fault not in kinds:
        raise ScenarioError(f"{path}.fault", f"there is no fault {fault.fault!r}; {_one_of(fault.fault, kinds)}")
    kind = kinds[fault.fault]
    _check_target(fault.target, scenario.fleet, f"{path}.target", kind.targets, fault.fault)
    for name, value in fault.params.items():
        where = f"{path}.params.{name}"
        if name not in kind.params:
            known = f"; {_one_of(name, kind.params)}" if kind.params else ""
            raise ScenarioError(where, f"{fault.fault} has no such parameter{known}")
        _scalar(type(kind.params[name]), value, where)
    _check_phase(fault.phase, f"{path}.phase")
    load_s = scenario.load.duration_s
    if fault.at_s >= load_s[0]:
        raise ScenarioError(f"{path}.at_s", f"must be within the load, which lasts {load_s[0]:g} s")
    if fault.every_s is not None and fault.for_s is not None and max(fault.for_s) >= fault.every_s:
        raise ScenarioError(f"{path}.for_s", f"must be below every_s, {fault.every_s:g}: it would befall twice at once")


def _check_target(target: str, fleet: FleetPlan, path: str, roles: Set[str], what: str) -> None:
    known, found = names(fleet), matching(target, fleet)
    if not found:
        usable = [name for name, role in known.items() if role in roles]
        raise ScenarioError(path, f"this fleet has no {target!r}; {_one_of(target, usable)}")
    wrong = [name for name in found if known[name] not in roles]
    if wrong:
        raise ScenarioError(path, f"{what} cannot befall {wrong[0]}; it may be a {' or '.join(sorted(roles))}")


def _check_phase(phase: str, path: str) -> None:
    stage, colon, number = phase.partition(":")
    if not phase:
        return
    if stage not in STAGES:
        raise ScenarioError(path, f"engines have no stage {stage!r}; {_one_of(stage, STAGES)}")
    if colon and stage not in COUNTED_STAGES:
        raise ScenarioError(path, f"only {' and '.join(sorted(COUNTED_STAGES))} are counted")
    if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ScenarioError(path, f"must be a stage and a number from 1 on, as in token:5, not {phase!r}")
