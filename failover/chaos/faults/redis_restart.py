"""Redis comes again with its data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from failover.chaos.faults.of_process import ProcessFault
from failover.chaos.scenario import Value


class RedisRestart(ProcessFault):
    """Redis is killed, and `after_s` later it comes again with all its data (saved just before)."""

    targets: ClassVar[frozenset[str]] = frozenset({"redis"})
    params: ClassVar[Mapping[str, Value]] = {"after_s": 0.0}

    async def apply(self) -> str:
        told = await self._world.redis("CONFIG", "GET", "dbfilename")
        *_, saved_as = told.values() if isinstance(told, Mapping) else told  # as the library has it
        await self._world.redis("SAVE")
        await self._kill()
        await asyncio.sleep(float(self._params["after_s"]))
        await self._process.start(("--dbfilename", _text(saved_as)))
        self._pid = None
        return "it answers again"

    async def lift(self) -> None:
        await self._revive()


def _text(word: str | bytes) -> str:
    return word.decode() if isinstance(word, bytes) else word
