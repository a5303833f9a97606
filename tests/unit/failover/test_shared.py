"""What gateways share, each part by itself over a stand-in: when it acts, how often, and that trouble stops nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from engines.tasks import running, spawn
from engines.types import EngineId
from failover.journal import FailoverKeys
from failover.poison import PoisonGuard
from failover.shared_leases import TTL_S, Alone, Leases
from failover.shared_poison import SharedPoison
from failover.shared_process import ProcessId
from failover.shared_signals import APART_S, JITTER_S, Signals
from tests.fakes import now_s, timeless
from tests.stream_link import FailoverStreamLink, Streams

KEYS = FailoverKeys("pdgate", "f")
P, D = EngineId("http://p0"), EngineId("http://d0")


@asynccontextmanager
async def started(*parts: Any) -> AsyncIterator[None]:
    for part in parts:
        await part.start()
    await asyncio.sleep(0.01)
    yield
    for part in parts:
        await part.stop()
    await asyncio.sleep(0)
    names = ("process id", "leases", "share poison", "tell suspicions", "hear signals")
    assert not [name for name in running() if name in names]


# ---- signals ---------------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, streams: Streams, name: str) -> None:
        self.suspicions: list[tuple[EngineId, str, str]] = []
        self.delays_s: list[float] = []
        self.leases = self.poison = 0
        self.signals = Signals(
            FailoverStreamLink(streams),
            KEYS,
            name,
            spawn,
            Random(7),
            on_suspicion=self._suspect,
            on_leases=self._leases,
            on_poison=self._poison,
        )

    def _suspect(self, engine_id: EngineId, reason: str, fingerprint: str, look_in_s: float) -> None:
        self.suspicions.append((engine_id, reason, fingerprint))
        self.delays_s.append(look_in_s)

    def _leases(self) -> None:
        self.leases += 1

    def _poison(self) -> None:
        self.poison += 1


@timeless
async def test_a_suspicion_is_heard_by_all_others() -> None:
    streams = Streams()
    a, b, c = (Listener(streams, name) for name in "abc")
    async with started(a.signals, b.signals, c.signals):
        a.signals.suspect(P, "lost", "boot")
        await asyncio.sleep(0.01)
        assert b.suspicions == c.suspicions == [(P, "lost", "boot")]
        assert a.suspicions == []
        assert (a.signals.sent, b.signals.heard, b.signals.acted, b.signals.sent) == (1, 1, 1, 0)


@timeless
async def test_of_one_engine_few_suspicions_are_sent_and_acted_on() -> None:
    streams = Streams()
    a, b, c = (Listener(streams, name) for name in "abc")
    async with started(a.signals, b.signals, c.signals):
        for _ in range(100):
            a.signals.suspect(P, "lost", "boot")
            b.signals.suspect(P, "lost", "boot")
            await asyncio.sleep(0.1)
        assert len(streams.entries[KEYS.signals()]) == 2 * 10 / APART_S
        assert len(c.suspicions) == 10 / APART_S
        assert 0.0 <= min(c.delays_s) < max(c.delays_s) <= JITTER_S
        a.signals.suspect(D, "lost", "boot")
        await asyncio.sleep(0.01)
        assert c.suspicions[-1] == (D, "lost", "boot"), "of other engines it does not matter"


@timeless
async def test_a_suspicion_that_cannot_be_sent_is_dropped() -> None:
    streams = Streams()
    a, b = (Listener(streams, name) for name in "ab")
    async with started(a.signals, b.signals):
        streams.down = True
        a.signals.suspect(P, "lost", "boot")
        await asyncio.sleep(1.0)
        streams.down = False
        await asyncio.sleep(1.0)
        assert (a.signals.dropped, b.suspicions) == (1, [])
        await asyncio.sleep(APART_S)
        a.signals.suspect(P, "lost again", "boot")
        await asyncio.sleep(0.01)
        assert b.suspicions == [(P, "lost again", "boot")]


@timeless
async def test_what_was_said_before_the_start_is_not_heard() -> None:
    streams = Streams()
    a, b = (Listener(streams, name) for name in "ab")
    async with started(a.signals):
        a.signals.suspect(P, "lost", "boot")
        await asyncio.sleep(0.01)
        await b.signals.start()
        await asyncio.sleep(0.01)
        assert b.suspicions == []
        await b.signals.stop()


@timeless
async def test_signals_of_leases_and_poison_go_where_they_belong() -> None:
    streams = Streams()
    a = Listener(streams, "a")
    async with started(a.signals):
        streams.add(KEYS.signals(), {b"replica": b"x", b"kind": b"leases"})
        await asyncio.sleep(0.01)
        assert (a.leases, a.poison) == (1, 0)
        for _ in range(10):
            streams.add(KEYS.signals(), {b"replica": b"x", b"kind": b"poison"})
        streams.add(KEYS.signals(), {b"kind": b"rubbish"})
        await asyncio.sleep(0.01)
        assert (a.leases, a.poison) == (1, 1), "what came together is told once"
        streams.add(KEYS.signals(), {b"replica": b"a", b"kind": b"poison"})
        await asyncio.sleep(0.01)
        assert a.poison == 1, "one's own"


@timeless
async def test_names_of_strangers_fill_no_memory() -> None:
    streams = Streams()
    a = Listener(streams, "a")
    for number in range(30_000):
        a.signals.suspect(EngineId(f"e{number}"), "lost", "")
    assert len(a.signals._sent._passed_s) <= 10_001
    await asyncio.sleep(APART_S)
    for _ in range(6_000):
        a.signals.suspect(P, "lost", "")
    assert len(a.signals._sent._passed_s) == 1, "and are forgotten"


# ---- process ids -----------------------------------------------------------------------------------------------------


class Claim:
    def __init__(self, *replies: int) -> None:
        self.replies = list(replies)
        self.link = FailoverStreamLink(Streams())
        self.link.script = self._reply
        self.took: list[int] = []
        self.came_back = 0
        self.part = ProcessId(
            self.link, KEYS, "me", spawn, Random(3), taken=self.took.append, came_back=self._came_back
        )

    def _reply(self, name: str, args: list[Any]) -> int:
        assert name == "claim_process"
        return self.replies.pop(0) if self.replies else 1

    def _came_back(self) -> None:
        self.came_back += 1


@timeless
async def test_other_ids_are_tried_until_one_is_free() -> None:
    claim = Claim(0, 0, 0, 2)
    async with started(claim.part):
        assert claim.took == [claim.part.id]
        assert len(claim.link.ran) == 4
        await asyncio.sleep(10.0)
        assert len(claim.took) == 1
        assert claim.came_back == 0


@timeless
async def test_a_claim_outlives_its_owner_by_700_s() -> None:
    claim = Claim(2)
    async with started(claim.part):
        pass
    times_ms = [args[1] for _, args in claim.link.ran]
    assert times_ms[0] - 1000 >= 700_000
    assert times_ms[-1] == 700_000


@timeless
async def test_a_lost_claim_is_noticed_and_a_stolen_one_replaced() -> None:
    claim = Claim(2, 1, 2, 1, 0, 2)
    async with started(claim.part):
        await asyncio.sleep(2.1)
        assert (claim.came_back, len(claim.took)) == (1, 1), "the data set was lost"
        await asyncio.sleep(2.0)
        assert (claim.came_back, len(claim.took)) == (2, 2), "and another has taken the id"
        assert claim.took[0] != claim.took[1] == claim.part.id


@timeless
async def test_an_outage_keeps_the_id_and_its_end_is_told() -> None:
    claim = Claim(2)
    async with started(claim.part):
        streams = claim.link._link.streams
        streams.down = True
        await asyncio.sleep(100.0)
        assert (claim.came_back, claim.part.id) == (0, claim.took[0])
        streams.down = False
        await asyncio.sleep(1.0)
        assert (claim.came_back, claim.part.id) == (1, claim.took[0])


@timeless
async def test_a_full_house_is_asked_again_and_without_redis_nothing_is_claimed() -> None:
    claim = Claim(*[0] * 50, 2)
    async with started(claim.part):
        assert claim.part.id is None
        await asyncio.sleep(5.0)
        assert claim.part.id is not None
    down = Claim()
    down.link._link.streams.down = True
    async with started(down.part):
        await asyncio.sleep(5.0)
        assert (down.part.id, down.took) == (None, [])


# ---- leases ----------------------------------------------------------------------------------------------------------


class Holding:
    """Leases of which a test says which are granted."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.link = FailoverStreamLink(self.streams)
        self.link.script = self._reply
        self.granted: dict[str, int] = {}
        self.changes = 0
        self.leases = Leases(self.link, KEYS, "me", spawn, self._changed)

    def _reply(self, name: str, args: list[Any]) -> Any:
        return [self.granted.get(each, 0) for each in args[4:]] if name == "renew_leases" else 0

    def _changed(self) -> None:
        self.changes += 1

    def renewals(self) -> int:
        return sum(name == "renew_leases" for name, _ in self.link.ran)


@timeless
async def test_a_lease_is_held_by_redis_word_only_and_asked_for_at_once() -> None:
    world = Holding()
    world.granted = {"x": 7}
    async with started(world.leases):
        assert not world.leases.hold("x")
        assert not world.leases.hold("y")
        await asyncio.sleep(0.05)
        assert (world.leases.hold("x"), world.leases.hold("y")) == (True, False)
        assert (world.leases.token("x"), world.leases.token("y")) == (7, 0)
        assert world.leases.held() == ("x",)
        assert world.changes == 1
        world.granted = {"y": 8}
        await asyncio.sleep(1.1)
        assert (world.leases.hold("x"), world.leases.hold("y")) == (False, True)
        assert world.changes == 2
    assert world.link.ran[-1] == ("free_leases", ["me", 1, 1000, "x", "y"])


@timeless
async def test_nothing_is_asked_while_nothing_is_wanted_nor_is_that_being_alone() -> None:
    world = Holding()
    async with started(world.leases):
        await asyncio.sleep(60.0)
        assert world.link.ran == []
        assert not world.leases.hold("x")


@timeless
async def test_who_cannot_ask_for_a_ttl_acts_alone_until_he_can() -> None:
    world = Holding()
    world.granted = {"x": 7}
    async with started(world.leases):
        world.leases.hold("x")
        world.leases.hold("y")
        await asyncio.sleep(0.1)
        world.streams.down = True
        await asyncio.sleep(TTL_S - 1.1)
        assert (world.leases.hold("x"), world.leases.hold("y")) == (True, False)
        await asyncio.sleep(1.3)
        changes = world.changes
        assert (world.leases.hold("x"), world.leases.hold("y"), world.leases.alone) == (True, True, True)
        assert world.leases.token("x") == 0
        assert changes == 2, "told, too"
        world.streams.down = False
        world.granted = {"y": 9}
        await asyncio.sleep(0.5)
        assert (world.leases.hold("x"), world.leases.hold("y"), world.leases.alone) == (False, True, False)
        assert world.changes == 3


@timeless
async def test_a_slow_answer_counts_from_when_it_was_asked_for() -> None:
    """So that nobody believes in a lease for longer than Redis does."""
    world = Holding()
    world.granted = {"x": 7}
    async with started(world.leases):
        await asyncio.sleep(0.1)
        world.streams.takes_s = 0.4
        asked_s = now_s()
        world.leases.hold("x")
        await asyncio.sleep(0.5)
        assert world.leases.hold("x")
        world.streams.down, world.streams.fails_in_s = True, 60.0
        await asyncio.sleep(asked_s + TTL_S - now_s() - 0.001)
        assert not world.leases.alone
        await asyncio.sleep(0.002)
        assert world.leases.alone


@timeless
async def test_a_storm_of_signals_causes_few_renewals() -> None:
    world = Holding()
    async with started(world.leases):
        world.leases.hold("x")
        await asyncio.sleep(0.1)
        before = world.renewals()
        for _ in range(1000):
            world.leases.look()
            await asyncio.sleep(0.001)
        assert 10 <= world.renewals() - before <= 51


@timeless
async def test_what_is_let_go_is_given_back_even_after_trouble() -> None:
    world = Holding()
    world.granted = {"x": 7, "y": 8}
    async with started(world.leases):
        world.leases.hold("x")
        world.leases.hold("y")
        await asyncio.sleep(0.1)
        world.streams.down = True
        world.leases.let_go("x")
        assert world.leases.held() == ("y",)
        await asyncio.sleep(1.0)
        world.streams.down = False
        await asyncio.sleep(0.5)
        assert ("free_leases", ["me", 0, 1000, "x"]) in world.link.ran
        assert world.link.ran[-1][1][4:] == ["y"]


def test_without_redis_everything_is_ours() -> None:
    assert Alone().hold("x")


# ---- poison ----------------------------------------------------------------------------------------------------------


class Refusing:
    def __init__(self) -> None:
        self.streams = Streams()
        self.link = FailoverStreamLink(self.streams)
        self.link.script = self._reply
        self.listed: list[Any] = []
        self.guard = PoisonGuard()
        self.shared = SharedPoison(self.link, KEYS, "me", spawn, self.guard)

    def _reply(self, name: str, args: list[Any]) -> Any:
        return self.listed if name == "refused" else 0

    def sent(self) -> list[tuple[bytes, int]]:
        found = [args[4:] for name, args in self.link.ran if name == "refuse"]
        return [(words[at], words[at + 1]) for words in found for at in range(0, len(words), 2)]  # type: ignore[misc]


@timeless
async def test_what_is_refused_here_is_told_once_and_what_is_elsewhere_is_taken_in() -> None:
    world = Refusing()
    world.listed = [b"theirs", 5000]
    async with started(world.shared):
        assert world.guard.is_refused(b"theirs", now_s())
        world.guard.refuse(b"mine", now_s())
        await asyncio.sleep(0.1)
        assert world.sent() == [(b"mine", 600_000)]
        world.listed = [b"news", 700]
        world.shared.look()
        await asyncio.sleep(0.1)
        assert world.guard.is_refused(b"news", now_s())
        await asyncio.sleep(5.0)
        assert not world.guard.is_refused(b"theirs", now_s())
        assert world.sent() == [(b"mine", 600_000)]


@timeless
async def test_after_trouble_and_after_a_loss_what_is_valid_is_told_again() -> None:
    world = Refusing()
    async with started(world.shared):
        world.guard.refuse(b"a", now_s())
        await asyncio.sleep(0.1)
        world.streams.down = True
        world.guard.refuse(b"b", now_s())
        await asyncio.sleep(99.9)
        world.streams.down = False
        world.link.ran.clear()
        await asyncio.sleep(0.5)
        assert [name for name, _ in world.sent()] == [b"a", b"b"]
        assert all(499_000 < left_ms <= 500_000 for _, left_ms in world.sent())
        world.link.ran.clear()
        world.shared.publish_all()
        await asyncio.sleep(0.1)
        assert [name for name, _ in world.sent()] == [b"a", b"b"]
        await asyncio.sleep(501.0)
        world.link.ran.clear()
        world.shared.publish_all()
        await asyncio.sleep(0.1)
        assert world.sent() == []


@timeless
async def test_many_go_in_parts() -> None:
    world = Refusing()
    for number in range(1200):
        world.guard.refuse(b"%d" % number, now_s())
    async with started(world.shared):
        assert len(world.sent()) == 1200
        assert max(len(args) for _, args in world.link.ran) <= 4 + 2 * 500


@timeless
async def test_more_than_is_kept_is_not_queued() -> None:
    world = Refusing()
    world.streams.down = True
    async with started(world.shared):
        for number in range(25_000):
            world.guard.refuse(b"%d" % number, now_s())
        assert len(world.shared._unsent) <= 10_000
