"""Equal leading blocks mean an equal prefix, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from routing.prefix import BlockKind, Namespace, id_blocks, reusable_tokens, root_hash, text_blocks

NAMES = st.text(max_size=6)
NAMESPACES = st.builds(
    Namespace, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES, st.integers(1, 64), NAMES, st.sampled_from(BlockKind)
)
ROOT = root_hash(Namespace("t", "m"))
TEXT = st.text("ab", max_size=40).map(str.encode)


def shared(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


@given(TEXT, TEXT, TEXT)
def test_leading_blocks_are_shared_exactly_as_far_as_the_prefix(head: bytes, one: bytes, other: bytes) -> None:
    one, other = head + one, head + other
    ours, theirs = text_blocks(ROOT, one, 4), text_blocks(ROOT, other, 4)
    common = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert shared(ours, theirs) == common // 4
    assert not set(ours[common // 4 :]) & set(theirs[common // 4 :])


@given(TEXT)
def test_the_chain_has_one_hash_for_each_whole_block(data: bytes) -> None:
    chain = text_blocks(ROOT, data, 4)
    assert len(chain) == len(data) // 4
    assert len(set(chain)) == len(chain)


@given(NAMESPACES, NAMESPACES, TEXT)
def test_namespaces_never_match(one: Namespace, other: Namespace, data: bytes) -> None:
    same = set(text_blocks(root_hash(one), data, 4)) & set(text_blocks(root_hash(other), data, 4))
    assert not same or one == other
    assert root_hash(one) == root_hash(replace(one))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
def test_ids_keep_the_chain_of_their_prefix(ids: list[int], block_tokens: int) -> None:
    chain = id_blocks(ROOT, ids, block_tokens)
    assert len(chain) == len(ids) // block_tokens
    for blocks in range(len(chain)):
        assert id_blocks(ROOT, ids[: blocks * block_tokens], block_tokens) == chain[:blocks]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 64)), min_size=1, max_size=4))
def test_what_is_reusable_is_whole_blocks_of_every_group_and_hit_by_all(groups: list[tuple[int, int]]) -> None:
    hits, blocks = zip(*groups, strict=True)
    tokens = reusable_tokens(hits, blocks)
    assert tokens <= min(hits)
    assert all(tokens % block == 0 for block in blocks)
