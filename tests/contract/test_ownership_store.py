"""What every ownership store must do; one suite over all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from engines.types import EngineId
from routing.ownership import ROOT, ClaimId, OwnershipConfig, OwnershipStore, RowState, Tier
from routing.ownership_memory import MemoryOwnership

P0, P1 = EngineId("p0"), EngineId("p1")
A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")
CONFIG = OwnershipConfig(held_s=100.0, pending_s=20.0, max_blocks_per_engine=8)

STORES: dict[str, Callable[[OwnershipConfig], OwnershipStore]] = {"memory": MemoryOwnership}


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[OwnershipStore]:
    opened = STORES[request.param](CONFIG)
    await opened.start()
    yield opened
    await opened.stop()


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


def test_a_claim_is_pending_and_no_owner_yet(store: OwnershipStore) -> None:
    store.claim_pending(P0, 1, [A, B], 0.0)
    [row] = store.snapshot(0.0)
    assert (row.state, row.tier, row.epoch, row.expires_s) == (RowState.PENDING, Tier.DEVICE, 1, 20.0)
    assert row.run.parent == ROOT
    assert store.owners([A, B], 0.0) == {}


def test_a_confirmed_claim_is_held(store: OwnershipStore) -> None:
    hold(store, A, B)
    [row] = store.snapshot(0.0)
    assert (row.state, row.engine_id, row.run.blocks, row.expires_s) == (RowState.HELD, P0, (A, B), 100.0)
    assert store.owners([A, B, C], 0.0) == {P0: 2}


def test_a_dropped_claim_is_gone(store: OwnershipStore) -> None:
    claim = store.claim_pending(P0, 1, [A, B], 0.0)
    store.drop(claim)
    store.confirm(claim, 0.0)
    assert list(store.snapshot(0.0)) == []


def test_a_claim_ends_once(store: OwnershipStore) -> None:
    claim = store.claim_pending(P0, 1, [A], 0.0)
    store.confirm(claim, 0.0)
    store.drop(claim)
    store.confirm(claim, 50.0)
    store.drop(ClaimId(10**9))
    assert [row.expires_s for row in store.snapshot(0.0)] == [100.0]


def test_only_what_is_new_becomes_a_run(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, B, C, D)
    rows = {row.run.blocks: row.run.parent for row in store.snapshot(0.0)}
    assert rows == {(A, B): ROOT, (C, D): B}
    assert store.owners([A, B, C, D, E], 0.0) == {P0: 4}


def test_claims_of_one_prefix_may_end_in_any_order(store: OwnershipStore) -> None:
    longer = store.claim_pending(P0, 1, [A, B, C], 0.0)
    shorter = store.claim_pending(P0, 1, [A, B], 0.0)
    store.confirm(longer, 0.0)
    store.drop(shorter)
    assert runs(store) == {(A, B, C)}


def test_engines_own_apart(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, engine_id=P1)
    assert store.owners([A, B], 0.0) == {P0: 2, P1: 1}
    store.drop_engine(P0, 1)
    assert store.owners([A, B], 0.0) == {P1: 1}


def test_a_row_carries_its_tier(store: OwnershipStore) -> None:
    hold(store, A, tier=Tier.HOST)
    assert [row.tier for row in store.snapshot(0.0)] == [Tier.HOST]


def test_an_older_epoch_is_refused(store: OwnershipStore) -> None:
    hold(store, A, epoch=2)
    hold(store, B, epoch=1)
    store.evict(P0, 1, [A])
    store.drop_engine(P0, 1)
    assert store.owners([A], 0.0) == {P0: 1}
    assert store.owners([B], 0.0) == {}
    assert store.refused == 3


def test_a_new_epoch_ends_the_rows_and_claims_of_the_old(store: OwnershipStore) -> None:
    hold(store, A, B)
    late = store.claim_pending(P0, 1, [A, C], 0.0)
    hold(store, D, epoch=2)
    store.confirm(late, 0.0)
    assert runs(store) == {(D,)}
    assert runs(store, RowState.PENDING) == set()


def test_a_dropped_engine_may_own_again(store: OwnershipStore) -> None:
    hold(store, A)
    pending = store.claim_pending(P0, 1, [B], 0.0)
    store.drop_engine(P0, 1)
    store.confirm(pending, 0.0)
    assert list(store.snapshot(0.0)) == []
    hold(store, C)
    assert store.owners([C], 0.0) == {P0: 1}


def test_evicted_blocks_end_their_runs(store: OwnershipStore) -> None:
    hold(store, A, B, C)
    hold(store, A, B, C, D)
    store.evict(P0, 1, [B, E])
    assert runs(store) == {(A,), (D,)}
    assert store.owners([A, B, C, D], 0.0) == {P0: 1}
    hold(store, A, B, C, D)
    assert runs(store) == {(A,), (B, C), (D,)}
    assert store.owners([A, B, C, D], 0.0) == {P0: 4}


def test_rows_expire(store: OwnershipStore) -> None:
    hold(store, A)
    store.claim_pending(P0, 1, [B], 90.0)
    assert store.owners([A], 99.0) == {P0: 1}
    assert store.owners([A], 100.0) == {}
    assert runs(store, now_s=100.0) == set()
    assert store.expire(100.0) == 1
    assert runs(store, RowState.PENDING, now_s=100.0) == {(B,)}
    assert store.expire(110.0) == 1


def test_a_claim_confirmed_after_its_time_does_nothing(store: OwnershipStore) -> None:
    claim = store.claim_pending(P0, 1, [A], 0.0)
    store.confirm(claim, 20.0)
    assert list(store.snapshot(20.0)) == []


def test_an_expired_run_is_new_again(store: OwnershipStore) -> None:
    hold(store, A, B)
    hold(store, A, B, C, now_s=100.0)
    assert store.owners([A, B, C], 199.0) == {P0: 3}


def test_a_hit_refreshes_only_when_under_half_of_the_time_is_left(store: OwnershipStore) -> None:
    hold(store, A, B)
    store.refresh(P0, 1, [A, B], 50.0)
    assert [row.expires_s for row in store.snapshot(50.0)] == [100.0]
    store.refresh(P0, 1, [A, B], 51.0)
    assert [row.expires_s for row in store.snapshot(51.0)] == [151.0]


def test_a_hit_refreshes_the_unbroken_run_alone(store: OwnershipStore) -> None:
    hold(store, A)
    hold(store, A, B, C)
    hold(store, D)
    store.refresh(P0, 1, [A, B, E, D], 60.0)
    assert {row.run.blocks: row.expires_s for row in store.snapshot(60.0)} == {(A,): 160.0, (B, C): 160.0, (D,): 100.0}


def test_a_refresh_does_not_bring_back_the_dead(store: OwnershipStore) -> None:
    hold(store, A)
    store.refresh(P0, 1, [A], 100.0)
    assert store.owners([A], 100.0) == {}


def test_the_oldest_runs_go_beyond_the_bound(store: OwnershipStore) -> None:
    hold(store, A, B, C, now_s=0.0)
    hold(store, D, E, now_s=1.0)
    hold(store, *(bytes([i]) * 16 for i in range(5)), now_s=2.0)
    assert (A, B, C) not in runs(store)
    assert (D, E) in runs(store)


async def test_starting_and_stopping_is_harmless(store: OwnershipStore) -> None:
    await store.stop()
    await store.start()
    hold(store, A)
    assert store.owners([A], 0.0) == {P0: 1}
