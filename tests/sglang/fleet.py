"""Real SGLang servers on this CPU with gateways in front, all real processes, and what a test may ask of them.

One prefill and one decode that a gateway serves, and a plain server that tells what answers must be. Starting takes
minutes, so one fleet serves all tests; a test that ended something gets it healed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from engines.sglang_process import Launch, SglangServer
from engines.types import Role
from tests.redis_servers import RedisServer, free_port
from tests.scenarios.client import Answer, ask
from tests.scenarios.cluster import GatewayProcess, eventually

PAGE_TOKENS = 16
MODEL = "tiny"
TIMEOUT_S = 20
"""SGLang's own limits for a leg whose other leg never comes, instead of 300 s."""
DEFERRED_RELEASE_S = 30.0
"""A decode keeps pages so long when the prefill that was to fill them died."""
READY_S = 60.0
SEED = ("--random-seed", "42")


class RealFleet:
    """`async with` starts and ends the servers; `add_gateway` puts one more gateway before them.

    `plain`: with the server that tells what answers must be.
    """

    def __init__(self, launch: Launch, *, plain: bool = True) -> None:
        self.launch = launch
        self.events_port = free_port(beside=1)
        pages = ("--page-size", str(PAGE_TOKENS), *SEED)
        events = json.dumps(
            {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.events_port}",
                "replay_endpoint": f"tcp://*:{self.events_port + 1}",
            }
        )
        limits = {
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_S),
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_S),
            "TORCH_COMPILE_DISABLE": "1",  # else the first penalty stops a scheduler for half a minute
        }
        self.prefill = SglangServer(
            Role.PREFILL, launch, arguments=(*pages, "--kv-events-config", events), environment=limits
        )
        self.decode = SglangServer(Role.DECODE, launch, arguments=pages, environment=limits)
        self.plain = SglangServer(Role.PLAIN, launch, arguments=pages)
        self._more_decode = partial(SglangServer, Role.DECODE, launch, arguments=pages, environment=limits)
        self._more: list[SglangServer] = [self.plain] if plain else []
        self.redis = RedisServer()
        self.gateways: list[GatewayProcess] = []
        self._exit = AsyncExitStack()
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> RealFleet:
        try:
            self.http = await self._exit.enter_async_context(aiohttp.ClientSession())
            self._folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="pdgate-sglang-")))
            self._exit.enter_context(self.redis)
            for server in self.servers:
                self._exit.push_async_callback(server.stop)
                await server.launch()
            for server in self.servers:
                await server.wait_ready()
            await self.add_gateway()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    @property
    def servers(self) -> tuple[SglangServer, ...]:
        return self.prefill, self.decode, *self._more

    @property
    def pair(self) -> tuple[SglangServer, SglangServer]:
        return self.prefill, self.decode

    @property
    def gateway(self) -> GatewayProcess:
        return self.gateways[0]

    @property
    def url(self) -> str:
        return self.gateway.url

    async def add_gateway(self, *flags: str, decodes: Sequence[str] = (), pairs: int = 1) -> GatewayProcess:
        """One more gateway on the same Redis; `decodes`: more of them than ours. It ends with the fleet.

        `pairs`: so many it has when it is ready.
        """
        named = ["--prefill", self.prefill.url, str(self.prefill.bootstrap_port), "--decode", self.decode.url]
        for url in decodes:
            named += ["--decode", url]
        own = ("--redis-url", self.redis.url, "--tokenizer-path", str(self.launch.model_dir))
        log = self._folder / f"gateway{len(self.gateways)}.log"
        gateway = GatewayProcess((*named, *own, "--probe-interval-secs", "1", *flags), log)
        self._exit.push_async_callback(gateway.stop)
        await gateway.launch()
        self.gateways.append(gateway)
        await self.ready(gateway, pairs)
        return gateway

    @asynccontextmanager
    async def second_decode(self) -> AsyncIterator[SglangServer]:
        """One more decode, which is healed like the others, but is known only to gateways that are told of it."""
        async with self._more_decode() as decode:
            self._more.append(decode)
            try:
                yield decode
            finally:
                self._more.remove(decode)

    # ---- asking --------------------------------------------------------------------------------------------------

    async def ask(self, body: Any, path: str, answer: Answer | None = None) -> Answer:
        """Of the gateway."""
        return await ask(self.http, self.url, body, path, answer)

    async def ask_plain(self, body: Any, path: str) -> Answer:
        """Of a server without a gateway, which needs no pair: what the answer must be."""
        return await ask(self.http, self.plain.url, body, path)

    async def get(self, url: str) -> Any:
        async with self.http.get(url) as reply:
            return await reply.json()

    async def explain(self, request_id: str = "newest") -> dict[str, Any]:
        return dict(await self.get(f"{self.url}/pdgate/explain/{request_id}"))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        async with self.http.get(self.url + "/metrics") as reply:
            families = list(text_string_to_metric_families(await reply.text()))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def epoch(self, server: SglangServer) -> float:
        return await self.metric("pdgate_engine_epoch", engine=server.url)

    # ---- state ---------------------------------------------------------------------------------------------------

    async def ready(self, gateway: GatewayProcess | None = None, pairs: int = 1, within_s: float = READY_S) -> None:
        """Wait until the gateway (the first, if none is given) has so many pairs."""
        gateway = gateway or self.gateway

        async def missing() -> str:
            assert gateway.returncode is None, f"the gateway has ended\n{gateway.log_tail()}"
            try:
                body = await self.get(gateway.url + "/readyz")
            except aiohttp.ClientError as error:
                return f"it does not answer: {error}"
            return "" if body["pairs"] == pairs else str(body)

        await eventually(missing, within_s)

    async def joined(self) -> None:
        """Wait until the gateway has found that its tokenizer is the engines' own."""

        async def missing() -> str:
            index = (await self.get(self.url + "/readyz"))["index"][MODEL]
            return "" if index["kind"] == "ids" else str(index)

        await eventually(missing, READY_S)

    async def idle(
        self, within_s: float = 20.0, servers: Sequence[SglangServer] | None = None, *, fresh: bool = True
    ) -> None:
        """Wait until servers say, in reports newer than this call if `fresh`, that nothing runs, waits, or holds KV."""
        for server in self.pair if servers is None else servers:
            began = 0.0
            if fresh:
                began = (await self._loads(server))["timestamp"]
                await self.http.get(server.url + "/health")  # takes a second: makes it run once, and report

            async def missing(server: SglangServer = server, began: float = began) -> str:
                load = await self._loads(server)
                queues = {name: count for name, count in load["disaggregation"].items() if name.endswith("_reqs")}
                counts = {name: load[name] for name in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")}
                busy = {name: count for name, count in {**counts, **queues}.items() if count}
                return f"{server.role} {busy}" if busy or load["timestamp"] <= began else ""

            await eventually(missing, within_s)

    async def _loads(self, server: SglangServer) -> dict[str, Any]:
        (rank,) = (await self.get(server.url + "/v1/loads"))["loads"]
        return dict(rank)

    async def heal(self) -> None:
        """Start what has ended, wake what is frozen, and wait until a request goes through and nothing is held."""
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
        dead = [server for server in self.servers if server.returncode is not None]
        for server in dead:
            await server.launch()
        for server in dead:
            await server.wait_ready()
        await self.ready()
        await self.idle(DEFERRED_RELEASE_S + 15.0, fresh=bool(dead))

    async def served(self, within_s: float = 60.0) -> None:
        """Wait until a request is answered."""

        async def missing() -> str:
            answer = await self.ask({"model": MODEL, "prompt": "hello", "max_tokens": 2}, "/v1/completions")
            return "" if answer.status == 200 else str(answer.body)

        await eventually(missing, within_s)


async def grown(answer: Answer, events: int, within_s: float = 30.0) -> None:
    """Wait until so many events of a stream have come."""
    async with asyncio.timeout(within_s):
        while len(answer.events) < events:
            answer.grew.clear()
            await answer.grew.wait()
