"""Helpers for tests over emulated servers: a small fleet, pair requests, and polling until something holds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from engines.emulator.process import EmulatedServer
from engines.types import Role
from tests.machine import Stopwatch
from tests.warm import WarmServer

_rooms = itertools.count(1000)
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply."""

    status: int
    content_type: str | None
    text: str

    def json(self) -> Any:
        return orjson.loads(self.text)

    def events(self) -> list[Any]:
        """The JSON of each SSE event; the terminator as the string `[DONE]`."""
        datas = [line[len("data: ") :] for line in self.text.split("\n") if line.startswith("data: ")]
        return [data if data == "[DONE]" else orjson.loads(data) for data in datas]


@dataclass(slots=True)
class EmuFleet:
    """One prefill, one decode, and an HTTP client."""

    prefill: EmulatedServer
    decode: EmulatedServer
    http: aiohttp.ClientSession
    extra: list[EmulatedServer] = field(default_factory=list)

    async def call(self, server: EmulatedServer, method: str, path: str, body: bytes | dict[str, Any] = b"") -> Reply:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.request(method, server.url + path, data=data or None, headers=JSON) as reply:
            return Reply(reply.status, reply.headers.get("Content-Type"), (await reply.read()).decode())

    async def post(self, server: EmulatedServer, path: str, body: dict[str, Any]) -> Reply:
        return await self.call(server, "POST", path, body)

    async def get(self, server: EmulatedServer, path: str) -> Any:
        return (await self.call(server, "GET", path)).json()

    def with_room(self, body: dict[str, Any], room: int | None = None) -> dict[str, Any]:
        """`body` with bootstrap fields for a fresh room."""
        return {
            **body,
            "bootstrap_host": self.prefill.host,
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": room or next(_rooms),
        }

    async def pair(self, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
        """Send the same request to both servers in a fresh room."""
        full = self.with_room(body)
        prefill, decode = await asyncio.gather(self.post(self.prefill, path, full), self.post(self.decode, path, full))
        return prefill, decode

    async def abort(self, server: EmulatedServer, rid: str) -> Reply:
        return await self.post(server, "/abort_request", {"rid": rid})

    async def ledger(self, server: EmulatedServer) -> Any:
        return await self.get(server, "/emulator/ledger")

    async def hold(self, server: EmulatedServer, stage: str, k: int = 1) -> int:
        reply = await self.post(server, "/emulator/hold", {"stage": stage, "k": k})
        return int(reply.json()["hold_id"])

    async def held(self, server: EmulatedServer, hold_id: int) -> Any:
        """Wait until the hold has a request; what it says then."""
        state = await self.get(server, f"/emulator/hold/{hold_id}?wait_s=10")
        assert state["state"] == "held", state
        return state

    async def release(self, server: EmulatedServer, hold_id: int) -> None:
        await self.call(server, "DELETE", f"/emulator/hold/{hold_id}")

    async def no_rooms(self, server: EmulatedServer, within_s: float = 5.0) -> None:
        """Wait until no KV of the server belongs to a room."""

        async def empty() -> bool:
            return not (await self.ledger(server))["by_room"]

        await until(empty, within_s)


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 5.0) -> None:
    """Poll until `condition` holds; AssertionError when it does not in time."""
    watch = Stopwatch()
    while not await condition():
        assert not watch.passed(within_s), "condition did not come true in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def emu_fleet(speed: float, arguments: tuple[str, ...] = (), plain: bool = False) -> AsyncIterator[EmuFleet]:
    """A running pair (and a plain server as `extra[0]`)."""
    servers = [WarmServer(role, speed=speed, arguments=arguments) for role in (Role.PREFILL, Role.DECODE)]
    servers += [WarmServer(Role.PLAIN, speed=speed, arguments=arguments)] if plain else []
    try:
        for server in servers:
            await server.launch()
        for server in servers:
            await server.wait_ready()
        async with aiohttp.ClientSession() as http:
            yield EmuFleet(servers[0], servers[1], http, servers[2:])
    finally:
        for server in servers:
            await server.stop()
