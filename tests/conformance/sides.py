"""The two sides of a comparison: a real pair and an emulated one, of the same sizes and time limits. A shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from engines.emulator.process import EmulatedServer
from engines.server_process import ServerFailed, ServerProcess
from engines.sglang_process import Launch, SglangServer
from engines.types import Role
from tests.conformance.cases import Case
from tests.conformance.stage import Make, Stage

TIME_LIMITS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "8",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "11",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
}
"""SGLang's own variables, which the emulator reads too."""


@dataclass(slots=True)
class Side:
    """A pair of servers of one kind; what a case left dead is started again before the next one."""

    name: str
    make: Make
    prefill: ServerProcess | None = None
    decode: ServerProcess | None = None
    starts: int = 0

    async def pair(self) -> tuple[ServerProcess, ServerProcess]:
        """The running pair."""
        if self.prefill is None or self.decode is None:
            self.prefill = self.make(Role.PREFILL, (), None)
            self.decode = self.make(Role.DECODE, (), self.prefill.bootstrap_port)
        dead = [server for server in (self.prefill, self.decode) if not _runs(server)]
        for server in dead:
            await server.launch()
        for server in dead:
            await server.wait_ready()
        self.starts += bool(dead)
        return self.prefill, self.decode

    async def observe(self, case: Case) -> dict[str, Any]:
        """Run `case` here; the caches are empty before it."""
        prefill, decode = await self.pair()
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            stage = Stage(prefill, decode, http, self.make)
            for leg in ("prefill", "decode"):
                await stage.quietly(leg, "/flush_cache")
            try:
                await case.play(stage)
                return await stage.observation()
            finally:
                await stage.close()
                if not _runs(prefill) and _runs(decode):
                    await decode.kill()  # it would go on with what it knew of the other

    async def stop(self) -> None:
        """End both servers."""
        for server in (self.prefill, self.decode):
            if server is not None:
                await server.stop()


REAL_FLAGS = ("--context-length", "4096")
"""Of both real servers, besides those of their environment."""


def real_side(launch: Launch) -> Side:
    """A pair of SGLang servers of an environment."""

    def make(role: Role, arguments: Sequence[str], bootstrap_port: int | None) -> ServerProcess:
        flags = (*REAL_FLAGS, *arguments)
        return SglangServer(role, launch, arguments=flags, environment=TIME_LIMITS, bootstrap_port=bootstrap_port)

    return Side("sglang", make)


def emulated_side(model: str = "tiny") -> Side:
    """A pair of emulated servers; TIME_LIMITS must be in our own environment, which they inherit."""
    sizes = {"context-length": 4096, "max-total-tokens": 8192, "page-size": 1, "chunked-prefill-size": 4096}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]

    def make(role: Role, arguments: Sequence[str], bootstrap_port: int | None) -> ServerProcess:
        own = ("--model", model, "--enable-cache-report", "--max-running-requests", "16", *flags, *arguments)
        return EmulatedServer(role, arguments=own, bootstrap_port=bootstrap_port)

    return Side("emulator", make)


def _runs(server: ServerProcess) -> bool:
    try:
        return server.pid > 0 and server.returncode is None
    except ServerFailed:
        return False
