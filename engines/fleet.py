"""The live set of servers: what is known of each, and immutable snapshots of it.

Mutated only from the event loop, and only by what the monitor saw. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, FleetSnapshot, Health


class Fleet:
    """The servers of one gateway. `version` grows with every change that a routing decision could see."""

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self._views = {
            spec.engine_id: EngineView(spec, Health.UNKNOWN, epoch=0, reason="not probed yet") for spec in specs
        }
        self._version = self._shape = 0
        self._snapshot: FleetSnapshot | None = None
        self._models: tuple[str, ...] | None = None

    def snapshot(self) -> FleetSnapshot:
        """The fleet as it is now; the same object until something changes."""
        if self._snapshot is None:
            self._snapshot = FleetSnapshot(self._version, tuple(self._views.values()), self._shape)
        return self._snapshot

    def view(self, engine_id: EngineId) -> EngineView:
        return self._views[engine_id]

    def has(self, engine_id: EngineId) -> bool:
        return engine_id in self._views

    def views(self) -> tuple[EngineView, ...]:
        return self.snapshot().engines

    def set_health(self, engine_id: EngineId, health: Health, reason: str = "") -> None:
        view = self._views[engine_id]
        if (view.health, view.reason) != (health, reason):
            self._change(replace(view, health=health, reason=reason))

    def set_draining(self, engine_id: EngineId, draining: bool) -> None:
        """Keep new rooms from a server, or no longer; over its restarts too."""
        view = self._views[engine_id]
        if view.draining != draining:
            self._change(replace(view, draining=draining))

    def set_facts(self, engine_id: EngineId, facts: EngineFacts) -> bool:
        """Take what a probe read; whether the server restarted since the last one, which begins a new epoch."""
        view = self._views[engine_id]
        if view.facts == facts:
            return False
        restarted = view.facts is not None and view.facts.boot_fingerprint != facts.boot_fingerprint
        first = view.facts is None
        epoch = view.epoch + 1 if restarted or first else view.epoch
        self._change(replace(view, facts=facts, epoch=epoch, load=None if restarted else view.load))
        return restarted

    def set_load(self, engine_id: EngineId, load: EngineLoad | None) -> None:
        view = self._views[engine_id]
        if view.load != load:
            self._views[engine_id] = replace(view, load=load)
            self._version += 1
            self._snapshot = None

    def models(self) -> tuple[str, ...]:
        """The models that at least one prefill and one decode serve, in order of appearance."""
        if self._models is not None:  # every request asks
            return self._models
        served: dict[str, set[str]] = {}
        for view in self._views.values():
            if view.facts is not None and view.facts.model:
                served.setdefault(view.facts.model, set()).add(view.spec.role.value)
        self._models = tuple(model for model, roles in served.items() if {"prefill", "decode"} <= roles)
        return self._models

    def _change(self, view: EngineView) -> None:
        self._views[view.engine_id] = view
        self._version += 1
        self._shape += 1
        self._snapshot = self._models = None
