"""The rule of the emulated model: the next token is a keyed hash of the whole context before it.

A leaf: standard library only, pure. One wrong, lost, repeated or spliced token changes everything after it, so a
checker that knows the prompt can verify any greedy segment. Ids are hashed as little-endian u32, one after another,
so the state is the same wherever a prompt ends and emitted tokens begin.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence

EOS_TOKEN = 2
FIRST_WORD_TOKEN = 259
"""Ids 0..2 are special and 3..258 are the bytes; the model only writes words and the end token."""
WORD_TOKENS = 1789
VOCABULARY_TOKENS = FIRST_WORD_TOKEN + WORD_TOKENS
EOS_PERIOD_TOKENS = 1024
"""On average one token in so many ends the answer."""

TOKEN_BYTES = 4
_MODEL_KEY = b"pdgate emulated model v1"
_EOS_MASK = EOS_PERIOD_TOKENS - 1
_EOS_BITS = EOS_PERIOD_TOKENS.bit_length() - 1


def pack(token_ids: Iterable[int]) -> bytes:
    """The ids as little-endian u32, the form in which they are hashed, cached and sent as KV."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes | bytearray | memoryview) -> list[int]:
    """The ids of `packed`; inverse of `pack`."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def sampling_key(server_secret: bytes, rid: str) -> bytes:
    """The extra key of one sampled request: differs between requests, and between servers for the same rid."""
    return hmac.digest(server_secret, rid.encode(), "sha256")


class ContextHash:
    """The running hash of one context; about 1 µs a token."""

    __slots__ = ("_state",)

    def __init__(self, packed: bytes | bytearray | memoryview = b"", sampling: bytes = b"") -> None:
        """Start from packed ids; `sampling` is empty for greedy, else the request's `sampling_key`."""
        self._state = hashlib.blake2b(packed, digest_size=8, key=_MODEL_KEY + sampling)

    @classmethod
    def from_tokens(cls, token_ids: Iterable[int], sampling: bytes = b"") -> ContextHash:
        """Start from a context given as ids."""
        return cls(pack(token_ids), sampling)

    def append(self, token: int) -> None:
        """Put `token` at the end of the context."""
        self._state.update(token.to_bytes(TOKEN_BYTES, "little"))

    def next_token(self, allow_eos: bool = True) -> int:
        """The token that follows the context: a word, or EOS unless it may not end here."""
        value = int.from_bytes(self._state.digest(), "little")
        if allow_eos and not value & _EOS_MASK:
            return EOS_TOKEN
        return FIRST_WORD_TOKEN + (value >> _EOS_BITS) % WORD_TOKENS

    def copy(self) -> ContextHash:
        """An independent hash with the same context."""
        twin = ContextHash.__new__(ContextHash)
        twin._state = self._state.copy()
        return twin


def verify_segment(prompt_ids: Sequence[int], segment_ids: Sequence[int], ignore_eos: bool = False) -> int:
    """How many tokens from the start of `segment_ids` the greedy model would have written after `prompt_ids`."""
    context = ContextHash.from_tokens(prompt_ids)
    for count, token in enumerate(segment_ids):
        if token != context.next_token(allow_eos=not ignore_eos):
            return count
        context.append(token)
    return len(segment_ids)


def continue_greedily(prompt_ids: Sequence[int], tokens: int, ignore_eos: bool = False) -> list[int]:
    """The greedy answer to `prompt_ids`: at most `tokens` ids, the last being EOS if it came."""
    context = ContextHash.from_tokens(prompt_ids)
    answer: list[int] = []
    while len(answer) < tokens and (not answer or answer[-1] != EOS_TOKEN or ignore_eos):
        answer.append(context.next_token(allow_eos=not ignore_eos))
        context.append(answer[-1])
    return answer
