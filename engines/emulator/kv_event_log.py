"""The KV events of one rank of a server: what its radix cache did, in SGLang's words, until a batch is taken. Pure."""

from __future__ import annotations

import msgspec

from engines.kv_events import page_digests, page_hash
from engines.token_rule import unpack

_MEDIUM = "GPU"


class BlockStored(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True):
    """Consecutive new pages."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True):
    """Pages that were evicted."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True):
    """The cache was flushed."""


class KvEventLog:
    """Collects events; a `PageLog` of the radix cache."""

    def __init__(self, page_size_tokens: int, dp_rank: int = 0) -> None:
        self._page_size_tokens = page_size_tokens
        self._dp_rank = dp_rank
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(self, parent: bytes | None, packed: bytes, cache_salt: str) -> list[bytes]:
        """One event for all pages of one insertion."""
        token_ids = unpack(packed)
        digests = page_digests(token_ids, self._page_size_tokens, cache_salt, parent)
        self._events.append(
            BlockStored(
                [page_hash(digest) for digest in digests],
                None if parent is None else page_hash(parent),
                token_ids,
                self._page_size_tokens,
                None,
                _MEDIUM,
                cache_salt or None,
            )
        )
        return digests

    def evicted(self, digests: list[bytes]) -> None:
        """One event for what one leaf lost."""
        self._events.append(BlockRemoved([page_hash(digest) for digest in digests], _MEDIUM))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self, wall_s: float) -> bytes | None:
        """The payload of one batch with all events since the last call; None when there are none."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return msgspec.msgpack.encode([wall_s, events, self._dp_rank])
