"""What sees a run while it goes on and after: the contract, and how emulated fleets are seen. A shell."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from failover.chaos.answer import Answer
from failover.chaos.history import History
from failover.chaos.leftovers import Leftovers
from failover.chaos.observe import Observer
from failover.chaos.processes import Processes
from failover.chaos.record import Record

UNTOLD = "answers of gateways that died"
"""What a record says of answers that nobody can judge."""
RELEASED = "dead_gateways_attempts_released"
_LAST_LOOK_S = 10.0
"""How long the last connections of our own may take to be gone: a busy host takes seconds to close dozens."""


class Eyes(Protocol):
    """Sees one run."""

    async def before(self) -> None:
        """All is idle; the load has not begun."""

    async def watch(self) -> None:
        """Look until cancelled; the load begins now."""

    def began(self, answer: Answer) -> None:
        """The first of a stream has come."""

    def ended(self, answer: Answer) -> None:
        """An answer is over."""

    async def settle(self, within_s: float) -> float | None:
        """The load is over: wait until all is given back, and learn what can still be learned. How long that took.

        None: it was not given back within that time.
        """

    async def close(self) -> None:
        """Ask nobody any more."""

    def told(self, record: Record) -> Record:
        """The record with all that was seen, and what could not be and why."""


class EmulatedEyes:
    """`Eyes` on emulated engines, which tell everything. `early`: gateways may die."""

    def __init__(self, world: Processes, *, early: bool) -> None:
        self._world, self._observer, self._left = world, Observer(world, early=early), Leftovers(world)

    async def before(self) -> None:
        await self._left.before()

    async def watch(self) -> None:
        await self._observer.watch()

    def began(self, answer: Answer) -> None:
        self._observer.began(answer)

    def ended(self, answer: Answer) -> None:
        self._observer.ended(answer)

    async def settle(self, within_s: float) -> float | None:
        began_s = self._world.now_s()
        settled = await self._left.wait(within_s, with_clients=False)
        taken_s = self._world.now_s() - began_s
        await self._observer.finish()
        settled = await self._left.wait(min(within_s, _LAST_LOOK_S)) and settled
        return taken_s if settled else None

    async def close(self) -> None:
        await self._observer.close()

    def told(self, record: Record) -> Record:
        observer, left = self._observer, self._left
        counts = {**left.counts, **left.log_errors(), "requests that a gateway does not know": observer.unexplained}
        history = History(observer.requests, left.ledgers, observer.deaths(), counts)
        unseen = {}
        if observer.untold:
            unseen[UNTOLD] = f"{observer.untold} sampled answers: their gateway died before it told how they were drawn"
        if observer.roomless:
            unseen[RELEASED] = f"{observer.roomless} gateways died before they told what their rooms begin with"
        samples, orphans, held = tuple(observer.samples), observer.orphans, observer.held
        return replace(record, history=history, samples=samples, unseen=unseen, orphans=orphans, held=held)
