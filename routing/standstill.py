"""A time limit on an answer that does not count against its sender what this process stood still. A shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STOOD_STILL_S = 0.1
"""A timer that is so late was kept from running: this process was frozen, or computed."""
READING_S = 1.0
"""Reading that is given as long as the standstill was, up to this: an answer may lie unread."""


@asynccontextmanager
async def answered_by(until_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout_at`, by the loop's clock; once prolonged where this process stood still at `until_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def due() -> None:
            now_s = loop.time()
            stood_s = now_s - until_s
            timeout.reschedule(now_s + min(stood_s, READING_S) if stood_s >= STOOD_STILL_S else now_s)

        timer = loop.call_at(until_s, due)
        try:
            yield
        finally:
            timer.cancel()
