"""Whether a record holds what must hold: each invariant with its evidence. Pure; `invariants.py` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Broken:
    """One case of an invariant that did not hold. Names are empty where they do not apply."""

    what: str
    request: str = ""
    attempt: str = ""
    fault: int | None = None
    """Number of the planned fault that was on, or had been last, when it happened."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One invariant: held where nothing is `broken`. `evidence`: what was looked at, in figures. `unseen`: why not."""

    invariant: str
    evidence: str
    broken: tuple[Broken, ...] = ()
    unseen: str = ""

    @property
    def held(self) -> bool:
        return not self.broken


@dataclass(frozen=True, slots=True)
class Judgement:
    """All of them, and the figures of the run by name (requests, whole, refused, broken, left, attempts, ...)."""

    verdicts: tuple[Verdict, ...]
    figures: Mapping[str, float]

    @property
    def passed(self) -> bool:
        return all(verdict.held for verdict in self.verdicts)
