"""Looks at every server again and again, feeds what it sees to the health table, and tells what changed.

A shell: `machine.py` decides. One task per server for probes, one for loads; a broken leg asks for a probe at once.
However many ask, one server is looked at by one probe at a time, which they share.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, Health, Outcome
from failover import machine
from failover.machine import HealthEvent

_log = logging.getLogger("pdgate.monitor")

STALE_PROBE_S = 5.0
"""No decode is given a prefill whose bootstrap server did not answer within this: a dead one stalls all its work."""


class Seen(Protocol):
    """What one probe found (`engines.base.Probe`)."""

    @property
    def reachable(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def timed_out(self) -> bool: ...
    @property
    def facts(self) -> EngineFacts | None: ...


class Prober(Protocol):
    """How servers are looked at; an `engines.base.Engine` does it."""

    async def probe(self, spec: EngineSpec, timeout_s: float) -> Seen: ...
    async def load(self, spec: EngineSpec, timeout_s: float) -> EngineLoad | None: ...


class Registry(Protocol):
    """Where it is written down (`engines.fleet.Fleet`)."""

    def views(self) -> tuple[EngineView, ...]: ...
    def view(self, engine_id: EngineId) -> EngineView: ...
    def set_health(self, engine_id: EngineId, health: Health, reason: str = "") -> None: ...
    def set_facts(self, engine_id: EngineId, facts: EngineFacts) -> bool: ...
    def set_load(self, engine_id: EngineId, load: EngineLoad | None) -> None: ...


class Listener(Protocol):
    """Who is told: the composition root wires these to the decider."""

    def fleet_changed(self, engine_id: EngineId) -> None: ...
    def restarted(self, engine_id: EngineId) -> None: ...


T = TypeVar("T")
SuspicionHeard = Callable[[EngineId, str, str], None]
"""Told of an engine that is suspected, why, and the fingerprint of the boot that is ("" when none is known)."""


def _nobody(engine_id: EngineId, reason: str, fingerprint: str) -> None:
    """Nobody else wants to know."""


class Spawn(Protocol):
    """How tasks are started (`engines.tasks.spawn`)."""

    def __call__(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...


class Monitor:
    """Keeps health, facts and loads of the fleet current. `start()` and `stop()` once each."""

    def __init__(
        self,
        registry: Registry,
        prober: Prober,
        listener: Listener,
        spawn: Spawn,
        *,
        probe_interval_s: float,
        load_interval_s: float,
        timeout_s: float = 2.0,
    ) -> None:
        self._registry = registry
        self._prober = prober
        self._listener = listener
        self._spawn = spawn
        self._probe_interval_s = probe_interval_s
        self._load_interval_s = load_interval_s
        self._timeout_s = timeout_s
        self._wake: defaultdict[EngineId, asyncio.Event] = defaultdict(asyncio.Event)
        """Set: a leg broke since the last look began."""
        self._looks: dict[EngineId, asyncio.Task[bool]] = {}
        self._probed_s: dict[EngineId, float] = {}
        self._progress_s: dict[EngineId, float] = {}
        self._read_s: dict[EngineId, float] = {}
        """When the last look began that read the server's facts."""
        self._asked: set[EngineId] = set()
        """Engines that somebody wants looked at, and that are not looked at yet."""
        self._answering: set[asyncio.Task[None]] = set()
        self.on_suspected: SuspicionHeard = _nobody
        """Called when this gateway itself has found a reason to send an engine no new rooms."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for view in self._registry.views():
            self._tasks.append(self._spawn(self._keep_probing(view.spec), f"probe {view.engine_id}"))
            self._tasks.append(self._spawn(self._keep_loading(view.spec), f"load {view.engine_id}"))

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._answering, *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._asked.clear()
        self._looks.clear()

    def is_stale(self, engine_id: EngineId) -> bool:
        """Whether its last good probe is too old to send it a new room."""
        probed_s = self._probed_s.get(engine_id)
        return probed_s is None or asyncio.get_running_loop().time() - probed_s > STALE_PROBE_S

    def has_read_since(self, engine_id: EngineId, since_s: float) -> bool:
        """Whether a look that began at `since_s` or later read the server's facts, its boot fingerprint among them."""
        return self._read_s.get(engine_id, -1.0) >= since_s

    def progress(self, engine_id: EngineId, now_s: float) -> None:
        """A leg on it got something: no late answer to a probe says that it is gone."""
        self._progress_s[engine_id] = now_s

    def leg_failed(self, outcome: Outcome) -> None:
        """A leg failed: where that is a sign of a dead server, it gets no new rooms until a probe succeeds."""
        if machine.breaks(outcome):
            self._step(outcome.engine_id, HealthEvent.LEG_BROKE, outcome.message)
            self._wake[outcome.engine_id].set()

    def leak_found(self, engine_id: EngineId) -> None:
        """A server never let go of a request: it gets no new rooms until it restarts."""
        self._step(engine_id, HealthEvent.LEAK_FOUND, "it still counts a request that was aborted 60 s ago")

    def suspect_elsewhere(self, engine_id: EngineId, reason: str, fingerprint: str, look_in_s: float = 0.0) -> None:
        """Another gateway suspects this boot of an engine: no new rooms until a probe of ours succeeds, in `look_in_s`.

        Of another boot than the one we know (we, or they, have not noticed a restart), it is only a reason to look.
        Not told to `on_suspected`. An engine that is not ours is left alone.
        """
        view = self._known(engine_id)
        if view is None:
            return
        if view.facts is not None and view.facts.boot_fingerprint == fingerprint:
            self._step(engine_id, HealthEvent.SUSPECTED_ELSEWHERE, f"another gateway says: {reason}")
        self.look_now(engine_id, look_in_s)

    def look_now(self, engine_id: EngineId, in_s: float = 0.0) -> None:
        """There is a reason to look at this engine, in `in_s`. Does not wait; who asks meanwhile shares the look."""
        view = self._known(engine_id)
        if view is not None and engine_id not in self._asked:
            self._asked.add(engine_id)
            task = self._spawn(self._look_in(view.spec, in_s), f"probe asked for {engine_id}")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def probe_now(self, engine_id: EngineId) -> bool:
        """A probe at once; whether the server is reachable and still the same process."""
        view = self._registry.view(engine_id)
        look = self._looks.get(engine_id)
        if look is not None and self._wake[engine_id].is_set():
            await asyncio.wait((look,))  # it began before the last leg broke, and may have seen the server before that
        reachable = await self._look(view.spec)
        return reachable and self._registry.view(engine_id).epoch == view.epoch

    # ---- loops ---------------------------------------------------------------------------------------------------

    async def _keep_probing(self, spec: EngineSpec) -> None:
        is_due = True
        while True:
            if is_due:
                await self._look(spec)
            is_due = await self._next_look_is_due(spec.engine_id)

    async def _next_look_is_due(self, engine_id: EngineId) -> bool:
        """True after the pause or soon after a leg broke; False when somebody else has looked since it broke."""
        wake = self._wake[engine_id]
        try:
            async with asyncio.timeout(self._pause_s(engine_id)):
                await wake.wait()
        except TimeoutError:
            return True
        await asyncio.sleep(0.05)  # a storm of broken legs is one reason to look, not hundreds
        return wake.is_set()

    def _pause_s(self, engine_id: EngineId) -> float:
        ready = self._registry.view(engine_id).health is Health.READY
        return self._probe_interval_s if ready else min(0.5, self._probe_interval_s)

    async def _keep_loading(self, spec: EngineSpec) -> None:
        while True:
            if self._registry.view(spec.engine_id).facts is not None:
                load = await self._prober.load(spec, self._timeout_s)
                before = self._registry.view(spec.engine_id).load
                self._registry.set_load(spec.engine_id, load)
                self._compare(spec.engine_id, before, load)
                self._listener.fleet_changed(spec.engine_id)
            await asyncio.sleep(self._load_interval_s)

    # ---- what was seen -------------------------------------------------------------------------------------------

    async def _look(self, spec: EngineSpec) -> bool:
        """Whether the server is reachable, by the one probe of all who ask at the same time."""
        look = self._looks.get(spec.engine_id)
        if look is None:
            self._wake[spec.engine_id].clear()
            look = self._spawn(self._probe(spec), f"probe once {spec.engine_id}")
            self._looks[spec.engine_id] = look
        return await asyncio.shield(look)

    async def _look_in(self, spec: EngineSpec, in_s: float) -> None:
        await asyncio.sleep(in_s)
        self._asked.discard(spec.engine_id)  # a reason that comes from now on is not answered by this look
        self._wake[spec.engine_id].set()  # a look that has begun already is followed by another
        await self._look(spec)

    async def _probe(self, spec: EngineSpec) -> bool:
        began_s = asyncio.get_running_loop().time()
        try:
            seen = await self._prober.probe(spec, self._timeout_s)
            if seen.facts is not None:
                self._read_s[spec.engine_id] = began_s
            self._take(spec, seen)
        finally:
            self._looks.pop(spec.engine_id, None)
        return seen.reachable

    def _take(self, spec: EngineSpec, seen: Seen) -> None:
        engine_id = spec.engine_id
        if seen.facts is not None and self._registry.set_facts(engine_id, seen.facts):
            _log.warning("%s %s restarted", spec.role, engine_id)
            self._step(engine_id, HealthEvent.RESTARTED, "it restarted")
            self._listener.restarted(engine_id)
        if seen.ready:
            self._probed_s[engine_id] = asyncio.get_running_loop().time()
            self._step(engine_id, HealthEvent.PROBE_READY, "")
        elif seen.reachable:
            self._step(engine_id, HealthEvent.PROBE_NOT_READY, seen.reason)
        elif not seen.timed_out:
            self._step(engine_id, HealthEvent.PROBE_FAILED, seen.reason)
        elif self._progress_s.get(engine_id, 0.0) <= asyncio.get_running_loop().time() - self._timeout_s:
            self._step(engine_id, HealthEvent.PROBE_TIMED_OUT, seen.reason)

    def _compare(self, engine_id: EngineId, before: EngineLoad | None, load: EngineLoad | None) -> None:
        """A counter that fell is the first sign of a restart too quick to be seen as an outage: suspect, and look."""
        if before is None or load is None:
            return
        if fell := machine.fallen_counter(before, load):
            self._step(engine_id, HealthEvent.COUNTER_FELL, f"it may have restarted: {fell}")
            self._wake[engine_id].set()

    def _known(self, engine_id: EngineId) -> EngineView | None:
        return next((view for view in self._registry.views() if view.engine_id == engine_id), None)

    def _step(self, engine_id: EngineId, event: HealthEvent, reason: str) -> None:
        view = self._registry.view(engine_id)
        health = machine.step(view.health, event)
        if health is view.health and health is Health.LEAKING:
            return
        self._registry.set_health(engine_id, health, "" if health is Health.READY else reason)
        if health is not view.health:
            level = logging.INFO if health is Health.READY else logging.WARNING
            _log.log(level, "%s %s is %s%s", view.spec.role, engine_id, health, f": {reason}" if reason else "")
            self._listener.fleet_changed(engine_id)
            if machine.is_news(view.health, event, health):
                fingerprint = view.facts.boot_fingerprint if view.facts is not None else ""
                self.on_suspected(engine_id, reason, fingerprint)
