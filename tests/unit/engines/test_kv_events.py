"""Batches, frames, sequence numbers and page hashes of KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engines.kv_events import (
    REPLAY_END,
    KvBatch,
    MalformedKvEvents,
    Order,
    SequenceTracker,
    decode_batch,
    live_frames,
    page_digests,
    page_hash,
    replay_frames,
    replay_request,
)
from engines.kv_types import Medium, PagesCleared, PagesRemoved, PagesStored

STORED = {
    **{"type": "BlockStored", "block_hashes": [7, -8], "parent_block_hash": 6, "token_ids": [1, 2, 3, 4]},
    **{"block_size": 2, "lora_id": None},
}


def batch(*events: Any, rank: tuple[int, ...] = (0,)) -> KvBatch:
    return decode_batch(9, msgspec.msgpack.encode([1.5, list(events), *rank]))


def test_events_in_map_form() -> None:
    removed, cleared = {"type": "BlockRemoved", "block_hashes": [7], "medium": "DISK"}, {"type": "AllBlocksCleared"}
    salted = {**STORED, "medium": "CPU_PINNED", "cache_salt": "s", "session_id": "x", "lora_name": "l", "new": [1]}
    assert batch(STORED, salted, removed, cleared) == KvBatch(
        9,
        1.5,
        (
            PagesStored([7, -8], 6, [1, 2, 3, 4], 2),
            PagesStored([7, -8], 6, [1, 2, 3, 4], 2, Medium.CPU_PINNED, "s", "l"),
            PagesRemoved([7], Medium.DISK),
            PagesCleared(),
        ),
        0,
    )


def test_fields_may_be_left_out() -> None:
    least = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1], "block_size": 1}
    assert batch(least, {"type": "BlockRemoved", "block_hashes": [7]}, rank=()) == KvBatch(
        9, 1.5, (PagesStored([7], None, [1], 1, Medium.GPU, None, None), PagesRemoved([7], Medium.GPU)), None
    )


@pytest.mark.parametrize("more", [(), (None,), (None, "GPU"), (None, "GPU", "later", {"field": 1})])
def test_events_in_array_form(more: tuple[Any, ...]) -> None:
    got = batch(["BlockStored", [7, -8], 6, [1, 2, 3, 4], 2, *more], ["BlockRemoved", [7]], ["AllBlocksCleared"])
    assert got.events == (PagesStored([7, -8], 6, [1, 2, 3, 4], 2), PagesRemoved([7]), PagesCleared())


def test_an_adapters_number_names_it_where_no_name_does() -> None:
    (event,) = batch(["BlockStored", [7], None, [1], 1, 3, "CPU_PINNED"]).events
    assert (event.lora, event.medium) == ("3", Medium.CPU_PINNED)  # type: ignore[union-attr]


def test_unsigned_hashes_and_pairs_of_tokens() -> None:
    event = {**STORED, "block_hashes": [2**64 - 8, 7], "parent_block_hash": 2**63, "token_ids": [[1, 2], [2, 3]]}
    assert batch({**event, "block_size": 1}).events == (PagesStored([-8, 7], -(2**63), [1, 2], 1),)


def test_media_that_nobody_knows_are_left_out() -> None:
    assert batch({**STORED, "medium": "TAPE"}, {"type": "AllBlocksCleared"}).events == (PagesCleared(),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode(["now", [], 0]),
        *(msgspec.msgpack.encode([float(time), [], 0]) for time in ("inf", "-inf", "nan")),
        msgspec.msgpack.encode([1.0, [STORED], "zero"]),
        msgspec.msgpack.encode([1.0, [3], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "Else"}], 0]),
        msgspec.msgpack.encode([1.0, [["Else", 1]], 0]),
        msgspec.msgpack.encode([1.0, [[]], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "token_ids": [1, 2, 3]}], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "token_ids": [1, 2, 3, -1]}], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "token_ids": [1, 2, 3, 2**32]}], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "block_size": 0, "token_ids": []}], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "block_hashes": ["a"]}], 0]),
        msgspec.msgpack.encode([1.0, [{**STORED, "cache_salt": 3}], 0]),
        msgspec.msgpack.encode([1.0, [STORED], 0])[:-9],
        b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x81\xa4type\xa2\xff\xfe\0",
        b"\x93\xcb\0\0\0\0\0\0\0\0\x91" + b"\x91" * 5000,
    ],
)
def test_a_malformed_batch_raises_one_error_with_its_number(payload: bytes) -> None:
    with pytest.raises(MalformedKvEvents, match="batch 9"):
        decode_batch(9, payload)


def test_frames() -> None:
    five = (5).to_bytes(8, "big")
    assert live_frames([b"topic", five, b"x"]) == (5, b"x")
    assert replay_request(5) == [b"", five]
    assert replay_frames([b"", b"topic", five, b"x"]) == replay_frames([b"", five, b"x"]) == (5, b"x")
    assert replay_frames([b"", b"", REPLAY_END, b""]) is replay_frames([b"", REPLAY_END, b""]) is None
    assert live_frames([b"", b"\x7f" + b"\xff" * 7, b""])[0] == 2**63 - 1
    assert replay_request(2**63)  # what follows the highest number
    for number in (b"\x80" + bytes(7), b"\xff" * 7 + b"\xfe"):
        with pytest.raises(MalformedKvEvents, match="no sequence number"):
            live_frames([b"", number, b"x"])
        with pytest.raises(MalformedKvEvents, match="no sequence number"):
            replay_frames([b"", number, b"x"])
    with pytest.raises(MalformedKvEvents, match="no sequence number"):
        live_frames([b"", REPLAY_END, b"x"])
    for wrong in ([], [b"", five], [b"topic", five, b"x", b""], [b"", five[1:], b"x"]):
        with pytest.raises(MalformedKvEvents):
            live_frames(wrong)
        with pytest.raises(MalformedKvEvents):
            replay_frames(wrong)


def test_sequence_numbers() -> None:
    numbers = SequenceTracker()
    assert numbers.see(0, 1.0) is Order.NEXT
    assert numbers.see(3, 1.0) is Order.GAP
    assert numbers.expected == 0
    numbers.skip_to(3)
    numbers.accept(3, 10.0)
    assert numbers.expected == 4
    assert [numbers.see(number, 10.0) for number in (3, 2, 4, 6)] == [
        *(Order.DUPLICATE, Order.DUPLICATE, Order.NEXT, Order.GAP)
    ]
    assert [numbers.see(number, 10.5) for number in (3, 0)] == [Order.RESTART, Order.RESTART]
    numbers.restart()
    assert numbers.see(0, 10.5) is Order.NEXT


@pytest.mark.parametrize(
    ("tokens", "page", "hashes"),
    [
        (range(1, 9), 4, [-3488128144981237669, 5674439469042975057]),
        (range(1, 12), 4, [-3488128144981237669, 5674439469042975057]),
        (
            range(5, 69),
            16,
            [6656831445796273067, 8907485180548743928, -2453922284989812645, 7093182188937364212],
        ),
    ],
)
def test_page_hashes_of_the_plain_rule(tokens: range, page: int, hashes: list[int]) -> None:
    assert [page_hash(digest) for digest in page_digests(list(tokens), page)] == hashes


def test_page_hashes_continue_and_differ_by_salt_and_wide_ids() -> None:
    plain = page_digests([1, 2, 3, 4], 2)
    assert page_digests([3, 4], 2, parent=plain[0]) == plain[1:]
    assert page_digests([1, 2], 2, "") == plain[:1]
    salted = page_digests([1, 2, 3, 4], 2, "salt")
    assert not set(salted) & set(plain)
    assert salted != page_digests([1, 2, 3, 4], 2, "salty")
    assert page_hash(salted[0]) == -48066477051406352
    assert page_digests([1, 2**32], 2)[0] not in plain
