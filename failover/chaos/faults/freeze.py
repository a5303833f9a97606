"""SIGSTOP and SIGCONT."""

from __future__ import annotations

import signal

from failover.chaos.faults.of_process import ProcessFault


class Freeze(ProcessFault):
    """A process stands still (SIGSTOP), its sockets stay open; when that is lifted, it goes on."""

    async def apply(self) -> str:
        self._befall(signal.SIGSTOP)
        return ""

    async def lift(self) -> None:
        if self._still_runs:
            self._process.send_signal(signal.SIGCONT)
        self._pid = None
