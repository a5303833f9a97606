"""The proxy of the chaos harness on real sockets: what each rule does, and that no change of rules costs a byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import tasks
from failover.chaos.proxy import TcpProxy
from failover.chaos.proxy_flow import MAX_HELD_BYTES
from failover.chaos.world import PLAIN, LinkRule
from tests.machine import Stopwatch

HOST = "127.0.0.1"
SILENT = LinkRule(silent=True)
QUIET_S = 0.15
"""So long nothing comes, where nothing may come."""
SOON_S = 2.0


@dataclass(eq=False)
class End:
    """One end of a connection: what it has read, and how that ended."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: bytearray = field(default_factory=bytearray)
    ended: str = ""
    task: asyncio.Task[None] | None = None

    def listen(self) -> End:
        self.task = tasks.spawn(self._read(), "end")
        return self

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(1 << 16):
                self.got += data
            self.ended = "FIN"
        except ConnectionResetError:
            self.ended = "RST"

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def abort(self) -> None:
        """Close by RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()

    @property
    def socket(self) -> socket.socket:
        found: socket.socket = self.writer.get_extra_info("socket")
        return found

    async def close(self) -> None:
        await tasks.stop(self.task)
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@dataclass
class Line:
    """A server, a proxy before it, and the connections made."""

    proxy: TcpProxy
    port: int = 0
    accepted: list[End] = field(default_factory=list)
    clients: list[End] = field(default_factory=list)
    listening: bool = True

    async def connect(self) -> End:
        end = End(*await asyncio.open_connection(HOST, self.port))
        self.clients.append(end)
        return end.listen() if self.listening else end

    async def pair(self) -> tuple[End, End]:
        """Both ends of a new connection."""
        count = len(self.accepted)
        client = await self.connect()
        await until(lambda: len(self.accepted) > count)
        return client, self.accepted[-1]

    async def close(self) -> None:
        for end in (*self.clients, *self.accepted):
            await end.close()
        await self.proxy.stop()


@asynccontextmanager
async def line(*, listening: bool = True) -> AsyncIterator[Line]:
    """`listening`: both ends read all the time."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = End(reader, writer)
        opened.accepted.append(end.listen() if listening else end)

    server = await asyncio.start_server(accept, HOST, 0)
    opened = Line(TcpProxy(HOST, server.sockets[0].getsockname()[1], Random(1)), listening=listening)
    opened.port = await opened.proxy.start()
    try:
        yield opened
    finally:
        await opened.close()
        server.close()


async def until(holds: Callable[[], bool], within_s: float = SOON_S) -> float:
    """Wait until it holds; after how long."""
    loop, watch = asyncio.get_running_loop(), Stopwatch()
    began_s = loop.time()
    while not holds():
        assert not watch.passed(within_s), "it did not come true in time"
        await asyncio.sleep(0.002)
    return loop.time() - began_s


async def quiet(holds: Callable[[], bool]) -> None:
    """See that it holds for a while."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + QUIET_S
    while loop.time() < until_s:
        assert holds()
        await asyncio.sleep(0.01)


# ---- a plain link ------------------------------------------------------------------------------------------------


async def test_bytes_pass_both_ways_and_are_counted() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        await client.send(b"question")
        await server.send(b"the answer")
        await until(lambda: server.got == b"question" and client.got == b"the answer")
        proxy = opened.proxy
        assert (proxy.bytes_forth, proxy.bytes_back) == (8, 10)
        assert (proxy.connections, proxy.connections_total) == (1, 1)


@pytest.mark.parametrize("first", ["client", "server"])
async def test_a_half_close_is_passed_on_and_the_other_half_goes_on(first: str) -> None:
    async with line() as opened:
        client, server = await opened.pair()
        closing, other = (client, server) if first == "client" else (server, client)
        await closing.send(b"last words")
        closing.writer.write_eof()
        await until(lambda: other.ended == "FIN")
        assert other.got == b"last words"
        await other.send(b"x" * 1_000_000)
        other.writer.write_eof()
        await until(lambda: closing.ended == "FIN")
        assert closing.got == b"x" * 1_000_000
        await until(lambda: opened.proxy.connections == 0)


@pytest.mark.parametrize("first", ["client", "server"])
async def test_a_reset_is_passed_on_behind_the_bytes(first: str) -> None:
    async with line() as opened:
        client, server = await opened.pair()
        breaking, other = (client, server) if first == "client" else (server, client)
        await breaking.send(b"last words")
        await until(lambda: other.got == b"last words")
        breaking.abort()
        await until(lambda: other.ended == "RST")
        await until(lambda: opened.proxy.connections == 0)


async def test_a_side_that_closes_and_then_gets_more_breaks_the_other() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        client.writer.close()
        await until(lambda: server.ended == "FIN")
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                await server.send(b"more")
                await asyncio.sleep(0.01)
        await until(lambda: opened.proxy.connections == 0)
        await until(server.writer.transport.is_closing)


async def test_where_no_server_is_the_connection_is_broken() -> None:
    async with line() as opened:
        with socket.socket() as unused:
            unused.bind((HOST, 0))
            proxy = TcpProxy(HOST, unused.getsockname()[1], Random(1))
            end = End(*await asyncio.open_connection(HOST, await proxy.start())).listen()
            opened.clients.append(end)
            await until(lambda: end.ended == "RST")
            assert proxy.connections == 0
            await proxy.stop()


async def test_who_does_not_read_makes_the_sender_wait() -> None:
    async with line(listening=False) as opened:
        client, server = await opened.pair()
        total = 64 << 20
        client.writer.write(b"x" * total)
        await asyncio.sleep(0.5)
        taken = total - client.writer.transport.get_write_buffer_size()
        await quiet(lambda: total - client.writer.transport.get_write_buffer_size() == taken)
        kernel_bytes = 24 << 20  # the buffers of four sockets
        assert taken < MAX_HELD_BYTES + kernel_bytes
        flows = [flow for connection in opened.proxy._open for flow in connection._flows]
        assert max(flow._held_bytes for flow in flows) <= MAX_HELD_BYTES + (64 << 10)
        server.listen()
        await until(lambda: len(server.got) == total, 10.0)


async def test_a_fixed_port_is_used_again_after_a_stop() -> None:
    async with line() as opened:
        client, _ = await opened.pair()
        await opened.proxy.stop()
        await until(lambda: client.ended != "")
        assert not [name for name in tasks.running() if name.startswith("chaos-proxy")]
        assert await opened.proxy.start(opened.port) == opened.port
        again, server = await opened.pair()
        await again.send(b"again")
        await until(lambda: server.got == b"again")


# ---- slow links --------------------------------------------------------------------------------------------------


async def test_a_delay_holds_back_the_end_as_well_and_only_its_direction() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        opened.proxy.impose(forth=LinkRule(delay_s=0.2))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await client.send(b"slow")
        client.writer.write_eof()
        await server.send(b"fast")
        await until(lambda: client.got == b"fast", 0.15)
        assert not server.got or loop.time() - began_s >= 0.2
        await until(lambda: server.ended == "FIN", 0.5)
        assert loop.time() - began_s >= 0.2
        assert server.got == b"slow"


async def test_jitter_keeps_the_order() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        opened.proxy.impose(LinkRule(delay_s=0.001, jitter_s=0.03))
        sent = b"".join(b"%04d " % number for number in range(200))
        for at in range(0, len(sent), 25):
            await client.send(sent[at : at + 25])
            await asyncio.sleep(0.002)
        await until(lambda: len(server.got) == len(sent))
        assert server.got == sent


async def test_what_a_delay_holds_comes_at_once_when_it_is_lifted() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(LinkRule(delay_s=60.0))
        await client.send(b"held")
        await quiet(lambda: not server.got)
        lift()
        await until(lambda: server.got == b"held", 0.2)


async def test_bandwidth_is_shared_fairly_by_all_connections() -> None:
    async with line() as opened:
        pairs = [await opened.pair() for _ in range(2)]
        opened.proxy.impose(forth=LinkRule(bytes_per_s=500_000.0))
        for client, _ in pairs:
            client.writer.write(b"x" * 1_000_000)
        took_s = await until(lambda: sum(len(server.got) for _, server in pairs) >= 300_000, 0.9)
        got = [len(server.got) for _, server in pairs]
        assert sum(got) < 667_000 * took_s
        assert min(got) > 0.3 * max(got)


async def test_what_a_bandwidth_holds_comes_at_once_when_it_is_lifted() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(LinkRule(bytes_per_s=1.0))
        client.writer.write(b"x" * 500_000)
        await quiet(lambda: len(server.got) <= 2)
        lift()
        await until(lambda: len(server.got) == 500_000, 1.0)


async def test_rules_add_up_and_are_lifted_one_by_one() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lifts = [
            opened.proxy.impose(SILENT, SILENT),
            opened.proxy.impose(SILENT),
            opened.proxy.impose(back=LinkRule(bytes_per_s=1.0)),
            opened.proxy.impose(LinkRule(delay_s=0.1), LinkRule(bytes_per_s=1e9)),
            opened.proxy.impose(LinkRule(delay_s=0.1)),
        ]
        await client.send(b"x")
        await server.send(b"abc")
        await quiet(lambda: not server.got and not client.got)
        lifts[0]()
        lifts[0]()
        await until(lambda: client.got == b"a")
        await quiet(lambda: not server.got and client.got == b"a")
        lifts[1]()
        assert await until(lambda: server.got == b"x") > 0.15
        lifts[2]()
        await until(lambda: client.got == b"abc")
        lifts[3]()
        lifts[4]()
        await client.send(b"y")
        await until(lambda: server.got == b"xy", 0.1)


# ---- silence -----------------------------------------------------------------------------------------------------


async def test_a_silent_direction_passes_nothing_and_loses_nothing() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(forth=SILENT)
        await client.send(b"lost?")
        await server.send(b"heard")
        await until(lambda: client.got == b"heard")
        await quiet(lambda: not server.got)
        lift()
        await until(lambda: server.got == b"lost?")


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("silent", ["forth", "both"])
async def test_behind_a_silent_link_the_end_of_the_other_side_is_not_seen(how: str, silent: str) -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(SILENT, SILENT if silent == "both" else PLAIN)
        await client.send(b"last words")
        await tasks.stop(client.task)
        if how == "FIN":
            client.writer.close()
        else:
            client.abort()
        await server.send(b"are you there?")
        await quiet(lambda: not server.got and not server.ended)
        await server.send(b"are you there?")
        await quiet(lambda: not server.got and not server.ended)
        assert opened.proxy.connections == 1
        lift()
        await until(lambda: bool(server.ended))
        if how == "FIN":
            assert server.got == b"last words"
            server.writer.close()
        await until(lambda: opened.proxy.connections == 0)


async def test_a_server_that_sends_to_a_dead_client_behind_silence_has_to_wait() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(forth=SILENT)
        client.abort()
        server.writer.write(b"x" * (64 << 20))
        await asyncio.sleep(0.2)
        await quiet(lambda: server.writer.transport.get_write_buffer_size() > 0 and not server.ended)
        assert not server.writer.transport.is_closing()
        lift()
        await until(lambda: server.ended == "RST")


async def test_who_connects_to_a_silent_link_reaches_nobody_until_it_is_lifted() -> None:
    async with line() as opened:
        lifts = [opened.proxy.impose(back=SILENT), opened.proxy.impose(forth=SILENT)]
        first, second = await opened.connect(), await opened.connect()
        await first.send(b"hello")
        await second.send(b"bye")
        await second.close()
        await quiet(lambda: not opened.accepted and not first.ended)
        assert opened.proxy.connections == 2
        lifts[0]()
        await quiet(lambda: not opened.accepted)
        lifts[1]()
        await until(
            lambda: {(bytes(end.got), end.ended) for end in opened.accepted} == {(b"hello", ""), (b"bye", "FIN")}
        )


# ---- ends --------------------------------------------------------------------------------------------------------


async def test_refused_connections_and_those_that_are_open() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lifts = [opened.proxy.impose(refuse=True), opened.proxy.impose(refuse=True)]
        for lift in lifts:
            with pytest.raises(ConnectionRefusedError):
                await opened.connect()
            await client.send(b"x")
            lift()
        await until(lambda: server.got == b"xx")
        again, other = await opened.pair()
        await again.send(b"y")
        await until(lambda: other.got == b"y")


async def test_who_came_before_connections_were_refused_is_let_in() -> None:
    async with line() as opened:
        with socket.create_connection((HOST, opened.port)) as client:  # the kernel has it, the proxy not yet
            lift = opened.proxy.impose(refuse=True)
            client.sendall(b"just in time")
            await until(lambda: bool(opened.accepted) and opened.accepted[0].got == b"just in time")
            lift()


async def test_a_connection_that_another_listener_took_is_passed_on_or_broken() -> None:
    async with line() as opened:
        with socket.create_server((HOST, 0)) as listener:
            end = End(*await asyncio.open_connection(*listener.getsockname())).listen()
            opened.clients.append(end)
            opened.proxy.take(listener.accept()[0])
            await end.send(b"handed on")
            await until(lambda: bool(opened.accepted) and opened.accepted[0].got == b"handed on")
            lift = opened.proxy.impose(refuse=True)
            late = End(*await asyncio.open_connection(*listener.getsockname())).listen()
            opened.clients.append(late)
            opened.proxy.take(listener.accept()[0])
            await until(lambda: late.ended == "RST")
            lift()


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
async def test_a_cut_ends_both_sides_in_order_behind_what_is_under_way(delay_s: float) -> None:
    async with line() as opened:
        pairs = [await opened.pair() for _ in range(3)]
        opened.proxy.impose(LinkRule(delay_s=delay_s), LinkRule(delay_s=delay_s))
        for client, server in pairs:
            client.writer.write(b"x" * 300_000)
            server.writer.write(b"y" * 300_000)
        await asyncio.sleep(0.05)
        assert opened.proxy.cut() == 3
        for client, server in pairs:
            await until(lambda ends=(client, server): all(end.ended == "FIN" for end in ends))  # type: ignore[misc]
            assert client.got == b"y" * 300_000
            assert server.got == b"x" * 300_000
        again, other = await opened.pair()
        await again.send(b"new")
        await until(lambda: other.got == b"new")


async def test_a_cut_is_orderly_also_for_a_side_that_goes_on_sending() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        await client.send(b"before")
        await until(lambda: server.got == b"before")
        opened.proxy.cut()
        await client.send(b"behind")
        await until(lambda: client.ended == "FIN" and server.ended == "FIN")
        await client.send(b"behind")
        assert server.got == b"before"
        await client.close()
        await server.close()
        await until(lambda: opened.proxy.connections == 0, 0.5)


async def test_a_cut_behind_silence_waits_for_it_to_be_lifted() -> None:
    async with line() as opened:
        client, server = await opened.pair()
        lift = opened.proxy.impose(SILENT, SILENT)
        await client.send(b"under way")
        await asyncio.sleep(0.02)
        opened.proxy.cut()
        await client.send(b"too late")
        await quiet(lambda: not server.ended and not client.ended)
        lift()
        await until(lambda: client.ended == "FIN" and server.ended == "FIN")
        assert server.got == b"under way"


async def test_a_reset_breaks_both_sides_also_behind_silence() -> None:
    async with line() as opened:
        pairs = [await opened.pair() for _ in range(2)]
        opened.proxy.impose(SILENT)
        waiting = await opened.connect()
        await until(lambda: opened.proxy.connections == 3)
        assert opened.proxy.reset() == 3
        await until(lambda: all(end.ended == "RST" for pair in pairs for end in pair))
        await until(lambda: waiting.ended == "RST")
        assert opened.proxy.connections == 0


# ---- any sequence of rules ---------------------------------------------------------------------------------------

RULES = st.builds(
    LinkRule,
    delay_s=st.sampled_from((0.0, 0.003, 5.0)),
    jitter_s=st.sampled_from((0.0, 0.004)),
    bytes_per_s=st.sampled_from((None, 1.0, 2e6, 2e7)),
    silent=st.booleans(),
)
ACTS = st.one_of(
    st.tuples(st.just("impose"), RULES, RULES),
    st.tuples(st.just("lift"), st.integers(0, 5)),
    st.tuples(st.sampled_from(("forth", "back")), st.integers(1, 200_000)),
    st.tuples(st.just("wait"), st.sampled_from((0.0, 0.001, 0.004))),
)


def numbered(count: int, number: int) -> Iterator[int]:
    """Bytes that tell their place."""
    return ((at * at + at * 7 + number) % 251 for at in range(count))


PATTERN = [bytes(numbered(250_000, number)) for number in range(2)]


async def play(acts: list[tuple[object, ...]], ending: str) -> None:
    """While bytes flow both ways the rules change; in the end all has come, in its order, and so has the end."""
    async with line() as opened:
        client, server = await opened.pair()
        lifts: list[Callable[[], None]] = []
        sent = {"forth": b"", "back": b""}
        senders = {"forth": client, "back": server}
        for number, act in enumerate(acts):
            if act[0] == "impose":
                lifts.append(opened.proxy.impose(*act[1:]))  # type: ignore[arg-type]
            elif act[0] == "lift" and lifts:
                lifts.pop(int(act[1]) % len(lifts))()  # type: ignore[call-overload]
            elif act[0] == "wait":
                await asyncio.sleep(float(act[1]))  # type: ignore[arg-type]
            elif act[0] in senders:
                way, data = str(act[0]), PATTERN[number % 2][number : number + int(act[1])]  # type: ignore[call-overload]
                senders[way].writer.write(data)
                sent[way] += data
            await asyncio.sleep(0)
        for sender in senders.values():
            sender.writer.write_eof()
        if ending == "lift":
            for lift in lifts:
                lift()
        else:  # the last change is one more rule, and then none
            lift = opened.proxy.impose(SILENT, SILENT)
            for each in lifts:
                each()
            lift()
        await until(lambda: client.ended == server.ended == "FIN", 5.0)
        assert server.got == sent["forth"]
        assert client.got == sent["back"]
        assert (opened.proxy.bytes_forth, opened.proxy.bytes_back) == (len(sent["forth"]), len(sent["back"]))
        await until(lambda: opened.proxy.connections == 0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@given(acts=st.lists(ACTS, min_size=1, max_size=25), ending=st.sampled_from(("lift", "silence")))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_doubled_or_reordered_by_changes_of_rules(
    run: Callable[[Awaitable[None]], None], acts: list[tuple[object, ...]], ending: str
) -> None:
    run(play(acts, ending))
