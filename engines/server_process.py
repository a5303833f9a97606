"""One server in a child process: started, awaited, signalled, restarted, ended. A shell.

Children die with this process, however it dies (PDEATHSIG), and are ended only by their own pid, or that of their
process group where they lead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import aiohttp

from engines.types import Role

READY_TIMEOUT_S = 30.0
_POLL_S = 0.03
_STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1
_PORTS = range(15_000, 32_000)
_TRIES = 100


class ServerFailed(RuntimeError):
    """A server ended, or did not become ready in time."""


def free_ports(count: int, host: str = "127.0.0.1", *, taken: Collection[int] = ()) -> list[int]:
    """Ports that were free a moment ago, all different; at random, so that programs beside each other do not meet.

    They lie below those that the kernel gives clients: nobody takes one while its server is still, or again, starting.
    `taken` are somebody's who does not listen yet. Raises ServerFailed where too few are free.
    """
    family, chance = socket.AF_INET6 if ":" in host else socket.AF_INET, Random()
    with contextlib.ExitStack() as bound:
        found: dict[int, None] = {}
        for _ in range(count * _TRIES):
            if len(found) == count:
                break
            if (port := chance.choice(_PORTS)) in taken:
                continue
            with contextlib.suppress(OSError):
                bound.enter_context(socket.socket(family)).bind((host, port))
                found[port] = None
    if len(found) < count:
        raise ServerFailed(f"{len(found)} of {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free")
    return list(found)


def die_with_parent() -> None:
    """Have the kernel end the calling process when its parent ends; called in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess(ABC):
    """One server in a child process; `async with` starts and stops it. Ports stay the same over `restart`.

    `environment` is added to ours. `log`: the file that its output is appended to; else it goes where ours goes.
    `leads_group`: it has children of its own, which are killed with it.
    """

    ready_timeout_s = READY_TIMEOUT_S
    stop_signal = signal.SIGINT
    """What ends it quickly."""

    def __init__(
        self,
        role: Role,
        *,
        host: str,
        port: int,
        bootstrap_port: int,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        leads_group: bool = False,
    ) -> None:
        self.role = role
        self.host = host
        self.port = port
        self.bootstrap_port = bootstrap_port
        self.log = log
        self._environment = environment or {}
        self._leads_group = leads_group
        self._process: asyncio.subprocess.Process | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """What starts the server, asked at every start."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """The child's pid; ServerFailed before `start`."""
        if self._process is None:
            raise ServerFailed("not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The child's exit status (negative: by that signal), None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def launch(self) -> None:
        """Start the child without waiting for it."""
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self.log.open("ab")) if self.log is not None else None
            self._process = await asyncio.create_subprocess_exec(
                *self.command(),
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=self._leads_group,
                preexec_fn=die_with_parent,
            )

    async def start(self) -> Self:
        """Start the child and wait until it is ready."""
        await self.launch()
        await self.wait_ready()
        return self

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until `/ready` answers 200; ServerFailed if the child ends or the time is over."""
        loop = asyncio.get_running_loop()
        timeout_s = self.ready_timeout_s if timeout_s is None else timeout_s
        until_s = loop.time() + timeout_s
        async with aiohttp.ClientSession() as http:
            while loop.time() < until_s:
                if self.returncode is not None:
                    raise ServerFailed(f"{self._name} ended with {self.returncode}{self._told()}")
                if await _is_ready(http, self.url):
                    return
                await asyncio.sleep(_POLL_S)
        raise ServerFailed(f"{self._name} was not ready within {timeout_s:g} s{self._told()}")

    @property
    def _name(self) -> str:
        return f"{self.role} server on port {self.port}"

    def _told(self) -> str:
        """The end of its output, which mostly says why, and where the rest is."""
        if self.log is None:
            return ""
        said = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "it has said nothing")
        return f": {last[:300]} (its output: {self.log})"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP, SIGCONT, SIGTERM...) without waiting for anything; to its children too.

        SIGTERM and SIGINT go to the server alone, which tells its children itself.
        """
        if self._process is None or self._process.returncode is not None:
            return
        if self._leads_group and number not in (signal.SIGTERM, signal.SIGINT):
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for the child's end; its exit status."""
        if self._process is None:
            raise ServerFailed("not started")
        return await self._process.wait()

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a deadly signal and wait for the end."""
        self.send_signal(number)
        await self.wait()
        self._end_group()

    async def restart(self) -> None:
        """Kill the child if it runs, and start it again with the same ports."""
        if self._process is not None:
            await self.kill()
        await self.start()

    async def stop(self) -> None:
        """End the child: quickly by its own signal, by SIGKILL if that does not help; no effect if it has ended."""
        if self._process is None or self._process.returncode is not None:
            self._end_group()
            return
        self.send_signal(signal.SIGCONT)
        self.send_signal(self.stop_signal)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()
        self._end_group()

    def _end_group(self) -> None:
        """Kill the children that a server has left behind when it ended: they hold memory and ports."""
        if self._leads_group and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=1.0)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
