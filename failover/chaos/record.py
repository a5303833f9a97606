"""Everything that is known of one run: enough to judge it again, draw it, and run it again. Frozen data. Pure.

Times are seconds from the start of the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from failover.chaos.history import History
from failover.chaos.real_fleet import RealFleet
from failover.chaos.scenario import Scenario, Value

SAMPLE_S = 0.25
"""How often engines are looked at."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of the schedule: all of it is fixed by scenario, seed and form."""

    number: int
    fault: str
    target: str
    at_s: float
    for_s: float | None
    phase: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FaultRun:
    """What became of a planned fault. `lifted_s` None: it was never lifted; `problem`: it could not be applied."""

    number: int
    applied_s: float | None
    lifted_s: float | None
    note: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Instance:
    """One process of the run: `role` is prefill, decode, gateway or redis."""

    name: str
    role: str
    url: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something befell an instance: started, killed, told to end, ended, frozen, thawed, or a state of its health."""

    at_s: float
    instance: str
    what: str


@dataclass(frozen=True, slots=True)
class Sample:
    """KV of an engine at one moment, in tokens: held by rooms, cached, and all there is."""

    at_s: float
    instance: str
    used_tokens: int
    cached_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Orphan:
    """KV that an engine held for a room of a gateway when that gateway's process had died; `seen_s`: the last time."""

    gateway: str
    died_s: float
    engine: str
    room: str
    seen_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """KV that an engine held for a room whose attempt was over: when it was seen first, and the last time."""

    engine: str
    room: str
    since_s: float
    seen_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """One run. `unseen`: invariants that could not be seen, and why; `stopped`: it was stopped before its end.

    `settled_s`: how long after the load everything was given back; None: it was not, within the scenario's bound.
    `orphans`: what dead gateways left on engines. `held`: what engines were seen to hold of attempts that were over.
    `fleet`: a real one, that was not started for the run. `references`: what it answered before the faults, by request.
    """

    scenario: Scenario
    seed: int
    long: bool
    version: str
    planned: tuple[Planned, ...]
    faults: tuple[FaultRun, ...]
    instances: tuple[Instance, ...]
    marks: tuple[Mark, ...]
    samples: tuple[Sample, ...]
    history: History
    load_s: float
    settled_s: float | None
    unseen: Mapping[str, str] = field(default_factory=dict)
    stopped: bool = False
    orphans: tuple[Orphan, ...] = ()
    fleet: RealFleet | None = None
    references: Mapping[str, str] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
