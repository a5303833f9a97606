"""The process id that a gateway's rooms begin with, claimed in Redis so that no two gateways share one.

Rooms of two processes with one id may meet at a decode. A claim outlives its owner for as long as a room must not come
again, whether the owner stopped or died. Until a claim has succeeded, and without Redis, the id is 20 random bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random

from failover.journal import FailoverKeys
from failover.monitor import Spawn
from failover.shared import RETRY_S, Link, LinkTrouble

PROCESS_ID_BITS = 20
REUSE_S = 700.0
"""No room may come twice within this."""
_RENEW_S = 1.0
_CLAIM_S = REUSE_S + 120.0
"""The room that was made last before a death may be younger than the last renewal."""
_TRIES = 20
"""Of ids in a row before a pause; with a million of them the first is nearly always free."""

_TAKEN, _RENEWED, _CLAIMED = 0, 1, 2


class ProcessId:
    """Claims an id and keeps it. `start` and `stop` once each.

    A data set that was lost takes the claim with it; it is claimed again within a second. Should another gateway have
    taken the id in that second, this one takes a new id; rooms of the two would meet only if their random 33-bit
    counters did, too.
    """

    def __init__(
        self,
        link: Link,
        keys: FailoverKeys,
        owner: str,
        spawn: Spawn,
        rng: Random,
        *,
        taken: Callable[[int], None],
        came_back: Callable[[], None],
        bits: int = PROCESS_ID_BITS,
    ) -> None:
        """`owner` must be new at every start. `taken` is told every new id.

        `came_back` is called when Redis can be used after it could not, or has lost what was in it.
        """
        self._link = link
        self._keys = keys
        self._owner = owner
        self._spawn = spawn
        self._rng = rng
        self._taken = taken
        self._came_back = came_back
        self._bits = bits
        self._task: asyncio.Task[None] | None = None
        self._trouble = False
        self._wish = rng.getrandbits(bits)
        self.id: int | None = None
        """None until a claim has succeeded."""

    async def start(self) -> None:
        self._task = self._spawn(self._keep(), "process id")

    async def stop(self) -> None:
        """Let go of the id; nobody gets it for `REUSE_S`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.id is not None:
            with suppress(LinkTrouble):  # it expires by itself
                await self._claim(self.id, REUSE_S)

    async def _keep(self) -> None:
        while True:
            pause_s = _RENEW_S
            try:
                await (self._take() if self.id is None else self._renew(self.id))
            except LinkTrouble:
                self._trouble = True
                pause_s = RETRY_S
            else:
                if self._trouble:
                    self._trouble = False
                    self._came_back()
            await asyncio.sleep(pause_s)

    async def _take(self) -> None:
        """Claim the wish, or other ids when it is taken. A claim of unknown end is asked for again: it is ours."""
        for _ in range(_TRIES):
            if await self._claim(self._wish, _CLAIM_S) != _TAKEN:
                self.id = self._wish
                self._taken(self.id)
                return
            self._wish = self._rng.getrandbits(self._bits)

    async def _renew(self, process_id: int) -> None:
        found = await self._claim(process_id, _CLAIM_S)
        if found == _TAKEN:
            self.id, self._wish = None, self._rng.getrandbits(self._bits)
            await self._take()
        if found != _RENEWED:
            self._trouble = True  # the data set has been lost: it came back at this moment

    async def _claim(self, process_id: int, for_s: float) -> int:
        key = self._keys.process(process_id)
        return int(await self._link.run("claim_process", [key], [self._owner, int(for_s * 1000)]))
