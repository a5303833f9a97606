"""Gateways that die, as the others see it through a real Redis: the journal, the rule of death, the reaper, fencing.

Times are a fifth of the real ones. A gateway is dead when nothing leaves it any more and its address is silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from engines.sglang_wire import RID_CHARS
from engines.types import EngineId
from failover import reaper, reaping, shared_reaper
from failover.journal import FailoverKeys, Server, pack_attempt, unpack_attempt
from failover.reaper import Verdict
from failover.shared_attempts import FLUSH_S
from tests.contract.test_replicas import D0, P0, Replica, until
from tests.fakes import FACTS, now_s
from tests.redis_servers import RedisCluster, RedisServer

LEASE_S = 0.55
DEAD_S = LEASE_S * 4 + 0.5
"""By then one that died is reaped."""
PACE_S = 0.1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reaper, reaping, shared_reaper):
        monkeypatch.setattr(module, "LEASE_S", LEASE_S)
    monkeypatch.setattr(reaper, "WATCHED_S", 2 * LEASE_S)
    monkeypatch.setattr(reaper, "GAP_S", LEASE_S)
    monkeypatch.setattr(shared_reaper, "GAP_S", LEASE_S)
    monkeypatch.setattr(shared_reaper, "LOOK_S", 2 * PACE_S)
    monkeypatch.setattr(shared_reaper, "LOOK_CLOSER_S", PACE_S)
    monkeypatch.setattr(reaping, "_RENEW_S", 2 * PACE_S)
    monkeypatch.setattr(reaping, "_AGAIN_S", PACE_S)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def fleet(server: RedisServer) -> str:
    server.ask("FLUSHALL")
    return "f"


def address_of(replica: Replica) -> str:
    return f"http://{id(replica):x}"


def names(replicas: list[Replica]) -> list[str]:
    return [each.replicas.name for each in replicas]


def answer_each_other(*replicas: Replica) -> None:
    """Each answers at its address, but for the dead."""
    for asking in replicas:
        for asked in replicas:
            asking.outside.names[address_of(asked)] = lambda asked=asked: None if asked.dead else asked.replicas.name  # type: ignore[misc]


@asynccontextmanager
async def gateways(url: str, fleet: str, number: int = 2) -> AsyncIterator[list[Replica]]:
    """Replicas that all know each other."""
    async with AsyncExitStack() as stack:
        replicas = [Replica(url, fleet) for _ in range(number)]
        answer_each_other(*replicas)
        for replica in replicas:
            stack.push_async_callback(replica.stop)
            await replica.start()
            replica.replicas.advertise(address_of(replica))
        for replica in replicas:
            await until(lambda replica=replica: replica.replicas.status().live == number)  # type: ignore[misc]
        await asyncio.sleep(2 * PACE_S)
        yield replicas


def journal(server: RedisServer, name: str) -> dict[str, bytes]:
    found = server.ask("HGETALL", FailoverKeys("pdgate", "f").attempts(name))
    return {rid.decode(): value for rid, value in zip(found[::2], found[1::2], strict=True)}


async def stays(true: Callable[[], object], for_s: float) -> None:
    until_s = now_s() + for_s
    while now_s() < until_s:
        assert true()
        await asyncio.sleep(0.02)


def aborts(replica: Replica) -> list[tuple[str, str]]:
    return sorted(replica.outside.aborted)


def rid(name: str) -> str:
    return name.ljust(RID_CHARS, "0")


R = rid("r")
BOTH = [(str(D0), R), (str(P0), R)]


# ---- the journal -----------------------------------------------------------------------------------------------------


async def test_attempts_are_journaled_while_they_live(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 1) as (a,):
        booking = a.book(R)
        await until(lambda: journal(server, a.replicas.name))
        value = pack_attempt(*(Server(each, FACTS.boot_fingerprint) for each in (P0, D0)))
        assert journal(server, a.replicas.name) == {R: value}
        assert unpack_attempt(value)[0].fingerprint == "boot"
        a.bookings.prefill_done(booking, now_s())
        await asyncio.sleep(3 * FLUSH_S)
        assert journal(server, a.replicas.name), "its decode still runs"
        a.bookings.release(booking, now_s())
        await until(lambda: not journal(server, a.replicas.name))


async def test_an_attempt_that_is_being_released_stays_in_the_journal(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 1) as (a,):
        booking = a.book(R)
        a.releaser._rids.add(R)
        a.bookings.release(booking, now_s())
        await until(lambda: journal(server, a.replicas.name))
        a.releaser._over(R, asyncio.ensure_future(asyncio.sleep(0)))
        await until(lambda: not journal(server, a.replicas.name))


async def test_the_journal_is_whole_again_after_a_flush(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        bookings = [a.book(rid(f"r{number:04d}")) for number in range(2500)]
        await until(lambda: len(journal(server, a.replicas.name)) == 2500)
        server.ask("FLUSHALL")
        a.bookings.release(bookings[0], now_s())
        await until(lambda: len(journal(server, a.replicas.name)) == 2499)
        await until(lambda: b.replicas.status().live == 2)


async def test_a_gateway_that_stops_leaves_nothing(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        name = a.replicas.name
        a.book(R)
        await until(lambda: journal(server, name))
        await a.replicas.stop()
        assert not journal(server, name)
        await until(lambda: b.replicas.status().live == 1, 2 * PACE_S + 0.2)
        await stays(lambda: not b.replicas.status().absent, DEAD_S)


# ---- death -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3])
async def test_one_gateway_releases_what_a_dead_one_had(server: RedisServer, fleet: str, number: int) -> None:
    async with gateways(server.url, fleet, number) as (a, *others):
        a.book(R)
        others[0].book(rid("other"))
        await until(lambda: journal(server, a.replicas.name))
        await a.kill()
        await stays(lambda: not any(map(aborts, others)), 2 * LEASE_S)
        await until(lambda: sum(each.replicas.status().reaped for each in others), DEAD_S)
        assert sorted(abort for each in others for abort in aborts(each)) == BOTH
        assert sum(each.replicas.status().released for each in others) == 1
        await until(lambda: not any(each.replicas.status().absent for each in others))
        assert not journal(server, a.replicas.name)
        assert set(journal(server, others[0].replicas.name)) == {rid("other")}
        assert server.ask("EXISTS", FailoverKeys("pdgate", fleet).reaped(a.replicas.name)) == 1, "until it comes back"


async def test_servers_that_do_not_answer_are_asked_again(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        for number in range(100):
            a.book(rid(f"r{number:04d}"))
        await until(lambda: len(journal(server, a.replicas.name)) == 100)
        b.outside.deaf.add(str(P0))
        await a.kill()
        await until(lambda: len(aborts(b)) == 100, DEAD_S)
        await asyncio.sleep(3 * PACE_S)
        assert {name for name, _ in aborts(b)} == {str(D0)}
        assert b.replicas.status().reaped == 0
        b.outside.deaf.clear()
        await until(lambda: b.replicas.status().reaped)
        assert len(set(aborts(b))) == len(aborts(b)) == 200


async def test_a_server_known_by_another_name_is_found_by_its_boot(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        known = FailoverKeys("pdgate", fleet).attempts(a.replicas.name)
        server.ask("HSET", known, R, pack_attempt(Server(P0), Server(EngineId("http://proxy"), "boot")))
        server.ask("HSET", known, rid("lost"), pack_attempt(Server(P0), Server(EngineId("http://proxy"), "another")))
        server.ask("HSET", known, "rubbish", b"?")
        await a.kill()
        await until(lambda: b.replicas.status().reaped, DEAD_S)
        assert aborts(b) == [(str(P0), rid("lost")), (str(P0), R), (str(P0), R)], "all here have one boot"


async def test_what_a_live_gateway_has_journaled_too_is_that_ones(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        a.book(R)
        a.book(rid("mine"))
        b.book(rid("mine"))
        await until(lambda: len(journal(server, a.replicas.name)) == 2 and journal(server, b.replicas.name))
        await a.kill()
        await until(lambda: b.replicas.status().reaped, DEAD_S)
        assert aborts(b) == BOTH
        assert set(journal(server, b.replicas.name)) == {rid("mine")}


async def test_a_reaper_that_dies_is_followed_by_another(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet, 3) as (a, b, c):
        a.book(R)
        await until(lambda: journal(server, a.replicas.name))
        for each in (b, c):
            each.outside.abort_takes_s = 60.0
        await a.kill()
        claim = FailoverKeys("pdgate", fleet).claim(a.replicas.name)
        await until(lambda: server.ask("GET", claim), DEAD_S)
        first, second = (b, c) if server.ask("GET", claim).decode().startswith(b.replicas.name + " ") else (c, b)
        await stays(lambda: server.ask("GET", claim).decode().startswith(first.replicas.name), 3 * LEASE_S)
        second.outside.abort_takes_s = 0.0
        await first.kill()
        await until(lambda: second.replicas.status().reaped, DEAD_S + LEASE_S)
        assert set(aborts(second)) == set(BOTH)


# ---- no death --------------------------------------------------------------------------------------------------------


async def test_one_that_answers_is_not_dead(server: RedisServer, fleet: str) -> None:
    """Cut off from Redis only."""
    async with gateways(server.url, fleet) as (a, b):
        a.book(R)
        await until(lambda: journal(server, a.replicas.name))
        await a.kill()
        a.dead = False
        await until(lambda: b.replicas.status().absent == {a.replicas.name: Verdict.CUT_OFF}, DEAD_S)
        await stays(lambda: not aborts(b), DEAD_S)
        a.dead = True
        await until(lambda: b.replicas.status().reaped, DEAD_S)


async def test_one_whose_address_another_answers_is_dead(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        await a.kill()
        b.outside.names[address_of(a)] = lambda: "another"
        await until(lambda: b.replicas.status().reaped, DEAD_S)


async def test_one_without_an_address_is_never_dead(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        a.replicas.advertise("")
        await asyncio.sleep(2 * PACE_S)
        await a.kill()
        await until(lambda: b.replicas.status().absent == {a.replicas.name: Verdict.CUT_OFF}, DEAD_S)
        await stays(lambda: not b.replicas.status().reaped, DEAD_S)


async def test_one_that_only_a_minority_misses_is_not_dead(server: RedisServer, fleet: str) -> None:
    """A is cut off from Redis, and from B; C still reaches it."""
    async with gateways(server.url, fleet, 3) as (a, b, c):
        await a.kill()
        c.outside.names[address_of(a)] = lambda: a.replicas.name
        await until(lambda: b.replicas.status().absent == {a.replicas.name: Verdict.SUSPECTED}, DEAD_S)
        await stays(lambda: not b.replicas.status().reaped + c.replicas.status().reaped, DEAD_S)
        del c.outside.names[address_of(a)]
        await until(lambda: b.replicas.status().reaped + c.replicas.status().reaped, DEAD_S)


async def test_flushes_kill_nobody_whose_address_is_silent(server: RedisServer, fleet: str) -> None:
    """The row of looks begins anew with every data set, though lease and answer are both missing for a moment."""
    async with gateways(server.url, fleet) as (a, b):
        a.book(R)
        a.replicas._reaper._link = _Down()  # type: ignore[assignment]
        a.dead = True
        for _ in range(6):
            await asyncio.sleep(0.8 * LEASE_S)
            server.ask("FLUSHALL")
            keys = FailoverKeys("pdgate", fleet)
            server.ask("HSET", keys.addresses(), a.replicas.name, address_of(a))
            server.ask("ZADD", keys.lives(), 1, a.replicas.name)
        assert b.replicas.status().reaped == 0
        a.dead = False


class _Down:
    async def run(self, *_: object) -> object:
        raise shared_reaper.LinkTrouble("down")


async def test_a_frozen_redis_kills_nobody(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        server.freeze()
        await asyncio.sleep(3 * LEASE_S)
        server.thaw()
        await until(lambda: a.replicas.status().live == b.replicas.status().live == 2, 4.0)
        await stays(lambda: not b.replicas.status().reaped + a.replicas.status().reaped, DEAD_S)
        assert a.fencings == b.fencings == 0


# ---- fencing ---------------------------------------------------------------------------------------------------------


async def test_one_that_was_declared_dead_goes_on_under_another_name(server: RedisServer, fleet: str) -> None:
    async with gateways(server.url, fleet) as (a, b):
        old = a.replicas.name
        a.book(R)
        await until(lambda: journal(server, old))
        way, a.replicas._reaper._link = a.replicas._reaper._link, _Down()  # type: ignore[assignment]
        a.dead = True
        await until(lambda: b.replicas.status().reaped, DEAD_S)
        assert aborts(b) == BOTH
        a.book(rid("late"))
        a.dead = False
        assert not a.replicas.is_fenced
        await asyncio.sleep(3 * FLUSH_S)
        assert not journal(server, old), "the mark keeps it from writing under its old name"
        a.replicas._reaper._link = way
        await until(lambda: a.fencings == 1)
        await until(lambda: not a.replicas.is_fenced)
        assert a.replicas.name == f"{old}-2"
        await until(lambda: set(journal(server, a.replicas.name)) == {R, rid("late")})
        await until(lambda: b.replicas.status().live == 2 and not b.replicas.status().absent)
        await stays(lambda: a.fencings == 1 and b.replicas.status().reaped == 1, DEAD_S)


async def test_all_of_it_works_in_a_cluster() -> None:
    with RedisCluster() as cluster:
        async with gateways(cluster.url, "f") as (a, b):
            a.book(R)
            await asyncio.sleep(0.3)
            await a.kill()
            await until(lambda: b.replicas.status().reaped, 2 * DEAD_S)
            assert aborts(b) == BOTH
