"""Prompts with the lengths and the shared prefixes of a trace, made of pseudo-words.

Pure and deterministic: equal block ids give equal text of equal length, different ids different text, and another seed
other text, so that a repeated run need not find what the last one left in the caches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from gateway.bench.trace import BLOCK_TOKENS, TraceRequest

_SYLLABLES = tuple(first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou")
_WORDS = tuple(first + second for first in _SYLLABLES for second in _SYLLABLES)
_WORD_BYTES = len(_WORDS[0]) + 1
_LEAST_BLOCK_BYTES = 16  # room for any 64-bit id, which every block begins with
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class PromptScale:
    """From the tokens of a trace to the bytes of a prompt.

    `text_scale` multiplies all lengths, of prompts and outputs. `bytes_per_token` is 1 for the emulator, whose
    tokeniser takes a byte for a token; about 4 for a real one. Raises ValueError when blocks would be too short to
    tell them apart.
    """

    text_scale: float = 1.0
    bytes_per_token: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_bytes < _LEAST_BLOCK_BYTES:
            least = _LEAST_BLOCK_BYTES / (BLOCK_TOKENS * self.bytes_per_token)
            raise ValueError(f"--text-scale: {self.text_scale:g} is too small, {least:g} is the least")

    @property
    def block_bytes(self) -> int:
        return self.bytes_of(BLOCK_TOKENS)

    def bytes_of(self, prompt_tokens: int) -> int:
        return max(1, round(prompt_tokens * self.text_scale * self.bytes_per_token))

    def output_tokens(self, request: TraceRequest) -> int:
        return max(1, round(request.output_tokens * self.text_scale))


def prompt_of(request: TraceRequest, number: int, scale: PromptScale) -> str:
    """The prompt of the `number`-th request of a trace; ASCII. Without block ids it shares nothing with any other."""
    if not request.blocks:
        return _pseudo_words(f"{scale.seed} request {number}", _base36(number), scale.bytes_of(request.prompt_tokens))
    *whole, last = (block_text(block, scale) for block in request.blocks)
    last_tokens = request.prompt_tokens - BLOCK_TOKENS * len(whole)
    return "".join(whole) + last[: scale.bytes_of(last_tokens)]


@lru_cache(maxsize=8192)
def block_text(block: int, scale: PromptScale) -> str:
    """The text of one block, `scale.block_bytes` long; its id comes first, so no two blocks are alike."""
    return _pseudo_words(f"{scale.seed} block {block}", _base36(block), scale.block_bytes)


def _pseudo_words(seed: str, head: str, size_bytes: int) -> str:
    words = random.Random(seed).choices(_WORDS, k=size_bytes // _WORD_BYTES + 1)
    return f"{head} {' '.join(words)}"[:size_bytes]


def _base36(number: int) -> str:
    digits = "-" if number < 0 else ""
    rest = abs(number)
    reverse = [_DIGITS[rest % 36]]
    while rest := rest // 36:
        reverse.append(_DIGITS[rest % 36])
    return f"{digits}{''.join(reversed(reverse))}."
