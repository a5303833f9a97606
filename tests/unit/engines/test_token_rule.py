"""The token rule: incremental, context-sensitive, checkable."""

from __future__ import annotations

import pytest

from engines.token_rule import (
    EOS_PERIOD_TOKENS,
    EOS_TOKEN,
    FIRST_WORD_TOKEN,
    VOCABULARY_TOKENS,
    ContextHash,
    continue_greedily,
    pack,
    sampling_key,
    unpack,
    verify_segment,
)

PROMPT = list(range(3, 103))


def test_packing_is_little_endian_u32_and_comes_back() -> None:
    assert pack([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert unpack(pack(PROMPT)) == PROMPT


@pytest.mark.parametrize("split", [0, 1, 17, 40])
def test_the_state_does_not_depend_on_where_the_prompt_ends(split: int) -> None:
    answer = continue_greedily(PROMPT, 40, ignore_eos=True)
    resumed = ContextHash.from_tokens([*PROMPT, *answer[:split]])
    rest = []
    for _ in range(40 - split):
        rest.append(resumed.next_token(allow_eos=False))
        resumed.append(rest[-1])
    assert answer[:split] + rest == answer


def test_a_copy_goes_its_own_way() -> None:
    first = ContextHash.from_tokens(PROMPT)
    second = first.copy()
    second.append(300)
    assert first.next_token() == ContextHash.from_tokens(PROMPT).next_token()
    assert second.next_token() == ContextHash.from_tokens([*PROMPT, 300]).next_token()


def test_tokens_are_words_or_the_end_about_once_in_a_period() -> None:
    context = ContextHash.from_tokens(PROMPT)
    tokens = []
    for _ in range(40 * EOS_PERIOD_TOKENS):
        tokens.append(context.next_token())
        context.append(tokens[-1])
    assert all(token == EOS_TOKEN or FIRST_WORD_TOKEN <= token < VOCABULARY_TOKENS for token in tokens)
    assert 15 < tokens.count(EOS_TOKEN) < 80


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: [*answer[:5], *answer[6:]],
        lambda answer: [*answer[:5], answer[4], *answer[5:]],
        lambda answer: [*answer[:5], answer[5] ^ 1, *answer[6:]],
        lambda answer: [*answer[:5], answer[6], answer[5], *answer[7:]],
    ],
    ids=["lost", "repeated", "wrong", "swapped"],
)
def test_a_spoiled_segment_is_valid_only_up_to_the_fault(spoil) -> None:  # type: ignore[no-untyped-def]
    answer = continue_greedily(PROMPT, 20, ignore_eos=True)
    assert verify_segment(PROMPT, answer, ignore_eos=True) == 20
    assert verify_segment(PROMPT, spoil(answer), ignore_eos=True) == 5


def test_sampled_requests_differ_by_rid_and_by_server() -> None:
    keys = [sampling_key(secret, rid) for secret in (b"a", b"b") for rid in ("r", "s")]
    tokens = {ContextHash.from_tokens(PROMPT, key).next_token(allow_eos=False) for key in keys}
    greedy = ContextHash.from_tokens(PROMPT).next_token(allow_eos=False)
    assert len(tokens) == 4
    assert greedy not in tokens
