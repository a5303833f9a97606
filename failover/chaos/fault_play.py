"""One planned fault in its own task: it waits for its moment, applies it, and lifts it. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import math

from engines import tasks
from failover.chaos import phases
from failover.chaos.faults import FAULTS
from failover.chaos.faults.base import Fault
from failover.chaos.record import FaultRun, Planned
from failover.chaos.world import NotAnyMore, RunWorld, Unable

_HELD_S = 0.3
"""A request that was held for a fault goes on when the fault was applied, and when that takes longer, after this."""
_AGAIN_S = 0.5
"""Between two tries to lift it."""


class FaultPlay:
    """`end` lifts it, however far it has come; `became` is then what became of it.

    `before`: the one of the same kind on the same target. On a slow machine it may last beyond this one's moment, and
    two at once would undo each other: this one waits.
    """

    def __init__(self, world: RunWorld, planned: Planned, before: FaultPlay | None = None) -> None:
        self.planned = planned
        self._world, self._before = world, before
        self._lifted = asyncio.Event()
        self._fault: Fault | None = None
        self._applied_s: float | None = None
        self._lifted_s: float | None = None
        self._note = self._problem = ""
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """It takes its time from now on."""
        self._task = tasks.spawn(self._run(), f"chaos-fault-{self.planned.number}")

    async def end(self) -> None:
        """Lift it now, if it is on; it does not begin any more."""
        self._over.set()
        if self._task is not None:
            await self._task

    async def over(self) -> None:
        """Wait until it is lifted, or given up."""
        await self._lifted.wait()

    async def stop(self) -> None:
        """Drop it as it is."""
        await tasks.stop(self._task)

    @property
    def is_on(self) -> bool:
        return self._applied_s is not None and self._lifted_s is None

    @property
    def became(self) -> FaultRun:
        return FaultRun(self.planned.number, self._applied_s, self._lifted_s, self._note, self._problem)

    async def _run(self) -> None:
        playing = tasks.spawn(self._play(), f"chaos-play-{self.planned.number}")
        over = tasks.spawn(self._over.wait(), f"chaos-over-{self.planned.number}")
        try:
            await asyncio.wait((playing, over), return_when=asyncio.FIRST_COMPLETED)
            await tasks.stop(playing)
            if not playing.cancelled():
                playing.result()
            elif self._applied_s is None and self.planned.phase:
                self._note = f"no request had come to {self.planned.phase} when the load ended"
            await self._lift()
        finally:
            self._lifted.set()
            await tasks.stop(playing)
            await tasks.stop(over)

    async def _play(self) -> None:
        """Until it may be lifted."""
        planned = self.planned
        try:
            await asyncio.sleep(planned.at_s - self._world.now_s())
            if self._before is not None:
                self._problem = "the one before it on this target was not lifted in time"
                await self._before.over()
                self._problem = ""
            kind = FAULTS[planned.fault]
            self._fault = kind(self._world, planned.target, {**kind.params, **planned.params})
            await self._apply(self._fault)
        except Unable as error:
            self._problem = str(error)
        else:
            await asyncio.sleep(math.inf if planned.for_s is None else planned.for_s)

    async def _apply(self, fault: Fault) -> None:
        held = None
        if self.planned.phase:
            held = await phases.reach(self._world, self.planned.target, self.planned.phase)
        self._applied_s = self._world.now_s()
        applying = tasks.spawn(self._do(fault), f"chaos-apply-{self.planned.number}")
        try:
            await asyncio.wait((applying,), timeout=_HELD_S)
            if held is not None:
                await held.release()
            await applying
        finally:
            await tasks.stop(applying)
            if held is not None:
                await held.release()

    async def _do(self, fault: Fault) -> None:
        try:
            self._note = await fault.apply()
        except Unable as error:
            self._applied_s, self._problem = None, str(error)

    async def _lift(self) -> None:
        """Until it is lifted, while the load goes on: whoever cannot be reached may stand still for now."""
        while self._fault is not None and self._lifted_s is None:
            last_try = self._over.is_set()
            try:
                await self._fault.lift()
                self._lifted_s = self._world.now_s()
            except NotAnyMore:
                return
            except Unable as error:
                if last_try:
                    self._problem = self._problem or f"it could not be lifted: {error}"
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), _AGAIN_S)
