"""Prefix identity: a prompt as a chain of block hashes, such that equal hashes mean an equal prefix. Pure.

Chain: `h0 = H(namespace)`, `hi = H(h(i-1) ‖ block_i)`, H = blake2b with 16 bytes. Only whole blocks count: the tail of
a prompt is recomputed anyway. Blocks of different namespaces never match, whatever they hold.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from hashlib import blake2b

HASH_BYTES = 16
TEXT_BLOCK_BYTES = 256
"""About 64 tokens of English; 16 bytes of hash then stand for 256 bytes of prompt."""


class BlockKind(StrEnum):
    """What is hashed: canonical bytes of the prompt, or the token ids of the model's own tokenizer."""

    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that must be equal before equal tokens may share KV. `tokenizer` names tokenizer and chat template."""

    tenant_or_salt: str
    model: str
    weight_version: str = ""
    tokenizer: str = ""
    lora: str = ""
    kv_dtype: str = ""
    page_size_tokens: int = 1
    layout: str = ""
    kind: BlockKind = BlockKind.TEXT


def root_hash(namespace: Namespace) -> bytes:
    """The start of every chain of this namespace; each field is length-prefixed, so no two namespaces collide."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"pdgate-root")
    for value in astuple(namespace):
        encoded = str(value).encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def text_blocks(root: bytes, data: bytes, block_bytes: int = TEXT_BLOCK_BYTES) -> tuple[bytes, ...]:
    """The chain over the whole blocks of `data`; ValueError when `block_bytes` is not positive."""
    if block_bytes <= 0:
        raise ValueError(f"block_bytes must be positive, not {block_bytes}")
    parent = root
    chain = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = blake2b(parent + data[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        chain.append(parent)
    return tuple(chain)


def id_blocks(root: bytes, ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """The chain over whole blocks of token ids, each id as an unsigned 32-bit little-endian integer.

    OverflowError when an id does not fit.
    """
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return text_blocks(root, words.tobytes(), block_tokens * words.itemsize)


def hash_block_tokens(group_block_tokens: Sequence[int]) -> int:
    """The block to hash at when KV groups have different block sizes: their greatest common divisor."""
    return math.gcd(*group_block_tokens)


def reusable_tokens(hit_tokens: Sequence[int], group_block_tokens: Sequence[int]) -> int:
    """How much of a prefix all KV groups can reuse together: the smallest hit, in whole least common multiples.

    `hit_tokens[i]` is the hit of the group (or shard) whose block is `group_block_tokens[i]`. Groups of 16 and 24
    tokens that both hold 72 reuse 48; ValueError when the lengths differ or no group is given.
    """
    if not hit_tokens or len(hit_tokens) != len(group_block_tokens):
        raise ValueError("one hit for each block size")
    common = math.lcm(*group_block_tokens)
    return min(hit_tokens) // common * common
