"""Phases of a request, reached by holds of emulated engines: never by waiting for the right moment.

A phase is a stage of `scenario.STAGES`, with the number of the chunk or token that it follows: `token:5`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from failover.chaos.scenario import STAGES
from failover.chaos.world import Unable, World

_POLL_S = 0.02
_ANSWER_S = 0.5
"""An engine that takes longer is asked again: it may stand still."""
_HOLD_S = 5.0
"""Engines end holds by themselves then, so that none is left of what was cancelled, or asked of a frozen engine."""


@dataclass(slots=True)
class Held:
    """A request that an engine holds at a phase until `release`, or for 5 s."""

    world: World
    engine: str
    pid: int
    hold_id: int
    rid: str = ""

    @property
    def exists(self) -> bool:
        """Whether the engine is still the process that was armed."""
        process = self.world.process(self.engine)
        return process.running and process.pid == self.pid

    async def release(self) -> None:
        """Let it go on; no effect where the engine has died. Twice is once."""
        if self.exists:
            with contextlib.suppress(Unable, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await self.world.admin(self.engine, "DELETE", f"/emulator/hold/{self.hold_id}")


async def reach(world: World, target: str, phase: str) -> Held:
    """Wait until a request is held at `phase`, by `target` or while `target` has a part in it.

    Every engine that comes to that stage is armed. An engine has a part in a request that it knows, a link in those
    that both of its ends know; gateways and Redis have one in every request. Waits for ever: cancel it. Unable for an
    unknown phase.
    """
    stage, _, number = phase.partition(":")
    if stage not in STAGES:
        raise Unable(f"there is no phase {phase!r}; one of {', '.join(STAGES)}")
    armed: dict[str, Held] = {}
    try:
        while True:
            names = [name for name in world.names(STAGES[stage]) if name not in armed]
            await asyncio.gather(*(_arm(world, name, stage, int(number or 1), armed) for name in names))
            states = await asyncio.gather(*map(_state, armed.values()))
            for held, state in zip(list(armed.values()), states, strict=True):
                if state in ("held", "released") or not held.exists:
                    del armed[held.engine]
                if state == "held":
                    if await _concerns(world, target, held):
                        return held
                    await held.release()
            await asyncio.sleep(_POLL_S)
    finally:
        await asyncio.gather(*(held.release() for held in armed.values()))


async def _arm(world: World, name: str, stage: str, count: int, armed: dict[str, Held]) -> None:
    """A hold on an engine, if it can be had now."""
    process = world.process(name)
    if process.running:
        pid = process.pid
        told = await _ask(world, name, "POST", "/emulator/hold", {"stage": stage, "k": count, "for_s": _HOLD_S})
        if "hold_id" in told:
            armed[name] = Held(world, name, pid, int(told["hold_id"]))


async def _state(held: Held) -> str:
    told = await _ask(held.world, held.engine, "GET", f"/emulator/hold/{held.hold_id}")
    held.rid = str(told.get("rid") or "")
    return str(told.get("state", ""))


async def _concerns(world: World, target: str, held: Held) -> bool:
    engines = {name for role in ("prefill", "decode") for name in world.names(role)} - {held.engine}
    for name in engines.intersection(target.split(">")):
        told = await _ask(world, name, "GET", "/emulator/requests")
        if all(each["rid"] != held.rid for each in (*told.get("live", ()), *told.get("recent", ()))):
            return False
    return True


async def _ask(
    world: World, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """What an engine answers; nothing where it does not."""
    with contextlib.suppress(Unable, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            return await world.admin(name, method, path, body)
    return {}
