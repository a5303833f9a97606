"""Two gateways, A and B, before one fleet: A dies in a way that closes no socket, and B releases what A ran.

And whatever befalls Redis, or A's way to it, nothing that lives is aborted. A reaches engines and Redis through
proxies; B reaches engines directly.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import pytest_asyncio

from engines.tasks import spawn
from engines.types import Role
from failover.chaos.proxy import TcpProxy
from failover.chaos.world import LinkRule
from failover.journal import FailoverKeys
from failover.reaper import LEASE_S, WATCHED_S
from tests.redis_servers import RedisServer, free_port
from tests.scenarios.client import CHAT, Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster, GatewayProcess, Hold, eventually
from tests.scenarios.phases import PREFILL_CHUNK, RESERVED, TOKEN, Phase

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone]

RELEASED_S = 10.0 + LEASE_S
TOKENS = 40
CLIENTS = 4
SILENT = LinkRule(silent=True)
HELD = ((TOKEN, True), (TOKEN, False), (PREFILL_CHUNK, False), (RESERVED, True))
PATIENT = [
    word for what in ("first-token", "stall") for end in ("timeout", "floor") for word in (f"--{what}-{end}-secs", "90")
]
"""Requests are held for longer than a gateway would wait for a server."""


class RedisProxy(TcpProxy):
    """A way to Redis that may be led to another server."""

    def lead_to(self, redis: RedisServer) -> None:
        self._target = ("127.0.0.1", redis.port)
        self.reset()


class Replicated(Cluster):
    """Two gateways that share a Redis; further the first is A, the second B."""

    def __init__(self, redis: RedisServer) -> None:
        super().__init__(2, 2, replicas=2, speed=3.0)  # engines give held requests up after 100 s
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

    async def of(self, gateway: GatewayProcess, name: str) -> float:  # type: ignore[override]
        return sum(value for sample, value in await self.metrics(gateway) if sample.name == name)


@dataclass
class Held:
    """A request that is held in a phase on an engine."""

    task: asyncio.Task[Answer]
    answer: Answer
    truth: str
    hold: Hold

    async def whole(self) -> None:
        (await asyncio.wait_for(self.task, 10.0)).check_whole(self.truth, attempts=1)
        assert not self.answer.comments, "its stream was never broken"


async def hold(cluster: Replicated, gateway: GatewayProcess, phase: Phase, stream: bool) -> Held:
    servers = cluster.prefills if phase.holder is Role.PREFILL else cluster.decodes
    holds = [await cluster.hold(server, phase.stage, phase.k) for server in servers]
    prompt, answer = new_prompt(), Answer()
    task = spawn(ask(cluster.http, gateway.url, chat(prompt, TOKENS, stream=stream), CHAT, answer), "held")
    [caught] = await cluster.held(holds)
    return Held(task, answer, expected_text(prompt, TOKENS), caught)


async def hold_all(cluster: Replicated, gateway: GatewayProcess) -> list[Held]:
    """One request for each of HELD, all in the journal."""
    held = [await hold(cluster, gateway, phase, stream) for phase, stream in HELD]
    await asyncio.sleep(0.3)  # written every 50 ms
    journal = [await cluster.of(gateway, "pdgate_attempts_journaled")]
    assert journal == [len(held)]
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


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(redis: RedisServer) -> AsyncIterator[Replicated]:
    async with Replicated(redis) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shared: Replicated) -> AsyncIterator[Replicated]:
    async def missing() -> str:
        live = [await shared.of(gateway, "pdgate_replicas_live") for gateway in shared.gateways]
        absent = [await shared.of(gateway, "pdgate_replicas_absent") for gateway in shared.gateways]
        return "" if live == [2, 2] and absent == [0, 0] else f"{live} live, {absent} absent"

    await eventually(missing, 15.0)
    yield shared
    shared.lift()
    shared.a.send_signal(signal.SIGCONT)
    await shared.heal()


# ---- one dies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_what_a_dead_gateway_ran_is_released(cluster: Replicated, number: signal.Signals) -> None:
    loop = asyncio.get_running_loop()
    old_name = (await cluster.get("/pdgate/replica", cluster.a))["replica"]
    of_b = await hold(cluster, cluster.b, TOKEN, True)
    rooms_of_b = await rooms(cluster)
    of_a = await hold_all(cluster, cluster.a)
    before = await rooms(cluster)
    assert len(before["decode"]) == 5
    assert len(before["prefill"]) == 2, "in the middle of their prefill, and before it"
    cluster.cut_off_from_engines()
    began_s = loop.time()
    cluster.a.send_signal(number)
    await asyncio.sleep(WATCHED_S)
    assert await rooms(cluster) == before, "nobody else lets go of it so soon"

    async def left() -> str:
        now = await rooms(cluster)
        return "" if now == rooms_of_b else f"{now} hold KV"

    await eventually(left, RELEASED_S - WATCHED_S)
    print(f"released {loop.time() - began_s:.2f} s after the death")
    await eventually(lambda: _is(cluster, cluster.b, "pdgate_replicas_reaped"), 2.0)
    assert await cluster.of(cluster.b, "pdgate_attempts_reaped") >= len(of_a)
    cluster.lift()
    await cluster.release(of_b.hold)
    await of_b.whole()
    if number is signal.SIGSTOP:
        cluster.a.send_signal(signal.SIGCONT)
        for each in of_a:
            await check_ended(await asyncio.wait_for(each.task, 5.0), each.truth)
        await eventually(lambda: _is(cluster, cluster.a, "pdgate_fencings"), 3.0)
        await eventually(lambda: _not_ready(cluster), 3.0)
        name = (await cluster.get("/pdgate/replica", cluster.a))["replica"]
        assert name != old_name
        assert name.startswith(old_name)
        prompt = new_prompt()
        (await ask(cluster.http, cluster.a.url, chat(prompt, 5))).check_whole(expected_text(prompt, 5), attempts=1)
    else:
        for proxy in cluster.to_engines.values():
            proxy.reset()
        await asyncio.gather(*(each.task for each in of_a), return_exceptions=True)


async def check_ended(answer: Answer, truth: str) -> None:
    """One clear error; or whole, where it could begin anew before the gateway had looked at its mark."""
    if not answer.errors:
        answer.check_whole(truth)
        return
    (error,) = answer.errors
    assert error["code"] in ("gateway_fenced", "engine_failed"), "an engine's word of the abort may be read first"
    assert (answer.status, answer.done, answer.ended) == (200 if answer.text() else 503, 0, True)
    assert truth.startswith(answer.text())


async def _not_ready(cluster: Replicated) -> str:
    told = await cluster.get("/readyz", cluster.a)
    return "" if told["ready"] else f"it takes nothing new: {told['replicas']}"


async def _is(cluster: Replicated, gateway: GatewayProcess, name: str) -> str:
    return "" if await cluster.of(gateway, name) else f"{name} is 0"


async def test_a_gateway_that_is_told_to_stop_leaves_nothing(cluster: Replicated) -> None:
    name = (await cluster.get("/pdgate/replica", cluster.a))["replica"]
    keys = FailoverKeys("pdgate", "default")
    held = await hold(cluster, cluster.a, TOKEN, True)
    await asyncio.sleep(0.3)
    cluster.a.send_signal(signal.SIGTERM)
    await asyncio.sleep(1.5)
    assert cluster.redis.ask("HLEN", keys.attempts(name)) == 1, "it waits for what runs"
    assert cluster.redis.ask("HGET", keys.addresses(), name) == b"", "it cannot be asked any more"
    await cluster.release(held.hold)
    await held.whole()
    assert await cluster.a.wait(10.0) == 0
    assert cluster.redis.ask("EXISTS", keys.attempts(name)) == 0
    assert cluster.redis.ask("ZSCORE", keys.lives(), name) is None
    assert cluster.redis.ask("HEXISTS", keys.addresses(), name) == 0
    await asyncio.sleep(1.5)
    assert await cluster.of(cluster.b, "pdgate_replicas_absent") == 0


# ---- nobody dies -----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Clients of both gateways: every answer is whole, at the first attempt."""

    cluster: Replicated
    gateways: list[GatewayProcess]
    answers: int = 0
    _over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._tasks = [spawn(self._client(Random(number)), f"client {number}") for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _client(self, rng: Random) -> None:
        while not self._over:
            gateway, prompt = rng.choice(self.gateways), new_prompt()
            answer = await ask(self.cluster.http, gateway.url, chat(prompt, 10, stream=rng.random() < 0.5))
            answer.check_whole(expected_text(prompt, 10), attempts=1)
            self.answers += 1
            await asyncio.sleep(0.1)


Trouble = Callable[[Replicated, bool], Awaitable[None]]
"""Something that must abort nothing; the flag: at its full size."""


async def flushed(cluster: Replicated, full: bool) -> None:
    for _ in range(5 if full else 2):
        cluster.redis.ask("FLUSHALL")
        await asyncio.sleep(1.0)


async def restarted(cluster: Replicated, full: bool) -> None:
    await asyncio.to_thread(cluster.redis.kill)
    await asyncio.sleep(10.0 if full else 0.5)
    await asyncio.to_thread(cluster.redis.restart, empty=True)


async def restarted_with_its_data(cluster: Replicated, full: bool) -> None:
    """Leases that had ended long ago come back."""
    await asyncio.to_thread(cluster.redis.ask, "SAVE")
    await asyncio.to_thread(cluster.redis.kill)
    await asyncio.sleep(10.0 if full else LEASE_S)
    await asyncio.to_thread(cluster.redis.start)


async def frozen(cluster: Replicated, full: bool) -> None:
    cluster.redis.freeze()
    try:
        await asyncio.sleep(30.0 if full else 6.0)
    finally:
        cluster.redis.thaw()


async def failed_over(cluster: Replicated, full: bool) -> None:
    """One after the other comes to a server that knows nothing."""
    with RedisServer() as empty:
        for proxy in reversed(cluster.to_redis):
            proxy.lead_to(empty)
            await asyncio.sleep(5.0 if full else 1.0)
        await asyncio.sleep(10.0 if full else 1.0)
        for proxy in cluster.to_redis:
            proxy.lead_to(cluster.redis)


async def a_cut_off_from_redis(cluster: Replicated, full: bool) -> None:
    """Its lease is gone for as long as a dead one's, but it answers."""
    lift = cluster.to_redis[0].impose(SILENT, SILENT)
    try:
        await asyncio.sleep(60.0 if full else RELEASED_S - 1.0)
        assert await cluster.of(cluster.b, "pdgate_replicas_absent") == 1
    finally:
        lift()


async def a_frozen_for_less_than_its_lease(cluster: Replicated, full: bool) -> None:
    for _ in range(5 if full else 1):
        cluster.a.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S - 1.25)
        cluster.a.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.5)


async def a_frozen_for_longer_than_its_lease(cluster: Replicated, full: bool) -> None:
    """No lease and no answer, but not for long enough."""
    for _ in range(3 if full else 1):
        cluster.a.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + WATCHED_S - 1.5)
        cluster.a.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.5)


TROUBLES: tuple[tuple[Trouble, bool], ...] = (
    (flushed, True),
    (restarted, True),
    (restarted_with_its_data, True),
    (frozen, True),
    (failed_over, True),
    (a_cut_off_from_redis, True),
    (a_frozen_for_less_than_its_lease, False),
    (a_frozen_for_longer_than_its_lease, False),
)
"""With whether A's clients are served without a pause meanwhile."""


async def _aborts_nothing(cluster: Replicated, trouble: Trouble, served: bool, full: bool) -> None:
    before = await verdicts(cluster, *cluster.gateways)
    held = [*await hold_all(cluster, cluster.a), await hold(cluster, cluster.b, TOKEN, True)]
    async with Load(cluster, cluster.gateways if served else [cluster.b]) as load:
        await asyncio.sleep(0.5)
        await trouble(cluster, full)
        await asyncio.sleep(RELEASED_S if full else 2.5)
    assert load.answers > 20
    await let_go(cluster, held)
    for each in held:
        await each.whole()
    assert await verdicts(cluster, *cluster.gateways) == before


@pytest.mark.parametrize(("trouble", "served"), TROUBLES, ids=lambda each: getattr(each, "__name__", ""))
async def test_nothing_that_lives_is_aborted(cluster: Replicated, trouble: Trouble, served: bool) -> None:
    await _aborts_nothing(cluster, trouble, served, full=False)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trouble", "served"), TROUBLES, ids=lambda each: getattr(each, "__name__", ""))
async def test_nothing_that_lives_is_aborted_at_full_size(cluster: Replicated, trouble: Trouble, served: bool) -> None:
    await _aborts_nothing(cluster, trouble, served, full=True)
