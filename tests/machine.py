"""A watch that does not count what the machine made a test wait, for promises like "within a second".

The kernel says of each process how long it was ready to run while the machine ran others (`/proc/PID/schedstat`), and
how long a virtual machine's host ran others ("steal" in `/proc/stat`). Waiting for an event, and computing, do count.
Where the kernel says nothing, all counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

_COUNTED_RATIO = 0.25
"""So much of the time counts whatever the machine did: something that hangs is found out on the busiest, too."""
_LOOK_S = 0.02
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Runs from its making on; watches this process and all that it has started, and what they will start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._stolen_s = _stolen_s()
        self._first = dict(_waited_s(os.getpid()))
        self._last = dict(self._first)

    def took_s(self) -> float:
        """Seconds since then, as on a machine that had nothing else to do."""
        return self.of(time.monotonic() - self._began_s)

    def of(self, by_clock_s: float) -> float:
        """What counts of so many seconds by the clock, which lie within the watch's run."""
        self._last |= _waited_s(os.getpid())  # of a process that has ended, the last word
        waited_s = sum(waited_s - self._first.get(pid, 0.0) for pid, waited_s in self._last.items())
        late_s = waited_s + _stolen_s() - self._stolen_s
        return max(by_clock_s - late_s, by_clock_s * _COUNTED_RATIO)

    def passed(self, limit_s: float) -> bool:
        """Whether it took longer than this."""
        return time.monotonic() - self._began_s > limit_s and self.took_s() > limit_s


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` by a `Stopwatch`."""
    watch, loop = Stopwatch(), asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal next_look
            if watch.passed(limit_s):
                timeout.reschedule(loop.time())
            else:
                next_look = loop.call_later(max(limit_s - watch.took_s(), _LOOK_S), look)

        next_look = loop.call_later(limit_s, look)
        try:
            yield
        finally:
            next_look.cancel()


def _waited_s(pid: int) -> Iterator[tuple[int, float]]:
    """How long each process of a tree has been ready to run and did not, since its start."""
    with suppress(OSError, ValueError, IndexError):
        yield pid, int(_read(f"/proc/{pid}/schedstat").split()[1]) / 1e9
        for child in _read(f"/proc/{pid}/task/{pid}/children").split():
            yield from _waited_s(int(child))


def _stolen_s() -> float:
    with suppress(OSError, ValueError, IndexError):
        return int(_read("/proc/stat").split(maxsplit=9)[8]) * _TICK_S
    return 0.0


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(4096)
