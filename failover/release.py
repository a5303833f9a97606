"""Frees both sides of an attempt that nobody waits for any more, and knows when they are free.

A shell. The acknowledgement is the end of a leg's own HTTP exchange, never the 200 of an abort (which is also given
when the abort came too early and was lost). So legs stay open, aborts are repeated, the decode's first as it tells its
prefill; what does not end is closed, watched in the server's own load report, and reported as a leak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_attempt
from tenacity.wait import wait_chain, wait_fixed

from engines.types import Leg

REPOST_AFTER_S = (0.25, 0.75, 2.0, 2.0)
"""Waits after each round of aborts: at 0, 0.25, 1 and 3 s; at 5 s the sockets are closed."""
WATCH_S = 60.0
"""How long a closed leg is watched before its server counts as leaking."""
_WATCH_EVERY_S = 1.0


class Held(Protocol):
    """The legs of one attempt, as `engines/pair.py` runs them."""

    @property
    def open_legs(self) -> Sequence[Leg]: ...

    async def wait_ended(self, timeout_s: float) -> bool: ...

    async def post_abort(self, leg: Leg) -> None: ...

    def drop_output(self) -> None: ...

    def close(self, leg: Leg) -> None: ...


class Counted(Enum):
    """Whether a server still counts a leg that was closed on it."""

    GONE = "gone"
    STILL_THERE = "still_there"
    UNKNOWN = "unknown"


Watch = Callable[[Leg], Awaitable[Counted]]
"""Looks at a leg's server again; GONE also when the server has restarted since."""


@dataclass(frozen=True, slots=True)
class Released:
    """How a release ended. `aborts` counts posts; `leaking` names legs whose server never let go."""

    aborts: int
    seconds: float
    closed: tuple[Leg, ...] = ()
    leaking: tuple[Leg, ...] = ()


async def release(legs: Held, watch: Watch, *, watch_s: float = WATCH_S) -> Released:
    """Free every open leg; returns when all are known to be free, or after `watch_s` with those that are not.

    Must be run as a task of its own, never under the deadline or the cancellation of the request.
    """
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    legs.drop_output()
    aborts = await _abort_until_ended(legs)
    closed = tuple(legs.open_legs)
    for leg in closed:
        legs.close(leg)
    leaking = await _watch_until_gone(closed, watch, watch_s) if closed else ()
    return Released(aborts, clock() - begun_s, closed, leaking)


async def _abort_until_ended(legs: Held) -> int:
    """Post aborts in rounds, each followed by a wait that ends early when the legs do; how many were posted."""
    aborts = 0

    async def round_of_aborts() -> int:
        nonlocal aborts
        for leg in tuple(legs.open_legs):
            aborts += 1
            await legs.post_abort(leg)  # in turn: the decode's abort is to reach its prefill first
        return len(legs.open_legs)

    async def wait_or_ended(seconds: float) -> None:
        await legs.wait_ended(seconds)

    rounds = AsyncRetrying(
        wait=wait_chain(*(wait_fixed(seconds) for seconds in REPOST_AFTER_S)),
        stop=stop_after_attempt(len(REPOST_AFTER_S)),
        retry=retry_if_result(bool),
        sleep=wait_or_ended,
    )
    if not legs.open_legs:
        return 0
    try:
        await rounds(round_of_aborts)
    except RetryError:
        await legs.wait_ended(REPOST_AFTER_S[-1])
    return aborts


async def _watch_until_gone(closed: tuple[Leg, ...], watch: Watch, watch_s: float) -> tuple[Leg, ...]:
    """Look until all are gone; the legs that were surely still there at the last look."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + watch_s
    left = dict.fromkeys(closed, Counted.UNKNOWN)
    while left and clock() < until_s:
        await asyncio.sleep(_WATCH_EVERY_S)
        for leg in tuple(left):
            left[leg] = await watch(leg)
            if left[leg] is Counted.GONE:
                del left[leg]
    return tuple(sorted(leg for leg, counted in left.items() if counted is Counted.STILL_THERE))
