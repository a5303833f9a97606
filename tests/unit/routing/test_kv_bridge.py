"""From pages to blocks: what is told, what waits, what is forgotten."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from engines.kv_types import Medium, PagesCleared, PagesRemoved, PagesStored
from routing.kv_bridge import Change, Cleared, Held, KvBridge, Lost
from routing.kv_ranks import RankUnion
from routing.ownership import Tier
from routing.prefix import id_blocks

ROOT = b"r" * 16
IDS = list(range(100, 124))
"""Six blocks of four tokens."""
CHAIN = id_blocks(ROOT, IDS, 4)
PAGES = list(range(-12, 12))
"""The engine's hashes of 24 pages of one token."""


def root_of(salt: str | None, lora: str | None) -> bytes:
    return ROOT if salt is lora is None else f"{salt},{lora}".encode()


def bridge(page_tokens: int = 1, max_pages: int = 1000) -> KvBridge:
    return KvBridge(root_of, 4, page_tokens, max_pages)


def stored(start: int, stop: int, medium: Medium = Medium.GPU) -> PagesStored:
    return PagesStored(PAGES[start:stop], PAGES[start - 1] if start else None, IDS[start:stop], 1, medium)


def test_a_chain_grows_block_by_block() -> None:
    at = bridge()
    assert at.apply(stored(0, 10)) == [Held(CHAIN[:2], Tier.DEVICE)]
    assert at.apply(stored(10, 11)) == []
    assert at.apply(stored(11, 24)) == [Held(CHAIN, Tier.DEVICE)]
    assert at.apply(stored(4, 8)) == []
    assert at.pages == 24


def test_prompts_part_within_a_block() -> None:
    at = bridge()
    at.apply(stored(0, 8))
    other = [*IDS[:6], 7, 8, 9]
    fork = PagesStored([70, 80, 90], PAGES[5], [7, 8, 9], 1)
    assert at.apply(fork) == [Held(id_blocks(ROOT, other, 4), Tier.DEVICE)]
    assert at.apply(PagesRemoved([PAGES[7]])) == [Lost(CHAIN[1:2], Tier.DEVICE)]
    both = at.apply(PagesRemoved([PAGES[4]]))
    assert both == [Lost(id_blocks(ROOT, other, 4)[1:], Tier.DEVICE)]
    (again,) = at.apply(PagesStored([PAGES[4]], PAGES[3], [IDS[4]], 1))
    assert again == Held(id_blocks(ROOT, other, 4), Tier.DEVICE)


def test_the_pages_that_another_prompt_has_there_are_not_its_own() -> None:
    at = bridge()
    at.apply(stored(0, 4))
    other = id_blocks(ROOT, [*IDS[:2], 7, 8], 4)
    assert at.apply(PagesStored([70, 80], PAGES[1], [7, 8], 1)) == [Held(other, Tier.DEVICE)]
    assert at.apply(PagesRemoved([80])) == [Lost(other, Tier.DEVICE)]


def test_salt_and_adapter_choose_the_root() -> None:
    at = bridge()
    event = PagesStored([1, 2, 3, 4], None, IDS[:4], 1, cache_salt="s", lora="l")
    assert at.apply(event) == [Held(id_blocks(b"s,l", IDS[:4], 4), Tier.DEVICE)]
    assert at.apply(PagesStored([5, 6, 7, 8], 4, IDS[4:8], 1)) == [
        Held(id_blocks(b"s,l", IDS[:8], 4), Tier.DEVICE),
    ]


def test_media_are_counted_apart_and_two_make_the_store() -> None:
    at = bridge()
    assert at.apply(stored(0, 4)) == [Held(CHAIN[:1], Tier.DEVICE)]
    assert at.apply(stored(0, 4, Medium.CPU_PINNED)) == [Held(CHAIN[:1], Tier.HOST)]
    assert at.apply(stored(0, 4, Medium.DISK)) == [Held(CHAIN[:1], Tier.STORE)]
    assert at.apply(stored(0, 4, Medium.EXTERNAL)) == []
    assert at.apply(PagesRemoved(PAGES[:4], Medium.DISK)) == []
    assert at.apply(PagesRemoved(PAGES[:4], Medium.EXTERNAL)) == [Lost(CHAIN[:1], Tier.STORE)]
    assert at.apply(PagesRemoved(PAGES[:4])) == [Lost(CHAIN[:1], Tier.DEVICE)]
    assert at.pages == 4
    assert at.apply(PagesRemoved(PAGES[:4], Medium.CPU_PINNED)) == [Lost(CHAIN[:1], Tier.HOST)]
    assert at.pages == 0


def test_what_is_missing_above_a_held_block_is_said() -> None:
    at = bridge()
    at.apply(stored(0, 12))
    assert at.apply(PagesRemoved(PAGES[5:6])) == [Lost(CHAIN[1:2], Tier.DEVICE)]
    assert at.apply(stored(12, 16)) == [Held(CHAIN[:4], Tier.DEVICE), Lost(CHAIN[1:2], Tier.DEVICE)]


def test_pages_wait_for_their_parent_and_what_waits_too_long_is_forgotten() -> None:
    at = bridge(max_pages=64)  # eight may wait
    assert at.apply(stored(8, 12)) == []
    assert at.apply(PagesRemoved(PAGES[11:12])) == []
    assert at.pages == 5
    assert at.apply(stored(4, 8)) == []  # one more than may wait: the oldest go
    assert (at.pages, at.forgotten_pages) == (4, 5)
    assert at.apply(stored(0, 4)) == [Held(CHAIN[:1], Tier.DEVICE), Held(CHAIN[:2], Tier.DEVICE)]
    assert at.apply(stored(8, 12)) == [Held(CHAIN[:3], Tier.DEVICE)]


def test_pages_that_contradict_each_other_end() -> None:
    at = bridge()
    at.apply(PagesStored([1, 2], None, [1, 2], 1))
    assert at.apply(PagesStored([4, 4, 2], 4, [1, 1, 2], 1)) == []
    assert at.apply(PagesStored([4], 2, [4], 1)) == []  # what waited for it comes, and is not its own parent
    assert at.apply(PagesStored([9], 8, [1], 1)) == at.apply(PagesStored([8, 9], 9, [1, 1], 1)) == []
    assert at.apply(PagesStored([3, 8, 3, 3], 4, [1, 1, 1, 1], 1))[0].blocks[:1] == id_blocks(ROOT, [1, 2, 4, 1], 4)  # type: ignore[union-attr]
    assert at.apply(PagesRemoved([1, 2, 3, 4, 8, 9, 4])) != []
    assert at.pages == 0
    assert at.memory_bytes == 0


def test_what_waited_never_waits_again() -> None:
    at = bridge()
    for event in (stored(4, 5), PagesRemoved(PAGES[4:5]), stored(5, 6)):
        assert at.apply(event) == []
    assert at.apply(stored(0, 4)) == [Held(CHAIN[:1], Tier.DEVICE)]
    assert at.pages == 4  # the last one's parent came and went


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_pages_that_come_one_by_one_take_no_more_than_those_that_come_together(page_tokens: int) -> None:
    slow, fast = (KvBridge(root_of, 64, page_tokens, 100_000) for _ in range(2))
    ids = list(range(1024 * page_tokens))
    fast.apply(PagesStored(range(1024), None, ids, page_tokens))
    told: set[bytes] = set()
    for page in range(1024):
        tokens = ids[page * page_tokens : (page + 1) * page_tokens]
        for change in slow.apply(PagesStored([page], page - 1 if page else None, tokens, page_tokens)):
            assert isinstance(change, Held)
            told |= set(change.blocks)
    assert told == set(id_blocks(ROOT, ids, 64))
    assert slow.memory_bytes == fast.memory_bytes
    assert fast.memory_bytes <= 1024 * (105 + 4 * page_tokens) + 360 * 1024 * page_tokens // 64


def test_memory_is_what_is_said_at_most() -> None:
    """Of prompts in one piece, page by page, parting in every page, and waiting; and no less than half of it."""

    def parting(at: KvBridge, start: int) -> None:
        for page in range(start, start + 200):
            before = page - 1 if page > start else None
            at.apply(PagesStored([page], before, [1], 1))
            at.apply(PagesStored([-page], before, [2], 1))

    def waiting(at: KvBridge, start: int) -> None:
        for page in range(start, start + 200):
            at.apply(PagesStored([page], -page, [1], 1))

    def by_page(at: KvBridge, start: int) -> None:
        for page in range(start, start + 200):
            at.apply(PagesStored([page], page - 1 if page > start else None, [1], 1))

    def together(at: KvBridge, start: int) -> None:
        at.apply(PagesStored(list(range(start, start + 200)), None, [1] * 200, 1))

    for fill in (parting, waiting, by_page, together):
        gc.collect()
        tracemalloc.start()
        at = KvBridge(root_of, 64, 1, 1_000_000)
        for prompt in range(5):
            fill(at, (prompt + 1) << 40)
        gc.collect()
        took = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert at.pages >= 1000
        assert at.memory_bytes / 2 <= took <= at.memory_bytes, (fill.__name__, took, at.memory_bytes, at.pages)
        at.reset()
        assert at.memory_bytes == 0


def test_a_bridge_that_overflows_follows_nothing_until_the_cache_is_cleared() -> None:
    at = bridge(max_pages=10)
    assert at.apply(stored(0, 8)) == [Held(CHAIN[:2], Tier.DEVICE)]
    assert not at.overflowed
    assert at.apply(stored(8, 12)) == []
    assert at.overflowed
    assert at.pages == 0
    assert at.apply(stored(0, 4)) == at.apply(PagesRemoved(PAGES[:1])) == []
    assert at.apply(PagesCleared()) == [Cleared()]
    assert not at.overflowed
    assert at.apply(stored(0, 4)) == [Held(CHAIN[:1], Tier.DEVICE)]


def test_pages_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        bridge().apply(PagesStored([1], None, [1, 2], 2))
    with pytest.raises(ValueError, match="positive"):
        KvBridge(root_of, 4, 0, 1)


def test_pages_larger_than_a_block() -> None:
    at = bridge(page_tokens=8)
    assert at.apply(PagesStored([1, 2], None, IDS[:16], 8)) == [Held(CHAIN[:4], Tier.DEVICE)]
    assert at.apply(PagesRemoved([2])) == [Lost(CHAIN[2:4], Tier.DEVICE)]
    other = id_blocks(ROOT, [*IDS[:4], 1, 2, 3, 4], 4)  # another page that begins with the same block
    assert at.apply(PagesStored([3], None, [*IDS[:4], 1, 2, 3, 4], 8)) == [Held(other, Tier.DEVICE)]
    assert at.apply(PagesRemoved([1])) == [Lost(CHAIN[1:2], Tier.DEVICE)]
    assert at.apply(PagesRemoved([3])) == [Lost(other, Tier.DEVICE)]


def test_a_block_is_lost_with_the_last_rank_that_has_it() -> None:
    ranks = RankUnion(2)
    held: list[Change] = [Held(CHAIN[:2], Tier.DEVICE)]
    assert list(ranks.apply(0, held)) == list(ranks.apply(1, held)) == held
    assert list(ranks.apply(0, [Lost(CHAIN[1:2], Tier.DEVICE)])) == []
    assert list(ranks.apply(1, [Lost(CHAIN[1:2], Tier.DEVICE)])) == [Lost(CHAIN[1:2], Tier.DEVICE)]
    list(ranks.apply(1, [Held(CHAIN[:2], Tier.DEVICE)]))
    assert ranks.cleared(1) == [Lost(CHAIN[1:2], Tier.DEVICE)]
    assert ranks.cleared(0) is None
    one: list[Change] = [Held(CHAIN, Tier.HOST), Lost(CHAIN[:1], Tier.HOST)]
    assert list(RankUnion(1).apply(0, one)) == one
    assert RankUnion(1).cleared(0) is None
