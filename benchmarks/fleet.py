"""An emulated fleet and one gateway before it, in real processes, for measurements of what happens when servers die."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from engines.emulator.process import EmulatedServer, free_ports
from engines.server_process import die_with_parent
from engines.types import Role

ROOT = Path(__file__).parents[1]
PREFILLS, DECODES = 2, 4
_READY_S = 30.0
_WARM_AT_ONCE, _WARM_LEAST, _WARM_MOST = 8, 24, 104


@dataclass(frozen=True)
class Plan:
    """What is run: streams on the decode that dies and on each other one, sizes, speed, seconds before and after."""

    victims: int
    others: int
    prompt_tokens: int
    speed: float
    profile: str
    before_s: int
    after_s: int
    gateway: tuple[str, ...] = ()
    fresh: bool = False


class Fleet:
    """The processes and their URLs; `async with` starts and ends them."""

    def __init__(self, plan: Plan, prefills: int = PREFILLS, decodes: int = DECODES) -> None:
        flags = ("--profile", plan.profile)
        self.prefills = [EmulatedServer(Role.PREFILL, speed=plan.speed, arguments=flags) for _ in range(prefills)]
        self.decodes = [EmulatedServer(Role.DECODE, speed=plan.speed, arguments=flags) for _ in range(decodes)]
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._plan = plan
        self._folder = tempfile.TemporaryDirectory(prefix="pdgate-storm-")
        self.log = Path(self._folder.name) / "gateway.log"
        self._gateway: asyncio.subprocess.Process | None = None
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Fleet:
        self.http = aiohttp.ClientSession()
        try:
            await asyncio.gather(*(server.start() for server in self.servers))
            await self._start_gateway()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        if self._gateway is not None and self._gateway.returncode is None:
            self._gateway.kill()
            await self._gateway.wait()
        await asyncio.gather(*(server.stop() for server in self.servers))
        self._folder.cleanup()

    @property
    def servers(self) -> list[EmulatedServer]:
        return [*self.prefills, *self.decodes]

    @property
    def gateway_pid(self) -> int:
        assert self._gateway is not None
        return self._gateway.pid

    @property
    def pids(self) -> list[int]:
        """Of all that run, this process included."""
        gateway = [self._gateway.pid] if self._gateway is not None else []
        return [os.getpid(), *gateway, *(server.pid for server in self.servers if server.returncode is None)]

    async def _start_gateway(self) -> None:
        prefills = [word for each in self.prefills for word in ("--prefill", each.url, str(each.bootstrap_port))]
        decodes = [word for each in self.decodes for word in ("--decode", each.url)]
        tokenizer = str(ROOT / "engines" / "emulator" / "tokenizer")
        with self.log.open("ab") as log:
            self._gateway = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "serve", "--pd-disaggregation", "--host", "127.0.0.1"),
                *("--port", str(self.port), "--profile", self._plan.profile, "--redis-url", "memory"),
                *("--tokenizer-path", tokenizer, *prefills, *decodes, *self._plan.gateway),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                preexec_fn=die_with_parent,
            )
        clock = asyncio.get_running_loop().time
        until_s = clock() + _READY_S
        while await self._pairs() < len(self.prefills) * len(self.decodes):
            if clock() > until_s:
                raise RuntimeError(f"not all pairs came up:\n{self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    async def _pairs(self) -> int:
        try:
            async with self.http.get(f"{self.url}/readyz") as reply:
                return int((await reply.json())["pairs"])
        except (aiohttp.ClientError, KeyError):
            return 0

    async def warm(self) -> str:
        """Short requests until servers are measured and prompts are looked up by ids; by what they are at the end."""
        for number in range(0, _WARM_MOST, _WARM_AT_ONCE):
            indexes = await asyncio.gather(*(self._short(number + each) for each in range(_WARM_AT_ONCE)))
            if number + _WARM_AT_ONCE >= _WARM_LEAST and set(indexes) == {"ids"}:
                break
        return indexes[-1]

    async def _short(self, number: int) -> str:
        body = {"model": "emulated", "prompt": f"warm {number:06d}", "max_tokens": 8, "ignore_eos": True}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            await reply.read()
            request_id = reply.headers["x-pdgate-request-id"]
        async with self.http.get(f"{self.url}/pdgate/explain/{request_id}") as reply:
            return str((await reply.json())["attempts"][-1]["prompt_index"])

    async def only(self, *wanted: EmulatedServer) -> None:
        """Let new streams go to these decodes alone."""
        for decode in self.decodes:
            path = "/admin/undrain" if decode in wanted else "/admin/drain"
            async with self.http.post(self.url + path, json={"engine": decode.url}) as reply:
                reply.raise_for_status()
