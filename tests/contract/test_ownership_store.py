"""What every ownership store must do; one suite over memory, Redis, an embedded Redis and a Redis Cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from engines.tasks import spawn
from engines.types import EngineId
from routing.embedded_redis import EmbeddedRedis, find_server
from routing.ownership import ROOT, ClaimId, OwnershipConfig, OwnershipStore, RowState, StoreState, Tier
from routing.ownership_memory import MemoryOwnership
from tests.contract.ownership_replicas import P0, P1, a_fleet, replica, rows, until
from tests.redis_servers import RedisCluster, RedisServer

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")
CONFIG = OwnershipConfig(held_s=100.0, pending_s=20.0, max_blocks_per_engine=8)
KINDS = ("memory", "redis", "embedded", "cluster")


@dataclass
class Opened:
    """A store under test. `agree` waits until others see what it has, if there are others."""

    store: OwnershipStore
    agree: Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as started:
        yield started


@pytest.fixture(params=KINDS)
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    if request.param == "memory":
        yield Opened(begun(MemoryOwnership(CONFIG)), nobody)
    elif request.param == "embedded":
        found = find_server()
        assert found is not None
        embedded = EmbeddedRedis(found, spawn)
        try:
            async for each in shared(await embedded.start()):
                yield each
        finally:
            await embedded.stop()
    else:
        async for each in shared(request.getfixturevalue({"redis": "server"}.get(request.param, request.param)).url):
            yield each


async def shared(url: str) -> AsyncIterator[Opened]:
    """A store with another replica; time stands still at 0."""
    keys = a_fleet()
    still = lambda: 0.0  # noqa: E731
    async with (
        replica(url, keys, config=CONFIG, clock=still, begin=False) as one,
        replica(url, keys, config=CONFIG, clock=still, begin=False) as other,
    ):

        async def agree() -> None:
            await until(lambda: one.store.status().queued_bytes == 0, what="written")
            await until(lambda: rows(one.store, 0.0) == rows(other.store, 0.0), what="seen by the other replica")

        yield Opened(begun(one.store), agree)


async def nobody() -> None:
    """There is nobody to agree with."""


def begun(store: OwnershipStore) -> OwnershipStore:
    for engine_id in (P0, P1):
        store.begin(engine_id, 1, "boot 1")
    return store


@pytest.fixture
async def store(opened: Opened) -> AsyncIterator[OwnershipStore]:
    """At the end, others have the same rows."""
    yield opened.store
    await opened.agree()


@pytest.fixture
async def timed(opened: Opened) -> OwnershipStore:
    """Time passes for it alone."""
    return opened.store


def hold(
    store: OwnershipStore,
    *blocks: bytes,
    engine_id: EngineId = P0,
    epoch: int = 1,
    now_s: float = 0.0,
    tier: Tier = Tier.DEVICE,
) -> None:
    store.confirm(store.claim_pending(engine_id, epoch, blocks, now_s), now_s, tier)


def runs(store: OwnershipStore, state: RowState = RowState.HELD, now_s: float = 0.0) -> set[tuple[bytes, ...]]:
    return {row.run.blocks for row in store.snapshot(now_s) if row.state is state}


async def test_a_claim_is_pending_and_no_owner_yet(store: OwnershipStore) -> None:
    store.claim_pending(P0, 1, [A, B], 0.0)
    [row] = store.snapshot(0.0)
    assert (row.state, row.tier, row.epoch, row.expires_s) == (RowState.PENDING, Tier.DEVICE, 1, 20.0)
    assert row.run.parent == ROOT
    assert store.owners([A, B], 0.0) == {}


async def test_a_confirmed_claim_is_held(store: OwnershipStore) -> None:
    hold(store, A, B)
    [row] = store.snapshot(0.0)
    assert (row.state, row.engine_id, row.run.blocks, row.expires_s) == (RowState.HELD, P0, (A, B), 100.0)
    assert store.owners([A, B, C], 0.0) == {P0: 2}


async def test_a_dropped_claim_is_gone(store: OwnershipStore) -> None:
    claim = store.claim_pending(P0, 1, [A, B], 0.0)
    store.drop(claim)
    store.confirm(claim, 0.0)
    assert list(store.snapshot(0.0)) == []


async def test_a_claim_ends_once(store: OwnershipStore) -> None:
    claim = store.claim_pending(P0, 1, [A], 0.0)
    store.confirm(claim, 0.0)
    store.drop(claim)
    store.confirm(claim, 50.0)
    store.drop(ClaimId(10**9))
    assert [row.expires_s for row in store.snapshot(0.0)] == [100.0]


async def test_only_what_is_new_becomes_a_run(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, B, C, D)
    rows = {row.run.blocks: row.run.parent for row in store.snapshot(0.0)}
    assert rows == {(A, B): ROOT, (C, D): B}
    assert store.owners([A, B, C, D, E], 0.0) == {P0: 4}


async def test_claims_of_one_prefix_may_end_in_any_order(store: OwnershipStore) -> None:
    longer = store.claim_pending(P0, 1, [A, B, C], 0.0)
    shorter = store.claim_pending(P0, 1, [A, B], 0.0)
    store.confirm(longer, 0.0)
    store.drop(shorter)
    assert runs(store) == {(A, B, C)}


async def test_engines_own_apart(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, engine_id=P1)
    assert store.owners([A, B], 0.0) == {P0: 2, P1: 1}
    store.drop_engine(P0, 1)
    assert store.owners([A, B], 0.0) == {P1: 1}


async def test_a_row_carries_its_tier(store: OwnershipStore) -> None:
    hold(store, A, tier=Tier.HOST)
    assert [row.tier for row in store.snapshot(0.0)] == [Tier.HOST]


async def test_an_older_epoch_is_refused(store: OwnershipStore) -> None:
    store.begin(P0, 2, "boot 2")
    hold(store, A, epoch=2)
    hold(store, B, epoch=1)
    store.evict(P0, 1, [A])
    store.drop_engine(P0, 1)
    assert store.owners([A], 0.0) == {P0: 1}
    assert store.owners([B], 0.0) == {}
    assert store.refused == 3


async def test_a_new_epoch_ends_the_rows_and_claims_of_the_old(store: OwnershipStore) -> None:
    hold(store, A, B)
    late = store.claim_pending(P0, 1, [A, C], 0.0)
    store.begin(P0, 2, "boot 2")
    hold(store, D, epoch=2)
    store.confirm(late, 0.0)
    assert runs(store) == {(D,)}
    assert runs(store, RowState.PENDING) == set()


async def test_a_dropped_engine_may_own_again(store: OwnershipStore) -> None:
    hold(store, A)
    pending = store.claim_pending(P0, 1, [B], 0.0)
    store.drop_engine(P0, 1)
    store.confirm(pending, 0.0)
    assert list(store.snapshot(0.0)) == []
    hold(store, C)
    assert store.owners([C], 0.0) == {P0: 1}


async def test_evicted_blocks_end_their_runs(store: OwnershipStore) -> None:
    hold(store, A, B, C)
    hold(store, A, B, C, D)
    store.evict(P0, 1, [B, E])
    assert runs(store) == {(A,), (D,)}
    assert store.owners([A, B, C, D], 0.0) == {P0: 1}
    hold(store, A, B, C, D)
    assert runs(store) == {(A,), (B, C), (D,)}
    assert store.owners([A, B, C, D], 0.0) == {P0: 4}


async def test_rows_expire(timed: OwnershipStore) -> None:
    hold(timed, A)
    timed.claim_pending(P0, 1, [B], 90.0)
    assert timed.owners([A], 99.0) == {P0: 1}
    assert timed.owners([A], 100.0) == {}
    assert runs(timed, now_s=100.0) == set()
    assert timed.expire(100.0) == 1
    assert runs(timed, RowState.PENDING, now_s=100.0) == {(B,)}
    assert timed.expire(110.0) == 1


async def test_a_claim_confirmed_after_its_time_does_nothing(timed: OwnershipStore) -> None:
    claim = timed.claim_pending(P0, 1, [A], 0.0)
    timed.confirm(claim, 20.0)
    assert list(timed.snapshot(20.0)) == []


async def test_an_expired_run_is_new_again(timed: OwnershipStore) -> None:
    hold(timed, A, B)
    hold(timed, A, B, C, now_s=100.0)
    assert timed.owners([A, B, C], 199.0) == {P0: 3}


async def test_a_hit_refreshes_only_when_under_half_of_the_time_is_left(store: OwnershipStore) -> None:
    hold(store, A, B)
    store.refresh(P0, 1, [A, B], 50.0)
    assert [row.expires_s for row in store.snapshot(50.0)] == [100.0]
    store.refresh(P0, 1, [A, B], 51.0)
    assert [row.expires_s for row in store.snapshot(51.0)] == [151.0]


async def test_a_hit_refreshes_the_unbroken_run_alone(store: OwnershipStore) -> None:
    hold(store, A)
    hold(store, A, B, C)
    hold(store, D)
    store.refresh(P0, 1, [A, B, E, D], 60.0)
    assert {row.run.blocks: row.expires_s for row in store.snapshot(60.0)} == {(A,): 160.0, (B, C): 160.0, (D,): 100.0}


async def test_a_refresh_does_not_bring_back_the_dead(timed: OwnershipStore) -> None:
    hold(timed, A)
    timed.refresh(P0, 1, [A], 100.0)
    assert timed.owners([A], 100.0) == {}


async def test_the_oldest_runs_go_beyond_the_bound(store: OwnershipStore) -> None:
    hold(store, A, B, C, now_s=0.0)
    hold(store, D, E, now_s=1.0)
    hold(store, *(bytes([i]) * 16 for i in range(5)), now_s=2.0)
    assert (A, B, C) not in runs(store)
    assert (D, E) in runs(store)


async def test_blocks_may_be_held_on_several_tiers(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, B, C, tier=Tier.HOST)
    assert {(row.tier, row.run.blocks) for row in store.snapshot(0.0)} == {
        (Tier.DEVICE, (A, B)),
        (Tier.HOST, (A, B, C)),
    }
    store.evict(P0, 1, [B], Tier.DEVICE)
    assert store.owners([A, B, C], 0.0) == {P0: 3}
    store.evict(P0, 1, [B])
    assert store.owners([A, B, C], 0.0) == {P0: 1}
    assert {(row.tier, row.run.blocks) for row in store.snapshot(0.0)} == {(Tier.DEVICE, (A,)), (Tier.HOST, (A,))}


async def test_a_hit_refreshes_the_rows_of_every_tier(store: OwnershipStore) -> None:
    hold(store, A)
    hold(store, A, B, tier=Tier.HOST)
    store.refresh(P0, 1, [A, B], 60.0)
    assert [row.expires_s for row in store.snapshot(60.0)] == [160.0, 160.0]


async def test_the_bound_is_of_each_tier(store: OwnershipStore) -> None:
    many = [bytes([number]) * 16 for number in range(7)]
    store.hold(P0, 1, many, 0.0)
    store.hold(P0, 1, many, 0.0, Tier.HOST)
    assert store.status().blocks == 14


async def test_what_an_engine_says_is_held_at_once(store: OwnershipStore) -> None:
    store.hold(P0, 1, [A, B], 0.0, Tier.HOST)
    store.hold(P0, 1, [A, B, C], 0.0, Tier.HOST)
    assert [(row.tier, row.run.blocks, row.run.parent) for row in store.snapshot(0.0)] == [
        (Tier.HOST, (A, B), ROOT),
        (Tier.HOST, (C,), B),
    ]
    store.hold(P0, 1, [], 0.0)
    store.hold(P0, 0, [D], 0.0)
    assert store.owners([D], 0.0) == {}
    assert store.refused == 1


async def test_a_boot_that_begins_ends_the_one_before(store: OwnershipStore) -> None:
    hold(store, A)
    store.begin(P0, 1, "boot 1")
    assert store.owners([A], 0.0) == {P0: 1}
    store.begin(P0, 2, "boot 2")
    assert list(store.snapshot(0.0)) == []
    hold(store, B)
    assert store.refused == 1


async def test_it_says_how_it_is(opened: Opened) -> None:
    hold(opened.store, A, B)
    await opened.agree()
    await until(lambda: opened.store.status().state in (StoreState.ALONE, StoreState.SHARED), what="shared")
    status = opened.store.status()
    assert (status.blocks, status.queued_bytes, status.dropped, status.refused, status.trouble) == (2, 0, 0, 0, "")
    assert status.kind in ("memory", "redis")
    assert status.state is (StoreState.ALONE if status.kind == "memory" else StoreState.SHARED)


async def test_starting_and_stopping_is_harmless(store: OwnershipStore) -> None:
    await store.stop()
    await store.start()
    hold(store, A)
    assert store.owners([A], 0.0) == {P0: 1}
