"""Looks at every server again and again, feeds what it sees to the health table, and tells what changed.

A shell: `machine.py`, `blame.py` and `wedge.py` decide. One task per server for probes, one for loads; a broken leg
asks for a probe at once. However many ask, one server is looked at by one probe at a time, which they share.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol, TypeVar

from engines.types import EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, Health, Outcome
from failover import machine, wedge
from failover.blame import Pair, sign_of
from failover.machine import HealthEvent
from failover.trust import Trust
from failover.wedge import Owed, Watch

_log = logging.getLogger("pdgate.monitor")

ROUSE_AFTER_S = 30.0
"""How long a server must have been not ready before it is roused, and again after that."""
_STILL = (Health.SLOW, Health.WEDGED)
_REASON_STAYS = (Health.READY, Health.PROBATION, Health.WEDGED, Health.LEAKING)
"""What is seen later, and changes nothing, says nothing of why these are as they are."""
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
    async def rouse(self, spec: EngineSpec) -> None: ...


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


def _owes_nothing(engine_id: EngineId) -> Owed:
    """Nobody knows what is under way."""
    return wedge.NOTHING_OWED


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
        wedged_after_s: float = wedge.SHORTEST_S,
        rng: Random | None = None,
    ) -> None:
        """`wedged_after_s`: no server counts as stuck sooner. `rng` must differ between gateways."""
        self._registry = registry
        self._prober = prober
        self._listener = listener
        self._spawn = spawn
        self._probe_interval_s = probe_interval_s
        self._load_interval_s = load_interval_s
        self._timeout_s = timeout_s
        self._trust = Trust(rng or Random(0))
        self._watches: defaultdict[EngineId, Watch] = defaultdict(lambda: Watch(wedged_after_s))
        self._unready_s: dict[EngineId, float] = {}
        """Since when, or since when it was last roused, a server is not ready."""
        self._heard_s: dict[EngineId, float] = {}
        """When the last sign of life came from a server: an answer to a probe, a load, output."""
        self._stands_still: set[EngineId] = set()
        """Those that are SLOW or WEDGED: asked for with every chunk of every stream."""
        self.owed: Callable[[EngineId], Owed] = _owes_nothing
        """What of our requests a server still has to do."""
        self.transitions: Counter[tuple[EngineId, Health, Health, HealthEvent]] = Counter()
        """How often a server went from one state to another, and by what."""
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
        if engine_id in self._stands_still:
            self._step(engine_id, HealthEvent.PROGRESSED, "")

    def output_s(self, engine_id: EngineId) -> float:
        """When a leg on it got something last, on the loop's clock; 0 for never."""
        return self._progress_s.get(engine_id, 0.0)

    def sign_s(self, engine_id: EngineId) -> float:
        """When it gave any sign of life; of one that is stuck, answers to probes are none."""
        output_s = self.output_s(engine_id)
        is_stuck = self._registry.view(engine_id).health is Health.WEDGED
        return output_s if is_stuck else max(output_s, self._heard_s.get(engine_id, 0.0))

    def proved(self, engine_id: EngineId) -> None:
        """A request that was sent to it on probation went well."""
        self._step(engine_id, HealthEvent.PROVED, "")

    def leg_failed(self, outcome: Outcome, pair: Pair | None = None) -> None:
        """A leg of `pair` failed: where that is a sign of a bad server, it gets no new rooms until a probe succeeds."""
        engine_id, event, look, counts = sign_of(outcome, pair)
        now_s = asyncio.get_running_loop().time()
        if event is HealthEvent.LEG_TIMED_OUT and self._made_progress(engine_id, now_s):
            return  # the others on it go on: busy, or not at fault
        if counts and self._trust.failed(engine_id, now_s, self._progress_s.get(engine_id, -math.inf)):
            event = HealthEvent.KEEPS_FAILING
        if event is not None:
            self._step(engine_id, event, outcome.message)
        if look:
            self._wake[engine_id].set()

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
            self._begin(self._look_in(view.spec, in_s), f"probe asked for {engine_id}")

    async def probe_now(self, engine_id: EngineId) -> bool:
        """A probe at once; whether the server is reachable and still the same process."""
        view = self._registry.view(engine_id)
        look = self._looks.get(engine_id)
        if look is not None and self._wake[engine_id].is_set():
            await asyncio.wait((look,))  # it began before the last leg broke, and may have seen the server before that
        reachable = await self._look(view.spec)
        return reachable and self._registry.view(engine_id).epoch == view.epoch

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._spawn(work, name)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    # ---- loops ---------------------------------------------------------------------------------------------------

    async def _keep_probing(self, spec: EngineSpec) -> None:
        is_due = True
        while True:
            if is_due:
                await self._look(spec)
                self._rouse(spec)
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

    def _rouse(self, spec: EngineSpec) -> None:
        """Ask a server that stays not ready to try a token: one whose warm-up failed needs that to become ready."""
        engine_id, now_s = spec.engine_id, asyncio.get_running_loop().time()
        if self._registry.view(engine_id).health is not Health.NOT_READY:
            self._unready_s.pop(engine_id, None)
        elif now_s - self._unready_s.setdefault(engine_id, now_s) >= ROUSE_AFTER_S:
            self._unready_s[engine_id] = now_s
            self._begin(self._prober.rouse(spec), f"rouse {engine_id}")

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
                self._watch(spec.engine_id, load)
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
            self._trust.forget(engine_id)
            self._watches.pop(engine_id, None)
            self._step(engine_id, HealthEvent.RESTARTED, "it restarted")
            self._listener.restarted(engine_id)
        now_s = asyncio.get_running_loop().time()
        if seen.ready or seen.reachable:
            self._heard_s[engine_id] = now_s
        if seen.ready:
            self._probed_s[engine_id] = now_s
            if seen.facts is None:
                self._step(engine_id, HealthEvent.PROBE_UNREAD, seen.reason)
            elif not self._must_pause(engine_id, now_s):
                self._step(engine_id, HealthEvent.PROBE_READY, "")
        elif seen.reachable:
            self._step(engine_id, HealthEvent.PROBE_NOT_READY, seen.reason)
        elif not seen.timed_out:
            self._step(engine_id, HealthEvent.PROBE_FAILED, seen.reason)
        elif not self._made_progress(engine_id, now_s):
            is_silent = now_s - self._last_sign_s(engine_id, now_s) >= machine.SILENT_S
            self._step(engine_id, HealthEvent.SILENT if is_silent else HealthEvent.PROBE_TIMED_OUT, seen.reason)

    def _made_progress(self, engine_id: EngineId, now_s: float) -> bool:
        """Whether output came from it while an answer was waited for."""
        return self._progress_s.get(engine_id, -math.inf) > now_s - self._timeout_s

    def _last_sign_s(self, engine_id: EngineId, now_s: float) -> float:
        """When anything came from it; now, if nothing ever did, from when on it is waited for."""
        heard_s = self._heard_s.setdefault(engine_id, now_s)
        return max(heard_s, self._progress_s.get(engine_id, -math.inf))

    def _must_pause(self, engine_id: EngineId, now_s: float) -> bool:
        """Whether its last trials went wrong too lately for another, and others of its role can do without it."""
        view = self._registry.view(engine_id)
        if view.health not in (Health.BROKEN, Health.WEDGED) or not self._trust.pauses(engine_id, now_s):
            return False
        peers = (each for each in self._registry.views() if each.spec.role is view.spec.role)
        return any(each.takes_rooms for each in peers)

    def _watch(self, engine_id: EngineId, load: EngineLoad | None) -> None:
        """Whether it works at what it has to do, as far as its loads and the output of our requests tell."""
        now_s = asyncio.get_running_loop().time()
        if load is not None:
            self._heard_s[engine_id] = now_s
        watch, owed = self._watches[engine_id], self.owed(engine_id)
        watch.progress(self._progress_s.get(engine_id, -math.inf))
        idle_s = watch.saw(load, owed, now_s)
        health = self._registry.view(engine_id).health
        if health is Health.WEDGED:
            if watch.is_moving and not self._must_pause(engine_id, now_s):
                self._step(engine_id, HealthEvent.PROGRESSED, "")
        elif idle_s >= watch.patience_s(owed) and not self.is_stale(engine_id):
            reason = f"it is ready, but {owed.requests} requests on it have not moved for {idle_s:.0f} s"
            self._step(engine_id, HealthEvent.WEDGE_FOUND, reason)

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
        before, health = view.health, machine.step(view.health, event)
        if health is before and (not reason or health in _REASON_STAYS):
            return
        if health is Health.PROBATION:
            reason = f"half-open, until a request has succeeded on it; before that: {view.reason}"
        self._registry.set_health(engine_id, health, "" if health is Health.READY else reason)
        if health is not before:
            (self._stands_still.add if health in _STILL else self._stands_still.discard)(engine_id)
            now_s = asyncio.get_running_loop().time()
            if machine.fails_trial(before, event):
                self._trust.trial_failed(engine_id, now_s)
            self.transitions[engine_id, before, health, event] += 1
            level = logging.INFO if health.takes_rooms else logging.WARNING
            _log.log(level, "%s %s is %s%s", view.spec.role, engine_id, health, f": {reason}" if reason else "")
            self._listener.fleet_changed(engine_id)
            if machine.is_news(before, event, health):
                fingerprint = view.facts.boot_fingerprint if view.facts is not None else ""
                self.on_suspected(engine_id, reason, fingerprint)
