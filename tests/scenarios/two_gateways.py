"""Two gateways, A and B, before one fleet and one Redis; requests that are held on its engines, and who let go of them.

A reaches engines and Redis through proxies; B reaches engines directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engines.tasks import spawn
from engines.types import Role
from failover.chaos.proxy import TcpProxy
from failover.chaos.world import LinkRule
from failover.journal import FailoverKeys
from tests.machine import time_limit
from tests.redis_servers import RedisServer, free_port
from tests.scenarios.client import CHAT, Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, GatewayProcess, Hold, eventually
from tests.scenarios.phases import PREFILL_CHUNK, RESERVED, TOKEN, Phase

TOKENS = 40
SILENT = LinkRule(silent=True)
HELD = ((TOKEN, True), (TOKEN, False), (PREFILL_CHUNK, False), (RESERVED, True))
PATIENT = [f"--{what}-{end}-secs=140" for what in ("first-token", "stall") for end in ("timeout", "floor")]
"""Requests are held for longer than a gateway would wait for a server."""


class RedisProxy(TcpProxy):
    """A way to Redis that may be led to another server."""

    def lead_to(self, redis: RedisServer) -> None:
        self._target = ("127.0.0.1", redis.port)
        self.reset()


class Replicated(Cluster):
    """Two gateways that share a Redis; further the first is A, the second B."""

    def __init__(self, redis: RedisServer) -> None:
        super().__init__(2, 2, replicas=2, speed=2.0)  # engines give held requests up after 150 s
        self.redis = redis
        self.to_redis = [RedisProxy("127.0.0.1", redis.port, Random(number)) for number in range(2)]
        self.to_engines: dict[str, TcpProxy] = {}
        """By what A calls them."""
        self._lifts: list[Callable[[], None]] = []

    @property
    def a(self) -> GatewayProcess:
        return self.gateways[0]

    @property
    def b(self) -> GatewayProcess:
        return self.gateways[1]

    async def _start(self) -> None:
        other: dict[str, str] = {}
        for server in self.servers:
            proxy = TcpProxy("127.0.0.1", int(server.url.rpartition(":")[2]), Random(7))
            other[server.url] = await self._started(proxy)
            self.to_engines[other[server.url]] = proxy
        for gateway, proxy in zip(self.gateways, self.to_redis, strict=True):
            redis = (await self._started(proxy)).replace("http", "redis")
            words = self._arguments(("--redis-url", redis, *PATIENT))
            gateway._arguments = [other.get(word, word) for word in words] if gateway is self.a else words
        await super()._start()

    async def _started(self, proxy: TcpProxy) -> str:
        self._exit.push_async_callback(proxy.stop)
        return f"http://127.0.0.1:{await proxy.start(free_port())}"  # no port that a server is about to take

    def cut_off_from_engines(self) -> None:
        """A's connections to engines stay as they are, and silent, whatever becomes of A."""
        self._lifts = [proxy.impose(SILENT, SILENT) for proxy in self.to_engines.values()]

    def lift(self) -> None:
        for each in self._lifts:
            each()
        self._lifts = []

    async def all_live(self) -> None:
        """Wait until both gateways see both, and nobody absent."""

        async def missing() -> str:
            live = [await self.of(gateway, "pdgate_replicas_live") for gateway in self.gateways]
            absent = [await self.of(gateway, "pdgate_replicas_absent") for gateway in self.gateways]
            return "" if live == [2, 2] and absent == [0, 0] else f"{live} live, {absent} absent"

        await eventually(missing, 15.0)

    async def of(self, gateway: GatewayProcess, name: str) -> float:  # type: ignore[override]
        return sum(value for sample, value in await self.metrics(gateway, (name,)) if sample.name == name)


@dataclass
class Held:
    """A request that is held in a phase on an engine."""

    task: asyncio.Task[Answer]
    answer: Answer
    truth: str
    hold: Hold

    async def whole(self) -> None:
        async with time_limit(10.0):
            (await self.task).check_whole(self.truth, attempts=1)
        assert not self.answer.comments, "its stream was never broken"


async def hold(cluster: Replicated, gateway: GatewayProcess, phase: Phase, stream: bool) -> Held:
    servers = cluster.prefills if phase.holder is Role.PREFILL else cluster.decodes
    holds = [await cluster.hold(server, phase.stage, phase.k) for server in servers]
    prompt, answer = new_prompt(), Answer()
    task = spawn(ask(cluster.http, gateway.url, chat(prompt, TOKENS, stream=stream), CHAT, answer), "held")
    [caught] = await cluster.held(holds)
    return Held(task, answer, expected_text(prompt, TOKENS), caught)


async def hold_all(cluster: Replicated, gateway: GatewayProcess) -> list[Held]:
    """One request for each of HELD, all in the journal, as Redis has it."""
    held = [await hold(cluster, gateway, phase, stream) for phase, stream in HELD]
    name = (await cluster.get("/pdgate/replica", gateway))["replica"]

    async def missing() -> str:
        journaled = cluster.redis.ask("HLEN", FailoverKeys("pdgate", "default").attempts(name))
        return "" if journaled == len(held) else f"{journaled} of {len(held)} are in the journal"

    await eventually(missing, 2.0)
    return held


async def let_go(cluster: Replicated, held: list[Held]) -> None:
    for each in held:
        await cluster.release(each.hold)


async def rooms(cluster: Replicated) -> dict[str, set[str]]:
    """The rooms that are live or hold KV on both sides, by the engines' own word."""
    found: dict[str, set[str]] = {}
    for server in cluster.servers:
        live = (await cluster.requests(server))["live"]
        held = (await cluster.ledger(server))["by_room"]
        found.setdefault(str(server.role), set()).update(held, (str(each["room"]) for each in live))
    return found


async def verdicts(cluster: Replicated, *gateways: GatewayProcess) -> dict[str, float]:
    """What has been aborted, and whom anybody took for dead."""
    names = ("pdgate_aborts_posted_total", "pdgate_attempts_reaped", "pdgate_replicas_reaped", "pdgate_fencings")
    return {name: sum([await cluster.of(gateway, name) for gateway in gateways]) for name in names}
