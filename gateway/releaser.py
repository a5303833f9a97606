"""Lets go of attempts in the background: what is still open is freed, watched, and reported if it leaks.

Glue between `failover/release.py` and the fleet. One named task per attempt that did not end by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from engines.fleet import Fleet
from engines.pair import PairRun
from engines.tasks import spawn
from engines.types import EngineId, EngineLoad, EngineView, Leg, Role
from failover.monitor import Monitor
from failover.release import Counted, release
from gateway.bookings import Bookings
from gateway.observability import Metrics

_ANSWER_GRACE_S = 1.0
"""How long after a whole answer the prefill's own answer may take before it is told to stop."""


def _nobody(_: object) -> None:
    """Nobody wants to know."""


class Releaser:
    """Owns every attempt that nobody follows any more, until both of its legs have ended."""

    def __init__(self, fleet: Fleet, bookings: Bookings, monitor: Monitor, metrics: Metrics) -> None:
        self._fleet = fleet
        self._bookings = bookings
        self._monitor = monitor
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_engine: Counter[EngineId] = Counter()
        self._rids: set[str] = set()
        self.on_released: Callable[[str], None] = _nobody
        """Called with the rid of each run that was taken over, when its legs have ended or are given up."""

    def let_go(self, run: PairRun, *, whole: bool) -> None:
        """Take over a run. `whole`: the answer had come, so that only the prefill's answer may be outstanding."""
        if run.open_legs:
            task = spawn(self._release(run, whole), f"release {run.attempt.rid}")
            self._tasks.add(task)
            self._rids.add(run.attempt.rid)
            task.add_done_callback(partial(self._over, run.attempt.rid))

    def has(self, rid: str) -> bool:
        """Whether an attempt was taken over and is not known to be free yet."""
        return rid in self._rids

    def _over(self, rid: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._rids.discard(rid)
        self.on_released(rid)

    @property
    def pending(self) -> int:
        """Attempts whose legs are not known to be free yet."""
        return len(self._tasks)

    def on_engine(self, engine_id: EngineId) -> int:
        """Of these, the legs on one server: what they hold there is of no use to anybody."""
        return self._on_engine[engine_id]

    async def drained(self, timeout_s: float) -> None:
        """Wait for what is being released, at most `timeout_s`; the rest is cancelled, which closes its sockets."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, run: PairRun, whole: bool) -> None:
        views = {leg: run.attempt.view(leg) for leg in Leg}
        before = {leg: self._fleet.view(view.engine_id).load for leg, view in views.items()}

        async def watch(leg: Leg) -> Counted:
            return self._counted(views[leg], before[leg])

        engines = [views[leg].engine_id for leg in run.open_legs]
        self._on_engine.update(engines)
        try:
            if whole and await run.wait_ended(_ANSWER_GRACE_S):
                return
            released = await release(run, watch)
        finally:
            self._on_engine.subtract(engines)
            for leg in run.open_legs:  # only when this task itself is cancelled
                run.close(leg)
        self._metrics.released(released.seconds, released.aborts)
        for leg in released.leaking:
            self._monitor.leak_found(views[leg].engine_id)

    def _counted(self, view: EngineView, before: EngineLoad | None) -> Counted:
        """Whether the server has more requests than this gateway has sent it; loads are refreshed by the monitor.

        More than this gateway has sent and is releasing come from somebody else, and then nothing can be said.
        """
        now = self._fleet.view(view.engine_id)
        if now.epoch != view.epoch:
            return Counted.GONE
        if now.load is None or now.load is before:
            return Counted.UNKNOWN
        sent = (
            self._bookings.prefill_requests(view.engine_id)
            if view.spec.role is Role.PREFILL
            else self._bookings.decode_requests(view.engine_id)
        )
        unexplained = now.load.running_requests + now.load.waiting_requests - sent
        if unexplained <= 0:
            return Counted.GONE
        return Counted.STILL_THERE if unexplained <= self._on_engine[view.engine_id] else Counted.UNKNOWN
