"""Attempts at contents that a server ended under: one at a time, until it is known whether more would end. Glue.

The rule is `failover/suspects.py`'s; here others wait for their turn, and what has ended too many is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Self

from engines.types import Leg, Outcome, Stage
from failover.poison import PoisonGuard
from failover.suspects import May, Suspects, Victim
from gateway.decider import Decision
from gateway.errors import GatewayError, upstream_failed

TRIAL_S = 10.0
"""An attempt that has shown nothing for so long is not waited for: its server may just be slow, or silent."""


class ContentTrials:
    """Gives each attempt its `Trial`."""

    def __init__(self, poison: PoisonGuard) -> None:
        self.suspects = Suspects()
        self.suspects.on_change = self._changed
        self._poison = poison
        self._waiting: dict[bytes, asyncio.Event] = {}

    def trial(self, content: bytes, deadline_s: float = inf) -> Trial:
        """Of the next attempt at this content; its request's deadline."""
        return Trial(self, content, deadline_s)

    async def turn(self, content: bytes, deadline_s: float) -> bool:
        """Wait until an attempt may begin, at most `TRIAL_S`; whether it took that. GatewayError if none may."""
        clock = asyncio.get_running_loop().time
        until_s = min(clock() + TRIAL_S, deadline_s)
        while True:
            may = self.may_try(content)
            if may is May.NEVER:
                raise poison_suspected()
            if may is May.GO:
                return False
            if clock() >= until_s:
                return True
            changed = self._waiting.setdefault(content, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await changed.wait()

    def may_try(self, content: bytes) -> May:
        """Whether one more attempt may begin now."""
        now_s = asyncio.get_running_loop().time()
        return May.NEVER if self._poison.is_refused(content, now_s) else self.suspects.may_try(content, now_s)

    def _changed(self, content: bytes) -> None:
        if (changed := self._waiting.pop(content, None)) is not None:
            changed.set()


class Trial:
    """One attempt at a content, until it is over and judged; entered when it may begin."""

    def __init__(self, trials: ContentTrials, content: bytes, deadline_s: float) -> None:
        self._trials, self._suspects, self.content = trials, trials.suspects, content
        self._deadline_s = deadline_s
        self._at_risk = self._has_waited = False
        self._in_doubt: set[Victim] = set()

    async def __aenter__(self) -> Self:
        self._has_waited = await self._trials.turn(self.content, self._deadline_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.found(())  # where nobody has looked any more
        self._shown()

    def begins(self) -> bool:
        """It is about to be sent; False where it may not any more, as a server has ended meanwhile."""
        may = self._trials.may_try(self.content)
        if may is May.NEVER or (may is May.WAIT and not self._has_waited):
            return False
        self._at_risk = True
        self._suspects.begins(self.content)
        return True

    def harmless(self) -> None:
        """Its servers have done their work, or the beginning of it."""
        if self._at_risk:
            self._shown()
            self._suspects.harmless(self.content)

    @property
    def deaths(self) -> int:
        """How many servers its content has ended, as far as they count against this attempt."""
        return self._suspects.deaths(self.content, asyncio.get_running_loop().time()) if self._at_risk else 0

    def broke(self, victim: Victim) -> None:
        """It broke off its part: others wait until it is `found` whether it has ended.

        What breaks after the first output says nothing of others.
        """
        if self._at_risk and victim not in self._in_doubt:
            self._in_doubt.add(victim)
            self._suspects.broke(self.content, [victim], asyncio.get_running_loop().time())

    def found(self, ended: Collection[Victim]) -> None:
        """Those that have ended, of all that broke off."""
        if self._in_doubt:
            in_doubt, self._in_doubt = self._in_doubt, set()
            self._suspects.found(self.content, in_doubt, in_doubt.intersection(ended))

    def _shown(self) -> None:
        if self._at_risk:
            self._at_risk = False
            self._suspects.ends(self.content)


def victim(decision: Decision, outcome: Outcome) -> Victim:
    """The process behind a failed leg."""
    view = decision.prefill if outcome.leg is Leg.PREFILL else decision.decode
    return Victim(outcome.leg, outcome.engine_id, view.epoch)


def poison_suspected(*, definite: bool = False) -> GatewayError:
    """502: servers ended while they worked on this content. `definite`: none has worked on this request."""
    return upstream_failed(
        "two servers ended while they worked on this request; it is refused for some minutes",
        code="poison_suspected",
        stage=Stage.ADMISSION,
        definite=definite,
        retry=False,
    )
