"""Replies that no Redis gives: each is a RedisTrouble, and none changes what is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio.connection import Connection

from routing.redis_errors import RedisTrouble, Trouble, kind_of, nonsense
from routing.redis_orders import entries
from routing.redis_server import ResponseError, pack
from routing.redis_topology import SLOTS, Topology, moved_by
from routing.redis_url import Address, parse

HERE = Address("h", 1)
A = Address("a", 7)
ALL = [[0, SLOTS - 1, [b"a", 7, b"id"]]]
leaves = (
    st.none() | st.integers() | st.binary(max_size=4) | st.just(b"master") | st.builds(ResponseError, st.just("ERR"))
)
replies = st.recursive(leaves | st.floats(), lambda inner: st.lists(inner, max_size=4), max_leaves=12)
"""Whatever the library may give for bytes; also maps, of the newer protocol."""
replies = replies | st.dictionaries(st.binary(max_size=2), replies, max_size=2)


# ---- commands --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=9000) | st.text(max_size=20) | st.integers(), max_size=8))
def test_a_command_is_sent_as_the_library_would_send_it(words: list[bytes | str | int]) -> None:
    command = ("GET", *words)
    assert pack(command) == b"".join(Connection().pack_command(*command))


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_reply_to_a_read_is_its_entries() -> None:
    reply = [[b"s", [[b"1-0", [b"a", b"1", b"b", b"2"]], [b"2-0", []]]], [b"t", []]]
    assert entries(reply) == {b"s": [(b"1-0", {b"a": b"1", b"b": b"2"}), (b"2-0", {})], b"t": []}
    assert entries(None) == {}


@pytest.mark.parametrize(
    "reply",
    [
        *(5, b"OK", [5], [[]], [[b"s"]], [[b"s", 5]], [[b"s", None]], [[5, []]], {b"a": b"b"}),
        *([[b"s", [5]]], [[b"s", [[b"1-0"]]]], [[b"s", [[b"1-0", None]]]], [[b"s", [[b"1-0", [b"a"]]]]]),
        *([[b"s", [[5, []]]]], [[b"s", [[b"1-0", [[], b"a"]]]]], [[b"s", [[b"1-0", [b"a", 5]]]]]),
    ],
)
def test_a_reply_to_a_read_that_is_none_is_trouble(reply: Any) -> None:
    with pytest.raises(RedisTrouble, match="XREAD") as raised:
        entries(reply)
    assert raised.value.kind is Trouble.DOWN


@given(replies)
@example([[b"s", [[b"1-0", [b"a", b"1"]]]]])
def test_any_reply_to_a_read_is_entries_or_trouble(reply: Any) -> None:
    try:
        found = entries(reply)
    except RedisTrouble:
        return
    for stream, new in found.items():
        assert type(stream) is bytes
        assert all(
            type(at) is bytes and {*map(type, fields), *map(type, fields.values())} <= {bytes} for at, fields in new
        )


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_reply_are_no_refusal() -> None:
    assert kind_of(exceptions.InvalidResponse('Protocol error, got "H" as reply type byte')) is Trouble.DOWN
    trouble = nonsense(HERE, "PING", b"x" * 10_000)
    assert (trouble.kind, trouble.maybe_done) == (Trouble.DOWN, True)
    assert trouble.message.startswith("h:1: the reply to PING is none of Redis: b'xx")
    assert len(trouble.message) < 200


@pytest.mark.parametrize("said", ["MOVED -1 a:7", "MOVED 16384 a:7", "MOVED 1 a:0", "ASK 1 a:65536", "MOVED 1 a:-7"])
def test_a_move_to_nowhere_is_not_followed(said: str) -> None:
    assert moved_by(BaseParser.parse_error(said), HERE) is None
    assert kind_of(BaseParser.parse_error(said)) is Trouble.REFUSED


# ---- finding servers -------------------------------------------------------------------------------------------------


def topology(url: str, answer: Callable[[Sequence[str]], Any]) -> Topology:
    """One whose servers answer by `answer`."""

    async def ask(address: Address, until_s: float, *words: str, sentinel: bool = False) -> Any:
        return answer(words)

    made = Topology(parse(url), 1.0, calls=1, reads=1, rng=Random(1))
    made._ask = ask  # type: ignore[method-assign]
    return made


def looked(made: Topology) -> list[RedisTrouble]:
    asyncio.run(made.look(0.0))
    return [*made.troubles()]


STRANGE_SLOTS = [
    *(None, 5, b"OK", [5], [[]], [[0]], [[0, 5]], [[0, 5, 7]], [[0, 5, []]], [[0, 5, [b"a"]]]),
    *([[0, 5, [b"\xff", 7]]], [[0, 5, [b"a", b"x"]]], [[0, 5, [b"a", 0]]], [[0, 5, [b"a", 65_536]]], {b"a": b"b"}),
    *([[0, 5, [7, 7]]], [[-1, 5, [b"a", 7]]], [[0, SLOTS, [b"a", 7]]], [[5, 4, [b"a", 7]]], [*ALL, [0, 1, [[], 7]]]),
]


@pytest.mark.parametrize("reply", STRANGE_SLOTS)
def test_slots_that_are_none_are_trouble_and_leave_what_is_known(reply: Any) -> None:
    (trouble,) = looked(made := topology("redis://h:1", lambda words: reply))
    assert trouble.kind is Trouble.DOWN
    assert trouble.message.startswith("h:1: the reply to CLUSTER SLOTS is none of Redis")
    assert not made.is_cluster
    assert made.unsettled, "it goes on looking"
    said: Any = ALL
    made = topology("redis://h:1", lambda words: said)
    assert looked(made) == []
    made._stale, said = True, reply
    assert looked(made) == []
    server = made.server_of(b"k")
    assert not isinstance(server, RedisTrouble)
    assert (server.address, made.unsettled) == (A, True)


def test_slots_are_taken_over() -> None:
    nameless = [
        [0, 9, [b"", 7], [b"r", 8]],
        [10, 10, [None, 8]],
        [11, 11, [b"?", 9]],
        [12, SLOTS - 1, [b"a", 7, b"i", []]],
    ]
    made = topology("redis://h:1", lambda words: nameless)
    assert looked(made) == []
    found = [made._slots[slot] for slot in (0, 9, 10, 11, 12, SLOTS - 1)]
    assert found == [("h", 7), ("h", 7), ("h", 8), ("h", 9), A, A]


@pytest.mark.parametrize("said", ["ERR This instance has cluster support disabled", "NOPERM this user"])
def test_a_server_that_refuses_to_say_its_slots_is_single(said: str) -> None:
    made = topology("redis://h:1", lambda words: BaseParser.parse_error(said))
    assert looked(made) == []
    assert not made.is_cluster


@given(replies)
def test_any_reply_is_borne(reply: Any) -> None:
    for url in ("redis://h:1", "redis+sentinel://h:1/name"):
        looked(topology(url, lambda words: reply))
        looked(topology(url, lambda words: reply if words[0] == "ROLE" else [b"a", b"7"]))


@pytest.mark.parametrize(
    ("named", "role"),
    [
        *(
            (named, [b"master"])
            for named in (5, b"OK", [], [b"a"], [5, 5], [b"a", b"x"], [b"a", b"0"], [b"", b"7"], [b"\xff", b"7"])
        ),
        *(([b"a", b"7"], role) for role in (5, None, b"master", [], [[]], [b"slave"])),
    ],
)
def test_what_a_sentinel_names_strangely_is_no_primary(named: Any, role: Any) -> None:
    made = topology("redis+sentinel://h:1/name", lambda words: role if words[0] == "ROLE" else named)
    (trouble,) = looked(made)
    assert trouble.kind is Trouble.DOWN


@pytest.mark.parametrize("role", [[b"master", 0, []], ResponseError("NOPERM")])
def test_what_a_sentinel_names_is_the_primary(role: Any) -> None:
    made = topology("redis+sentinel://h:1/name", lambda words: role if words[0] == "ROLE" else [b"a", b"7"])
    assert looked(made) == []
    server = made.server_of(b"k")
    assert not isinstance(server, RedisTrouble)
    assert server.address == A
