"""One gateway's reaper over a stand-in for Redis: when it looks, probes, says and claims; that trouble begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from engines.tasks import running, spawn
from failover.journal import FailoverKeys, Server
from failover.reaper import GAP_S, LEASE_S, WATCHED_S, ReplicaName, Verdict
from failover.shared import LinkTrouble
from failover.shared_attempts import SharedAttempts
from failover.shared_reaper import LOOK_CLOSER_S, LOOK_S, SharedReaper
from tests.fakes import now_s, timeless

KEYS = FailoverKeys("pdgate", "f")


class Fleet:
    """What a look shows: others who are there, or gone, and what they say. The one that looks is there itself."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.say: dict[str, set[str]] = {}
        self.data_set = b"1 x"
        self.marked: set[bytes] = set()
        self.down = False
        self.takes_s = 0.0
        self.looks: list[tuple[float, list[str]]] = []
        self.claims: list[str] = []
        self.left: list[str] = []
        self.wrote = 0

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        marked = keys[-1] in self.marked  # Redis is asked before it answers
        await asyncio.sleep(self.takes_s)
        if self.down:
            raise LinkTrouble("down")
        if script == "look_replicas":
            me, said = args[0], args[6:]
            self.looks.append((now_s(), list(said)))
            if marked:
                return [1]
            rows = [[name.encode(), int(name not in self.gone), b"http://" + name.encode()] for name in self._all(me)]
            words = [f"{me} {name}" for name in said]
            words += [f"{observer} {name}" for observer, names in self.say.items() for name in names]
            return [0, self.data_set, [word for row in rows for word in row], [word.encode() for word in words]]
        if script == "claim_dead":
            self.claims.append(args[1])
            return b""
        if script == "leave_replicas":
            self.left.append(args[0])
        self.wrote += script == "write_attempts"
        return 1

    def _all(self, me: str) -> list[str]:
        return sorted({me} | self.there | self.gone)


class One:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.answers: dict[str, str | None] = {}
        self.probed: list[float] = []
        self.probe_takes_s = 0.5
        self.fenced = 0
        self.name = ReplicaName("me")
        self.attempts = SharedAttempts(fleet, KEYS, self.name, spawn)  # type: ignore[arg-type]
        self.reaper = SharedReaper(
            fleet,  # type: ignore[arg-type]
            KEYS,
            self.name,
            spawn,
            Random(7),
            self.attempts,
            probe=self._probe,
            abort=self._abort,
            fenced=self._fenced,
        )

    async def _probe(self, address: str) -> str | None:
        self.probed.append(now_s())
        await asyncio.sleep(self.probe_takes_s)
        return self.answers.get(address.removeprefix("http://"))

    async def _abort(self, server: Server, rid: str) -> bool:
        return True

    def _fenced(self) -> None:
        self.fenced += 1


@asynccontextmanager
async def started(fleet: Fleet) -> AsyncIterator[One]:
    one = One(fleet)
    await one.attempts.start()
    await one.reaper.start()
    await asyncio.sleep(0.01)
    yield one
    await one.attempts.stop()
    await one.reaper.stop()
    await asyncio.sleep(0)
    assert not [name for name in running() if name == "replicas" or name.startswith(("probe ", "reap "))]


@timeless
async def test_one_look_a_second_and_nothing_more_while_all_are_there() -> None:
    fleet = Fleet()
    fleet.there = {"a", "b"}
    async with started(fleet) as one:
        await asyncio.sleep(10.0)
        assert len(fleet.looks) == pytest.approx(10 / LOOK_S, abs=1)
        assert (one.reaper.live, one.probed, fleet.claims, one.reaper.absent) == (3, [], [], {})
    assert fleet.left == ["me"]


@timeless
async def test_who_is_gone_and_silent_is_claimed_and_no_sooner() -> None:
    fleet = Fleet()
    fleet.there = {"a"}
    async with started(fleet) as one:
        await asyncio.sleep(3.0)
        fleet.gone = {"a"}
        began_s = now_s()
        while not fleet.claims:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert WATCHED_S <= now_s() - began_s <= WATCHED_S + LOOK_S + LOOK_CLOSER_S + 0.1
        assert one.reaper.absent == {"a": Verdict.DEAD}
        assert [said for _, said in fleet.looks][-1] == ["a"], "it had said so first"
        assert len(one.probed) >= 4, "again and again"


@timeless
async def test_others_must_agree() -> None:
    fleet = Fleet()
    fleet.there, fleet.gone = {"b", "c"}, {"a"}
    async with started(fleet) as one:
        await asyncio.sleep(20.0)
        assert (one.reaper.absent, fleet.claims) == ({"a": Verdict.SUSPECTED}, [])
        fleet.say = {"b": {"a"}}
        await asyncio.sleep(LOOK_S)
        assert fleet.claims


@pytest.mark.parametrize("what", ["answers", "flushes", "trouble", "slow"])
def test_what_is_no_death(what: str) -> None:
    @timeless
    async def test() -> None:
        fleet = Fleet()
        fleet.gone = {"a"}
        async with started(fleet) as one:
            if what == "answers":
                one.answers["a"] = "a"
            for number in range(10):
                await asyncio.sleep(WATCHED_S - 1.0)
                if what == "flushes":
                    fleet.data_set = b"%d x" % number
                if what == "trouble":
                    fleet.down = True
                    await asyncio.sleep(LOOK_CLOSER_S + 0.1)
                    fleet.down = False
                if what == "slow":
                    fleet.takes_s = GAP_S + 0.1
                    await asyncio.sleep(GAP_S + 1.5)
                    fleet.takes_s = 0.0
            assert fleet.claims == []
            assert one.reaper.absent["a"] in (Verdict.ABSENT, Verdict.CUT_OFF)

    test()


@timeless
async def test_the_journal_is_written_anew_for_another_data_set_and_after_trouble() -> None:
    fleet = Fleet()
    async with started(fleet):
        await asyncio.sleep(1.0)
        wrote = fleet.wrote
        await asyncio.sleep(5.0)
        assert fleet.wrote == wrote
        fleet.data_set = b"2 x"
        await asyncio.sleep(2.0)
        assert fleet.wrote == wrote + 1
        fleet.down = True
        await asyncio.sleep(2.0)
        fleet.down = False
        await asyncio.sleep(2.0)
        assert fleet.wrote == wrote + 2


@timeless
async def test_who_was_away_for_longer_than_its_lease_looks_before_it_begins_anything() -> None:
    fleet = Fleet()
    async with started(fleet) as one:
        await asyncio.sleep(2.0)
        assert await _sure_after_s(one) == 0.0
        fleet.takes_s = LEASE_S + 1.0
        await asyncio.sleep(LOOK_S + LEASE_S)
        assert not one.reaper.is_sure
        fleet.takes_s = 0.2
        waiting = spawn(_sure_after_s(one), "waiting")
        await asyncio.sleep(0.01)
        fleet.marked.add(KEYS.reaped("me"))
        assert (await waiting) < LEASE_S
        assert (one.fenced, one.name.now) == (1, "me-2"), "not the answer of a look that had begun before counts"
        assert one.reaper.is_sure, "it waited for the look under its new name, too"


@timeless
async def test_nobody_waits_for_a_redis_that_is_gone_nor_for_ever() -> None:
    fleet = Fleet()
    async with started(fleet) as one:
        fleet.down = True
        await asyncio.sleep(3 * LEASE_S)
        assert await _sure_after_s(one) == 0.0
        fleet.down, fleet.marked = False, {KEYS.reaped("me"), KEYS.reaped("me-2")}
        fleet.takes_s = 0.1
        while not one.fenced:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fleet.takes_s = 60.0
        await asyncio.sleep(0.5)
        assert (one.name.now, one.reaper.is_fenced) == ("me-3", True)
        assert await _sure_after_s(one) == pytest.approx(MOST_S)


MOST_S = 20.0


async def _sure_after_s(one: One) -> float:
    began_s = now_s()
    await one.reaper.sure(MOST_S)
    return now_s() - began_s


@timeless
async def test_one_that_is_marked_fences_itself_once_and_goes_on() -> None:
    fleet = Fleet()
    async with started(fleet) as one:
        await asyncio.sleep(2.0)
        fleet.marked.add(KEYS.reaped("me"))
        fleet.down = True
        await asyncio.sleep(LEASE_S * 4)
        assert one.fenced == 0
        fleet.down, fleet.takes_s = False, 0.1
        await asyncio.sleep(0.36)
        assert (one.fenced, one.reaper.is_fenced, one.name.now) == (1, True, "me-2")
        await asyncio.sleep(0.2)
        assert not one.reaper.is_fenced
        await asyncio.sleep(10.0)
        assert (one.fenced, one.reaper.fencings) == (1, 1)
    assert fleet.left == ["me-2"]
