"""What the servers of each model say of themselves, one of each kind: asked with every request, and seldom new."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from engines.fleet import Fleet
from engines.types import EngineFacts, Role


class EngineKinds:
    """Worked out once for each shape of the fleet, which has few kinds of servers however many there are."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shape = -1
        self._kinds: dict[tuple[str, Role], dict[Hashable, EngineFacts]] = {}

    def of(self, model: str, role: Role) -> Sequence[EngineFacts]:
        """Facts that differ in what a request is asked by; empty while nothing is known."""
        fleet = self._fleet.snapshot()
        if fleet.shape != self._shape:
            self._shape, self._kinds = fleet.shape, {}
            for view in fleet.engines:
                if view.facts is not None:
                    self._kinds.setdefault((view.facts.model, view.spec.role), {})[_kind(view.facts)] = view.facts
        return tuple(self._kinds.get((model, role), {}).values())


def _kind(facts: EngineFacts) -> Hashable:
    return (
        facts.chat,
        facts.frontend,
        facts.sampling_defaults,
        facts.cache_report,
        facts.context_tokens,
        facts.deterministic,
        facts.incremental_streaming,
    )
