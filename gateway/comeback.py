"""A pair for the next attempt of a request that has failed, where all its servers were lost a moment ago. Glue.

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
