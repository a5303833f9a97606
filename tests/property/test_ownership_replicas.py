"""Replicas over one Redis as a state machine: whatever happens between them, they end alike, and as Redis is.

Time is virtual, and Redis small (`fake_redis`). `Settled` waits after every step and knows exactly what
must be held; `Racing` does not wait, cuts replicas off and loses writes, and knows what must never be.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engines.tasks import spawn
from engines.types import EngineId
from routing.ownership import ClaimId, Keys, OwnershipConfig, RowState, Run, Tier
from routing.ownership_redis import RedisOwnership
from tests.property.fake_redis import FakeLink, FakeRedis, VirtualLoop

ENGINES = (EngineId("http://p0:30000"), EngineId("http://p1:30000"))
CONFIG = OwnershipConfig(held_s=600.0, pending_s=120.0, max_blocks_per_engine=1000)
REPLICAS = st.integers(0, 1)
ENGINE = st.sampled_from(ENGINES)
NAMES = st.text("ab", min_size=1, max_size=5)
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST])


def block(name: str) -> bytes:
    """A block whose identity is its whole prefix, as with real hashes."""
    return blake2b(name.encode(), digest_size=16).digest()


def chain(name: str) -> tuple[bytes, ...]:
    return tuple(block(name[: end + 1]) for end in range(len(name)))


ALL_NAMES = [
    format(number, f"0{size}b").replace("0", "a").replace("1", "b") for size in range(1, 6) for number in range(2**size)
]


def subtree(name: str) -> set[bytes]:
    return {block(each) for each in ALL_NAMES if each.startswith(name)}


@dataclass
class Replica:
    """One gateway's store with its link, what it thinks the engines' boots are, and an index fed by the listener."""

    link: FakeLink
    store: RedisOwnership
    boots: dict[EngineId, tuple[int, int]] = field(default_factory=dict)
    look_again: set[EngineId] = field(default_factory=set)
    index: dict[tuple[EngineId, Tier], set[bytes]] = field(default_factory=dict)
    promises: dict[EngineId, list[bytes]] = field(default_factory=dict)

    def held(self, engine_id: EngineId, run: Run, tier: Tier) -> None:
        self.index.setdefault((engine_id, tier), set()).update(run.blocks)

    def lost(self, engine_id: EngineId, blocks: list[bytes], tier: Tier) -> None:
        self.index.setdefault((engine_id, tier), set()).difference_update(blocks)

    def promised(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.promises.setdefault(engine_id, []).extend(blocks)

    def unpromised(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        for each in blocks:
            self.promises[engine_id].remove(each)

    def cleared(self, engine_id: EngineId) -> None:
        for tier in Tier:
            self.index.pop((engine_id, tier), None)

    def restart_seen(self, engine_id: EngineId) -> None:
        self.look_again.add(engine_id)

    def blocks(self, engine_id: EngineId, tier: Tier, now_s: float) -> set[bytes]:
        return {
            each
            for row in self.store.snapshot(now_s)
            if (row.engine_id, row.tier, row.state) == (engine_id, tier, RowState.HELD)
            for each in row.run.blocks
        }


class Replicas(RuleBasedStateMachine):
    claims: Bundle[tuple[int, ClaimId]] = Bundle("claims")
    settled: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.redis = FakeRedis(self.loop.time)
        self.boots = dict.fromkeys(ENGINES, 1)
        self.names = 0
        self.ever: dict[tuple[EngineId, int], set[bytes]] = {}
        self.model: dict[tuple[EngineId, Tier], set[bytes]] = {}
        self.live: dict[tuple[int, ClaimId], tuple[EngineId, int, tuple[bytes, ...]]] = {}
        self.orphaned = False
        self.old: dict[bytes, Any] | None = None
        self.replicas = [self.opened(0.001), self.opened(0.004)]
        for index in range(2):
            for engine_id in ENGINES:
                self.learn(index, engine_id)
        self.settle()

    def opened(self, latency_s: float) -> Replica:
        self.names += 1
        link = FakeLink(self.redis, latency_s)
        store = RedisOwnership(link, Keys("t", "f"), spawn, self.loop.time, f"r{self.names}", lambda _: True, CONFIG)
        replica = Replica(link, store)
        store.listen(replica)  # type: ignore[arg-type]
        self.loop.run_until_complete(store.start())
        return replica

    def learn(self, index: int, engine_id: EngineId) -> None:
        """The replica reads the engine's fingerprint now."""
        replica, boot = self.replicas[index], self.boots[engine_id]
        epoch, known = replica.boots.get(engine_id, (0, 0))
        again = engine_id in replica.look_again
        if known != boot:
            epoch += 1
            if not again:
                replica.cleared(engine_id)
            replica.boots[engine_id] = (epoch, boot)
        replica.look_again.discard(engine_id)
        replica.store.begin(engine_id, epoch, f"{engine_id} {boot}")

    def settle(self, seconds: float = 1.0) -> None:
        self.loop.pass_s(seconds)
        for _ in range(4):
            again = [(index, each) for index, replica in enumerate(self.replicas) for each in replica.look_again]
            for index, engine_id in again:
                self.learn(index, engine_id)
            self.loop.pass_s(0.6 if again else 0.0)

    def after(self) -> None:
        if self.settled:
            self.settle()
            self.check_model()
        else:
            self.loop.pass_s(0.004)

    def knows(self, index: int, engine_id: EngineId) -> bool:
        return self.replicas[index].boots[engine_id][1] == self.boots[engine_id]

    def note_held(self, index: int, engine_id: EngineId, blocks: tuple[bytes, ...], tier: Tier) -> None:
        _, boot = self.replicas[index].boots[engine_id]
        self.ever.setdefault((engine_id, boot), set()).update(blocks)
        if self.knows(index, engine_id):
            self.model.setdefault((engine_id, tier), set()).update(blocks)

    # ---- what replicas do ----------------------------------------------------------------------------------------

    @rule(target=claims, index=REPLICAS, engine_id=ENGINE, name=NAMES)
    def claim(self, index: int, engine_id: EngineId, name: str) -> tuple[int, ClaimId]:
        replica = self.replicas[index]
        epoch, boot = replica.boots[engine_id]
        claim = self.loop.do(replica.store.claim_pending, engine_id, epoch, chain(name), self.loop.time())
        self.live[self.names * 10 + index, claim] = (engine_id, boot, chain(name))
        self.after()
        return self.names * 10 + index, claim

    def ended(self, claimed: tuple[int, ClaimId]) -> tuple[int, ClaimId, EngineId, int, tuple[bytes, ...]] | None:
        live = self.live.pop(claimed, None)
        return None if live is None else (claimed[0] % 10, claimed[1], *live)

    @rule(claimed=consumes(claims), tier=TIERS)
    def confirm(self, claimed: tuple[int, ClaimId], tier: Tier) -> None:
        if (found := self.ended(claimed)) is not None:
            index, claim, engine_id, boot, blocks = found
            before = self.replicas[index].blocks(engine_id, tier, self.loop.time())
            self.replicas[index].store.confirm(claim, self.loop.time(), tier)
            now_held = set(blocks) <= self.replicas[index].blocks(engine_id, tier, self.loop.time())
            if now_held and not set(blocks) <= before and boot == self.replicas[index].boots[engine_id][1]:
                self.note_held(index, engine_id, blocks, tier)
            self.after()

    @rule(claimed=consumes(claims))
    def drop(self, claimed: tuple[int, ClaimId]) -> None:
        if (found := self.ended(claimed)) is not None:
            self.replicas[found[0]].store.drop(found[1])
            self.after()

    @rule(index=REPLICAS, engine_id=ENGINE, name=NAMES, tier=TIERS)
    def hold(self, index: int, engine_id: EngineId, name: str, tier: Tier) -> None:
        replica = self.replicas[index]
        replica.store.hold(engine_id, replica.boots[engine_id][0], chain(name), self.loop.time(), tier)
        self.note_held(index, engine_id, chain(name), tier)
        self.after()

    @rule(index=REPLICAS, engine_id=ENGINE, name=NAMES, tier=st.none() | TIERS)
    def evict(self, index: int, engine_id: EngineId, name: str, tier: Tier | None) -> None:
        replica = self.replicas[index]
        replica.store.evict(engine_id, replica.boots[engine_id][0], subtree(name), tier)
        if self.knows(index, engine_id):
            for each in Tier if tier is None else (tier,):
                self.model.get((engine_id, each), set()).difference_update(subtree(name))
        self.after()

    @rule(index=REPLICAS, engine_id=ENGINE)
    def drop_engine(self, index: int, engine_id: EngineId) -> None:
        replica = self.replicas[index]
        replica.store.drop_engine(engine_id, replica.boots[engine_id][0])
        if self.knows(index, engine_id):
            for tier in Tier:
                self.model.pop((engine_id, tier), None)
        self.after()

    # ---- what happens to engines, replicas and Redis -------------------------------------------------------------

    @rule(engine_id=ENGINE, first=REPLICAS)
    def restart_engine(self, engine_id: EngineId, first: int) -> None:
        self.boots[engine_id] += 1
        for tier in Tier:
            self.model.pop((engine_id, tier), None)
        self.learn(first, engine_id)
        self.after()

    @rule(index=REPLICAS, engine_id=ENGINE)
    def look(self, index: int, engine_id: EngineId) -> None:
        if not self.knows(index, engine_id):
            self.learn(index, engine_id)
            self.after()

    @rule(index=REPLICAS)
    def new_replica(self, index: int) -> None:
        if self.settled or self.old is not None:
            self.settle()
        old = self.replicas[index]
        old.link.down = True
        self.loop.run_until_complete(old.store.stop())
        mine = [key for key in self.live if key[0] % 10 == index]
        self.orphaned = self.orphaned or bool(mine) or not self.settled
        for key in mine:
            del self.live[key]
        self.replicas[index] = self.opened(0.001)
        for engine_id in ENGINES:
            self.learn(index, engine_id)
        self.after()

    @rule()
    def trim_logs(self) -> None:
        self.redis.trim()
        self.after()

    @rule()
    def flush(self) -> None:
        self.redis.flush()
        if self.settled:
            self.settle(3.0)
        self.after()

    @rule(index=REPLICAS)
    def lose_replies(self, index: int) -> None:
        """What was sent in this time is done and sent again."""
        self.replicas[index].link.deaf = True
        self.loop.pass_s(0.05)
        self.replicas[index].link.deaf = False
        self.loop.pass_s(1.1 if self.settled else 0.0)
        self.after()

    @precondition(lambda self: not self.settled)
    @rule(index=REPLICAS, seconds=st.floats(0.0, 3.0))
    def cut_off(self, index: int, seconds: float) -> None:
        self.replicas[index].link.down = not self.replicas[index].link.down
        self.loop.pass_s(seconds)

    @precondition(lambda self: not self.settled)
    @rule()
    def save(self) -> None:
        self.old = self.redis.saved()

    @precondition(lambda self: not self.settled and self.old is not None)
    @rule()
    def fail_over_to_the_past(self) -> None:
        assert self.old is not None
        self.redis.restore(self.old)
        self.orphaned = True
        self.after()

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.loop.pass_s(seconds)

    # ---- what must be --------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        for index, replica in enumerate(self.replicas):
            for engine_id in ENGINES:
                for tier in Tier:
                    if self.knows(index, engine_id) or not replica.look_again:
                        held = replica.blocks(engine_id, tier, self.loop.time())
                        assert held == self.model.get((engine_id, tier), set()), (index, engine_id, tier)

    def teardown(self) -> None:
        try:
            self.check_end()
        finally:
            for replica in self.replicas:
                self.loop.run_until_complete(replica.store.stop())
            self.loop.close()
            asyncio.set_event_loop(None)

    def check_end(self) -> None:
        for replica in self.replicas:
            replica.link.down = replica.link.deaf = False
        for (index, claim), _ in self.live.items():
            self.replicas[index % 10].store.drop(claim)
        for index in range(2):
            for engine_id in ENGINES:
                if not self.knows(index, engine_id):
                    self.learn(index, engine_id)
        self.settle(6.0)
        self.settle(3.0)
        if self.orphaned:  # what a replica that died had claimed lives as long as claims do
            self.loop.pass_s(CONFIG.pending_s)
            for replica in self.replicas:
                replica.store.expire(self.loop.time())
        self.replicas.append(self.opened(0.001))
        self.settle()
        now_s = self.loop.time()
        rows = [held_rows(replica.store, now_s) for replica in self.replicas]
        assert rows[0] == rows[1] == rows[2]
        for replica in self.replicas:
            assert [row for row in replica.store.snapshot(now_s) if row.state is RowState.PENDING] == []
            assert not any(replica.promises.values())
            assert replica.store.status().state == "shared"
        for engine_id in ENGINES:
            held = {each for tier in Tier for each in self.replicas[2].blocks(engine_id, tier, now_s)}
            assert held <= self.ever.get((engine_id, self.boots[engine_id]), set()), "a stale epoch won"
            for tier in Tier:
                fresh = self.replicas[2]
                assert fresh.index.get((engine_id, tier), set()) == fresh.blocks(engine_id, tier, now_s)


def held_rows(store: RedisOwnership, now_s: float) -> set[Any]:
    return {
        (row.engine_id, row.tier, row.run.parent, row.run.blocks)
        for row in store.snapshot(now_s)
        if row.state is RowState.HELD
    }


class Settled(Replicas):
    settled = True


class Racing(Replicas):
    settled = False


@pytest.mark.parametrize("machine", [Settled, Racing])
def test_replicas_end_alike(machine: type[Replicas]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=settings().max_examples // 3,
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_what_others_did_first_does_not_undo_what_we_did_later() -> None:
    """In the log our hold comes after their clearing; here it was done before that was heard of."""
    machine = Racing()
    one, other = machine.replicas
    now_s = machine.loop.time
    one.store.hold(ENGINES[0], 1, chain("aa"), now_s())
    machine.settle()
    one.store.drop_engine(ENGINES[0], 1)
    machine.loop.pass_s(0.005)
    other.store.hold(ENGINES[0], 1, chain("bb"), now_s())
    machine.note_held(1, ENGINES[0], chain("bb"), Tier.DEVICE)
    machine.loop.pass_s(0.2)
    for replica in (one, other):
        assert replica.blocks(ENGINES[0], Tier.DEVICE, now_s()) == set(chain("bb"))
    machine.teardown()
