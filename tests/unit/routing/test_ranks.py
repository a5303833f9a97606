"""DP ranks: which was sent what, and which one a request goes to."""

from __future__ import annotations

from engines.types import EngineId
from routing.index import NO_HIT, Hit
from routing.ranks import RankPrefixes, cheapest, hits_of_ranks, home

P0, P1 = EngineId("http://p0"), EngineId("http://p1")
BLOCKS = tuple(bytes([number]) * 16 for number in range(1, 11))
WHOLE = Hit(10, 10)


def runs(prefixes: RankPrefixes, hit: Hit = WHOLE, engine_id: EngineId = P0, ranks: int = 3) -> list[int]:
    return [each.held_blocks for each in hits_of_ranks(engine_id, ranks, hit, prefixes.match(BLOCKS))]


def test_a_rank_has_what_it_was_sent() -> None:
    prefixes = RankPrefixes()
    assert runs(prefixes) == [0, 0, 0]
    prefixes.sent(P0, 1, BLOCKS[:6], 100)
    prefixes.sent(P0, 2, BLOCKS, 100)
    prefixes.sent(P0, 0, BLOCKS[3:], 100)
    assert runs(prefixes) == [0, 6, 10], "only the run from the first block on counts"
    assert runs(prefixes, engine_id=P1) == [0, 0, 0]


def test_no_rank_has_more_than_its_engine() -> None:
    prefixes = RankPrefixes()
    prefixes.sent(P0, 1, BLOCKS, 100)
    prefixes.sent(P0, 2, BLOCKS[:3], 100)
    hits = hits_of_ranks(P0, 3, Hit(4, 7), prefixes.match(BLOCKS))
    assert hits == [NO_HIT, Hit(4, 7), Hit(3, 3)]
    assert hits_of_ranks(P0, 2, NO_HIT, prefixes.match(BLOCKS)) == [NO_HIT, NO_HIT]


def test_a_rank_forgets_the_oldest_beyond_its_capacity() -> None:
    prefixes = RankPrefixes()
    prefixes.sent(P0, 0, BLOCKS, 12)
    prefixes.sent(P0, 1, BLOCKS, 12)
    prefixes.sent(P0, 0, tuple(bytes([number]) * 16 for number in range(100, 112)), 12)
    assert runs(prefixes, ranks=2) == [0, 10]


def test_a_restart_empties_all_ranks_of_one_engine() -> None:
    prefixes = RankPrefixes()
    for engine_id in (P0, P1):
        for rank in range(3):
            prefixes.sent(engine_id, rank, BLOCKS, 100)
    prefixes.forget(P0)
    assert (runs(prefixes), runs(prefixes, engine_id=P1)) == ([0, 0, 0], [10, 10, 10])
    prefixes.forget(P0)
    prefixes.sent(P0, 2, BLOCKS, 100)
    assert runs(prefixes) == [0, 0, 10]


def test_the_cheapest_and_of_equal_ones_the_next() -> None:
    assert cheapest([(2.0,), (1.0,), (3.0,)], 0) == 1
    assert [cheapest([(1.0,)] * 3, first) for first in range(5)] == [0, 1, 2, 0, 1]
    assert cheapest([(1.0,), (0.0,), (0.0,)], 0) == 1
    assert cheapest([(0.0, 5.0), (0.0, 4.0), (1.0, 0.0)], 0) == 1


def test_prompts_that_begin_alike_have_one_home() -> None:
    assert home(BLOCKS, 1) == home(BLOCKS[:1], 2)
    assert home((), 5) == 5
    assert len({home((bytes([number]) * 16,), 0) % 4 for number in range(50)}) > 1
