"""KV events as SGLang publishes them: batches, frames, sequence numbers, replay, page hashes. Pure.

A batch is MessagePack `[time, events, DP rank]`. An event is a map with a `type`, or in older releases an array with
the type in front; fields equal to their default may be left out. Every publisher numbers its batches from 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from engines.kv_types import KvEvent, Medium, PagesCleared, PagesRemoved, PagesStored

SEQUENCE_BYTES = 8
REPLAY_END = b"\xff" * SEQUENCE_BYTES
"""In the place of a sequence number: the end of a replay."""
_SEQUENCE_LIMIT = 1 << 63
"""No publisher counts so far: what is after any number below it can still be asked for."""

_SALT_PREFIX = b"sglang-cache-salt-v1\0"
_HASH_LIMIT = 1 << 63


class MalformedKvEvents(ValueError):
    """Frames or a payload that are not what the protocol says."""


@dataclass(frozen=True, slots=True)
class KvBatch:
    """What one scheduler step changed. `time_s` is the server's own wall clock."""

    sequence: int
    time_s: float
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None


# ---- payloads --------------------------------------------------------------------------------------------------------


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int]
    token_ids: list[int | tuple[int, int]]
    block_size: int
    parent_block_hash: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


def decode_batch(sequence: int, payload: bytes) -> KvBatch:
    """The batch in `payload`; MalformedKvEvents when it is none. Events of media that we do not know are left out."""
    try:
        batch = _decode_batch(payload)
        events = [_event(bytes(raw)) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedKvEvents(f"batch {sequence}: {error}") from error
    if not math.isfinite(batch.ts):
        raise MalformedKvEvents(f"batch {sequence}: its time is {batch.ts}")
    return KvBatch(sequence, batch.ts, tuple(event for event in events if event is not None), batch.dp_rank)


def _event(raw: bytes) -> KvEvent | None:
    is_array = bool(raw) and (0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD))
    decoded = _decode_array(raw) if is_array else _decode_map(raw)
    if isinstance(decoded, _ClearedMap | _ClearedArray):
        return PagesCleared()
    medium = _medium(decoded.medium)
    if medium is None:
        return None
    if isinstance(decoded, _RemovedMap | _RemovedArray):
        return PagesRemoved(_signed(decoded.block_hashes), medium)
    return _stored(decoded, medium)


def _stored(event: _StoredMap | _StoredArray, medium: Medium) -> PagesStored:
    hashes, ids = event.block_hashes, event.token_ids
    if event.block_size < 1 or len(ids) != len(hashes) * event.block_size:
        raise msgspec.ValidationError(f"{len(ids)} tokens for {len(hashes)} pages of {event.block_size}")
    tokens = [each if isinstance(each, int) else each[0] for each in ids]  # pairs: a draft model's tree of bigrams
    if tokens and not (min(tokens) >= 0 and max(tokens) < 1 << 32):
        raise msgspec.ValidationError("a token id is not an unsigned 32-bit integer")
    parent = event.parent_block_hash
    lora = getattr(event, "lora_name", None) or (None if event.lora_id is None else str(event.lora_id))
    return PagesStored(
        _signed(hashes),
        None if parent is None else _signed([parent])[0],
        tokens,
        event.block_size,
        medium,
        getattr(event, "cache_salt", None) or None,
        lora,
    )


def _medium(name: str | None) -> Medium | None:
    if name is None:
        return Medium.GPU
    return Medium(name) if name in Medium.__members__ else None


def _signed(hashes: list[int]) -> list[int]:
    """Hashes as signed 64-bit integers; some engines write the same bits unsigned."""
    if hashes and max(hashes) >= _HASH_LIMIT:
        return [each - 2 * _HASH_LIMIT if each >= _HASH_LIMIT else each for each in hashes]
    return hashes


# ---- frames ----------------------------------------------------------------------------------------------------------


def live_frames(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Sequence number and payload of a published message `[topic, sequence, payload]`."""
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise MalformedKvEvents(f"a message of {[len(frame) for frame in frames]} bytes is no [topic, sequence, batch]")
    return _sequence(frames[1]), frames[2]


def _sequence(frame: bytes) -> int:
    number = int.from_bytes(frame, "big")
    if number >= _SEQUENCE_LIMIT:
        raise MalformedKvEvents(f"{number} is no sequence number")
    return number


def replay_request(first: int) -> list[bytes]:
    """What a DEALER socket sends to get every batch from number `first` on that is still kept."""
    return [b"", first.to_bytes(SEQUENCE_BYTES, "big")]


def replay_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence number and payload of one reply `[empty, topic, sequence, payload]`; None at the end of the replay.

    vLLM's replies have no topic frame.
    """
    if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != SEQUENCE_BYTES:
        raise MalformedKvEvents(f"a replay of {[len(frame) for frame in frames]} bytes is no [topic, sequence, batch]")
    return None if frames[-2] == REPLAY_END else (_sequence(frames[-2]), frames[-1])


# ---- sequence numbers ------------------------------------------------------------------------------------------------


class Order(StrEnum):
    """What a sequence number says of what came before it."""

    NEXT = "next"
    GAP = "gap"
    RESTART = "restart"
    DUPLICATE = "duplicate"


class SequenceTracker:
    """Follows the numbers of one publisher. `expected` is the next number; 0 at first: every publisher begins there."""

    def __init__(self) -> None:
        self.expected = 0
        self._last_time_s = float("-inf")

    def see(self, sequence: int, time_s: float) -> Order:
        """What `sequence` is, from a batch of the server's time `time_s`; nothing is changed.

        A low number that is no newer than the last batch is a repetition, a newer one comes of a new process; it
        misses the numbers from 0 on. A gap misses those from `expected` on.
        """
        if sequence == self.expected:
            return Order.NEXT
        if sequence > self.expected:
            return Order.GAP
        return Order.RESTART if time_s > self._last_time_s else Order.DUPLICATE

    def accept(self, sequence: int, time_s: float) -> None:
        """Batch `sequence` was handed on."""
        self.expected = sequence + 1
        self._last_time_s = time_s

    def skip_to(self, sequence: int) -> None:
        """All before `sequence` is given up."""
        self.expected = sequence

    def restart(self) -> None:
        """Another process publishes now."""
        self.expected = 0


# ---- page hashes -----------------------------------------------------------------------------------------------------


def page_digests(
    token_ids: Sequence[int], page_tokens: int, cache_salt: str | None = None, parent: bytes | None = None
) -> list[bytes]:
    """SGLang's SHA-256 chain over the whole pages of `token_ids`, continued from the digest `parent` if there is one.

    LoRA requests are hashed in another way that differs between servers: their hashes cannot be foretold.
    """
    digest = parent if parent is not None else _salt_digest(cache_salt)
    digests = []
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        digest = hashlib.sha256(digest + _page_bytes(token_ids[start : start + page_tokens])).digest()
        digests.append(digest)
    return digests


def page_hash(digest: bytes) -> int:
    """The number that events carry for a page of this digest."""
    return int.from_bytes(digest[:8], "big", signed=True)


def _salt_digest(cache_salt: str | None) -> bytes:
    return hashlib.sha256(_SALT_PREFIX + cache_salt.encode()).digest() if cache_salt else b""


def _page_bytes(token_ids: Sequence[int]) -> bytes:
    if max(token_ids) < 1 << 32:
        return b"".join([token.to_bytes(4, "little") for token in token_ids])
    return b"\xff" + b"".join([token.to_bytes(8, "little") for token in token_ids])
