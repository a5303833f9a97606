"""One emulated server put together: engine, peers, routes, listeners, and the end of its life. A shell."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable

from aiohttp import web

from engines.emulator import wire
from engines.emulator.admin import AdminServer
from engines.emulator.bootstrap import BootstrapServer
from engines.emulator.config import Options
from engines.emulator.decode_node import DecodeNode
from engines.emulator.engine import Engine
from engines.emulator.info import InfoServer
from engines.emulator.parse import BadRequest
from engines.emulator.pd_decode import DecodeLinks
from engines.emulator.pd_prefill import PrefillLinks
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.server import GenerationServer, Handler, json_response
from engines.tasks import spawn
from engines.types import Role

KEEP_ALIVE_S = 5.0
"""SGLang's idle keep-alive (`SGLANG_TIMEOUT_KEEP_ALIVE`); a property of the socket, so the speed does not scale it."""

_MAX_BODY_BYTES = 256 << 20
_BACKLOG = 2048
_GC_THRESHOLD = 50_000
"""Objects between collections: the default would collect every few requests."""
_OPEN_PREFIXES = ("/health", "/ready", "/metrics")


class EmulatedApp:
    """One running server; `serve` returns when it has drained after SIGTERM, or was told to stop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._started_s = asyncio.get_running_loop().time()

    async def serve(self) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        engine = Engine(self._options)
        built_s = loop.time()
        publishers = [rank.kv_publisher for rank in engine.ranks if rank.kv_publisher is not None]
        for publisher in publishers:
            publisher.start()
        links = await self._connect_peers(engine)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.on_response_prepare.append(_without_type)
        add = self._adder(app)
        info = InfoServer(engine, self._startup_time(built_s))
        GenerationServer(engine).add_routes(add)
        info.add_routes(add)
        AdminServer(engine).add_routes(add)
        app.router.add_route("*", "/{tail:.*}", _not_found(app))
        loop.add_signal_handler(signal.SIGTERM, lambda: spawn(self._drain(engine, info), "emulator-drain"))
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        await self._listen(app, self._options.port)
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        info.ready = True
        await self._stop.wait()
        for runner in self._runners:
            await runner.cleanup()
        for each in (*links, *publishers):
            await each.close()

    async def _connect_peers(self, engine: Engine) -> list[PrefillLinks | DecodeLinks]:
        """Open what every rank needs towards the ranks of other servers, and a prefill's bootstrap server."""
        connected: list[PrefillLinks | DecodeLinks] = []
        registry = BootstrapServer(lambda: engine.now_s)
        for rank in engine.ranks:
            if isinstance(rank.node, PrefillNode):
                prefill = PrefillLinks(rank, rank.node)
                await prefill.start()
                registry.register(prefill.registration())
                connected.append(prefill)
            elif isinstance(rank.node, DecodeNode):
                decode = DecodeLinks(rank, rank.node)
                await decode.start()
                connected.append(decode)
        if self._options.role is Role.PREFILL:
            await self._listen(registry.app(), self._options.bootstrap_port)
        return connected

    async def _listen(self, app: web.Application, port: int) -> None:
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        await web.TCPSite(runner, self._options.host, port, backlog=_BACKLOG).start()
        self._runners.append(runner)

    def _startup_time(self, built_s: float) -> dict[str, object]:
        """This start's durations, under SGLang's names."""
        loop_s = asyncio.get_running_loop().time()
        times = os.times()
        graph = dict.fromkeys(
            ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"), 0.0
        )
        return {
            "load_weight": built_s - self._started_s,
            "kv_cache_allocation": loop_s - built_s,
            "scheduler_e2e": loop_s - self._started_s,
            "cuda_graph": graph,
            "tokenizer_e2e": loop_s - self._started_s + times.user + times.system,
        }

    async def _drain(self, engine: Engine, info: InfoServer) -> None:
        """SIGTERM: unhealthy at once, but serving until no request is left, looked at every few seconds."""
        info.draining = True
        while True:
            await asyncio.sleep(engine.timeouts.drain_poll_s)
            if not engine.live:
                self._stop.set()
                return

    def _adder(self, app: web.Application) -> Callable[[str, str, Handler], None]:
        key = self._options.api_key

        def add(method: str, path: str, handler: Handler) -> None:
            guarded = handler if not key or path.startswith(_OPEN_PREFIXES) else _with_key(handler, key)
            app.router.add_route(method, path, _answering_errors(guarded))

        return add


async def _without_type(request: web.Request, reply: web.StreamResponse) -> None:
    """Take back the content type that aiohttp gives to every body."""
    if wire.UNTYPED in reply:
        del reply.headers["Content-Type"]


def _answering_errors(handler: Handler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequest as error:
            return json_response(error.body, error.status)

    return handle


def _with_key(handler: Handler, key: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return json_response({"error": "Unauthorized"}, 401)
        return await handler(request)

    return handle


def _not_found(app: web.Application) -> Handler:
    """FastAPI's answers for unknown paths and for known paths with another method."""

    async def handle(request: web.Request) -> web.StreamResponse:
        for resource in app.router.resources():
            allowed = {route.method for route in resource} - {"*"}
            if allowed and resource.canonical == request.path:
                refusal = json_response({"detail": "Method Not Allowed"}, 405)
                refusal.headers["Allow"] = ", ".join(sorted(allowed))
                return refusal
        return json_response({"detail": "Not Found"}, 404)

    return handle


async def serve(options: Options) -> None:
    """Run one emulated server until it ends."""
    await EmulatedApp(options).serve()
