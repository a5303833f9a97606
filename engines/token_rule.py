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
FIRST_BYTE_TOKEN = 3
FIRST_WORD_TOKEN = 259
"""Ids 0..2 are special and 3..258 are the bytes; the model writes words, the bytes of a few characters, and the end."""
WORD_TOKENS = 1789
VOCABULARY_TOKENS = FIRST_WORD_TOKEN + WORD_TOKENS
EOS_PERIOD_TOKENS = 1024
"""On average one token in so many ends the answer."""

TOKEN_BYTES = 4
_MODEL_KEY = b"pdgate emulated model v1"
_EOS_MASK = EOS_PERIOD_TOKENS - 1
_EOS_BITS = EOS_PERIOD_TOKENS.bit_length() - 1
_LEAD_DRAWS = 38
"""How many draws, over those that are words, begin a character: on average one token in 48 does."""
_DRAWS = WORD_TOKENS + _LEAD_DRAWS
_LEADS = (0xC3, 0xF0)
_BEGUN = (b"\xc3", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98")
"""What a character that the model writes may have before its last byte: U+00C0..U+00FF, and U+1F600..U+1F63F."""
_FIXED_NEXT = {b"\xf0": 0x9F, b"\xf0\x9f": 0x98}
_OPEN_TAIL_BYTES = max(map(len, _BEGUN)) * TOKEN_BYTES


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


def seeded_key(seed: int) -> bytes:
    """The extra key of a sampled request on servers with deterministic inference: the same on all of them."""
    return b"seed" + seed.to_bytes(8, "little", signed=True)


class ContextHash:
    """The running hash of one context; about 1 µs a token."""

    __slots__ = ("_begun", "_state")

    def __init__(self, packed: bytes | bytearray | memoryview = b"", sampling: bytes = b"") -> None:
        """Start from packed ids; `sampling` is empty for greedy, else the request's `sampling_key`."""
        self._state = hashlib.blake2b(packed, digest_size=8, key=_MODEL_KEY + sampling)
        self._begun = b""
        """The bytes of a character that the context ends inside of."""
        for token in unpack(packed[-_OPEN_TAIL_BYTES:]):
            self._begun = _begun_after(self._begun, token)

    @classmethod
    def from_tokens(cls, token_ids: Iterable[int], sampling: bytes = b"") -> ContextHash:
        """Start from a context given as ids."""
        return cls(pack(token_ids), sampling)

    def append(self, token: int) -> None:
        """Put `token` at the end of the context."""
        self._state.update(token.to_bytes(TOKEN_BYTES, "little"))
        if token < FIRST_WORD_TOKEN or self._begun:
            self._begun = _begun_after(self._begun, token)

    def next_token(self, allow_eos: bool = True) -> int:
        """The token that follows the context: a word or a character's byte, or EOS unless it may not end here.

        A character that was begun is ended before anything else comes.
        """
        value = int.from_bytes(self._state.digest(), "little")
        if self._begun:
            return FIRST_BYTE_TOKEN + (_FIXED_NEXT.get(self._begun) or 0x80 + (value >> _EOS_BITS) % 64)
        if allow_eos and not value & _EOS_MASK:
            return EOS_TOKEN
        drawn = (value >> _EOS_BITS) % _DRAWS
        if drawn < WORD_TOKENS:
            return FIRST_WORD_TOKEN + drawn
        return FIRST_BYTE_TOKEN + _LEADS[drawn % len(_LEADS)]

    def copy(self) -> ContextHash:
        """An independent hash with the same context."""
        twin = ContextHash.__new__(ContextHash)
        twin._state, twin._begun = self._state.copy(), self._begun
        return twin


def _begun_after(begun: bytes, token: int) -> bytes:
    """The character that is begun behind `token`, before which `begun` was."""
    if not FIRST_BYTE_TOKEN <= token < FIRST_WORD_TOKEN:
        return b""
    byte = bytes((token - FIRST_BYTE_TOKEN,))
    longer = begun + byte
    return longer if longer in _BEGUN else byte if byte in _BEGUN else b""


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
