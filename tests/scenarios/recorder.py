"""A pass-through before one server that notes when calls come and when answers end, and can keep answers back.

What a server is told, and when, is seen on the wire rather than asked of either side.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp
from aiohttp import web

from engines.emulator.process import free_ports

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/generate")
_HOP_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "date", "server"})


@dataclass
class Call:
    """One call; times are the loop's clock in seconds. `ended_s` is when the answer was whole or given up."""

    path: str
    body: bytes
    came_s: float
    ended_s: float = 0.0


@dataclass
class Recorder:
    """Stands before the server at `target` while it is entered.

    So many answers as `owed` says are kept back, although the server has given them, until `reset` breaks them off;
    of so many as `unended` says everything is passed on but the end of the body.
    """

    target: str
    owed: int = 0
    unended: int = 0
    calls: list[Call] = field(default_factory=list)
    _reset: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    def reset(self) -> None:
        """Break off every connection whose answer is kept back."""
        self._reset.set()
        self._reset = asyncio.Event()

    async def __aenter__(self) -> Recorder:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._pass)
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        call = Call(request.path, await request.read(), clock())
        self.calls.append(call)
        try:
            return await self._forward(request, call.body)
        except (aiohttp.ClientError, OSError):
            assert request.transport is not None
            request.transport.abort()  # what befell the server's connection befalls the gateway's
            raise asyncio.CancelledError from None
        finally:
            call.ended_s = clock()

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        url = self.target + request.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as reply:
            if self.owed and request.path in _GENERATING:
                self.owed -= 1
                await reply.read()
                await self._reset.wait()
                raise ConnectionResetError
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP_HEADERS}
            response = web.StreamResponse(status=reply.status, headers=kept)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            if self.unended and request.path in _GENERATING:
                self.unended -= 1
                await self._reset.wait()
                raise ConnectionResetError
            await response.write_eof()
            return response
