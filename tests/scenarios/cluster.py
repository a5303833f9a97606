"""A fleet of emulated servers with a gateway in front, all real processes, and what a test may ask of them.

Phases are reached by holds, and `held` says that one was. No process outlives its cluster, nor the test process.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from engines.emulator.process import EmulatedServer, free_ports
from engines.types import Role
from failover.pair_health import PairState
from tests.machine import Stopwatch, time_limit
from tests.scenarios.history import judge
from tests.scenarios.recorder import Recorder
from tests.warm import WarmProcess, WarmServer, start

SPEED = 20.0
"""Emulated servers run so many times faster than SGLang, its timeouts included."""
CLOSED_S = 8.0
"""A leg that no abort ends is closed after 5 s, and looked for in its server's load report after that."""
DEFERRED_RELEASE_S = 30.0 / SPEED + 2.0
"""A decode that waited for a dead prefill gives its pages back after this at the latest."""
HEARTBEATS_S = 3 * 5.0 / SPEED
"""Decodes have noticed a prefill's death when it was gone for so long; before that they keep its stale address."""
READY_S = 20.0

ROOT = Path(__file__).parents[2]
_POLL_S = 0.03
_LOG_TAIL_BYTES = 3_000
_UNCLEAN = ("Traceback", "crashed", "never retrieved", " ERROR ")
_running: list[Cluster] = []


def running() -> tuple[Cluster, ...]:
    """The clusters that are up, for reports of failed tests."""
    return tuple(_running)


async def eventually(missing: Callable[[], Awaitable[str]], within_s: float) -> None:
    """Ask `missing` until it says that nothing is; AssertionError with its last words after `within_s`."""
    watch = Stopwatch()
    while what := await missing():
        assert not watch.passed(within_s), f"after {within_s:g} s: {what}"
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True)
class Hold:
    """A hold armed on a server; `held` and `release` are on the cluster."""

    server: EmulatedServer
    pid: int
    hold_id: int


@dataclass(frozen=True)
class Secret:
    """What a server's sampling keys are made of, from a moment of the loop's clock on; `server` as the gateway says."""

    server: str
    from_s: float
    secret: bytes
    deterministic: bool


class GatewayProcess:
    """`pdgate serve` as a child process, its log in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._arguments = arguments
        self._process: WarmProcess | None = None

    async def launch(self) -> None:
        flags = ("serve", "--pd-disaggregation", "--host", "127.0.0.1", "--port", str(self.port), *self._arguments)
        with self.log.open("ab") as log:
            self._process = start("gateway", flags, log.fileno())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def wait(self, within_s: float) -> int:
        """Its exit status."""
        assert self._process is not None
        async with time_limit(within_s):
            return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        self.send_signal(signal.SIGTERM)
        if self._process is None:
            return
        try:
            await self.wait(10.0)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self.wait(5.0)

    def log_tail(self) -> str:
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""


class Cluster:
    """N prefills, M decodes and a gateway; `async with` starts and ends them all.

    `gateway`, `engine`, `decode` are further flags: of the gateway, of every server, of decodes alone. `recorded` puts
    a recorder before every server. With `replicas` there are several gateways before the same servers, all started
    alike; what is asked of "the gateway" is asked of the first.
    """

    def __init__(
        self,
        prefills: int = 2,
        decodes: int = 2,
        *,
        speed: float = SPEED,
        gateway: Sequence[str] = (),
        engine: Sequence[str] = (),
        decode: Sequence[str] = (),
        recorded: bool = False,
        replicas: int = 1,
    ) -> None:
        flags = ("--chunked-prefill-size", "64", *engine)
        self.prefills = [WarmServer(Role.PREFILL, speed=speed, arguments=flags) for _ in range(prefills)]
        decode_flags = (*flags, *decode)
        self.decodes = [WarmServer(Role.DECODE, speed=speed, arguments=decode_flags) for _ in range(decodes)]
        self.recorders = {server.url: Recorder(server.url) for server in self.servers} if recorded else {}
        self._folder = tempfile.TemporaryDirectory(prefix="pdgate-scenario-")
        folder, arguments = Path(self._folder.name), self._arguments(gateway)
        self.gateways = [GatewayProcess(arguments, folder / f"gateway{number}.log") for number in range(replicas)]
        self._exit = AsyncExitStack()
        self._holds: list[Hold] = []
        self._pids: dict[str, int] = {}
        self._died_s: dict[int, float] = {}
        """When the processes that were killed here had ended, on the loop's clock, by their pids."""
        self.secrets: list[Secret] = []
        """What the keys of sampled answers are made of, of every server that has run."""
        self.http: aiohttp.ClientSession

    def _arguments(self, further: Sequence[str]) -> tuple[str, ...]:
        prefills = (("--prefill", self.name(server), str(server.bootstrap_port)) for server in self.prefills)
        decodes = (("--decode", self.name(server)) for server in self.decodes)
        named = [word for words in (*prefills, *decodes) for word in words]
        quiet = ("--canary-interval-secs", "0")  # no requests but a test's own, while nothing is wrong
        patient = ("--first-token-floor-secs", "30", "--stall-floor-secs", "30", "--first-token-hold-secs", "1")
        return (*named, "--profile", "tiny", "--seed", "7", "--probe-interval-secs", "0.4", *quiet, *patient, *further)

    # ---- life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Cluster:
        self._exit.callback(self._folder.cleanup)
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        _running.append(self)
        return self

    async def _start(self) -> None:
        for gateway in self.gateways:
            self._exit.push_async_callback(gateway.stop)
        for server in self.servers:
            self._exit.push_async_callback(server.stop)
            await server.launch()
        for recorder in self.recorders.values():
            await self._exit.enter_async_context(recorder)
        for gateway in self.gateways:
            await gateway.launch()
        self.http = aiohttp.ClientSession()
        self._exit.push_async_callback(self.http.close)
        await self.ready()
        for server in self.servers:
            await self._learn_secret(server, 0.0)
        self._pids = {gateway.url: gateway.pid for gateway in self.gateways}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self in _running:
            await judge(self)
        if self in _running:
            _running.remove(self)
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
        await asyncio.gather(*(gateway.stop() for gateway in self.gateways))
        logs = [gateway.log.read_text(errors="replace") for gateway in self.gateways if gateway.log.exists()]
        await self._exit.aclose()
        for log in logs:
            if kind is not None:
                print(f"---- gateway log ----\n{log[-_LOG_TAIL_BYTES:]}")
                continue
            at = min((at for word in _UNCLEAN if (at := log.find(word)) >= 0), default=None)
            assert at is None, "a gateway's log holds errors:\n" + log[max(0, at - 500) :][:_LOG_TAIL_BYTES]

    @property
    def servers(self) -> tuple[EmulatedServer, ...]:
        return (*self.prefills, *self.decodes)

    @property
    def gateway(self) -> GatewayProcess:
        return self.gateways[0]

    @property
    def url(self) -> str:
        return self.gateway.url

    def of(self, role: Role) -> list[EmulatedServer]:
        return self.prefills if role is Role.PREFILL else self.decodes

    def name(self, server: EmulatedServer) -> str:
        """What the gateway calls a server."""
        return self.recorders[server.url].url if self.recorders else server.url

    def recorder(self, server: EmulatedServer) -> Recorder:
        return self.recorders[server.url]

    def server(self, name: str) -> EmulatedServer:
        """The server that the gateway calls so."""
        return next(server for server in self.servers if self.name(server) == name)

    async def ready(self, pairs: int | None = None, within_s: float = READY_S) -> None:
        """Wait until every gateway that runs counts so many usable pairs, by default all there can be."""
        wanted = len(self.prefills) * len(self.decodes) if pairs is None else pairs

        async def missing(gateway: GatewayProcess) -> str:
            assert gateway.returncode is None, f"a gateway has ended\n{gateway.log_tail()}"
            try:
                body = await self.get("/readyz", gateway)
            except aiohttp.ClientError as error:
                return f"a gateway does not answer: {error}"
            return "" if body["pairs"] == wanted else f"{body['pairs']} pairs instead of {wanted}: {body['engines']}"

        for gateway in self.gateways:
            if gateway is self.gateway or gateway.returncode is None:
                await eventually(partial(missing, gateway), within_s)

    async def _doubted_pairs(self) -> str:
        """The pairs that a gateway has yet to send a canary on: the next test's hold would catch that."""
        for gateway in self.gateways:
            if gateway.returncode is None:
                samples = await self.metrics(gateway, ("pdgate_pairs",))
                states = {each.labels["state"]: count for each, count in samples if each.name == "pdgate_pairs"}
                if sum(count for state, count in states.items() if state != PairState.OK):
                    return f"{gateway.url} counts pairs {states}"
        return ""

    async def kill(self, server: EmulatedServer, number: signal.Signals = signal.SIGKILL) -> None:
        """End a server's process; returns when it has ended."""
        await server.kill(number)
        self._died_s[server.pid] = asyncio.get_running_loop().time()

    async def restart(self, server: EmulatedServer) -> None:
        """A new process in a server's place: of a prefill only after decodes have forgotten the old one."""
        await server.kill()
        if server.role is Role.PREFILL:
            now_s = asyncio.get_running_loop().time()
            gone_s = now_s - self._died_s.pop(server.pid, now_s)
            await asyncio.sleep(HEARTBEATS_S - gone_s)  # the downtime is what is wanted here
        from_s = asyncio.get_running_loop().time()
        await server.start()
        await self._learn_secret(server, from_s)

    async def _learn_secret(self, server: EmulatedServer, from_s: float) -> None:
        """Ask a server for its secret; the process that has it was started at `from_s`, and none ran then."""
        async with self.http.get(server.url + "/emulator/secret") as reply:
            told = await reply.json()
        self.secrets.append(Secret(self.name(server), from_s, bytes.fromhex(told["secret"]), told["deterministic"]))

    def killed_gateways(self) -> list[str]:
        """The URLs of the replicas that are not the processes any more that they were at the last call."""
        now = {gateway.url: gateway.pid for gateway in self.gateways if gateway.returncode is None}
        killed = [url for url, pid in self._pids.items() if now.get(url) != pid]
        self._pids |= now
        return killed

    async def heal(self) -> None:
        """Undo what a test did: every server runs and holds nothing, the gateway runs and knows it."""
        dead = [server for server in self.servers if server.returncode is not None]
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
        await asyncio.gather(*(self.restart(server) for server in dead))
        if self.gateway.returncode is not None:
            await self.gateway.launch()
        await self.clear_faults()
        for recorder in self.recorders.values():
            recorder.owed = recorder.unended = 0
            recorder.reset()
        for hold in self._holds:
            await self.release(hold)
        self._holds.clear()
        await self.ready()
        await eventually(self._doubted_pairs, READY_S)
        await self.settled(CLOSED_S)
        await judge(self, with_ledgers=True)

    # ---- what the gateway says -----------------------------------------------------------------------------------

    async def explain(self, request_id: str = "newest") -> dict[str, Any]:
        """Why a request went where it went; {} while there is none."""
        async with self.http.get(f"{self.url}/pdgate/explain/{request_id}") as reply:
            return dict(await reply.json()) if reply.status == 200 else {}

    async def last_attempt(self, prompt_of: str = "newest") -> dict[str, Any]:
        attempts = (await self.explain(prompt_of)).get("attempts") or [{}]
        return dict(attempts[-1])

    async def get(self, path: str, gateway: GatewayProcess | None = None) -> dict[str, Any]:
        """What a gateway (the first, if none is given) answers as JSON, whatever the status."""
        async with self.http.get((gateway or self.gateway).url + path) as reply:
            return dict(await reply.json())

    async def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        found = [value for sample, value in await self.metrics(names=(name,)) if _fits(sample, name, labels)]
        assert len(found) == 1, f"{len(found)} samples of {name}{labels}"
        return found[0]

    async def metrics(
        self, gateway: GatewayProcess | None = None, names: tuple[str, ...] = ("pdgate_",)
    ) -> list[tuple[Any, float]]:
        """The samples of /metrics whose names begin with one of `names`: reading all of them takes a while."""
        async with self.http.get((gateway or self.gateway).url + "/metrics") as reply:
            text = "".join(line for line in (await reply.text()).splitlines(keepends=True) if line.startswith(names))
        return [(sample, sample.value) for family in text_string_to_metric_families(text) for sample in family.samples]

    # ---- what the servers say ------------------------------------------------------------------------------------

    async def ledger(self, server: EmulatedServer) -> dict[str, Any]:
        async with self.http.get(server.url + "/emulator/ledger") as reply:
            return dict(await reply.json())

    async def requests(self, server: EmulatedServer) -> dict[str, Any]:
        """What a server has seen: `live` and `recent` requests."""
        async with self.http.get(server.url + "/emulator/requests") as reply:
            return dict(await reply.json())

    async def fault(self, server: EmulatedServer, name: str, **fields: int | str) -> None:
        """Make the next requests of a server go wrong."""
        async with self.http.post(server.url + "/emulator/fault", json={"fault": name, **fields}) as reply:
            assert reply.status == 200, await reply.text()

    async def clear_faults(self) -> None:
        for server in self.servers:
            await self._delete(server.url + "/emulator/fault")

    async def hold(self, server: EmulatedServer, stage: str, k: int = 1) -> Hold:
        """Stop the next request that comes to `stage` on a server."""
        async with self.http.post(server.url + "/emulator/hold", json={"stage": stage, "k": k}) as reply:
            assert reply.status == 200, await reply.text()
            hold = Hold(server, server.pid, (await reply.json())["hold_id"])
        self._holds.append(hold)
        return hold

    async def hold_any(self, role: Role, stage: str, k: int = 1) -> list[Hold]:
        """A hold on every server of a role: the next request comes to one of them."""
        return [await self.hold(server, stage, k) for server in self.of(role)]

    async def state(self, hold: Hold) -> str:
        async with self.http.get(f"{hold.server.url}/emulator/hold/{hold.hold_id}") as reply:
            return str((await reply.json())["state"])

    async def held(self, holds: Sequence[Hold], count: int = 1, within_s: float = 10.0) -> list[Hold]:
        """Wait until `count` of these holds have a request, and give the others up."""
        caught = await self.held_once(holds, count, within_s)
        for hold in holds:
            if hold not in caught:
                await self.release(hold)
        return caught

    async def held_once(self, holds: Sequence[Hold], count: int = 1, within_s: float = 10.0) -> list[Hold]:
        """Wait until `count` of these holds have a request; the others stay armed."""
        caught: list[Hold] = []

        async def missing() -> str:
            caught[:] = [hold for hold in holds if await self.state(hold) == "held"]
            return "" if len(caught) >= count else f"{len(caught)} of {count} requests are held"

        await eventually(missing, within_s)
        return caught

    async def release(self, hold: Hold) -> None:
        """Let go of what a hold holds; no effect where its server has ended."""
        if hold.server.returncode is None and hold.server.pid == hold.pid:
            await self._delete(f"{hold.server.url}/emulator/hold/{hold.hold_id}")

    async def _delete(self, url: str) -> None:
        async with self.http.delete(url) as reply:
            assert reply.status == 200, await reply.text()

    # ---- nothing is left -----------------------------------------------------------------------------------------

    async def settled(self, within_s: float = 5.0, servers: Sequence[EmulatedServer] | None = None) -> None:
        """Wait until no request holds KV on `servers` (all, if not given), and the gateway knows it."""
        watched = self.servers if servers is None else servers

        async def missing() -> str:
            return await self._kept(watched) or await self._believed(watched)

        await eventually(missing, within_s)

    async def _kept(self, servers: Sequence[EmulatedServer]) -> str:
        for server in servers:
            ledger = await self.ledger(server)
            if ledger["by_room"] or ledger["locked_cache_tokens"]:
                return f"{server.role} {server.url} still holds {ledger}"
        return ""

    async def _believed(self, servers: Sequence[EmulatedServer]) -> str:
        names = {self.name(server) for server in servers}
        of_server = ("pdgate_kv_unaccounted", "pdgate_booked")
        whole = ("pdgate_live_bookings", "pdgate_releases_pending", "pdgate_queue_requests")
        for sample, value in await self.metrics(names=(*of_server, *whole)):
            if value != 0 and (sample.name in whole or sample.labels["engine"] in names):
                return f"{sample.name}{sample.labels} is {value}"
        return ""


def _fits(sample: Any, name: str, labels: dict[str, str]) -> bool:
    return sample.name == name and labels.items() <= sample.labels.items()
