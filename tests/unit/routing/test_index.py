from __future__ import annotations

import tracemalloc

import pytest

from engines.types import EngineId
from routing.index import NO_HIT, Hit, PrefixIndex
from routing.ownership import Tier
from routing.prefix import Namespace, root_hash, text_blocks

P0, P1, P2 = EngineId("p0"), EngineId("p1"), EngineId("p2")
A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")


def held(index: PrefixIndex, engine_id: EngineId, *blocks: bytes) -> int:
    return index.match(blocks).get(engine_id, NO_HIT).held_blocks


def test_one_match_tells_the_longest_run_of_every_engine() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B, C])
    index.add_held(P1, [A])
    index.add_held(P2, [B])
    assert index.match([A, B, D]) == {P0: Hit(2, 2), P1: Hit(1, 1)}
    assert index.match([A, B, C]) == {P0: Hit(3, 3), P1: Hit(1, 1)}
    assert index.match([E]) == index.match([]) == {}


def test_pending_counts_apart_until_it_is_confirmed() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A])
    index.add_pending(P0, [A, B, C])
    assert index.match([A, B, C, D])[P0] == Hit(held_blocks=1, pending_blocks=3)
    index.confirm(P0, [A, B, C])
    assert index.match([A, B, C, D])[P0] == Hit(3, 3)


def test_a_pending_prefix_alone_is_no_held_one() -> None:
    index = PrefixIndex()
    index.add_pending(P1, [A, B])
    assert index.match([A, B]) == {P1: Hit(0, 2)}
    index.drop(P1, [A, B])
    assert index.match([A, B]) == {}


def test_one_of_two_promises_dropped_leaves_the_other() -> None:
    index = PrefixIndex()
    index.add_pending(P0, [A, B])
    index.add_pending(P0, [A, B, C])
    index.drop(P0, [A, B])
    assert index.match([A, B, C])[P0].pending_blocks == 3
    index.drop(P0, [A, B, C])
    index.drop(P0, [A, B, C])
    assert index.match([A]) == {}


def test_beyond_its_capacity_the_oldest_leaf_goes() -> None:
    index = PrefixIndex(capacity_blocks=4)
    index.add_held(P0, [A, B, C])
    index.add_held(P0, [A, D, E])
    assert held(index, P0, A, B, C) == 2, "C was the oldest leaf"
    assert held(index, P0, A, D, E) == 3
    assert index.held_blocks(P0) == 4


def test_use_keeps_a_chain() -> None:
    index = PrefixIndex(capacity_blocks=3)
    index.add_held(P0, [A, B])
    index.add_held(P0, [C])
    index.add_held(P0, [A, B])
    index.add_held(P0, [D])
    assert held(index, P0, C) == 0
    assert held(index, P0, A, B) == 2


def test_a_chain_longer_than_the_capacity_keeps_its_beginning() -> None:
    index = PrefixIndex(capacity_blocks=2)
    index.add_held(P0, [A, B, C, D])
    assert held(index, P0, A, B, C, D) == 2


def test_a_smaller_capacity_forgets_at_once() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B, C])
    index.set_capacity(P0, 1)
    assert held(index, P0, A, B, C) == 1


def test_a_report_of_fewer_cached_blocks_forgets_the_rest() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B, C])
    index.add_held(P1, [A, B, C])
    assert index.correct(P0, [A, B, C, D], 1) == 2
    assert index.match([A, B, C]) == {P0: Hit(1, 1), P1: Hit(3, 3)}
    assert index.correct(P0, [A, B, C], 3) == 0
    assert index.correct(EngineId("gone"), [A], 0) == 0


def test_slower_tiers_count_where_the_faster_have_nothing() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B])
    index.add_held(P0, [A, B, C], Tier.HOST)
    index.add_held(P0, [A, B, C, D], Tier.STORE)
    index.add_held(P1, [A])
    assert index.match([A, B, C, D, E]) == {P0: Hit(4, 4, host_blocks=1, store_blocks=1), P1: Hit(1, 1)}
    assert index.evict(P0, [B]) == 1
    assert index.match([A, B, C, D])[P0] == Hit(4, 4, host_blocks=2, store_blocks=1)


def test_a_dropped_engine_leaves_nothing_and_its_bit_is_used_again() -> None:
    index = PrefixIndex()
    for engine_id in (P0, P1):
        index.add_held(engine_id, [A, B])
        index.add_held(engine_id, [A], Tier.HOST)
        index.add_pending(engine_id, [C])
    index.drop_engine(P0)
    index.drop_engine(P0)
    index.add_held(P2, [A])
    assert index.match([A, B]) == {P1: Hit(2, 2), P2: Hit(1, 1)}
    assert index.match([C]) == {P1: Hit(0, 1)}
    index.drop_engine(P1)
    index.drop_engine(P2)
    assert index.memory_bytes() == 0


@pytest.mark.parametrize("change", ["add_held", "add_pending", "confirm"])
def test_every_change_moves_the_version(change: str) -> None:
    index = PrefixIndex()
    before = index.version
    getattr(index, change)(P0, [A])
    between = index.version
    index.drop_engine(P0)
    assert before < between < index.version
    index.match([A])
    assert index.version == between + 1


def test_many_engines_match_in_one_walk() -> None:
    index = PrefixIndex()
    for i in range(300):
        index.add_held(EngineId(f"e{i}"), [A, B, C][: i % 4])
    hits = index.match([A, B, C])
    assert len(hits) == 225
    assert all(hit.held_blocks == int(engine_id[1:]) % 4 for engine_id, hit in hits.items())


@pytest.mark.parametrize("engines", [1, 4])
def test_memory_is_told_about_right(engines: int) -> None:
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for number in range(40 * engines):
            root = root_hash(Namespace("t", str(number // engines)))
            index.add_held(EngineId(f"p{number % engines}"), text_blocks(root, bytes(64), 1))
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown_bytes / 1.2 < index.memory_bytes() < grown_bytes * 1.7
