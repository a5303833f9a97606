"""The processes and links of one run on emulated engines: `world.World`. A shell.

Ports stay the same over restarts. Whoever is behind a link with a proxy in it is told the proxy's address. Nothing
outlives the run, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp
import redis.asyncio
import redis.exceptions

from failover.chaos.children import START_S, Child
from failover.chaos.commands import Addresses, plans
from failover.chaos.links import Links
from failover.chaos.record import Instance, Mark
from failover.chaos.scenario import FleetPlan
from failover.chaos.world import Link, NotAnyMore, Unable

ENGINES = ("prefill", "decode")
_CALL_S = 5.0
_MAX_MARKS = 100_000
_POLL_S = 0.05


class Processes:
    """All processes of a run; `async with` starts them, until every gateway can use every engine, and ends them.

    `links`: those that get a proxy. `rng`: the chance of their jitter. `folder`: for logs, and what Redis writes.
    """

    def __init__(self, plan: FleetPlan, links: Collection[str], rng: Random, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.addresses = Addresses.free(plan)
        self.links = Links(self.addresses, links, rng, self._pid_of, self.now_s)
        self.children: dict[str, Child] = {}
        self.marks: list[Mark] = []
        self.http: aiohttp.ClientSession
        self.zero_s = 0.0
        """When the load began, by the loop's clock: times of the record count from there."""
        self.on_start: Callable[[Child], Awaitable[None]] | None = None
        """Awaited whenever a process has begun to answer, before anybody is told so."""
        self._redis: redis.asyncio.Redis | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.zero_s = asyncio.get_running_loop().time()
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=_CALL_S)
        )
        try:
            for each in plans(self.plan, self.addresses, self.links, self.folder, self.http):
                child = Child(each, self.folder / f"{each.name}.log", self.mark)
                child.started = partial(self._started, child)
                self.children[each.name] = child
            await self.links.start()
            starts = await asyncio.gather(*(each.start() for each in self.children.values()), return_exceptions=True)
            for problem in filter(None, starts):
                raise problem
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything; also when this is cancelled meanwhile, every process has its signal."""
        begun = [child for child in self.children.values() if child.begun]
        for child in begun:
            child.end()
        await asyncio.gather(*(child.wait() for child in begun))
        await self.links.stop()
        if self._redis is not None:
            await self._redis.aclose()
        await self.http.close()

    async def ready(self, within_s: float = START_S) -> None:
        """Wait until every gateway thinks well of every engine; Unable with what is missing."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while missing := [each for gateway in self.of("gateway") for each in await self._missing(gateway)]:
            if loop.time() > until_s:
                raise Unable(f"after {within_s:g} s: {'; '.join(missing[:5])}")
            await asyncio.sleep(_POLL_S)

    async def _missing(self, gateway: Child) -> list[str]:
        try:
            told = await self.told(gateway.name, "/readyz")
        except Unable as error:
            return [str(error)]
        bad = [each for each in told["engines"] if each["health"] != "ready"]
        missing = [f"{gateway.name}: {self.name_of(each['id'])} is {each['health']}" for each in bad]
        if told["pairs"] == 0:
            missing.append(f"{gateway.name} has no pair that fits")
        if not told["index"] or any(join["kind"] != "ids" for join in told["index"].values()):
            missing.append(f"{gateway.name} has not looked at the engines' tokenizer")
        return missing

    # ---- the contract --------------------------------------------------------------------------------------------

    def process(self, name: str) -> Child:
        """The process of that name."""
        if name not in self.children:
            raise Unable(f"there is no {name} in this run")
        return self.children[name]

    def names(self, role: str) -> Sequence[str]:
        """The processes of a role."""
        return [child.name for child in self.of(role)]

    def seen(self, gateway: str, engine: str) -> str:
        """The URL by which a gateway knows an engine."""
        return self.links.engine_url(gateway, engine)

    def link(self, name: str) -> Link:
        """The proxy in that link."""
        return self.links.named(name)

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Call an engine's or a gateway's own endpoints, past every proxy; its JSON answer. Unable when it cannot."""
        status, told = await self._call(name, method, path, body)
        if status >= 400:
            raise Unable(f"{name} refuses {path}: {told}")
        return told

    async def redis(self, *words: str | int | bytes) -> Any:
        """Run one command on the run's Redis, past every proxy."""
        self.process("redis")
        if self._redis is None:
            self._redis = redis.asyncio.Redis(
                port=self.addresses.ports["redis"], socket_timeout=_CALL_S, socket_connect_timeout=_CALL_S
            )
        try:
            return await self._redis.execute_command(*words)  # type: ignore[no-untyped-call]
        except (redis.exceptions.RedisError, OSError) as error:
            raise Unable(f"redis: {error or type(error).__name__}") from error

    def mark(self, name: str, what: str) -> None:
        """Note that something befell an instance now; the same twice in a row is once."""
        last = next((mark.what for mark in reversed(self.marks) if mark.instance == name), "")
        if what != last and len(self.marks) < _MAX_MARKS:
            self.marks.append(Mark(self.now_s(), name, what))

    async def text(self, name: str, path: str) -> str:
        """The text that a process answers at `path`; Unable when it does not."""
        try:
            async with self.http.get(self.process(name).url + path) as reply:
                return await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unable(f"{name} does not answer: {error or type(error).__name__}") from error

    async def told(self, name: str, path: str) -> Mapping[str, Any]:
        """The JSON that a process answers at `path`, whatever its status; Unable when it does not."""
        return (await self._call(name, "GET", path, None))[1]

    async def _call(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, Mapping[str, Any]]:
        try:
            async with self.http.request(method, self.process(name).url + path, json=body) as reply:
                return reply.status, dict(await reply.json())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unable(f"{name} does not answer: {error or type(error).__name__}") from error

    # ---- for the runner ------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the load began."""
        return asyncio.get_running_loop().time() - self.zero_s

    def begin(self) -> None:
        """The load begins now."""
        before_s = self.now_s()
        self.zero_s += before_s
        self.marks = [Mark(mark.at_s - before_s, mark.instance, mark.what) for mark in self.marks]

    def of(self, *roles: str) -> list[Child]:
        return [child for child in self.children.values() if child.role in roles]

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(Instance(child.name, child.role, child.url) for child in self.children.values())

    def name_of(self, url: str) -> str:
        """The engine that gateways call so."""
        return self.links.names.get(url.rstrip("/"), url)

    def hurry(self) -> None:
        """The run is stopped: from now on nothing is started, and nobody gets time to end. Twice is once."""
        for child in self.children.values():
            child.hurry()

    async def heal(self) -> list[str]:
        """Nothing stands still, and but for a hurry everything runs, as far as that is possible; what does not.

        Engines have no faults any more, also those that stood still when theirs were to be lifted.
        """
        for child in self.children.values():
            child.send_signal(signal.SIGCONT)
        await asyncio.gather(*map(self._without_faults, self.of(*ENGINES)))
        return [each for each in await asyncio.gather(*map(_again, self.children.values())) if each]

    async def _without_faults(self, engine: Child) -> None:
        if engine.running:
            with contextlib.suppress(Unable):  # it has died meanwhile, and its faults with it
                await self.admin(engine.name, "DELETE", "/emulator/fault")

    async def _started(self, child: Child) -> None:
        if self.on_start is not None:
            await self.on_start(child)

    def _pid_of(self, name: str) -> int:
        child = self.children[name]
        return child.pid if child.running else 0


async def _again(child: Child) -> str:
    try:
        if not child.running:
            await child.start()
    except NotAnyMore:
        return ""
    except Unable as error:
        return str(error)
    return ""
