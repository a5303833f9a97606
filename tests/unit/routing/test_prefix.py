from __future__ import annotations

import struct
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import pytest

from routing.prefix import (
    BlockKind,
    Namespace,
    hash_block_tokens,
    id_blocks,
    reusable_tokens,
    root_hash,
    text_blocks,
)

NAMESPACE = Namespace("tenant", "model")
ROOT = root_hash(NAMESPACE)


def test_the_chain_is_blake2b_of_parent_and_block() -> None:
    data = b"a" * 256 + b"b" * 256
    first = blake2b(ROOT + data[:256], digest_size=16).digest()
    assert text_blocks(ROOT, data) == (first, blake2b(first + data[256:], digest_size=16).digest())


def test_a_tail_that_fills_no_block_is_ignored() -> None:
    assert text_blocks(ROOT, b"x" * 255) == ()
    assert text_blocks(ROOT, b"x" * 256) == text_blocks(ROOT, b"x" * 511)


def test_every_field_of_a_namespace_changes_the_root() -> None:
    changed: dict[str, Any] = {"page_size_tokens": 16, "kind": BlockKind.IDS}
    roots = {ROOT}
    for field in fields(Namespace):
        roots.add(root_hash(replace(NAMESPACE, **{field.name: changed.get(field.name, "other")})))
    assert len(roots) == 1 + len(fields(Namespace))


def test_fields_do_not_run_into_each_other() -> None:
    assert root_hash(Namespace("ab", "c")) != root_hash(Namespace("a", "bc"))


def test_ids_are_hashed_as_little_endian_32_bit_words() -> None:
    assert id_blocks(ROOT, [1, 2, 3, 70_000, 5], 2) == text_blocks(ROOT, struct.pack("<4I", 1, 2, 3, 70_000), 8)


def test_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OverflowError):
        id_blocks(ROOT, [1 << 32], 1)


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        text_blocks(ROOT, b"abc", 0)


def test_groups_hash_at_their_gcd_and_reuse_at_their_lcm() -> None:
    assert hash_block_tokens([16, 24]) == 8
    assert reusable_tokens([72, 72], [16, 24]) == 48
    assert reusable_tokens([64], [16]) == 64


def test_the_smallest_hit_over_shards_counts() -> None:
    assert reusable_tokens([96, 48, 72], [16, 16, 16]) == 48
    assert reusable_tokens([96, 47], [16, 24]) == 0


@pytest.mark.parametrize(("hits", "blocks"), [([], []), ([16], [16, 24])])
def test_each_group_needs_a_hit(hits: list[int], blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="one hit"):
        reusable_tokens(hits, blocks)
