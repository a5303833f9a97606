"""The KV pool's ledger and the radix cache."""

from __future__ import annotations

from engines.emulator.kv_pool import KvPool
from engines.emulator.radix import RadixCache
from engines.token_rule import pack


def _balanced(pool: KvPool) -> bool:
    ledger = pool.ledger()
    owned = sum(ledger.by_room.values()) + ledger.cache_tokens
    return ledger.used_tokens == owned and ledger.used_tokens + ledger.free_tokens == ledger.total_tokens


def test_a_prefix_is_matched_in_whole_pages_only() -> None:
    cache = RadixCache(4)
    assert cache.insert(pack(range(10))) == 2
    assert cache.match(pack(range(10)))[1] == 8
    assert cache.match(pack([*range(6), 99, 98]))[1] == 4
    assert cache.match(pack([99, *range(9)]))[1] == 0


def test_a_branch_costs_only_what_is_new() -> None:
    cache = RadixCache(1)
    assert cache.insert(pack([1, 2, 3, 4])) == 4
    assert cache.insert(pack([1, 2, 7, 8, 9])) == 3
    assert cache.insert(pack([1, 2, 3])) == 0
    assert cache.total_pages == 7
    assert cache.match(pack([1, 2, 7, 8, 9, 10]))[1] == 5


def test_eviction_takes_the_least_recently_used_and_spares_locks() -> None:
    cache = RadixCache(1)
    cache.insert(pack([1, 2, 3]))
    cache.insert(pack([4, 5, 6]))
    cache.insert(pack([7, 8, 9]))
    locked, _ = cache.match(pack([4, 5, 6]))
    cache.lock(locked)
    cache.match(pack([1, 2, 3]))
    assert cache.evictable_pages == 6
    assert cache.evict(3) == 3
    assert cache.match(pack([7]))[1] == 0
    assert cache.evict(100) == 3
    assert cache.match(pack([4, 5, 6]))[1] == 3
    cache.unlock(locked)
    assert cache.evict(100) == 3
    assert cache.total_pages == 0


def test_a_lock_survives_a_split_of_its_node() -> None:
    cache = RadixCache(1)
    cache.insert(pack([1, 2, 3, 4]))
    node, _ = cache.match(pack([1, 2, 3, 4]))
    cache.lock(node)
    cache.insert(pack([1, 2, 9]))
    assert cache.evict(100) == 1
    cache.unlock(node)
    assert cache.locked_pages == 0
    assert cache.evict(100) == 4


def test_the_pool_evicts_when_it_must_and_refuses_when_it_cannot() -> None:
    pool = KvPool(16, 4, RadixCache(4))
    assert pool.reserve(1, "room1", 3)
    pool.release_into_cache(1, pack(range(11)))
    assert pool.ledger().cache_tokens == 8
    assert pool.used_tokens == 0
    assert pool.reserve(2, "room2", 3)
    assert pool.ledger().cache_tokens == 4
    assert _balanced(pool)
    assert not pool.reserve(3, "room3", 2)
    assert pool.ledger().by_room == {"room2": 12}
    pool.release(2)
    pool.flush_cache()
    assert pool.ledger().free_tokens == 16


def test_a_prompt_that_another_cached_meanwhile_is_freed_not_kept_twice() -> None:
    pool = KvPool(64, 1, RadixCache(1))
    for owner in (1, 2):
        assert pool.reserve(owner, "room", 20)
    for owner in (1, 2):
        pool.release_into_cache(owner, pack(range(20)))
        assert _balanced(pool)
    assert pool.ledger().cache_tokens == 20
