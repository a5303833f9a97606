"""One child process of a run: started, signalled, started again at the same address, ended by its pid. A shell.

A child dies with this process, however it dies, and is ended by nothing but its own pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from engines.server_process import die_with_parent
from engines.tasks import spawn
from failover.chaos.world import NotAnyMore, Unable

START_S = 60.0
_POLL_S = 0.03
_LOG_TAIL_BYTES = 2_000
_SHOWN = {
    signal.SIGKILL: "killed",
    signal.SIGTERM: "told to end",
    signal.SIGSTOP: "frozen",
    signal.SIGCONT: "thawed",
}


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What a child is. `command` is asked at every start; `answers` whether it does its work yet."""

    name: str
    role: str
    url: str
    command: Callable[[], Sequence[str]]
    answers: Callable[[], Awaitable[bool]]


class Program(Protocol):
    """A program that was begun, as `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, number: signal.Signals) -> None: ...

    async def wait(self) -> int: ...


class Child:
    """`world.Process`. Its output is appended to `log`; `mark` is told (name, what) whatever befalls it."""

    def __init__(self, plan: ChildPlan, log: Path, mark: Callable[[str, str], None]) -> None:
        self.name, self.role, self.url, self.log = plan.name, plan.role, plan.url, log
        self._plan = plan
        self._mark = mark
        self._process: Program | None = None
        self._starting = asyncio.Lock()
        self._told: set[signal.Signals] = set()
        self.launched_s = 0.0
        """When the present process was begun, by the loop's clock."""
        self.frozen = self._announced = self._hurried = False
        self.deaths_s: list[float] = []
        """When processes were gone that had been killed, or ended though nobody had told them to; as above."""
        self.crashes: list[int] = []
        """Exit statuses of those that ended though nobody had told them to."""
        self.started: Callable[[], Awaitable[None]] = _nothing
        """Awaited whenever a process has begun to answer."""

    @property
    def pid(self) -> int:
        if self._process is None:
            raise Unable(f"{self.name} was never started")
        return self._process.pid

    @property
    def begun(self) -> bool:
        """Whether there ever was a process."""
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send_signal(self, number: signal.Signals) -> None:
        """No effect when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        if self._hurried and number == signal.SIGTERM:
            number = signal.SIGKILL
        self._told.add(number)
        if number in _SHOWN and (number != signal.SIGCONT or self.frozen):
            self._mark(self.name, _SHOWN[number])
        self.frozen = number == signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        if self._process is None:
            raise Unable(f"{self.name} was never started")
        return await self._process.wait()

    async def start(self, flags: Sequence[str] = (), before: Sequence[str] = ()) -> None:
        """A new process unless one runs; returns when it answers. Unable if it ends, or does not within a minute.

        NotAnyMore from `hurry` on.
        """
        async with self._starting:
            self._check_hurry()
            if not self.running:
                await self._launch(flags, before)
            await self._until_it_answers()
            await self.started()
            if not self._announced:
                self._mark(self.name, "started")
                self._announced = True

    def hurry(self) -> None:
        """From now on it is not started any more, and not waited for if it was told to end."""
        self._hurried = True
        if signal.SIGTERM in self._told:
            self.send_signal(signal.SIGKILL)

    async def _launch(self, flags: Sequence[str], before: Sequence[str]) -> None:
        self._told.clear()
        self.frozen = self._announced = False
        self.launched_s = asyncio.get_running_loop().time()
        self._process = await execute((*before, *self._plan.command(), *flags), self.log)
        spawn(self._watch(self._process), f"chaos-watch-{self.name}")

    async def _watch(self, process: Program) -> None:
        status = await process.wait()
        deadly = {signal.SIGKILL, signal.SIGTERM} & self._told
        if signal.SIGKILL not in deadly:
            self._mark(self.name, "ended")
        if deadly != {signal.SIGTERM}:
            self.deaths_s.append(asyncio.get_running_loop().time())
        if not deadly:
            self.crashes.append(status)

    async def _until_it_answers(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + START_S
        while not await self._plan.answers():
            self._check_hurry()
            if not self.running:
                raise Unable(f"{self.name} ended when it was started: {self.log_tail()}")
            if loop.time() > until_s:
                raise Unable(f"{self.name} did not answer within {START_S:g} s: {self.log_tail()}")
            await asyncio.sleep(_POLL_S)

    def _check_hurry(self) -> None:
        if self._hurried:
            raise NotAnyMore(f"{self.name} is not started any more")

    def end(self) -> None:
        """SIGKILL, as nothing that is of the record; no effect when it has ended."""
        if self._process is not None and self._process.returncode is None:
            self._told.add(signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    def log_tail(self) -> str:
        """The end of what it wrote."""
        text = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return text.strip() or "it wrote nothing"


async def execute(command: Sequence[str], log: Path) -> Program:
    """Begin a program that ends when we end; what it writes is appended to `log`."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(_die_with, os.getpid()),
        )


async def _nothing() -> None:
    return


def _die_with(parent: int) -> None:
    """In the child: end when `parent` ends, and at once if it already has."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
