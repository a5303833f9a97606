"""A raw TCP server for one test: a script decides, byte by byte, what a client gets.

It knows just enough HTTP to read a request. Nothing here sleeps; scripts and tests wait for each other's events.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from engines import tasks

Script = Callable[["Connection"], Awaitable[None]]

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class Request:
    line: bytes
    headers: Mapping[bytes, bytes]
    body_sha: str
    body_bytes: int


class Connection:
    """The server's end of one connection; `number` counts from 1 in order of acceptance."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self._writer = writer

    async def request(self) -> Request:
        head = await self.head()
        size_bytes = int(head.headers.get(b"content-length", b"0"))
        digest, left = hashlib.sha256(), size_bytes
        while left:
            part = await self.reader.read(min(left, 1 << 18))
            if not part:
                raise asyncio.IncompleteReadError(b"", left)
            digest.update(part)
            left -= len(part)
        return Request(head.line, head.headers, digest.hexdigest(), size_bytes)

    async def head(self) -> Request:
        """The request's head; its body stays unread."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = (line.split(b": ", 1) for line in lines[1:] if line)
        return Request(lines[0], {name.lower(): value for name, value in fields}, "", 0)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def freeze(self) -> None:
        """Read nothing more, as a stopped process."""
        cast("asyncio.Transport", self._writer.transport).pause_reading()

    def reset(self) -> None:
        """End with a RST instead of a FIN."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Return when the client has closed its end."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class Server:
    url: str
    port: int
    accepted: int = 0


@asynccontextmanager
async def serving(script: Script, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    """Run `script` for every connection; its end closes the connection, the context's end cancels it."""
    running: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.accepted += 1
        connection = Connection(server.accepted, reader, writer)
        running.append(tasks.spawn(_run(script, connection), f"script-{connection.number}"))

    listener = await asyncio.start_server(accept, host, 0, backlog=2048)
    port = listener.sockets[0].getsockname()[1]
    server = Server(f"http://{f'[{host}]' if ':' in host else host}:{port}", port)
    try:
        yield server
    finally:
        listener.close()
        for task in running:
            await tasks.stop(task)


async def _run(script: Script, connection: Connection) -> None:
    try:
        await script(connection)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client went away: what it saw is for the test to judge
    finally:
        connection.close()


def sockets_to(port: int) -> Iterator[socket.socket]:
    """This process's sockets whose peer is `port`, as duplicates: the client's ends. Linux only."""
    for name in os.listdir("/proc/self/fd"):
        with ExitStack() as stack:
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                twin = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                peer = twin.getpeername()
            except OSError:
                continue
            if isinstance(peer, tuple) and peer[1] == port:
                yield twin
