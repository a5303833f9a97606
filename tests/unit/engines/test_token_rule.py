"""The token rule: incremental, context-sensitive, checkable."""

from __future__ import annotations

import pytest

from engines.token_rule import (
    EOS_PERIOD_TOKENS,
    EOS_TOKEN,
    FIRST_BYTE_TOKEN,
    FIRST_WORD_TOKEN,
    VOCABULARY_TOKENS,
    ContextHash,
    continue_greedily,
    pack,
    sampling_key,
    seeded_key,
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


def drawn(count: int) -> list[int]:
    context = ContextHash.from_tokens(PROMPT)
    tokens = []
    for _ in range(count):
        tokens.append(context.next_token())
        context.append(tokens[-1])
    return tokens


def test_tokens_are_words_characters_or_the_end_about_once_in_a_period() -> None:
    tokens = drawn(40 * EOS_PERIOD_TOKENS)
    assert 15 < tokens.count(EOS_TOKEN) < 80
    assert max(tokens) < VOCABULARY_TOKENS
    others = [token for token in tokens if token < FIRST_WORD_TOKEN and token != EOS_TOKEN]
    characters = bytes(token - FIRST_BYTE_TOKEN for token in others).decode()
    assert {ord(each) for each in characters} == {*range(0xC0, 0x100), *range(0x1F600, 0x1F640)}
    assert 40 < len(tokens) / len(characters) < 60, "about one token in 48 begins a character"


def test_a_character_is_never_left_open() -> None:
    """Whatever was drawn, also EOS, lies outside of the bytes of a character."""
    tokens = drawn(40 * EOS_PERIOD_TOKENS)
    data = b"".join(bytes([token - 3]) if 3 <= token < FIRST_WORD_TOKEN else b" " for token in tokens)
    assert data.decode().isprintable()


@pytest.mark.parametrize("text", ["\xc0", "\xff", "\U0001f600", "\U0001f63f"])
def test_a_character_that_the_prompt_has_begun_is_ended(text: str) -> None:
    """Its fixed bytes as they must be, its last one by the context; one that is whole is not gone on with."""
    for count in range(1, len(text.encode())):
        begun = [byte + FIRST_BYTE_TOKEN for byte in text.encode()[:count]]
        rest = continue_greedily([*PROMPT, *begun], len(text.encode()) - count)
        character = bytes(token - FIRST_BYTE_TOKEN for token in [*begun, *rest]).decode()
        assert len(character) == 1
        assert ord(character) - ord(text) in range(-63, 64)
    whole = [byte + FIRST_BYTE_TOKEN for byte in text.encode()]
    follow = {continue_greedily([*whole, *PROMPT[:start], *whole], 1)[0] for start in range(60)}
    assert len([token for token in follow if token >= FIRST_WORD_TOKEN]) > 40


def test_a_word_inside_a_character_leaves_it() -> None:
    broken = [*PROMPT, FIRST_BYTE_TOKEN + 0xF0, FIRST_WORD_TOKEN]
    context = ContextHash.from_tokens(PROMPT)
    for token in broken[len(PROMPT) :]:
        context.append(token)
    assert context.next_token() == ContextHash.from_tokens(broken).next_token() >= FIRST_WORD_TOKEN


def test_a_resumed_context_ends_the_character_that_was_begun() -> None:
    answer = continue_greedily(PROMPT, 3000, ignore_eos=True)
    inside = [at for at, token in enumerate(answer, 1) if token < FIRST_WORD_TOKEN]
    assert len(inside) > 100
    for at in inside:
        assert continue_greedily([*PROMPT, *answer[:at]], 5, ignore_eos=True) == answer[at : at + 5]
        assert verify_segment([*PROMPT, *answer[:at]], answer[at : at + 9], ignore_eos=True) == len(answer[at : at + 9])
        copied = ContextHash.from_tokens([*PROMPT, *answer[:at]]).copy()
        assert [copied.next_token(allow_eos=False)] == answer[at : at + 1]


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
    seeded = {ContextHash.from_tokens(PROMPT, seeded_key(seed)).next_token(allow_eos=False) for seed in (-1, 0, 42)}
    assert len(seeded) == 3
    assert greedy not in seeded
