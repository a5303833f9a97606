"""Lets prompts be computed again only so many at a time, first come first served. A shell around one counter.

When a server dies, all its streams want their prompts computed again at once, and fresh requests would wait behind all
of them in one prefill. Counted in tokens, not in requests: a prefill computes many short prompts in one forward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turn:
    """The right to have one prompt computed again. `over` is told at hand-over; later calls do nothing."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def over(self) -> None:
        """The prompt is computed, or will not be."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Turns:
    """Those who have one, and those who wait. `room_tokens` says how many tokens may be under way now.

    One who finds nobody under way always gets its turn, however long its prompt and however little room there is.
    """

    def __init__(self, room_tokens: Callable[[], float]) -> None:
        self._room_tokens = room_tokens
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.under_way = 0
        self.under_way_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tokens: int, deadline_s: float) -> AsyncIterator[Turn]:
        """Wait for a turn, at most until `deadline_s` of the loop's clock (TimeoutError); it ends with the block."""
        await self._enter(tokens, deadline_s)
        turn = Turn(lambda: self._leave(tokens))
        try:
            yield turn
        finally:
            turn.over()

    async def _enter(self, tokens: int, deadline_s: float) -> None:
        entered = asyncio.get_running_loop().create_future()
        place = (entered, tokens)
        self._waiting.append(place)
        self._admit()
        try:
            async with asyncio.timeout_at(deadline_s):
                await entered
        except (asyncio.CancelledError, TimeoutError):
            if entered.done() and not entered.cancelled():  # the turn came, and nobody is left to take it
                self._leave(tokens)
            elif place in self._waiting:
                self._waiting.remove(place)
                self._admit()  # who waits behind it may fit
            raise

    def _leave(self, tokens: int) -> None:
        self.under_way -= 1
        self.under_way_tokens -= tokens
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            entered, tokens = self._waiting[0]
            if entered.done():  # cancelled, and its task has not run yet
                self._waiting.popleft()
                continue
            if self.under_way and self.under_way_tokens + tokens > self._room_tokens():
                return
            self._waiting.popleft()
            self.under_way += 1
            self.under_way_tokens += tokens
            entered.set_result(None)
