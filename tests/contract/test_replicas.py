"""What gateways of one fleet share through a real Redis: bookings, process ids, leases, suspicion, refused requests.

Each gateway here is real but for its HTTP edge; its engines are looked at by a stand-in. "Killed" means that it stops
in the middle, without a word.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random

import orjson
import pytest

from engines.base import Probe
from engines.errors import UpstreamError
from engines.sglang import SglangStrategy
from engines.sglang_wire import RoomMaker
from engines.tasks import spawn
from engines.timing import PrefillWork
from engines.types import EngineId, EngineLoad, EngineSpec, FailureKind, Health, Leg, Outcome, Stage
from engines.upstream import Reply
from failover.journal import FailoverKeys
from failover.monitor import Monitor
from failover.poison import PoisonGuard
from failover.shared_process import ProcessId
from gateway.bookings import Booking
from gateway.observability import Metrics
from gateway.releaser import Releaser
from gateway.replicas import REPLICA_PATH, Replicas, _FailoverLink
from routing.ownership import Keys
from routing.redis_link import Link
from tests.fakes import FACTS, decider, now_s, up
from tests.machine import Stopwatch
from tests.redis_servers import RedisCluster, RedisServer

P0, D0 = EngineId("http://p0"), EngineId("http://d0")
NAMES = ("p0", "p1", "d0", "d1")
LEASES = [f"events {number}" for number in range(9)]
_serial = count(1)


class Prober:
    """Finds every engine ready, after `takes_s`."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self.looks: Counter[EngineId] = Counter()

    async def probe(self, spec: EngineSpec, timeout_s: float) -> Probe:
        self.looks[spec.engine_id] += 1
        await asyncio.sleep(self.takes_s)
        return Probe(spec.engine_id, True, True, facts=FACTS)

    async def load(self, spec: EngineSpec, timeout_s: float) -> EngineLoad | None:
        return None


class _Deaf:
    def fleet_changed(self, engine_id: EngineId) -> None: ...
    def restarted(self, engine_id: EngineId) -> None: ...


class Outside:
    """Other gateways and servers, as one gateway reaches them: probes are answered as `names` says, aborts taken."""

    def __init__(self) -> None:
        self.names: dict[str, Callable[[], str | None]] = {}
        """By address; who is not in it does not answer."""
        self.aborted: list[tuple[str, str]] = []
        """Server and rid."""
        self.deaf: set[str] = set()
        """Servers that answer no abort."""
        self.abort_takes_s = 0.0

    async def fetch(self, method: str, url: str, *, body: bytes | None = None, **further: object) -> Reply:
        await asyncio.sleep(0)
        if method == "GET":
            name = self.names.get(url.removesuffix(REPLICA_PATH), lambda: None)()
            if name is None:
                raise UpstreamError(FailureKind.TIMEOUT, "no answer")
            return Reply(200, {}, orjson.dumps({"replica": name}))
        server = url.removesuffix("/abort_request")
        await asyncio.sleep(self.abort_takes_s)
        if server in self.deaf:
            raise UpstreamError(FailureKind.TIMEOUT, "no answer")
        self.aborted.append((server, orjson.loads(body or b"")["rid"]))
        return Reply(200, {}, b"")


class Replica:
    """One gateway."""

    def __init__(self, url: str, fleet: str) -> None:
        number = next(_serial)
        self.link = Link(url, spawn, lambda state: None, timeout_s=1.0, rng=Random(number))
        self.fleet = up(*NAMES)
        self.decider = decider(self.fleet)
        self.bookings = self.decider.bookings
        self.prober = Prober()
        self.monitor = Monitor(self.fleet, self.prober, _Deaf(), spawn, probe_interval_s=60.0, load_interval_s=60.0)
        self.poison = PoisonGuard()
        self.rooms = RoomMaker(Random(f"rooms of {number}"))
        self.outside = Outside()
        self.releaser = Releaser(self.fleet, self.bookings, self.monitor, Metrics())
        self.fencings = 0
        self.replicas = Replicas(
            self.link,
            "pdgate",
            fleet,
            f"replica-{number}",
            spawn,
            Random(number),
            decider=self.decider,
            fleet=self.fleet,
            monitor=self.monitor,
            poison=self.poison,
            rooms=self.rooms,
            strategy=SglangStrategy(),
            upstream=self.outside,  # type: ignore[arg-type]
            releaser=self.releaser,
            fence=self._fence,
        )
        self.leases = self.replicas.leases
        self.dead = False

    def _fence(self) -> None:
        self.fencings += 1

    async def start(self) -> None:
        await self.link.start()
        await self.replicas.start()

    async def kill(self) -> None:
        """Nothing leaves it any more."""
        self.dead = True
        await self.link.stop()

    async def stop(self) -> None:
        await self.replicas.stop()
        await self.monitor.stop()
        if not self.dead:
            await self.link.stop()

    def book(self, rid: str = "r", tokens: int = 100) -> Booking:
        booking = Booking(rid, P0, D0, PrefillWork(tokens), tokens + 50, 0.5, now_s())
        self.bookings.book(booking)
        return booking

    def promised(self) -> tuple[int, int, int, int, int]:
        """What is promised by all, as this one knows it."""
        b = self.bookings
        return (
            b.uncached_tokens(P0),
            b.prefill_requests(P0),
            b.prefill_kv_tokens(P0),
            b.decode_kv_tokens(D0),
            b.decode_requests(D0),
        )

    def health(self) -> Health:
        return self.fleet.view(P0).health

    def leg_broke(self, engine_id: EngineId = P0) -> None:
        self.monitor.leg_failed(Outcome(engine_id, Leg.PREFILL, FailureKind.RESET, Stage.DISPATCHED, "connection lost"))

    def holds(self) -> set[str]:
        return {name for name in LEASES if self.leases.hold(name)}


async def until(true: Callable[[], object], within_s: float = 2.0) -> float:
    """How long it took by the clock; fails after `within_s`, by a stopwatch."""
    watch, began_s = Stopwatch(), time.monotonic()
    while not true():
        assert not watch.passed(within_s), f"not so within {within_s} s"
        await asyncio.sleep(0.001)
    return time.monotonic() - began_s


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def fleet() -> str:
    return f"fleet-{next(_serial)}"


@asynccontextmanager
async def gateways(url: str, fleet: str, number: int = 2) -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        replicas = [Replica(url, fleet) for _ in range(number)]
        for replica in replicas:
            stack.push_async_callback(replica.stop)
            await replica.start()
        yield replicas


async def known_to_each_other(*replicas: Replica) -> None:
    """Until each hears all others: streams are read from their ends."""
    for replica in replicas:
        others = [other for other in replicas if other is not replica]
        booking = replica.book("hello")
        for other in others:
            await until(lambda other=other: other.promised()[1])  # type: ignore[misc]
        replica.bookings.release(booking, now_s())
        for other in others:
            await until(lambda other=other: not other.promised()[1])  # type: ignore[misc]


# ---- bookings --------------------------------------------------------------------------------------------------------


async def test_others_see_a_booking_within_100_ms(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        delays_s = []
        for number in range(40):
            booking = a.book(f"r{number}", tokens=100 + number)
            watch = Stopwatch()
            delays_s.append(watch.of(await until(lambda: b.promised()[0])))
            assert b.promised() == a.promised() == (100 + number, 1, 100 + number, 150 + number, 1)
            assert b.bookings.live() == 0
            a.bookings.release(booking, now_s())
            watch = Stopwatch()
            delays_s.append(watch.of(await until(lambda: not any(b.promised()))))
        delays_s.sort()
        print(f"bookings seen after: p50 {delays_s[40] * 1e3:.1f} ms, p99 {delays_s[78] * 1e3:.1f} ms")
        assert delays_s[78] <= 0.1


async def test_sums_are_of_all_gateways(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 3) as replicas:
        await known_to_each_other(*replicas)
        for number, replica in enumerate(replicas):
            replica.book(f"r{number}", tokens=20_000 + 10**number)
        for replica in replicas:
            await until(lambda replica=replica: replica.promised() == (60_111, 3, 60_111, 60_261, 3))  # type: ignore[misc]
        timing = replicas[0].decider.learned.prefill_timing(P0, FACTS.chunk_tokens)
        alone_s = 20_000 * timing.per_token_s
        for replica in replicas:
            others_s = replica.bookings.queue_s(P0, timing, now_s()) - replica.bookings.own_queue_s(P0, timing, now_s())
            assert 1.5 * alone_s < others_s < 2.5 * alone_s


async def test_bookings_of_a_killed_gateway_count_for_a_second(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        a.book()
        await until(lambda: b.promised()[1])
        await asyncio.sleep(1.2)
        assert b.promised() == (100, 1, 100, 150, 1), "said again and again"
        killed_s = time.monotonic()
        await a.kill()
        await until(lambda: not any(b.promised()), 1.2)
        assert time.monotonic() - killed_s >= 0.7
        assert b.replicas.status().booked_elsewhere == 0


async def test_a_gateway_that_stops_takes_its_bookings_along(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        a.book()
        await until(lambda: b.promised()[1])
        await a.replicas.stop()
        await until(lambda: not any(b.promised()), 0.2)


async def test_a_newcomer_learns_what_is_booked(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 1) as (a,):
        a.book()
        await asyncio.sleep(0.1)
        async with gateways(server.url, fleet, 1) as (b,):
            await until(lambda: b.promised()[1], 0.5)


async def test_bookings_come_back_after_a_flush(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        server.ask("FLUSHALL")
        a.book()
        await until(lambda: b.promised()[1], 2.5)


async def test_an_idle_gateway_says_nothing(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        stream = Keys("pdgate", fleet).bookings()
        entries = server.ask("XLEN", stream)
        await asyncio.sleep(0.35)
        assert server.ask("XLEN", stream) == entries


# ---- process ids -----------------------------------------------------------------------------------------------------


class Claims:
    """Many claims of ids out of 128, over one link."""

    def __init__(self, link: Link, keys: FailoverKeys, number: int) -> None:
        way = _FailoverLink(link)
        self.took: list[list[int]] = [[] for _ in range(number)]
        self.came_back = 0
        self.all = [
            ProcessId(
                way, keys, f"{keys.fleet} {at}", spawn, Random(at), taken=took.append, came_back=self._back, bits=7
            )
            for at, took in enumerate(self.took)
        ]

    def _back(self) -> None:
        self.came_back += 1

    def ids(self) -> list[int | None]:
        return [each.id for each in self.all]

    def clash(self) -> bool:
        ids = self.ids()
        return None in ids or len(set(ids)) < len(ids)


async def test_no_two_of_50_claims_get_one_id_and_none_after_a_flush(server: RedisServer, fleet: str) -> None:
    link, keys = Link(server.url, spawn, lambda state: None), FailoverKeys("pdgate", fleet)
    await link.start()
    claims = Claims(link, keys, 50)
    for each in claims.all:
        await each.start()
    await until(lambda: None not in claims.ids())
    assert not claims.clash()
    assert [took[-1] for took in claims.took] == claims.ids()

    server.ask("FLUSHALL")
    await until(lambda: claims.came_back == 50, 3.0)
    assert not claims.clash()
    assert server.ask("DBSIZE") == 50

    stolen, thief = claims.all[0].id, keys.process(claims.all[0].id or 0)
    server.ask("SET", thief, "another")
    await until(lambda: claims.all[0].id not in (None, stolen), 3.0)
    assert not claims.clash()
    assert claims.took[0][-1] == claims.all[0].id

    ids = claims.ids()
    for each in claims.all:
        await each.stop()
    left_ms = [server.ask("PTTL", keys.process(each or 0)) for each in ids]
    assert all(690_000 < each <= 700_000 for each in left_ms)
    server.ask("DEL", thief)

    later = Claims(link, FailoverKeys("pdgate", fleet), 50)
    for each in later.all:
        each._owner += " later"
        await each.start()
    await until(lambda: None not in later.ids())
    assert not later.clash()
    assert not set(later.ids()) & set(ids)
    for each in later.all:
        await each.stop()
    await link.stop()


async def test_rooms_begin_with_the_claimed_id(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 1) as (a,):
        await until(lambda: a.replicas.status().process_id is not None)
        process_id = a.replicas.status().process_id
        assert a.rooms.next_room() >> 43 == process_id
        key = FailoverKeys("pdgate", fleet).process(process_id or 0)
        assert server.ask("PTTL", key) > 700_000, "its rooms outlive it, should it die"


# ---- leases ----------------------------------------------------------------------------------------------------------


def shared_out(*replicas: Replica) -> bool:
    """Each lease has one holder among them."""
    return sorted(name for replica in replicas for name in replica.holds()) == sorted(LEASES)


def fair(*replicas: Replica) -> bool:
    return max(len(each.holds()) for each in replicas) <= -(-len(LEASES) // len(replicas))


async def test_leases_have_one_holder_and_spread_and_come_back(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 3) as (a, b, c):
        a.holds()
        await until(lambda: shared_out(a))
        tokens = {name: a.leases.token(name) for name in LEASES}
        for newcomer in (b, c):
            newcomer.holds()
        took_s = await until(lambda: shared_out(a, b, c) and fair(a, b, c), 3.0)
        print(f"three gateways share {len(LEASES)} leases after {took_s * 1e3:.0f} ms")
        for _ in range(120):
            await asyncio.sleep(0.005)
            assert shared_out(a, b, c), "nothing moves any more"
        moved = b.holds() | c.holds()
        assert all(b.leases.token(name) or c.leases.token(name) > tokens[name] for name in moved)

        await b.kill()
        took_s = await until(lambda: shared_out(a, c), 4.0)
        print(f"taken over {took_s:.2f} s after a death")
        assert fair(a, c)

        await c.replicas.stop()
        await until(lambda: shared_out(a), 0.5)


async def test_without_redis_everybody_acts_and_one_remains_when_it_is_back(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 3) as (a, b, c):
        await until(lambda: shared_out(a, b, c) and fair(a, b, c), 3.0)
        server.freeze()
        try:
            began_s = time.monotonic()
            while time.monotonic() - began_s < 1.0:
                assert shared_out(a, b, c), "the last answer is good for a while"
                await asyncio.sleep(0.05)
            await until(lambda: all(each.holds() == set(LEASES) for each in (a, b, c)), 3.0)
            assert all(each.replicas.status().alone for each in (a, b, c))
            assert a.leases.token(LEASES[0]) == 0
        finally:
            server.thaw()
        took_s = await until(lambda: shared_out(a, b, c), 4.0)
        print(f"one holder each {took_s:.2f} s after Redis went on")
        await asyncio.sleep(0.5)
        assert shared_out(a, b, c)


async def test_a_lease_that_is_let_go_is_taken_by_who_wants_it(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        a.leases.hold("x")
        await until(lambda: a.leases.hold("x"))
        assert not b.leases.hold("x")
        await asyncio.sleep(0.2)
        assert not b.leases.hold("x")
        assert a.leases.hold("x")
        a.leases.let_go("x")
        await until(lambda: b.leases.hold("x"))
        assert a.leases.held() == ()


async def test_a_lease_that_only_one_wants_is_his_beyond_his_share(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await until(lambda: shared_out(a, b) and fair(a, b), 3.0)
        b.leases.hold("x")
        for name in LEASES:
            b.leases.let_go(name)
        took_s = await until(lambda: shared_out(a), 4.0)
        assert took_s > 0.5, "they were left to b for a while"
        await asyncio.sleep(0.3)
        assert shared_out(a)
        assert b.leases.held() == ("x",)


# ---- suspicion -------------------------------------------------------------------------------------------------------


async def test_a_suspicion_reaches_the_others_at_once(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        b.prober.takes_s = 0.2
        a.leg_broke()
        took_s = await until(lambda: b.health() is Health.SUSPECTED, 0.1)
        print(f"suspicion heard after {took_s * 1e3:.1f} ms")
        assert "connection lost" in b.fleet.view(P0).reason
        await until(lambda: b.health() is Health.READY, 0.5)
        assert b.prober.looks == {P0: 1}
        assert (b.replicas.status().suspicions_sent, a.replicas.status().suspicions_heard) == (0, 0), "not sent on"
        assert b.fleet.view(D0).health is Health.READY


async def test_a_suspicion_of_another_boot_is_only_a_reason_to_look(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        a.fleet.set_facts(P0, replace(FACTS, boot_fingerprint="another boot"))
        seen: set[Health] = set()
        b.prober.takes_s = 0.1
        a.leg_broke()
        while not b.prober.looks[P0]:
            seen.add(b.health())
            await asyncio.sleep(0.001)
        assert seen == {Health.READY}


async def test_who_cannot_reach_an_engine_does_not_keep_others_from_it(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        usable = looks = 0
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            a.fleet.set_health(P0, Health.READY)
            a.leg_broke()
            await asyncio.sleep(0.005)
            usable += b.health() is Health.READY
            looks += 1
        assert usable >= 0.9 * looks
        assert b.replicas.status().suspicions_acted == 1


# ---- poison ----------------------------------------------------------------------------------------------------------


async def test_a_refused_request_is_refused_everywhere_and_after_a_restart_and_a_flush(
    server: RedisServer, fleet: str
) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await known_to_each_other(a, b)
        a.poison.refuse(b"deadly", now_s())
        took_s = await until(lambda: b.poison.is_refused(b"deadly", now_s()), 0.2)
        print(f"refused elsewhere after {took_s * 1e3:.1f} ms")
        for each in (a, b):
            await each.replicas.stop()
        async with gateways(server.url, fleet, 1) as (c,):
            await until(lambda: c.poison.is_refused(b"deadly", now_s()))
            ((_, left_s),) = c.poison.refused(now_s())
            assert 590.0 < left_s <= 600.0
            server.ask("FLUSHALL")
            await until(lambda: server.ask("ZCARD", FailoverKeys("pdgate", fleet).poison()) == 1, 3.0)
            async with gateways(server.url, fleet, 1) as (d,):
                await until(lambda: d.poison.is_refused(b"deadly", now_s()))


# ---- Redis dies ------------------------------------------------------------------------------------------------------


async def test_while_redis_is_dead_nothing_waits_and_afterwards_all_agree(fleet: str) -> None:
    with RedisServer() as server:
        async with gateways(server.url, fleet) as (a, b):
            await known_to_each_other(a, b)
            await until(lambda: shared_out(a, b))
            b.book("theirs")
            await until(lambda: a.promised()[1])
            server.kill()
            longest_s = 0.0
            ends_s = time.monotonic() + 3.0
            number = 0
            while time.monotonic() < ends_s:
                began_s = time.process_time()
                booking = a.book(f"r{number}")
                a.leg_broke()
                a.fleet.set_health(P0, Health.READY)
                a.poison.refuse(b"%d" % (number % 5), now_s())
                a.rooms.next_room()
                a.leases.hold(LEASES[0])
                a.leases.token(LEASES[0])
                a.replicas.status()
                a.bookings.release(booking, now_s())
                longest_s = max(longest_s, time.process_time() - began_s)
                number += 1
                await asyncio.sleep(0.01)
            print(f"longest of {number} rounds: {longest_s * 1e3:.2f} ms of CPU")
            assert longest_s < 0.02
            assert not any(a.promised()), "what others had booked is forgotten"
            assert a.leases.hold(LEASES[0])
            assert b.leases.hold(LEASES[0])
            assert not b.poison.is_refused(b"0", now_s())

            server.restart(empty=True)
            await until(lambda: all(b.poison.is_refused(b"%d" % each, now_s()) for each in range(5)), 5.0)
            await until(lambda: shared_out(a, b), 5.0)
            await until(lambda: a.promised() == (100, 1, 100, 150, 1), 5.0)
            a.leg_broke(D0)
            await until(lambda: b.replicas.status().suspicions_acted)


# ---- Cluster ---------------------------------------------------------------------------------------------------------


async def test_all_of_it_on_a_cluster(fleet: str) -> None:
    with RedisCluster() as cluster:
        async with gateways(cluster.url, fleet) as (a, b):
            await known_to_each_other(a, b)
            await until(lambda: shared_out(a, b) and fair(a, b), 3.0)
            await until(lambda: a.replicas.status().process_id is not None)
            a.poison.refuse(b"deadly", now_s())
            await until(lambda: b.poison.is_refused(b"deadly", now_s()))
            b.prober.takes_s = 0.1
            a.leg_broke()
            await until(lambda: b.health() is Health.SUSPECTED)
            await a.replicas.stop()
            await until(lambda: shared_out(b))
