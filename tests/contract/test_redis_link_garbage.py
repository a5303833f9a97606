"""The link and a peer that is no Redis, or a sick one: each call is RedisTrouble, and the link gets well again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from engines.tasks import spawn
from routing.redis_link import Link, RedisTrouble, Script, ScriptCall, Trouble
from tests.machine import time_limit

Answer = Callable[[bytes], bytes]
"""What is answered to a command's first word."""
CALL = ScriptCall(Script("s", "return 1", "0" * 40), [b"k"], [])


def sane(command: bytes) -> bytes:
    known = {b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n", b"XREAD": b"*-1\r\n"}
    return known.get(command, b":1\r\n" if command == b"EVALSHA" else b"+OK\r\n")


class Peer:
    """Answers by `answer`, which may be changed; `connections` counts those that were opened."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                writer.write(self.answer(words[0].upper()))
        writer.close()


@contextlib.asynccontextmanager
async def linked(answer: Answer) -> AsyncIterator[tuple[Peer, Link]]:
    peer = Peer(answer)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = Link(f"redis://127.0.0.1:{port}", spawn, lambda state: None, timeout_s=0.2, backoff_s=(0.01, 0.05))
    await link.start()
    try:
        yield peer, link
    finally:
        await link.stop()
        server.close()
        await server.wait_closed()


async def well(link: Link) -> None:
    """Wait until it answers again; its time limit is short, so a busy machine may be SLOW now and then."""
    async with time_limit(5.0):
        while True:
            while link.state.trouble is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            try:
                answers = await link.command("GET", "k"), await link.run(CALL), await link.read({b"s": b"0"}, 0.01)
                break
            except RedisTrouble as trouble:
                if trouble.kind is not Trouble.SLOW:
                    raise
    assert answers == (b"OK", 1, {})


GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "tls": b"\x15\x03\x01\x00\x02\x02\x46",
    "an error that is no text": b"-\xff\xfe\r\n",
    "moved nowhere": b"-MOVED\r\n",
    "moved to no port": b"-MOVED 1 a:x\r\n",
    "moved to no slot": b"-MOVED 99999 a:1\r\n",
    "a length below none": b"$-5\r\n",
    "a length that is no number": b"$x\r\n",
    "a list of more than there is room for": b"*9223372036854775807\r\n",
    "lists in lists": b"*1\r\n" * 10_000,
    "a number that is none": b":x\r\n",
}


@pytest.mark.parametrize("command", [b"CLIENT", b"CLUSTER", b"GET", b"EVALSHA", b"XREAD", b"SCRIPT"])
@pytest.mark.parametrize("bad", GARBAGE.values(), ids=GARBAGE.keys())
async def test_whatever_comes_is_trouble_and_ends(command: bytes, bad: bytes) -> None:
    async with linked(lambda asked: bad if asked == command else sane(asked)) as (peer, link):
        with contextlib.suppress(RedisTrouble):
            await link.command("GET", "k")
        with contextlib.suppress(RedisTrouble):
            await link.read({b"s": b"0"}, 0.01)
        assert all(isinstance(each, RedisTrouble | int) for each in await link.run_all([CALL, CALL]))
        peer.answer = sane
        await well(link)


HOST_OF_BYTES = b"*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\n\xff\r\n:1\r\n"


@pytest.mark.parametrize("slots", [b"*1\r\n:5\r\n", b"*1\r\n*0\r\n", b"+OK\r\n", HOST_OF_BYTES])
async def test_strange_slots_do_not_end_the_links_task(slots: bytes) -> None:
    async with linked(lambda asked: slots if asked == b"CLUSTER" else sane(asked)) as (peer, link):
        assert link.state.trouble is Trouble.DOWN
        assert "CLUSTER SLOTS" in link.state.message
        peer.answer = sane
        await well(link)


async def test_bytes_that_are_no_reply_are_down_and_perhaps_done_and_the_connection_is_dropped() -> None:
    async with linked(sane) as (peer, link):
        await well(link)
        before = peer.connections
        peer.answer = lambda asked: GARBAGE["http"]
        with pytest.raises(RedisTrouble, match="Protocol error") as raised:
            await link.command("GET", "k")
        assert (raised.value.kind, raised.value.maybe_done) == (Trouble.DOWN, True)
        assert link.state.trouble is Trouble.DOWN
        peer.answer = sane
        await well(link)
        assert peer.connections > before


async def test_a_strange_reply_to_a_read_is_trouble() -> None:
    async with linked(lambda asked: b"*1\r\n:5\r\n" if asked == b"XREAD" else sane(asked)) as (_, link):
        with pytest.raises(RedisTrouble, match="XREAD"):
            await link.read({b"s": b"0"}, 0.01)
