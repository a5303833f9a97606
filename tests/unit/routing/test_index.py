from __future__ import annotations

import tracemalloc
from itertools import accumulate
from random import Random

import pytest

from engines.types import EngineId
from routing import index as index_module
from routing.index import NO_HIT, Hit, PrefixIndex
from routing.ownership import Tier
from routing.prefix import Namespace, root_hash, text_blocks
from routing.segments import MAX_BEHIND, MAX_SEGMENT_BLOCKS, Segment, Segments

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
    assert index.pending_blocks() == 3
    index.drop(P0, [A, B, C])
    index.add_held(P0, [A, B, C])
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


def test_a_report_of_fewer_cached_blocks_forgets_the_rest_and_says_what() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B, C])
    index.add_held(P0, [A, B], Tier.HOST)
    index.add_held(P1, [A, B, C])
    assert index.correct(P0, [A, B, C, D], 1) == {Tier.DEVICE: [C, B], Tier.HOST: [B]}
    assert index.match([A, B, C]) == {P0: Hit(1, 1), P1: Hit(3, 3)}
    assert index.correct(P0, [A, B, C], 3) == {}
    assert index.correct(EngineId("gone"), [A], 0) == {}


def test_what_is_older_than_a_lost_block_is_lost_too() -> None:
    index = PrefixIndex()
    index.add_held(P0, [D, E])
    index.add_held(P0, [A, B, C])
    assert index.correct(P0, [A, B, C], 2) == {Tier.DEVICE: [E, D, C]}, "the oldest first"
    assert held(index, P0, A, B, C) == 2
    assert index.held_blocks(P0) == 2


def test_a_lost_block_behind_an_unknown_one_is_found() -> None:
    index = PrefixIndex()
    index.add_held(P0, [C, D])
    assert index.correct(P0, [A, B, C, D], 0) == {Tier.DEVICE: [D, C]}


def test_a_run_counts_as_soon_as_its_ancestors_are_held() -> None:
    index = PrefixIndex()
    index.add_held(P0, [C, D])
    index.add_held(P1, [D, E])
    assert index.match([A, B, C, D, E]) == {}
    assert index.held_blocks(P0) == 2
    for engine_id in (P0, P1):
        index.add_held(engine_id, [A, B])
    assert index.match([A, B, C, D, E]) == {P0: Hit(4, 4), P1: Hit(2, 2)}
    index.add_held(P1, [C])
    assert index.match([A, B, C, D, E]) == {P0: Hit(4, 4), P1: Hit(5, 5)}


def test_a_block_lost_from_the_middle_hides_what_follows_until_it_is_back() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B, C, D])
    assert index.evict(P0, [E, B, B]) == 1
    assert (held(index, P0, A, B, C, D), index.held_blocks(P0)) == (1, 3)
    index.add_held(P0, [A, B])
    assert held(index, P0, A, B, C, D) == 4


def test_what_was_used_in_part_keeps_that_part_longer_and_nobody_elses() -> None:
    index = PrefixIndex(capacity_blocks=5)
    for engine_id in (P0, P1):
        index.add_held(engine_id, [A, B, C])
        index.add_held(engine_id, [D, E])
    index.add_held(P0, [A])
    other = b"f" * 16
    for engine_id in (P0, P1):
        index.set_capacity(engine_id, 3)
        index.add_held(engine_id, [other])
    assert [held(index, P0, *blocks) for blocks in ((A, B, C), (D, E), (other,))] == [1, 1, 1]
    assert [held(index, P1, *blocks) for blocks in ((A, B, C), (D, E), (other,))] == [0, 2, 1]


def test_without_a_capacity_only_the_hard_bound_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_HELD_BLOCKS", 4)
    index = PrefixIndex(capacity_blocks=2)
    index.set_capacity(P0, None)
    index.add_held(P0, [A, B, C])
    assert held(index, P0, A, B, C) == 3
    index.add_held(P0, [D, E])
    assert index.held_blocks(P0) == 4
    index.set_capacity(P1, 9)
    index.add_held(P1, [A, B, C, D, E])
    assert index.held_blocks(P1) == 4, "nobody is thought to have more"


def test_a_chain_used_in_part_by_another_is_split_with_what_each_has() -> None:
    index = PrefixIndex()
    for engine_id in (P0, P1, P2):
        index.add_held(engine_id, [A, B, C, D, E])
    index.evict(P0, [E])
    index.evict(P2, [C, D, E])
    index.add_held(P1, [A, B])
    assert index.match([A, B, C, D, E]) == {P0: Hit(4, 4), P1: Hit(5, 5), P2: Hit(2, 2)}


def test_a_trunk_is_split_once_however_many_branches_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    split = Segments._split

    def counted(self: Segments, segment: Segment, at: int) -> Segment:
        splits.append(at)
        return split(self, segment, at)

    monkeypatch.setattr(Segments, "_split", counted)
    index = PrefixIndex()
    trunk = some_chain(0, 20)
    for number in range(1, 10):
        index.add_held(P0, trunk + some_chain(number, 5))
    assert splits == [20]


def test_a_chain_that_names_a_block_twice_breaks_nothing() -> None:
    """No hash chain does; but what comes from others is believed only."""
    for seed in range(300):
        random = Random(seed)
        index = PrefixIndex(4, sweep_blocks=1)
        for _ in range(20):
            engine_id = random.choice((P0, P1))
            blocks = random.choices((A, B, C), k=random.randrange(6))
            random.choice((index.add_held, index.add_held, index.evict))(engine_id, blocks)
            index.correct(engine_id, blocks, 5)
            assert 0 <= index.held_blocks(engine_id) <= 4
            index.match(blocks)


def test_a_chain_longer_than_a_segment_is_one_run() -> None:
    blocks = some_chain(1, 3 * MAX_SEGMENT_BLOCKS + 7)
    index = PrefixIndex()
    index.add_held(P0, blocks[:-5])
    index.add_held(P0, blocks)
    assert held(index, P0, *blocks) == len(blocks)
    index.evict(P0, [blocks[MAX_SEGMENT_BLOCKS]])
    assert held(index, P0, *blocks) == MAX_SEGMENT_BLOCKS


def test_a_chain_that_another_engine_lengthens_stays_one_segment_with_what_each_has() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A])
    index.add_held(P1, [A, B])
    index.add_held(P2, [A, B, C, D])
    index.add_held(P2, [A, B], Tier.HOST)
    index.add_held(P1, [A, B, C, D, E])
    assert segments_of(index) == 2, "cut once, where only a part was used"
    assert index.match([A, B, C, D, E]) == {P0: Hit(1, 1), P1: Hit(5, 5), P2: Hit(4, 4)}
    assert [index.held_blocks(engine_id) for engine_id in (P0, P1, P2)] == [1, 5, 4]
    index.evict(P1, [C, D, E])
    assert index.match([A, B, C, D, E]) == {P0: Hit(1, 1), P1: Hit(2, 2), P2: Hit(4, 4)}


def test_what_another_engine_lengthens_is_not_used_by_those_left_behind() -> None:
    index = PrefixIndex(capacity_blocks=2)
    index.add_held(P0, [A])
    index.add_held(P0, [D])
    index.add_held(P1, [A, B])
    index.add_held(P0, [E])
    assert [held(index, P0, block) for block in (A, D, E)] == [0, 1, 1]
    assert held(index, P1, A, B) == 2


def test_a_miss_behind_what_an_engine_was_left_with_forgets_nothing() -> None:
    index = PrefixIndex()
    index.add_held(P0, [E])
    index.add_held(P0, [A])
    index.add_held(P1, [A, B, C, D])
    assert index.correct(P0, [A, B, C, D], 2) == {}
    assert held(index, P0, E) == 1


@pytest.mark.parametrize(("owners", "segments"), [(MAX_BEHIND, 1), (MAX_BEHIND + 1, 2)])
def test_what_many_engines_have_is_not_lengthened(owners: int, segments: int) -> None:
    """A match looks at each of those left behind."""
    index = PrefixIndex()
    for number in range(owners):
        index.add_held(EngineId(f"e{number}"), [A, B])
    index.add_held(P0, [A, B, C])
    assert segments_of(index) == segments
    behind = {EngineId(f"e{number}"): Hit(2, 2) for number in range(owners)}
    assert index.match([A, B, C]) == behind | {P0: Hit(3, 3)}


def test_slower_tiers_count_where_the_faster_have_nothing() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A, B])
    index.add_held(P0, [A, B, C], Tier.HOST)
    index.add_held(P0, [A, B, C, D], Tier.STORE)
    index.add_held(P1, [A])
    assert index.match([A, B, C, D, E]) == {P0: Hit(4, 4, host_blocks=1, store_blocks=1), P1: Hit(1, 1)}
    assert index.evict(P0, [B]) == 1
    assert index.match([A, B, C, D])[P0] == Hit(4, 4, host_blocks=2, store_blocks=1)


@pytest.mark.parametrize(("tier", "hit"), [(Tier.HOST, Hit(1, 1, host_blocks=1)), (Tier.STORE, Hit(1, 1, 0, 1))])
def test_a_part_on_a_slower_tier_alone_counts(tier: Tier, hit: Hit) -> None:
    index = PrefixIndex()
    index.add_held(P0, [A], tier)
    index.add_held(P1, [A, B])
    assert index.match([A, B]) == {P0: hit, P1: Hit(2, 2)}


def test_what_a_slower_tier_has_beyond_the_prompt_does_not_count() -> None:
    index = PrefixIndex()
    index.add_held(P0, [A])
    index.add_held(P0, [A, B], Tier.HOST)
    index.add_held(P1, [A, B, C])
    assert index.match([A]) == {P0: Hit(1, 1), P1: Hit(1, 1)}


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


def test_what_left_is_removed_little_by_little_and_never_seen() -> None:
    index = PrefixIndex(sweep_blocks=10)
    chains = [some_chain(number, 100) for number in range(20)]
    for blocks in chains:
        index.add_held(P0, blocks)
    full_bytes = index.memory_bytes()
    index.drop_engine(P0)
    assert index.memory_bytes() > full_bytes / 2, "not all at once"
    assert index.match(chains[0]) == {}
    assert index.held_blocks(P0) == 0
    index.add_held(P0, chains[0][:50])
    index.add_held(P1, chains[1])
    assert index.match(chains[0]) == {P0: Hit(50, 50)}
    for _ in range(1000):
        index.add_pending(P0, ())
    assert index.match(chains[0]) == {P0: Hit(50, 50)}
    assert index.match(chains[1]) == {P1: Hit(100, 100)}
    assert index.memory_bytes() < full_bytes / 3


def test_blocks_of_gone_engines_do_not_pile_up() -> None:
    index = PrefixIndex(sweep_blocks=10)
    sizes = []
    for number in range(60):
        for part in range(5):
            index.add_held(P0, some_chain(5 * number + part, 40))
        index.drop_engine(P0)
        sizes.append(index.memory_bytes())
    assert max(sizes[20:]) < 3 * sizes[0]


def test_many_short_lived_branches_leave_no_more_than_they_hold() -> None:
    """However a chain was cut, what is left costs by what is held."""
    index = PrefixIndex(capacity_blocks=400)
    trunk = some_chain(0, 100)
    for number in range(300):
        index.add_held(P0, (*trunk[: number % 100], *some_chain(number + 1, 10)))
    assert index.held_blocks(P0) == 400
    assert index.memory_bytes() < 400 * 500


@pytest.mark.parametrize("change", ["add_held", "add_pending"])
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


@pytest.mark.parametrize("engines", [1, 8])
@pytest.mark.parametrize("run_blocks", [1, 10, 188])
def test_memory_is_told_about_right(engines: int, run_blocks: int) -> None:
    tracemalloc.start()
    try:
        index = PrefixIndex(capacity_blocks=50_000)
        for number in range(min(2_000, 15_000 // run_blocks)):
            blocks = some_chain(number, run_blocks)
            for engine in range(engines):
                index.add_held(EngineId(f"p{engine}"), blocks)
        del blocks
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown_bytes / 1.1 < index.memory_bytes() < grown_bytes * 1.5, grown_bytes


def test_a_block_in_long_runs_is_cheap_however_many_hold_it() -> None:
    index = PrefixIndex(capacity_blocks=50_000)
    for number in range(200):
        for engine in range(8):
            index.add_held(EngineId(f"p{engine}"), some_chain(number, 188))
    assert index.memory_bytes() / (200 * 188) <= 140, "an unlucky size of the tables included"


def test_a_chat_of_short_turns_is_cheap_wherever_each_turn_goes() -> None:
    index = PrefixIndex(capacity_blocks=50_000)
    random = Random(0)
    blocks = 0
    for number in range(400):
        ends = list(accumulate(random.choices((1, 2, 3, 4), k=20)))
        for end in ends:
            index.add_held(EngineId(f"p{random.randrange(8)}"), some_chain(number, end))
        blocks += ends[-1]
    assert index.memory_bytes() / blocks <= 150, "an unlucky size of the tables included"


def segments_of(index: PrefixIndex) -> int:
    return len(index._segments._segments)


def some_chain(number: int, blocks: int) -> tuple[bytes, ...]:
    return text_blocks(root_hash(Namespace("t", str(number))), bytes(blocks), 1)
