"""Leases: which one of the gateways does what only one should, such as subscribing to an instance's events.

Each gateway renews all of its leases in one call a second. Free ones are taken up to a fair share, so that they spread
by themselves; who has more hands some over when a newcomer asks (`lua/renew_leases.lua` has the rules). Times are
Redis's; here only durations count, from before a call was sent, so no gateway believes in a lease longer than Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from failover.journal import MAX_SIGNALS, FailoverKeys
from failover.monitor import Spawn
from failover.shared import RETRY_S, Link, LinkTrouble

TTL_S = 2.75
"""With a renewal a second, leases of a dead gateway are others' within 4 s."""
_RENEW_S = 1.0
_PATIENCE_S = 1.0
"""A free lease is left to those who have less than their share for so long."""
_APART_S = 0.02
"""Between two renewals, however many signals ask for one."""


class Holder(Protocol):
    """Who can say whether this gateway is the one to do something."""

    @property
    def alone(self) -> bool:
        """Whether everybody acts for himself: nobody takes what is let go."""

    def hold(self, name: str) -> bool:
        """Whether it is; asking is wanting to be."""

    def let_go(self, name: str) -> None:
        """It does not want to be any more."""


class Alone:
    """The leases of a gateway without Redis."""

    alone = True

    def hold(self, name: str) -> bool:
        """Always: there is nobody else."""
        return True

    def let_go(self, name: str) -> None:
        """Nobody else takes it."""


def _nobody() -> None:
    """Nobody wants to know."""


class Leases:
    """The leases of one gateway. `start` and `stop` once each; the rest is synchronous and never fails."""

    def __init__(
        self, link: Link, keys: FailoverKeys, replica: str, spawn: Spawn, changed: Callable[[], None] = _nobody
    ) -> None:
        """`changed` is called whenever an answer of `hold` may have changed."""
        self._link = link
        self._keys = [keys.leases(), keys.members(), keys.asked(), keys.signals()]
        self._replica = replica
        self._spawn = spawn
        self.changed = changed
        self._wanted: dict[str, None] = {}
        self._unwanted: dict[str, None] = {}
        self._tokens: dict[str, int] = {}
        self._known_s: float | None = None
        """When the call was sent whose answer `_tokens` is."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def hold(self, name: str) -> bool:
        """Whether this gateway holds this lease; asking for the first time is wanting it.

        Exactly one of the gateways that want it gets True, save in two cases: nobody for a moment while it changes
        hands; and everybody who could not reach Redis for `TTL_S`, since all is better than none.
        """
        if name not in self._wanted:
            self._wanted[name] = None
            self._unwanted.pop(name, None)
            self._wake.set()
        return self.alone or name in self._tokens

    def token(self, name: str) -> int:
        """A number that grows whenever the lease changes hands; 0 while it is not held by Redis's word."""
        return 0 if self.alone else self._tokens.get(name, 0)

    def let_go(self, name: str) -> None:
        """This lease is wanted no more; whoever wants it gets it."""
        if name in self._wanted:
            del self._wanted[name]
            self._tokens.pop(name, None)
            self._unwanted[name] = None
            self._wake.set()

    def look(self) -> None:
        """A lease was freed, asked for or handed over: renew now."""
        self._wake.set()

    @property
    def alone(self) -> bool:
        """Whether Redis could not be asked for so long that everybody acts for himself."""
        return self._known_s is not None and asyncio.get_running_loop().time() >= self._known_s + TTL_S

    def held(self) -> tuple[str, ...]:
        """The leases that this gateway acts on."""
        return tuple(name for name in self._wanted if self.hold(name))

    async def start(self) -> None:
        self._known_s = asyncio.get_running_loop().time()
        self._task = self._spawn(self._keep(), "leases")

    async def stop(self) -> None:
        """Give all of them back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        names, self._tokens = [*self._wanted, *self._unwanted], {}
        if names:
            with suppress(LinkTrouble):  # they expire by themselves
                await self._link.run("free_leases", self._keys, [self._replica, 1, MAX_SIGNALS, *names])

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        answers: tuple[bool, dict[str, int]] = (False, {})
        while True:
            self._wake.clear()
            began_s = loop.time()
            pause_s = _RENEW_S
            try:
                await self._renew(began_s)
            except LinkTrouble:
                pause_s = RETRY_S
            if answers != (self.alone, self._tokens):
                answers = (self.alone, self._tokens)
                self.changed()
            await asyncio.sleep(_APART_S)
            try:
                async with asyncio.timeout_at(began_s + pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass  # it is time

    async def _renew(self, began_s: float) -> None:
        if self._unwanted:
            names = list(self._unwanted)
            await self._link.run("free_leases", self._keys, [self._replica, 0, MAX_SIGNALS, *names])
            for name in names:
                self._unwanted.pop(name, None)
        names = list(self._wanted)
        if names:
            times = [int(TTL_S * 1000), int(_PATIENCE_S * 1000)]
            reply = await self._link.run("renew_leases", self._keys, [self._replica, *times, MAX_SIGNALS, *names])
            self._tokens = {name: int(token) for name, token in zip(names, reply, strict=True) if int(token)}
        self._known_s = began_s
