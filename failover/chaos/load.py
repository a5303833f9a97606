"""What the clients of a run ask, and when: fixed by the plan, the seed and the form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from failover.chaos.scenario import LoadPlan


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `leaves_after`: its client hangs up when it has read so many events; 0: before any answer."""

    number: int
    at_s: float
    kind: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_after: int | None = None


def requests(plan: LoadPlan, seed: int, *, long: bool, trace: str = "") -> tuple[Asked, ...]:
    """Every request of a run, by time; `trace`: the text of the plan's trace file, where it names one."""
    raise NotImplementedError
