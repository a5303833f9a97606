"""Emulated servers as child processes, for tests, the demo and the fleet command. A shell.

Children die with this process, however it dies (PDEATHSIG), and are ended only by their own pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import TracebackType

import aiohttp

from engines.types import Role

READY_TIMEOUT_S = 30.0
_POLL_S = 0.03
_STOP_TIMEOUT_S = 5.0


class ServerFailed(RuntimeError):
    """A server ended, or did not become ready in time."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.socket(family) for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class EmulatedServer:
    """One emulated server in a child process; `async with` starts and stops it.

    Ports default to free ones and stay the same over `restart`. `arguments` are further flags of `pdgate emulate`.
    """

    def __init__(
        self,
        role: Role,
        *,
        speed: float = 1.0,
        arguments: Sequence[str] = (),
        port: int | None = None,
        bootstrap_port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        free = free_ports(2, host)
        self.role = role
        self.host = host
        self.port = port or free[0]
        self.bootstrap_port = bootstrap_port or free[1]
        self.arguments = (
            *("--role", role.value, "--host", host, "--port", str(self.port)),
            *("--bootstrap-port", str(self.bootstrap_port), "--speed", str(speed)),
            *arguments,
        )
        self._process: asyncio.subprocess.Process | None = None

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
        # -P: a folder called `engines` in the working directory is not ours.
        command = [sys.executable, "-P", "-m", "engines.emulator", *self.arguments, "--die-with", str(os.getpid())]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)

    async def start(self) -> EmulatedServer:
        """Start the child and wait until it is ready."""
        await self.launch()
        await self.wait_ready()
        return self

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until `/ready` answers 200; ServerFailed if the child ends or the time is over."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        async with aiohttp.ClientSession() as http:
            while loop.time() < until_s:
                if self.returncode is not None:
                    raise ServerFailed(f"{self.role} server on port {self.port} ended with {self.returncode}")
                if await _is_ready(http, self.url):
                    return
                await asyncio.sleep(_POLL_S)
        raise ServerFailed(f"{self.role} server on port {self.port} was not ready within {timeout_s} s")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP, SIGCONT, SIGTERM...) without waiting for anything."""
        if self._process is not None and self._process.returncode is None:
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

    async def restart(self) -> None:
        """Kill the child if it runs, and start it again with the same ports."""
        if self._process is not None:
            await self.kill()
        await self.start()

    async def stop(self) -> None:
        """End the child: quickly by SIGINT, by SIGKILL if that does not help; no effect if it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def __aenter__(self) -> EmulatedServer:
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
