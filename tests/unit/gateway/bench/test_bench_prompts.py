"""Prompts share exactly what the trace says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.prompts import PromptScale, block_text, prompt_of
from gateway.bench.trace import BLOCK_TOKENS, TraceRequest

ONE = PromptScale()
BLOCKS = st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True)
SCALES = st.builds(
    PromptScale, text_scale=st.sampled_from([0.05, 0.333, 1.0, 2.0]), bytes_per_token=st.sampled_from([1.0, 3.7])
)


def request(blocks: list[int], last_tokens: int = BLOCK_TOKENS) -> TraceRequest:
    return TraceRequest(0.0, BLOCK_TOKENS * (len(blocks) - 1) + last_tokens, 10, tuple(blocks))


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def test_lengths_are_those_of_the_trace() -> None:
    assert len(prompt_of(TraceRequest(0.0, 1100, 3, (7, 8, 9)), 0, ONE)) == 1100
    assert len(prompt_of(TraceRequest(0.0, 374, 3), 0, ONE)) == 374
    assert prompt_of(TraceRequest(0.0, 1100, 3, (7, 8, 9)), 0, ONE).isascii()


def test_scale() -> None:
    half = PromptScale(text_scale=0.5, bytes_per_token=4.0)
    long = TraceRequest(0.0, 1100, 7, (7, 8, 9))
    assert len(prompt_of(long, 0, half)) == 2200
    assert half.output_tokens(long) == 4
    assert half.output_tokens(TraceRequest(0.0, 1, 1)) == 1


def test_too_small_a_scale() -> None:
    with pytest.raises(ValueError, match=r"--text-scale: 0.01 is too small, 0.03125 is the least"):
        PromptScale(text_scale=0.01)
    assert PromptScale(text_scale=0.03125).block_bytes == 16


@given(BLOCKS, BLOCKS, BLOCKS, SCALES)
def test_equal_leading_ids_are_the_shared_prefix(
    common: list[int], left: list[int], right: list[int], scale: PromptScale
) -> None:
    first, second = prompt_of(request(common + left), 0, scale), prompt_of(request(common + right), 1, scale)
    equal = shared(common + left, common + right)
    got = shared(first, second)
    assert got >= equal * scale.block_bytes
    if left[0] != right[0]:
        assert got < (equal + 1) * scale.block_bytes


@given(st.integers(0, 2**63), st.integers(0, 2**63), SCALES)
def test_blocks_are_equal_only_to_themselves(one: int, other: int, scale: PromptScale) -> None:
    block_text.cache_clear()
    text = block_text(one, scale)
    block_text.cache_clear()
    assert block_text(one, scale) == text
    assert len(text) == scale.block_bytes
    assert (block_text(other, scale) == text) == (other == one)


@given(BLOCKS, st.integers(1, BLOCK_TOKENS), SCALES)
def test_a_partial_block_is_the_start_of_the_whole_one(blocks: list[int], last_tokens: int, scale: PromptScale) -> None:
    whole = prompt_of(request(blocks), 0, scale)
    assert whole.startswith(prompt_of(request(blocks, last_tokens), 1, scale))


def test_without_ids_nothing_is_shared() -> None:
    texts = [prompt_of(TraceRequest(0.0, 2000, 1), number, ONE) for number in range(100)]
    assert max(shared(first, second) for first in texts for second in texts if first is not second) < 16


def test_another_seed_is_another_text() -> None:
    long = TraceRequest(0.0, 1100, 3, (7, 8, 9))
    assert shared(prompt_of(long, 0, ONE), prompt_of(long, 0, PromptScale(seed=1))) < 16
