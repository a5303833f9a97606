"""A real fleet as a run's world: proxies that listen here, and reads of its gateways. A shell.

Nothing else is done to it: no signals, no admin calls, no commands to Redis; and nothing is connected to that the fleet
does not allow.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from engines.types import Health
from failover.chaos.links import NamedLinks
from failover.chaos.proxy import HOST, TcpProxy
from failover.chaos.real_fleet import RealFleet, address, host_and_port
from failover.chaos.record import Instance, Mark
from failover.chaos.world import Link, Process, Unable

READ_S = 5.0
_POLL_S = 0.2
_MAX_MARKS = 100_000
_DENIED = (401, 403)
_USABLE = frozenset(health.value for health in Health if health.takes_rooms)
"""What gateways call engines that they use; those on probation wait for a request, which the load will bring."""
_NOT_OURS = "a real fleet is only looked at, and only its links can be broken"


class RealLinks(NamedLinks):
    """The proxies by the names of their links: one on each address of the fleet file, and those of `wanted` clients."""

    def __init__(self, fleet: RealFleet, wanted: Collection[str], rng: Random, now_s: Callable[[], float]) -> None:
        self._fleet = fleet
        clients = [name for name in wanted if name.startswith("client>")]
        super().__init__({name: self._proxy(name, rng) for name in (*fleet.proxies, *clients)}, now_s)
        self._ports: dict[str, int] = {}

    def _proxy(self, name: str, rng: Random) -> TcpProxy:
        return TcpProxy(*host_and_port(self._fleet.connected[name.partition(">")[2]]), rng)

    async def start(self) -> None:
        """Listen everywhere; Unable where that cannot be."""
        for name, proxy in self._proxies.items():
            host, port = host_and_port(self._fleet.proxies.get(name, f"{HOST}:0"))
            try:
                _check_free(host, port)
                self._ports[name] = await proxy.start(port, host)
            except OSError as error:
                raise Unable(f"proxies.{name}: nobody can listen on {host}:{port}: {error.strerror}") from error

    async def stop(self) -> None:
        for proxy in self._proxies.values():
            await proxy.stop()

    def unused(self, name: str) -> bool:
        """Whether nobody has come by it yet."""
        return self._proxies[name].connections_total == 0

    def client_url(self, gateway: str) -> str:
        """Where clients find a gateway: at the proxy, where its link is to be broken."""
        port = self._ports.get(f"client>{gateway}")
        return f"http://{HOST}:{port}" if port else self._fleet.targets[gateway][1].rstrip("/")


class RealWorld:
    """`world.RunWorld`; `async with` opens the proxies and waits until the fleet answers, and closes them.

    `befallen`: the links that faults are planned for. The wait ends with `stop` too.
    """

    def __init__(self, fleet: RealFleet, befallen: Collection[str], rng: Random, stop: asyncio.Event) -> None:
        self.fleet = fleet
        self.links = RealLinks(fleet, befallen, rng, self.now_s)
        self.marks: list[Mark] = []
        self.pdgates: frozenset[str] = frozenset()
        """The gateways that are pdgate."""
        self.model = fleet.model
        """What to ask for."""
        self.headers = _headers(fleet)
        self._befallen, self._stop = befallen, stop
        self._zero_s = 0.0
        self._http: aiohttp.ClientSession

    # ---- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._zero_s = asyncio.get_running_loop().time()
        connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=READ_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            await self.links.start()
            await self._ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections."""
        await self.links.stop()
        await self._http.close()

    async def _ready(self) -> None:
        """Wait until every gateway is ready, and uses every proxy that is to be broken; Unable with what is missing."""
        while missing := await self._unready():
            if self._stop.is_set():
                raise Unable("it was stopped before its load began")
            if self.now_s() > self.fleet.ready_s:
                raise Unable(f"after {self.fleet.ready_s:g} s: {'; '.join(missing[:5])}")
            await asyncio.sleep(_POLL_S)

    async def _unready(self) -> list[str]:
        missing = [each for gateway in self.names("gateway") for each in await self._missing(gateway)]
        return missing or await self._nameless()

    async def _missing(self, gateway: str) -> list[str]:
        try:
            status, told = await self.read(gateway, "/readyz")
            is_pdgate = isinstance(told, dict) and "pairs" in told and "engines" in told
            if not is_pdgate and status != 200:
                status, _ = await self.read(gateway, "/health")
        except Unable as error:
            return [str(error)]
        if status in _DENIED:
            fix = (
                f"what {self.fleet.api_key_env} holds" if self.fleet.api_key_env else "a token: name it by api_key_env"
            )
            raise Unable(f"{gateway} answers {status}: it wants {fix}")
        if status != 200:
            return [f"{gateway} is not ready: it answers {status} to {'/readyz' if is_pdgate else '/health'}"]
        missing = []
        if is_pdgate:
            self.pdgates |= {gateway}
            known = {self.name_of(each["id"]): each["health"] for each in told["engines"]}
            wanted = {link.partition(">")[2] for link in self.fleet.proxies if link.startswith(f"{gateway}>")}
            missing = [
                f"{name} is {known[name]} for {gateway}" for name in wanted & known.keys() if known[name] not in _USABLE
            ]
        for link in self.fleet.proxies:
            if link in self._befallen and link.startswith(f"{gateway}>") and self.links.unused(link):
                at = self.fleet.proxies[link]
                missing.append(f"nobody has come by {link}: tell {gateway} that {link.partition('>')[2]} is at {at}")
        return missing

    # ---- reads ---------------------------------------------------------------------------------------------------

    async def read(self, gateway: str, path: str) -> tuple[int, Any]:
        """What a gateway answers to a GET past every proxy: its status, and JSON or text. Unable when it does not."""
        url = self.fleet.targets[gateway][1].rstrip("/")
        try:
            async with self._http.get(url + path, headers=self.headers, allow_redirects=False) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise Unable(f"{gateway} does not answer at {url}: {error or type(error).__name__}") from error
        try:
            return reply.status, orjson.loads(body)
        except orjson.JSONDecodeError:
            return reply.status, body.decode(errors="replace")

    async def _nameless(self) -> list[str]:
        """Why nobody knows a model to ask for, if that is so."""
        if not self.model:
            try:
                status, told = await self.read("gateway0", "/v1/models")
            except Unable as error:
                return [str(error)]
            try:
                self.model = str(told["data"][0]["id"])
            except (TypeError, KeyError, IndexError):
                return [f"gateway0 names no model at /v1/models ({status}): name it by --model"]
        return []

    def name_of(self, url: str) -> str:
        """The process at an address that gateways know: its own, or that of a proxy that leads to it."""
        try:
            at = address(url)
        except ValueError:
            return url
        own = next((name for name, (_, where) in self.fleet.targets.items() if address(where) == at), None)
        port = host_and_port(at)[1]  # whatever they call this host
        behind = (link for link, where in self.fleet.proxies.items() if host_and_port(where)[1] == port)
        return own or next(behind, url).rpartition(">")[2]

    # ---- the contract --------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        raise Unable(f"{name}: {_NOT_OURS}")

    def names(self, role: str) -> Sequence[str]:
        return [name for name, (of, _) in self.fleet.targets.items() if of == role]

    def seen(self, gateway: str, engine: str) -> str:
        raise Unable(f"{engine}: {_NOT_OURS}")

    def link(self, name: str) -> Link:
        return self.links.named(name)

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        raise Unable(f"{name}: {_NOT_OURS}")

    async def redis(self, *words: str | int) -> Any:
        raise Unable(f"redis: {_NOT_OURS}")

    def mark(self, name: str, what: str) -> None:
        if len(self.marks) < _MAX_MARKS:
            self.marks.append(Mark(self.now_s(), name, what))

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._zero_s

    def begin(self) -> None:
        self._zero_s += self.now_s()

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(Instance(name, role, url) for name, (role, url) in self.fleet.targets.items())

    def hurry(self) -> None:
        """Nothing is ever started here."""

    async def heal(self) -> list[str]:
        """Every process is left as it is."""
        return []


def _check_free(host: str, port: int) -> None:
    """OSError where somebody has the port: a proxy alone would share it with that of another run."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _headers(fleet: RealFleet) -> Mapping[str, str]:
    """What every gateway is sent; Unable where its token is not there."""
    if not fleet.api_key_env:
        return {}
    if not (token := os.environ.get(fleet.api_key_env)):
        raise Unable(f"api_key_env: the environment variable {fleet.api_key_env} is not set")
    return {"authorization": f"Bearer {token}"}
