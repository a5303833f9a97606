"""The link to Redis over real servers: every topology, and every way in which Redis can fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import inspect
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop

from engines.tasks import running, spawn
from routing.redis_link import Link, LinkState, RedisTrouble, Script, ScriptCall, Trouble, load_script
from tests.machine import Stopwatch, time_limit
from tests.redis_servers import (
    RedisCluster,
    RedisServer,
    SentinelGroup,
    SlowProxy,
    Tls,
    free_port,
    frozen,
    server_binary,
    version_of,
)

TIMEOUT_S = 0.4
"""Of links in tests of slow servers. Others are patient: a busy machine may be slow for a moment, too."""
PATIENT_S = 2.0
AT_ONCE_S = 0.1
"""Without a look at the network; far below the timeout, and enough for a busy machine."""
BACK_S = 5.0
BINARIES = [
    pytest.param(binary, id=f"redis-{version_of(binary)}")
    for binary in dict.fromkeys((server_binary(), shutil.which("redis-server") or server_binary()))
]


def script(name: str, text: str) -> Script:
    return Script(name, text, hashlib.sha1(text.encode()).hexdigest())


SET = script("set", "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
APPEND = script("append", "return redis.call('APPEND', KEYS[1], ARGV[1])")
BROKEN = script("broken", "return redis.call('INCR', KEYS[1])")


def set_to(key: bytes, value: bytes | int | str) -> ScriptCall:
    return ScriptCall(SET, [key], [value])


class Seen:
    """The troubles that a link told of, in order."""

    def __init__(self) -> None:
        self.states: list[LinkState] = []

    def __call__(self, state: LinkState) -> None:
        self.states.append(state)

    @property
    def troubles(self) -> list[Trouble | None]:
        return [state.trouble for state in self.states]


@contextlib.asynccontextmanager
async def linked(
    url: str, seen: Callable[[LinkState], None] = lambda state: None, **options: Any
) -> AsyncIterator[Link]:
    """A started link."""
    link = Link(url, spawn, seen, **{"timeout_s": PATIENT_S, "backoff_s": (0.05, 0.3), **options})
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


@pytest.fixture(autouse=True)
def no_task_is_left() -> Iterator[None]:
    yield
    assert not [name for name in running() if name.startswith("redis-link")]


async def until(true: Callable[[], Any], within_s: float = BACK_S) -> None:
    """Poll; `true` may be a coroutine function."""
    async with time_limit(within_s):
        while True:
            reached = true()
            if await reached if inspect.isawaitable(reached) else reached:
                return
            await asyncio.sleep(0.005)


async def fails(call: Any) -> RedisTrouble:
    with pytest.raises(RedisTrouble) as caught:
        await call
    return caught.value


async def fails_at_once(link: Link, kind: Trouble) -> None:
    asyncio.get_running_loop()
    for call in (
        lambda: link.run(set_to(b"k", 1)),
        lambda: link.read({b"s": b"0"}, 5.0),
        lambda: link.command("GET", "k"),
    ):
        watch = Stopwatch()
        error = await fails(call())
        assert (error.kind, error.maybe_done) == (kind, False)
        assert watch.took_s() < AT_ONCE_S
    (reply,) = await link.run_all([set_to(b"k", 1)])
    assert isinstance(reply, RedisTrouble)


# ---- the servers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls.make(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(replicas=1) as started:
        yield started


@pytest.fixture
def single() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


WAYS = ("tcp", "unix", "tls+acl", "sentinel", "cluster")


class Way:
    """A URL, and the servers behind it."""

    def __init__(self, url: str, servers: list[RedisServer]) -> None:
        self.url = url
        self.servers = servers


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    match request.param:
        case "cluster":
            cluster = request.getfixturevalue("cluster")
            yield Way(cluster.url, cluster.masters)
        case "sentinel":
            with SentinelGroup(password="secret") as group:
                yield Way(group.url, [group.primary])
        case "tls+acl":
            users = {"gateway": "on >pass:/@word ~pdgate:* +@all -@dangerous"}
            with RedisServer(tls=request.getfixturevalue("tls"), users=users) as server:
                yield Way(server.url.replace("://", "://gateway:pass%3A%2F%40word@"), [server])
        case name:
            with RedisServer() as server:
                yield Way(server.url if name == "tcp" else server.unix_url, [server])


def key(text: str) -> bytes:
    return f"pdgate:{text}".encode()


# ---- what works everywhere ---------------------------------------------------------------------------------------


async def test_scripts_reads_and_commands(way: Way) -> None:
    seen = Seen()
    async with linked(way.url, seen) as link:
        assert link.state.trouble is None
        assert link.is_cluster == (len(way.servers) > 1)
        assert await link.run(set_to(key("a"), 7)) == b"7"
        assert await link.command("GET", key("a")) == b"7"
        assert await link.run_all([]) == []
        calls = [set_to(key(f"k{at}"), at) for at in range(40)]
        calls[3] = ScriptCall(BROKEN, [key("a:stream")], [])
        await link.command("XADD", key("a:stream"), "1-1", "field", b"\x00\xff")
        replies = await link.run_all(calls)
        assert isinstance(replies[3], RedisTrouble)
        assert (replies[3].kind, replies[3].maybe_done) == (Trouble.REFUSED, False)
        assert [*replies[:3], *replies[4:]] == [str(at).encode() for at in range(40) if at != 3]
        assert await link.read({key("a:stream"): b"0"}, 0.0) == {
            key("a:stream"): [(b"1-1", {b"field": b"\x00\xff"})],
        }
        assert await link.read({key("a:stream"): b"1-1"}, 0.0) == {}
        assert await link.read({}, 1.0) == {}
        await link.command("DEL", key("a:stream"))
    assert seen.troubles == [None]
    assert "pass" not in link.where
    assert "secret" not in link.where


async def test_a_read_waits_for_the_first_entry_and_nobody_waits_for_it(way: Way) -> None:
    loop = asyncio.get_running_loop()
    async with linked(way.url) as link:
        streams = [key(f"waited{at}") for at in range(8)]
        # Longer than the timeout: waiting in the server is no slowness.
        reads = [asyncio.ensure_future(link.read({stream: b"$"}, 5.0)) for stream in streams]
        watch, short_s = Stopwatch(), loop.time()
        assert await link.read({key("nothing"): b"$"}, 0.05) == {}
        assert loop.time() - short_s > 0.04
        assert watch.took_s() < 1.0
        await asyncio.sleep(PATIENT_S + 0.1)
        watch = Stopwatch()
        assert await link.run_all([set_to(key(f"k{at}"), 1) for at in range(20)]) == [b"1"] * 20
        for stream in streams:
            await link.command("XADD", stream, "1-1", "f", "v")
        got = await asyncio.gather(*reads)
        assert watch.took_s() < 1.0
        assert got == [{stream: [(b"1-1", {b"f": b"v"})]} for stream in streams]
        for stream in streams:
            await link.command("DEL", stream)


async def test_flushed_scripts_are_loaded_again(way: Way) -> None:
    async with linked(way.url) as link:
        calls = [set_to(key(f"k{at}"), at) for at in range(9)]
        expected = [str(at).encode() for at in range(9)]
        assert await link.run_all(calls) == expected
        for server in way.servers:
            server.ask("SCRIPT", "FLUSH")
        assert await link.run(calls[5]) == b"5"
        for server in way.servers:
            server.ask("SCRIPT", "FLUSH")
        assert await link.run_all(calls) == expected
        assert link.state.trouble is None


async def test_nothing_is_left_after_stop(way: Way) -> None:
    before = [server.clients() for server in way.servers]
    async with linked(way.url) as link:
        reads = [asyncio.ensure_future(link.read({key("never"): b"$"}, 30.0)) for _ in range(3)]
        await asyncio.gather(*(link.run(set_to(key(f"k{at}"), at)) for at in range(20)))
        await until(lambda: sum(server.clients() for server in way.servers) >= sum(before) + 4)
        await link.stop()
        ended = await asyncio.gather(*reads, return_exceptions=True)
        assert [getattr(each, "kind", each) for each in ended] == [Trouble.DOWN] * 3
        assert (await fails(link.run(set_to(key("k"), 1)))).kind is Trouble.DOWN
    await until(lambda: [server.clients() for server in way.servers] == before)
    gc.collect()  # a socket that is still open warns, and warnings are errors


def test_the_same_under_uvloop(single: RedisServer) -> None:
    async def work() -> None:
        seen = Seen()
        async with linked(single.url, seen, timeout_s=TIMEOUT_S) as link:
            assert await link.run(set_to(b"k", 1)) == b"1"
            single.freeze()
            assert (await fails(link.run(set_to(b"k", 2)))).kind is Trouble.SLOW
            single.thaw()
            await until(lambda: link.state.trouble is None)
            single.kill()
            assert (await fails(link.run(set_to(b"k", 2)))).kind is Trouble.DOWN
            single.start()
            await until(lambda: link.state.trouble is None)
            reading = asyncio.ensure_future(link.read({b"s": b"$"}, 30.0))
            await until(lambda: single.info("clients")["blocked_clients"] == "1")
        assert (await fails(reading)).kind is Trouble.DOWN
        assert seen.troubles == [None, Trouble.SLOW, None, Trouble.DOWN, None]

    uvloop.run(work())
    gc.collect()


# ---- scripts -----------------------------------------------------------------------------------------------------


async def test_the_calls_of_one_pipeline_run_in_order_whichever_script_is_known(single: RedisServer) -> None:
    single.ask("SCRIPT", "LOAD", APPEND.text)
    async with linked(single.url) as link:
        await link.run_all([set_to(b"k", "a"), ScriptCall(APPEND, [b"k"], ["b"]), ScriptCall(APPEND, [b"k"], ["c"])])
        assert await link.command("GET", "k") == b"abc"


def test_a_script_is_read_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somewhere" / "lua").mkdir(parents=True)
    (tmp_path / "somewhere" / "__init__.py").write_text("")
    (tmp_path / "somewhere" / "lua" / "set.lua").write_text(SET.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_script("somewhere", "set") == SET


# ---- down and slow -----------------------------------------------------------------------------------------------


async def test_killed_and_back(single: RedisServer) -> None:
    seen = Seen()
    loop = asyncio.get_running_loop()
    async with linked(single.url, seen) as link:
        reading = asyncio.ensure_future(link.read({b"s": b"$"}, 30.0))
        await link.run_all([set_to(b"k", 1)] * 3)
        single.kill()
        assert (await fails(reading)).kind is Trouble.DOWN
        await fails_at_once(link, Trouble.DOWN)
        assert str(single.port) in link.state.message
        await asyncio.sleep(0.5)  # some tries that fail
        assert seen.troubles == [None, Trouble.DOWN]
        since_s = loop.time()
        single.start()
        await until(lambda: link.state.trouble is None, 2.5)
        assert await link.run_all([set_to(b"k", 2), ScriptCall(APPEND, [b"k"], ["x"])]) == [b"2", 2]
    assert seen.troubles == [None, Trouble.DOWN, None]
    times = [state.since_s for state in seen.states]
    assert times == sorted(times)
    assert times[0] <= since_s <= times[2] <= loop.time()


async def test_a_restart_between_two_calls_is_not_noticed(single: RedisServer) -> None:
    seen = Seen()
    async with linked(single.url, seen) as link:
        await link.run(set_to(b"k", 1))
        single.restart(empty=True)
        await asyncio.sleep(0.05)
        assert await link.run_all([set_to(b"k", 2), ScriptCall(APPEND, [b"k"], ["x"])]) == [b"2", 2]
    assert seen.troubles == [None]


async def test_frozen_and_back(single: RedisServer) -> None:
    seen = Seen()
    loop = asyncio.get_running_loop()
    async with linked(single.url, seen, timeout_s=TIMEOUT_S) as link:
        await link.run(set_to(b"k", 1))
        async with frozen(single):
            watch, since_s = Stopwatch(), loop.time()
            errors = await asyncio.gather(*(fails(link.run(set_to(b"k", at))) for at in range(12)))
            assert loop.time() - since_s > TIMEOUT_S * 0.9
            assert watch.took_s() < TIMEOUT_S + 0.3
            assert {error.kind for error in errors} == {Trouble.SLOW}
            assert any(error.maybe_done for error in errors)
            await fails_at_once(link, Trouble.SLOW)
            await asyncio.sleep(2 * TIMEOUT_S)
            await fails_at_once(link, Trouble.SLOW)
        await until(lambda: link.state.trouble is None)
        # A late reply of the frozen time is nobody's.
        assert await link.run_all([set_to(b"k", at) for at in range(5)]) == [b"0", b"1", b"2", b"3", b"4"]
    assert seen.troubles == [None, Trouble.SLOW, None]


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_replies_that_come_late_are_slow_until_they_come_in_time(single: RedisServer, unix: bool) -> None:
    seen = Seen()
    async with SlowProxy(single, unix=unix) as proxy, linked(proxy.url, seen, timeout_s=TIMEOUT_S) as link:
        await link.run(set_to(b"k", 1))
        proxy.delay_s = 2.0
        assert (await fails(link.run(set_to(b"k", 2)))).kind is Trouble.SLOW
        await asyncio.sleep(2 * TIMEOUT_S)
        await fails_at_once(link, Trouble.SLOW)
        proxy.delay_s = 0.0
        await until(lambda: link.state.trouble is None)
        assert await link.run(set_to(b"k", 3)) == b"3"
        await proxy.cut()
        await asyncio.sleep(0.05)
        assert await link.run(set_to(b"k", 4)) == b"4"
    assert seen.troubles == [None, Trouble.SLOW, None]


async def test_what_passed_while_this_process_stood_still_is_no_silence_of_redis(single: RedisServer) -> None:
    seen = Seen()
    async with linked(single.url, seen, timeout_s=TIMEOUT_S) as link:
        await link.run(set_to(b"k", 1))
        reading = asyncio.ensure_future(link.read({b"nothing": b"$"}, 0.01))
        calls = [asyncio.ensure_future(link.run(set_to(b"k", at))) for at in (2, 3)]
        await asyncio.sleep(0)  # they are sent, or about to be
        time.sleep(4 * TIMEOUT_S)  # noqa: ASYNC251
        assert await asyncio.gather(*calls, reading) == [b"2", b"3", {}]
        async with frozen(single):
            watch = Stopwatch()
            late = asyncio.ensure_future(fails(link.run(set_to(b"k", 4))))
            await asyncio.sleep(0)
            time.sleep(2 * TIMEOUT_S)  # noqa: ASYNC251
            assert (await late).kind is Trouble.SLOW, "once, and for as long"
            assert watch.took_s() < 3 * TIMEOUT_S + 0.3
        await until(lambda: link.state.trouble is None)
    assert seen.troubles == [None, Trouble.SLOW, None]


async def test_a_cancelled_call_leaves_no_reply_to_the_next(single: RedisServer) -> None:
    async with SlowProxy(single) as proxy, linked(proxy.url, max_connections=1) as link:
        await link.run(set_to(b"k", 1))
        proxy.delay_s = 0.1
        given_up = asyncio.ensure_future(link.run(set_to(b"k", "given up")))
        await asyncio.sleep(0.05)
        given_up.cancel()
        assert await link.run(set_to(b"k", "next")) == b"next"
        assert link.state.trouble is None


async def test_a_start_without_redis_is_quick_and_finds_it_later() -> None:
    seen = Seen()
    asyncio.get_running_loop()
    server = RedisServer()
    try:
        watch = Stopwatch()
        async with linked(server.url, seen) as link:
            assert watch.took_s() < AT_ONCE_S
            await fails_at_once(link, Trouble.DOWN)
            server.start()
            await until(lambda: link.state.trouble is None)
            assert await link.run(set_to(b"k", 1)) == b"1"
        assert seen.troubles == [Trouble.DOWN, None]
    finally:
        server.stop()


async def test_a_start_does_not_wait_for_silence(single: RedisServer) -> None:
    asyncio.get_running_loop()
    async with SlowProxy(single) as proxy:
        proxy.silent = True
        watch = Stopwatch()
        async with linked(proxy.url, timeout_s=TIMEOUT_S) as link:
            assert watch.took_s() < TIMEOUT_S + 0.3
            assert link.state.trouble is not None
            proxy.silent = False
            await until(lambda: link.state.trouble is None)


async def test_a_cluster_that_is_down_at_start_is_known_as_one_later(cluster: RedisCluster) -> None:
    async with SlowProxy(cluster.nodes[0]) as proxy:
        proxy.refusing = True
        async with linked(proxy.url) as link:
            assert not link.is_cluster
            proxy.refusing = False
            await until(lambda: link.state.trouble is None)
            assert link.is_cluster
            assert await link.run_all([set_to(b"%d" % at, at) for at in range(20)]) == [b"%d" % at for at in range(20)]


async def test_connections_are_bounded(single: RedisServer) -> None:
    async with linked(single.url, max_connections=2, max_reads=3) as link:
        waiting = [asyncio.ensure_future(link.read({b"s": b"$"}, 0.2)) for _ in range(3)]
        await asyncio.gather(*(link.run(set_to(b"k", at)) for at in range(200)))
        assert single.clients() <= 5
        assert await asyncio.gather(*waiting) == [{}] * 3


async def test_many_links_come_back_without_a_storm(single: RedisServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(SlowProxy(single))
        links = [
            await stack.enter_async_context(linked(proxy.url, timeout_s=2.0, backoff_s=(0.1, 2.0), rng=Random(at)))
            for at in range(20)
        ]
        before = proxy.accepted
        assert before <= 2 * len(links)
        proxy.refusing = True
        await proxy.cut()
        loop = asyncio.get_running_loop()
        down_s = loop.time()
        looked_s: list[float] = []
        tries_at: list[int] = []
        while loop.time() < down_s + 2.5:
            replies = await asyncio.gather(*(link.run_all([set_to(b"k", 1)] * 10) for link in links))
            assert all(isinstance(reply, RedisTrouble) for each in replies for reply in each)
            await asyncio.sleep(0.05)
            looked_s.append(loop.time())
            tries_at.append(proxy.accepted - before)
        # Pauses of 0.05, 0.1, 0.2, 0.4, then 0.5 s, half of each chance: at most 13 tries in 2.5 s, not one per call.
        assert 3 * len(links) <= tries_at[-1] <= 14 * len(links)
        # What is due while the machine runs others comes together afterwards: such moments say nothing of the pauses.
        late = [later - now > 0.15 for now, later in itertools.pairwise(looked_s)]
        together = [later - now for now, later in itertools.pairwise(tries_at)]
        on_time = [tries for at, tries in enumerate(together) if at > len(late) // 2 and not any(late[at - 1 : at + 1])]
        assert max(on_time, default=0) <= len(links) * 0.75
        proxy.refusing = False
        up = proxy.accepted
        await until(lambda: all(link.state.trouble is None for link in links))
        await asyncio.gather(*(link.run(set_to(b"k", 1)) for link in links))
        assert proxy.accepted - up <= 4 * len(links)
        assert single.clients() <= 2 * len(links)


# ---- writes refused ----------------------------------------------------------------------------------------------


def make_read_only(server: RedisServer) -> Callable[[], Any]:
    server.ask("REPLICAOF", "127.0.0.1", free_port())
    return lambda: server.ask("REPLICAOF", "NO", "ONE")


def make_full(server: RedisServer) -> Callable[[], Any]:
    server.ask("CONFIG", "SET", "maxmemory", 1)
    return lambda: server.ask("CONFIG", "SET", "maxmemory", 0)


def make_unsaved(server: RedisServer) -> Callable[[], Any]:
    """A background save that failed: MISCONF."""
    (server.folder / "dump.rdb").mkdir()
    server.ask("CONFIG", "SET", "save", "3600 1")
    server.ask("BGSAVE")
    return lambda: server.ask("CONFIG", "SET", "save", "")


REFUSALS = [
    pytest.param(make_read_only, Trouble.READ_ONLY, id="replica"),
    pytest.param(make_full, Trouble.OUT_OF_MEMORY, id="full"),
    pytest.param(make_unsaved, Trouble.READ_ONLY, id="cannot-save"),
]


@pytest.mark.parametrize("binary", BINARIES)
@pytest.mark.parametrize(("refuse", "kind"), REFUSALS)
async def test_while_writes_are_refused_reads_go_on(
    refuse: Callable[[RedisServer], Callable[[], Any]], kind: Trouble, binary: str
) -> None:
    seen = Seen()
    loop = asyncio.get_running_loop()
    with RedisServer(binary=binary) as server:
        async with linked(server.url, seen) as link:
            await link.run(set_to(b"k", 1))
            await link.command("XADD", "s", "1-1", "f", "v")
            allow = refuse(server)

            async def is_refused() -> bool:
                (reply,) = await link.run_all([set_to(b"k", 2)])
                return isinstance(reply, RedisTrouble) and reply.kind is kind

            await until(is_refused)  # a background save takes its time to fail
            assert link.state.trouble is kind

            evalsha = script_runs(server)
            since_s = loop.time()
            while loop.time() < since_s + 1.3:
                assert await link.read({b"s": b"0"}, 0.0) == {b"s": [(b"1-1", {b"f": b"v"})]}
                assert await link.command("XLEN", "s") == 1
                assert (await fails(link.run(set_to(b"k", 3)))).kind is kind
                await asyncio.sleep(0.02)
            assert 1 <= script_runs(server) - evalsha <= 2
            assert seen.troubles == [None, kind]

            keys = server.ask("DBSIZE")
            allow()
            await until(lambda: link.state.trouble is None)  # nobody else writes
            assert server.ask("DBSIZE") == keys
            assert await link.run(set_to(b"k", 4)) == b"4"
    assert seen.troubles == [None, kind, None]


def script_runs(server: RedisServer) -> int:
    stats = server.info("commandstats").get("cmdstat_evalsha", "calls=0")
    fields = dict(each.split("=") for each in stats.split(","))
    return int(fields["calls"]) + int(fields.get("rejected_calls", 0))


async def test_where_the_empty_write_is_not_allowed_a_callers_write_ends_the_state() -> None:
    users = {"default": "on nopass ~* +@all", "gateway": "on >pw ~* +@all -setrange"}
    seen = Seen()
    with RedisServer(users=users) as server:
        async with linked(server.url.replace("://", "://gateway:pw@"), seen) as link:
            allow = make_full(server)
            assert (await fails(link.run(set_to(b"k", 1)))).kind is Trouble.OUT_OF_MEMORY
            await asyncio.sleep(0.3)
            allow()
            await asyncio.sleep(0.3)
            assert link.state.trouble is Trouble.OUT_OF_MEMORY

            async def written() -> bool:
                (reply,) = await link.run_all([set_to(b"k", 1)])
                return reply == b"1"

            await until(written)
            assert link.state.trouble is None
    assert seen.troubles == [None, Trouble.OUT_OF_MEMORY, None]


# ---- permissions -------------------------------------------------------------------------------------------------


async def test_a_changed_password_is_said_and_so_is_its_return() -> None:
    seen = Seen()
    with RedisServer(password="old secret") as server:
        async with linked(server.url, seen) as link:
            await link.run(set_to(b"k", 1))
            server.ask("CONFIG", "SET", "requirepass", "new")
            server.password = "new"
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.05)
            assert (await fails(link.run(set_to(b"k", 1)))).kind is Trouble.AUTH
            await fails_at_once(link, Trouble.AUTH)
            await asyncio.sleep(0.5)
            assert "secret" not in link.state.message
            assert seen.troubles == [None, Trouble.AUTH]
            server.ask("CONFIG", "SET", "requirepass", "old secret")
            await until(lambda: link.state.trouble is None)
    assert seen.troubles == [None, Trouble.AUTH, None]


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:secret@"], ids=["none", "wrong", "unknown user"])
async def test_a_wrong_login_is_said_at_start(login: str) -> None:
    with RedisServer(password="secret") as server:
        async with linked(f"redis://{login}127.0.0.1:{server.port}") as link:
            await fails_at_once(link, Trouble.AUTH)


@pytest.mark.parametrize("binary", BINARIES)
async def test_a_missing_permission_is_a_state_until_the_same_succeeds(binary: str) -> None:
    seen = Seen()
    users = {"default": "on nopass ~* +@all", "gateway": "on >pw ~* +@all -append"}
    with RedisServer(users=users, binary=binary) as server:
        async with linked(server.url.replace("://", "://gateway:pw@"), seen) as link:
            assert (await fails(link.run(ScriptCall(APPEND, [b"k"], ["x"])))).kind is Trouble.AUTH
            assert (link.state.trouble, "append" in link.state.message) == (Trouble.AUTH, True)
            assert await link.run(set_to(b"k", 1)) == b"1"  # the rest works on
            await asyncio.sleep(0.3)
            assert link.state.trouble is Trouble.AUTH
            server.ask("ACL", "SETUSER", "gateway", "+append")
            assert await link.run(ScriptCall(APPEND, [b"k"], ["x"])) == 2
            assert link.state.trouble is None
            server.ask("ACL", "SETUSER", "gateway", "resetkeys", "~k")
            assert (await fails(link.run(set_to(b"other", 1)))).kind is Trouble.AUTH
            assert await link.run(set_to(b"k", 1)) == b"1"
            server.ask("ACL", "SETUSER", "gateway", "-get")
            assert (await fails(link.command("GET", "k"))).kind is Trouble.AUTH  # an inspection; not a state
    assert seen.troubles == [None, Trouble.AUTH, None, Trouble.AUTH, None]


async def test_a_certificate_of_another_ca_is_down(tls: Tls, tmp_path: Path) -> None:
    other = Tls.make(tmp_path)
    with RedisServer(tls=tls) as server:
        async with linked(server.url.replace(str(tls.ca), str(other.ca))) as link:
            assert link.state.trouble is Trouble.DOWN
            assert "certificate" in link.state.message.lower()


@pytest.mark.parametrize("url", ["redis:/x", "rediss://h?ssl_ca_certs=/missing.pem"])
def test_a_link_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"missing\.pem|begins with"):
        Link(url, spawn, lambda state: None)


# ---- fail-over ---------------------------------------------------------------------------------------------------


async def test_a_sentinel_fails_over_when_the_primary_is_killed() -> None:
    seen = Seen()
    with SentinelGroup(sentinels=2) as group:
        group.sentinels[0].kill()  # and the quorum with it: two are needed
        group.sentinels[0].start()
        async with linked(group.url, seen) as link:
            await link.run(set_to(b"k", 1))
            group.primary.kill()
            assert (await fails(link.run(set_to(b"k", 2)))).kind is Trouble.DOWN
            await until(lambda: link.state.trouble is None, 15.0)
            assert await link.run(set_to(b"k", 3)) == b"3"
            assert group.replica.ask("GET", "k") == b"3"
    assert seen.troubles == [None, Trouble.DOWN, None]


async def test_a_switched_primary_is_followed_though_the_old_one_answers() -> None:
    with SentinelGroup() as group:
        async with linked(group.url) as link:
            await link.run(set_to(b"k", 1))
            group.sentinels[0].ask("SENTINEL", "FAILOVER", "pdgate")
            group.wait_promoted()
            # The Sentinel would do this within ten seconds. Connections stay: only READONLY tells.
            group.primary.ask("REPLICAOF", "127.0.0.1", group.replica.port)

            async def written() -> bool:
                (reply,) = await link.run_all([set_to(b"k", 2)])
                return reply == b"2"

            await until(written)
            assert group.replica.ask("GET", "k") == b"2"


async def test_a_sentinel_that_knows_no_such_service_is_said(single: RedisServer) -> None:
    with SentinelGroup() as group:
        url = group.url.removesuffix("pdgate") + "other"
        async with linked(url) as link:
            assert link.state.trouble is Trouble.DOWN
            assert "'other'" in link.state.message


# ---- Cluster -----------------------------------------------------------------------------------------------------


def slot_key(cluster: RedisCluster, node: RedisServer) -> bytes:
    """A key of `node`, in a slot of its own."""
    return next(name for name in (b"moving%d" % at for at in range(1_000)) if cluster.master_of(name) is node)


async def test_a_slot_that_has_moved_is_followed(cluster: RedisCluster) -> None:
    seen = Seen()
    source, target = cluster.masters[1], cluster.masters[2]
    async with linked(cluster.url, seen) as link:
        name = slot_key(cluster, source)
        slot = source.ask("CLUSTER", "KEYSLOT", name)
        target_id, source_id = target.ask("CLUSTER", "MYID"), source.ask("CLUSTER", "MYID")
        # On its way: the source sends who asks for what it has not on to the target (ASK).
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        assert await link.run_all([set_to(b"other", 0), set_to(name, 1)]) == [b"0", b"1"]
        assert await link.run(set_to(name, 2)) == b"2"
        # Arrived (MOVED).
        for node in (target, source, cluster.masters[0]):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target_id)
        assert await link.run_all([set_to(name, 3), set_to(b"other", 0)]) == [b"3", b"0"]
        assert await link.command("GET", name) == b"3"
        assert await link.read({name + b"{" + name + b"}": b"0"}, 0.0) == {}
    assert seen.troubles == [None]


async def test_a_cluster_refuses_keys_of_two_slots(cluster: RedisCluster) -> None:
    async with linked(cluster.url) as link:
        call = ScriptCall(SET, [b"a", b"b"], [1])
        assert (await fails(link.run(call))).kind is Trouble.REFUSED
        assert (await fails(link.read({b"a": b"0", b"b": b"0"}, 0.0))).kind is Trouble.REFUSED
        assert link.state.trouble is None


async def test_a_frozen_node_of_a_cluster_does_not_slow_the_others(cluster: RedisCluster) -> None:
    async with linked(cluster.url, timeout_s=TIMEOUT_S) as link:
        names = [slot_key(cluster, node) for node in cluster.masters]
        calls = [set_to(name, 1) for name in names]
        assert await link.run_all(calls) == [b"1"] * 3
        async with frozen(cluster.masters[2]):
            first, second, third = await link.run_all(calls)
            assert (first, second) == (b"1", b"1")
            assert third.kind is Trouble.SLOW
            assert link.state.trouble is Trouble.SLOW
            watch = Stopwatch()
            assert (await link.run_all(calls))[:2] == [b"1", b"1"]
            assert watch.took_s() < AT_ONCE_S
        await until(lambda: link.state.trouble is None, 10.0)
        cluster.wait_ok()
        assert await link.run_all(calls) == [b"1"] * 3


async def test_a_cluster_fails_over_and_one_that_cannot_is_down_until_it_is_whole(cluster: RedisCluster) -> None:
    seen = Seen()
    async with linked(cluster.url, seen) as link:
        lost = cluster.masters[0]
        name = slot_key(cluster, lost)
        await link.run(set_to(name, 1))
        lost.kill()
        assert (await fails(link.run(set_to(name, 2)))).kind is Trouble.DOWN

        async def written() -> bool:
            (reply,) = await link.run_all([set_to(name, 3)])
            return reply == b"3"

        await until(written, 15.0)
        await until(lambda: link.state.trouble is None)
        assert cluster.replicas[0].ask("GET", name) == b"3"

        # A master without a replica: after a while the others answer CLUSTERDOWN.
        cluster.masters[2].kill()
        others = slot_key(cluster, cluster.masters[1])
        await until(lambda: b"cluster_state:fail" in cluster.masters[1].ask("CLUSTER", "INFO"), 10.0)
        assert (await fails(link.run(set_to(others, 1)))).kind is Trouble.DOWN
        await asyncio.sleep(0.5)
        assert link.state.trouble is Trouble.DOWN
        cluster.masters[2].start()
        await until(lambda: link.state.trouble is None, 15.0)
        await link.run(set_to(others, 2))
    assert set(seen.troubles) == {None, Trouble.DOWN}
