"""Waiting for servers of which a moment will tell: after a start, and after all connections broke at once. Glue.

A network that breaks all connections at once makes every server suspected or broken until it was looked at, which takes
milliseconds: who would be told by then that there is no pair waits for that.
"""

from __future__ import annotations

import asyncio

from engines.types import EngineId, EngineView, Health
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.errors import GatewayError
from routing.types import RequestView

COMEBACK_S = 2.0
"""So long it may take to know of a server that it is there: two probes."""
_LOOK_AGAIN_S = 0.05
_LOOKED_AT = (Health.SUSPECTED, Health.BROKEN)
"""What a good probe ends."""


async def first_look(gw: Gateway) -> None:
    """Wait until a model is known, where servers were not looked at yet: who names none is served by the first."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + COMEBACK_S
    while not gw.fleet.models() and clock() < until_s:
        if all(each.health is not Health.UNKNOWN for each in gw.fleet.snapshot().engines):
            return
        await asyncio.sleep(_LOOK_AGAIN_S)


async def submit_again(gw: Gateway, view: RequestView, pinned: EngineId | None = None) -> Decision:
    """`Decider.submit` of a further attempt; raises what that raises, where no server comes back in time."""
    clock = asyncio.get_running_loop().time
    until_s = min(clock() + COMEBACK_S, view.deadline_s)
    while True:
        try:
            return await gw.decider.submit(view, pinned)
        except GatewayError as error:
            hopeful = any(_may_come_back(each, view) for each in gw.fleet.snapshot().engines)
            if error.code != "no_pair_available" or not hopeful or clock() >= until_s:
                raise
        await asyncio.sleep(_LOOK_AGAIN_S)


def _may_come_back(server: EngineView, view: RequestView) -> bool:
    return server.health in _LOOKED_AT and server.engine_id not in view.excluded_engines and not server.draining
