"""The composition root: builds every part of a gateway, starts and stops them in order.

`run` is `pdgate serve`. Nothing else builds parts, and no part knows another that it does not use.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from gateway import admin_api, logs, process
from gateway.candidates import BLOCK_BYTES
from gateway.config import Config
from gateway.context import Gateway
from gateway.decider import Decider
from gateway.explain import ExplainRing
from gateway.http_server import listen, make_runner
from gateway.learned import Learned
from gateway.live import LiveRequests
from gateway.observability import Metrics
from gateway.owners import Owners
from gateway.releaser import Releaser
from gateway.shared_state import SharedState
from gateway.tracing import Tracing
from routing.index import PrefixIndex
from routing.policies import make_policy
from routing.queueing import QueueLimits, WaitingQueue

_log = logging.getLogger("pdgate")
_LOADS_PER_PROBE = 4
"""Load snapshots are cheap for a server (shared memory) and probes are not: take more of them."""
_LAST_WORDS_S = 6.0
"""At shutdown, how long the last answers may take to be read."""
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


def build(config: Config) -> Gateway:
    """All parts of a gateway, none of them started. Must run on the event loop."""
    rng = Random(config.routing.seed)
    ids = SystemRandom()  # rids and rooms must differ between processes that share a seed
    fleet = Fleet((*config.fleet.prefills, *config.fleet.decodes))
    upstream = Upstream()
    engine = SglangEngine(upstream, config.server.api_key)
    to_decider = _ToDecider()
    probe_s = config.fleet.probe_interval_s
    monitor = Monitor(
        fleet, engine, to_decider, spawn, probe_interval_s=probe_s, load_interval_s=probe_s / _LOADS_PER_PROBE
    )
    metrics = Metrics()
    learned = Learned(config.routing.profile)
    shared = SharedState(config.ownership, ids, asyncio.get_running_loop().time, fleet.has)
    owners = Owners(PrefixIndex(), shared.store, lambda model: BLOCK_BYTES / learned.bytes_per_token(model))
    owners.on_restart_seen = _looker(monitor, fleet, owners)
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
    gw = Gateway(
        config=config,
        fleet=fleet,
        upstream=upstream,
        engine=engine,
        strategy=SglangStrategy(config.server.api_key),
        monitor=monitor,
        decider=decider,
        shared=shared,
        releaser=Releaser(fleet, decider.bookings, monitor, metrics),
        poison=PoisonGuard(),
        rooms=RoomMaker(Random(ids.getrandbits(64))),
        rng=Random(ids.getrandbits(64)),
        live=LiveRequests(),
        explain=ExplainRing(config.explain.ring),
        metrics=metrics,
        tracing=Tracing(),
        wall_clock_s=wall_clock_s,
        started_s=int(wall_clock_s()),
    )
    metrics.add_fleet(lambda: admin_api.fleet_gauges(gw))
    return gw


def _looker(monitor: Monitor, fleet: Fleet, owners: Owners) -> Callable[[EngineId], None]:
    """Looks at an engine of which others have seen a newer boot; one look at a time."""
    looking: set[EngineId] = set()

    async def look(engine_id: EngineId) -> None:
        try:
            if await monitor.probe_now(engine_id):
                owners.seen_again(fleet.view(engine_id))
        finally:
            looking.discard(engine_id)

    def look_once(engine_id: EngineId) -> None:
        if engine_id not in looking and fleet.has(engine_id):
            looking.add(engine_id)
            spawn(look(engine_id), f"look again at {engine_id}")

    return look_once


@asynccontextmanager
async def started(gw: Gateway) -> AsyncIterator[Gateway]:
    """The parts at work; on leaving, abandoned attempts are released and every task has ended."""
    await gw.upstream.start()
    await gw.shared.start()
    gw.monitor.start()
    try:
        yield gw
    finally:
        await gw.releaser.drained(_LAST_RELEASES_S)
        await gw.monitor.stop()
        await gw.shared.stop()
        await gw.upstream.close()


async def serve(config: Config, *, announce: bool = True) -> int:
    """Serve until a stop signal; then no new connections, and what runs may end within the grace period."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in process.stop_signals():
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    gw = build(config)
    async with started(gw):
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
        if announce:
            _announce(config, port, gw.shared.line)
        await stop.wait()
        await _drain(gw, runner, hurry, config.deadlines.shutdown_grace_s)
        await runner.cleanup()
    return 0


async def _drain(gw: Gateway, runner: web.AppRunner, hurry: asyncio.Event, grace_s: float) -> None:
    """No new connections; what runs may end within the grace period, or until a second signal. The rest is told."""
    for site in tuple(runner.sites):
        await site.stop()
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
        return uvloop.run(serve(config))
