"""Emulated servers and gateways that start in a moment: forked from a process that has imported all they need.

They are what `python -m` starts, without the second that Python takes to import it. The forking process is started with
the first of them; it ends with this one, and they with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from engines.emulator.process import EmulatedServer
from engines.server_process import die_with_parent

ROOT = Path(__file__).parents[1]


class WarmProcess:
    """One that was forked, as `asyncio.subprocess.Process` shows a child."""

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self._report = report
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit status (negative: by that signal), None while it runs."""
        if self._status is None:
            with contextlib.suppress(BlockingIOError):
                told = os.read(self._report, 32)
                self._status = int(told) if told else -signal.SIGKILL  # the parent has ended, and it with the parent
                os.close(self._report)
        return self._status

    async def wait(self) -> int:
        if (status := self.returncode) is not None:
            return status
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        own = os.dup(self._report)  # several may wait
        loop.add_reader(own, told.set)
        try:
            while (status := self.returncode) is None:
                await told.wait()
        finally:
            loop.remove_reader(own)
            os.close(own)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class WarmServer(EmulatedServer):
    """An emulated server that starts at once; the slow way where it has an environment of its own."""

    async def launch(self) -> None:
        if self._environment:
            await super().launch()
        else:
            flags = (*self.arguments, "--die-with", str(_parent()[0]))
            self._process = start("engines.emulator", flags)  # type: ignore[assignment]


def start(module: str, arguments: Sequence[str], log: int | None = None) -> WarmProcess:
    """As `python -m MODULE ARGUMENTS`, in our environment; it writes to the descriptor `log`, else as we do."""
    _, control = _parent()
    message = {"module": module, "arguments": arguments, "environment": dict(os.environ)}
    output, errors = (log, log) if log is not None else (1, 2)
    report, reported = os.pipe()
    folder = os.open(ROOT, os.O_PATH)
    try:
        socket.send_fds(control, [orjson.dumps(message)], [output, errors, folder, reported])
    finally:
        os.close(folder)
        os.close(reported)
    process = WarmProcess(int(_line(report)), report)
    os.set_blocking(report, False)
    return process


def _line(descriptor: int) -> bytes:
    """Read byte by byte: what follows is for somebody else."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(descriptor, 1)
        if not read:
            raise RuntimeError("the process that servers are forked from has ended")
        line += read
    return line


@functools.cache
def _parent() -> tuple[int, socket.socket]:
    """The pid of the process that forks, and how to tell it what to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = (sys.executable, "-m", "tests.warm_parent", str(theirs.fileno()))
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent
        )
    _kept.append(process)
    return process.pid, ours


_kept: list[subprocess.Popen[bytes]] = []
"""An object that is dropped while its process runs warns of that."""
