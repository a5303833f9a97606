"""What one scenario is: a fleet, a load, faults, and what must hold. Frozen data, read from TOML. Pure.

A file that cannot be used is refused with the name of the field and what it may be (`ScenarioError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from failover.reaper import LEASE_S

Value = str | int | float | bool
Form = tuple[float, float]
"""A value in the short form of a scenario, and in the long one."""

STAGES: Mapping[str, str] = {
    "bootstrap": "prefill",
    "prefill_chunk": "prefill",
    "transfer": "prefill",
    "reserved": "decode",
    "handed_over": "decode",
    "token": "decode",
    "role_chunk": "decode",
    "finish_chunk": "decode",
}
"""Where an emulated engine can hold a request (`POST /emulator/hold`), and which side's engines come there."""
COUNTED_STAGES = frozenset({"prefill_chunk", "token"})
"""Stages that a request comes to many times."""


class ScenarioError(ValueError):
    """A scenario that cannot be run; `field` is its dotted path in the file, as in `faults[2].target`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The processes of a run. With more than one gateway, or with `redis`, there is a Redis that they share.

    `speed`: emulated servers run so many times faster than the profile says, SGLang's timeouts included. Flags are
    those of `pdgate serve` and `pdgate emulate`. `links`: the TCP links that get a proxy, as in `gateway0>prefill1`,
    `*` standing for any name; faults of links add theirs by themselves.
    """

    prefills: int = 2
    decodes: int = 2
    gateways: int = 1
    redis: bool = False
    speed: float = 20.0
    profile: str = "tiny"
    engine_flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What clients ask, at seeded times over `duration_s` (short form, long form).

    `mix`: kinds of request to their weights (`failover/chaos/load.py` has the kinds). Lengths are in tokens, from and
    to. `leave_ratio` of the streams are left by their clients midway. `trace`: a file whose arrivals and lengths are
    used instead (Mooncake JSON lines), sped up by `trace_speed`.
    """

    duration_s: Form = (10.0, 60.0)
    rate_per_s: float = 20.0
    mix: Mapping[str, float] = field(default_factory=lambda: {"stream": 3.0, "whole": 1.0})
    prompt_tokens: tuple[int, int] = (20, 400)
    output_tokens: tuple[int, int] = (5, 120)
    leave_ratio: float = 0.0
    trace: str = ""
    trace_speed: float = 1.0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault, or one that comes again `every_s` until the load ends; `fault` is a name of `failover/chaos/faults`.

    `target`: a name (`prefill0`, `gateway1`, `redis`, a link), one by chance of those that fit (`prefill*`,
    `gateway0>decode*`), or all of them (`all prefill`, `all gateway0>*`). It comes up to `jitter_s` after `at_s`.
    `phase`: one of STAGES, for chunks and tokens with the number of the one it follows, as in `token:5`; the fault
    waits until a request is there. `for_s`: it is lifted after so long; None: at the end of the load. One that comes
    again waits until the one before it is lifted: leave time for a process to start.
    """

    fault: str
    target: str
    at_s: float = 1.0
    jitter_s: float = 0.0
    for_s: Form | None = None
    every_s: float | None = None
    phase: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The bounds that are this scenario's own; the invariants that always hold are not named here.

    `refused_ratio`, `broken_ratio`: how many requests may be refused, or end with an error after their beginning.
    `settle_s`: all KV is back so long after the load. `recovery_s`: the longest pause of a stream that goes on, one
    number or `[short, long]`.
    `attempts_ratio`: attempts per request, at most. `deaths`: engines that may die beyond those that faults kill.
    `reaped_s`: what a gateway had on engines is released so long after its death. `released_s`: what any attempt had
    there is, so long after its end, and that before its connections are closed, after 5 s. `errors`: codes of errors
    that clients must be told, each at least once, as the scenario is about them.
    """

    refused_ratio: float = 0.0
    broken_ratio: float = 0.0
    settle_s: float = 15.0
    recovery_s: Form = (10.0, 10.0)
    attempts_ratio: float = 3.0
    deaths: int = 0
    reaped_s: float = 10.0 + LEASE_S
    released_s: float = 4.0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. `proves`: what a run that passes has shown, in a sentence. `quick`: it runs with the tests."""

    name: str
    about: str
    proves: str
    fleet: FleetPlan = field(default_factory=FleetPlan)
    load: LoadPlan = field(default_factory=LoadPlan)
    faults: tuple[FaultPlan, ...] = ()
    expect: Expectations = field(default_factory=Expectations)
    quick: bool = False
