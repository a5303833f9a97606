"""The composition root: builds every part of a gateway, starts and stops them in order.

`run` is `pdgate serve`. Nothing else builds parts, and no part knows another that it does not use.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from random import Random, SystemRandom

import uvloop
from aiohttp import web

from engines.fleet import Fleet
from engines.sglang import SglangEngine, SglangStrategy
from engines.sglang_wire import RoomMaker, new_rid
from engines.tasks import spawn
from engines.types import EngineId
from engines.upstream import Upstream
from failover.monitor import Monitor
from failover.poison import PoisonGuard
from gateway import logs, process, redis_flags, tokenizer
from gateway.canaries import Canaries, Way
from gateway.config import Config, ConfigError
from gateway.context import Gateway
from gateway.decider import Decider
from gateway.engine_kinds import EngineKinds
from gateway.engine_tokens import EngineTokens
from gateway.explain import ExplainRing
from gateway.gauges import gauges
from gateway.http_server import listen, make_runner, unheard
from gateway.join_probe import JoinProbe
from gateway.kv_engine_feed import Hashing
from gateway.kv_feed import KvFeed
from gateway.learned import Learned
from gateway.live import LiveRequests
from gateway.observability import Metrics
from gateway.owners import Owners
from gateway.prompt import block_tokens, chain_root, id_block_tokens
from gateway.releaser import Releaser
from gateway.replicas import Replicas
from gateway.retries import Retries
from gateway.second_look import SecondLook
from gateway.shared_state import KEY_PREFIX, Place, SharedState, opened
from gateway.suspects import ContentTrials
from gateway.tracing import Tracing
from routing.index import PrefixIndex
from routing.ownership import OwnershipConfig
from routing.policies import make_policy
from routing.prefix import BlockKind
from routing.queueing import QueueLimits, WaitingQueue

_log = logging.getLogger("pdgate")
_LOADS_PER_PROBE = 4
"""Load snapshots are cheap for a server (shared memory) and probes are not: take more of them."""
_WEDGED_AFTER_S = 60.0
"""A scheduler that compiles a kernel at its first use was seen to stand still for 30 s."""
_LAST_WORDS_S = 6.0
"""At shutdown, how long the last answers may take to be read."""
_TURNS_TO_ACCEPT = 3
"""At shutdown, of the loop: what has connected by then is taken, as the kernel breaks what waits on a closed port."""
_LAST_ARRIVALS_S = 0.2
"""At shutdown, how long a connection that was used before may take to ask again: one that closes unread loses that."""
_FIRST_ARRIVALS_S = 2.0
"""At shutdown, how long who has connected and never asked may take: that is mostly a request on its way."""
_LOOK_S = 0.05
_LAST_RELEASES_S = 6.0
"""At shutdown, how long abandoned attempts may take to be released: the five seconds of aborts, and one."""


def wall_clock_s() -> float:
    """Unix seconds; only for `created` fields."""
    return datetime.now(UTC).timestamp()


class _ToDecider:
    """Carries what the monitor saw to the decider, which is built after it."""

    decider: Decider | None = None

    def fleet_changed(self, engine_id: EngineId) -> None:
        if self.decider is not None:
            self.decider.fleet_changed(engine_id)

    def restarted(self, engine_id: EngineId) -> None:
        if self.decider is not None:
            self.decider.restarted(engine_id)


def build(config: Config, place: Place | None = None) -> Gateway:
    """All parts of a gateway, none of them started. Must run on the event loop.

    `place`: where ownership is kept; in this process, if none is given.
    """
    rng = Random(config.routing.seed)
    ids = SystemRandom()  # rids and rooms must differ between processes that share a seed
    fleet = Fleet((*config.fleet.prefills, *config.fleet.decodes))
    upstream = Upstream()
    engine = SglangEngine(upstream, config.server.api_key)
    model_tokenizer = tokenizer.load(config.tokenizer)
    joins = JoinProbe(fleet, engine, model_tokenizer)
    to_decider = _ToDecider()
    monitor = _monitor(config.fleet.probe_interval_s, fleet, engine, to_decider, ids)
    metrics = Metrics()
    learned = Learned(config.routing.profile)
    clock = asyncio.get_running_loop().time
    shared = SharedState(place or Place(), config.ownership.namespace, ids, clock, fleet.has)
    index = PrefixIndex(OwnershipConfig().max_blocks_per_engine)
    owners = Owners(index, shared.store, lambda model: block_tokens(model, joins, learned), clock)
    second_look = SecondLook(monitor, owners, fleet.view)
    owners.on_restart_seen = second_look
    decider = Decider(
        fleet,
        make_policy(config.routing.policy, config.routing.prefill_policy, config.routing.decode_policy),
        owners,
        learned,
        WaitingQueue(QueueLimits(config.queue.max_requests, config.queue.max_bytes)),
        rng,
        new_rid=lambda: new_rid(ids),
        is_stale=monitor.is_stale,
    )
    to_decider.decider = decider
    monitor.owed = decider.bookings.owed
    poison, rooms = PoisonGuard(), RoomMaker(Random(ids.getrandbits(64)))
    strategy, releaser = SglangStrategy(config.server.api_key), Releaser(fleet, decider.bookings, monitor, metrics)
    send_on = Way(fleet, strategy, upstream, monitor, releaser, rooms)
    live = LiveRequests()
    replicas = _replicas(shared, ids, decider, send_on, poison, live)
    hashing = _hashing(joins, lambda model, salt, lora: chain_root(gw, model, salt, lora))
    leases = replicas.leases if replicas is not None else None
    feed = KvFeed(fleet, owners, hashing, leases, restart_seen=monitor.look_now)
    canaries = Canaries(decider, send_on, ids, config.fleet.canary_interval_s)
    gw = Gateway(
        config=config,
        fleet=fleet,
        upstream=upstream,
        engine=engine,
        strategy=strategy,
        tokenizer=model_tokenizer,
        joins=joins,
        kinds=EngineKinds(fleet),
        engine_tokens=EngineTokens(fleet, engine),
        monitor=monitor,
        decider=decider,
        shared=shared,
        replicas=replicas,
        feed=feed,
        second_look=second_look,
        releaser=releaser,
        retries=Retries(config.retry, fleet, decider.bookings, Random(ids.getrandbits(64))),
        canaries=canaries,
        poison=poison,
        contents=ContentTrials(poison),
        rooms=rooms,
        rng=Random(ids.getrandbits(64)),
        live=live,
        explain=ExplainRing(config.explain.ring),
        metrics=metrics,
        tracing=Tracing(),
        wall_clock_s=wall_clock_s,
        started_s=int(wall_clock_s()),
    )
    metrics.add_fleet(lambda: gauges(gw))
    return gw


def _hashing(joins: JoinProbe, root: Callable[[str, str | None, str | None], bytes]) -> Hashing:
    """How KV events become the hashes that requests are looked up by."""
    return Hashing(
        is_ids=lambda model: joins.of(model).kind is BlockKind.IDS,
        chain_root=root,
        block_tokens=lambda model: id_block_tokens(joins.of(model).page_tokens),
    )


def _monitor(probe_s: float, fleet: Fleet, engine: SglangEngine, to_decider: _ToDecider, ids: Random) -> Monitor:
    return Monitor(
        fleet,
        engine,
        to_decider,
        spawn,
        probe_interval_s=probe_s,
        load_interval_s=probe_s / _LOADS_PER_PROBE,
        wedged_after_s=_WEDGED_AFTER_S,
        rng=Random(ids.getrandbits(64)),
    )


def _replicas(
    shared: SharedState, ids: Random, decider: Decider, way: Way, poison: PoisonGuard, live: LiveRequests
) -> Replicas | None:
    """What is shared besides ownership; None where nothing is."""
    if shared.link is None:
        return None
    return Replicas(
        shared.link,
        KEY_PREFIX,
        shared.fleet,
        shared.replica,
        spawn,
        Random(ids.getrandbits(64)),
        decider=decider,
        fleet=way.fleet,
        monitor=way.monitor,
        poison=poison,
        rooms=way.rooms,
        strategy=way.strategy,
        upstream=way.upstream,
        releaser=way.releaser,
        fence=live.fence,
        several=not shared.place.private,
    )


@asynccontextmanager
async def started(gw: Gateway) -> AsyncIterator[Gateway]:
    """The parts at work; on leaving, abandoned attempts are released and every task has ended.

    What was started is ended in the reverse order, also when a later part does not start, or an earlier end fails.
    """
    async with AsyncExitStack() as ends:
        ends.push_async_callback(gw.upstream.close)
        await gw.upstream.start()
        ends.push_async_callback(gw.shared.stop)
        await gw.shared.start()
        if gw.tokenizer is not None:
            ends.callback(gw.tokenizer.close)
        else:
            _log.info("no --tokenizer-path: prompts are hashed as text, and no KV events are followed")
        ends.push_async_callback(gw.monitor.stop)
        if gw.replicas is not None:
            ends.push_async_callback(gw.replicas.stop)
            await gw.replicas.start()
        gw.monitor.start()
        ends.push_async_callback(gw.joins.stop)
        gw.joins.start()
        ends.push_async_callback(gw.second_look.stop)
        ends.push_async_callback(gw.feed.stop)
        gw.feed.start()
        ends.push_async_callback(gw.releaser.drained, _LAST_RELEASES_S)
        ends.push_async_callback(gw.canaries.stop)
        gw.canaries.start()
        yield gw


async def serve(config: Config, *, announce: bool = True) -> int:
    """Serve until a stop signal; then no new connections, and what runs may end within the grace period."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in process.stop_signals():
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    async with opened(config.ownership) as place, started(build(config, place)) as gw:
        runner = make_runner(gw, _LAST_WORDS_S)
        await runner.setup()
        try:
            port = await listen(runner, config.server.host, config.server.port)
        except OSError as error:
            print(
                f"pdgate: cannot listen on {config.server.host}:{config.server.port}: {error.strerror}", file=sys.stderr
            )
            await runner.cleanup()
            return 1
        process.collect_rarely()
        _advertise(gw, port)
        if announce:
            _announce(config, port, gw.shared.line)
        await stop.wait()
        await _drain(gw, runner, hurry, config.deadlines.shutdown_grace_s)
        await runner.cleanup()
    return 0


def _advertise(gw: Gateway, port: int) -> None:
    """Tell other gateways where to ask whether this one is there."""
    if gw.replicas is None or gw.shared.place.private:
        return
    server, redis_url = gw.config.server, gw.config.ownership.url or ""
    address = server.advertise_url or redis_flags.listener_address(server.host, port, redis_url)
    if not address:
        _log.warning(
            "no --advertise-url, and other gateways cannot use %s: if this gateway's host is lost, what it runs stays "
            "on the servers until they notice",
            server.host,
        )
    gw.replicas.advertise(address)


async def _drain(gw: Gateway, runner: web.AppRunner, hurry: asyncio.Event, grace_s: float) -> None:
    """No new connections; what runs may end within the grace period, or until a second signal. The rest is told."""
    if gw.replicas is not None:
        gw.replicas.advertise("")  # from now on it does not answer those who ask
    for _ in range(_TURNS_TO_ACCEPT):
        await asyncio.sleep(0)
    for site in tuple(runner.sites):
        await site.stop()
    await _last_arrivals(runner)
    _log.info(
        "stopping: no new connections, waiting for %d requests; at most %g s, or until a second signal",
        len(gw.live),
        grace_s,
    )
    waits = [spawn(gw.live.idle(), "drain"), spawn(hurry.wait(), "second signal")]
    await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    if ended := gw.live.shut_down():
        _log.warning("%d requests were ended with an error, as they had not ended in time", ended)


async def _last_arrivals(runner: web.AppRunner) -> None:
    """Who has connected is heard."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + _FIRST_ARRIVALS_S
    await asyncio.sleep(_LAST_ARRIVALS_S)
    while unheard(runner):
        if clock() >= until_s:
            return
        await asyncio.sleep(_LOOK_S)


def _announce(config: Config, port: int, ownership: str) -> None:
    """One line for every note, and one for what is served where."""
    for note in config.notes:
        _log.warning("%s", note)
    _log.info(
        "listening on http://%s:%s for %d prefill and %d decode servers, policy %s; prefix ownership %s",
        f"[{config.server.host}]" if ":" in config.server.host else config.server.host,
        port,
        len(config.fleet.prefills),
        len(config.fleet.decodes),
        config.routing.shown,
        ownership,
    )


def run(config: Config) -> int:
    """`pdgate serve`: the exit code."""
    level = {"warn": "WARNING"}.get(config.server.log_level, config.server.log_level.upper())
    process.prepare()
    with logs.to_stderr(level):
        try:
            return uvloop.run(serve(config))
        except ConfigError as error:
            print(f"pdgate serve: error: {error}", file=sys.stderr)
            return 2
