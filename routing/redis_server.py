"""One Redis server as a link sees it: its connections, what is wrong with it, and one exchange of commands.

A shell around the library's connections. Its clients and pools are not used: they retry, and wait for more than one
timeout, and each topology has a client of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection, RedisSSLContext, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import Connection as TcpConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    InvalidResponse,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from routing.redis_errors import RedisTrouble, trouble_of
from routing.redis_url import Address, RedisUrl
from routing.standstill import answered_by

__all__ = ("AskError", "Connector", "MovedError", "NoScriptError", "ResponseError", "Server", "TryAgainError")

Words = Sequence[bytes | str | int]
"""One command."""
_NO_TEXTS: Mapping[str, str] = {}


def pack(words: Words) -> bytes:
    """A command as it is sent; for the long ones that we have this takes half as long as the library's ways."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        packed = word if isinstance(word, bytes) else str(word).encode()
        parts += (b"$%d\r\n" % len(packed), packed, b"\r\n")
    return b"".join(parts)


class Connector:
    """Makes connections as one URL says. ValueError if a file of its certificates cannot be read."""

    def __init__(self, url: RedisUrl, *, for_sentinels: bool = False) -> None:
        self._common: dict[str, Any] = {
            "username": url.sentinel_username if for_sentinels else url.username,
            "password": url.sentinel_password if for_sentinels else url.password,
            "db": 0 if for_sentinels else url.db,
            "protocol": 2,  # streams as lists; one round trip less at connect
            "socket_timeout": None,  # every exchange has one deadline of its own, the connecting included
            "socket_connect_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "client_name": "pdgate",
        }
        self._tls = None
        if (tls := url.tls) is not None:
            # One for all connections: to make one reads files.
            self._tls = RedisSSLContext(
                keyfile=tls.keyfile,
                certfile=tls.certfile,
                ca_certs=tls.ca_certs,
                cert_reqs=tls.cert_reqs,
                check_hostname=tls.check_hostname,
            )
            try:
                self._tls.get()
            except OSError as error:  # an SSLError is one
                files = ", ".join(each for each in (tls.ca_certs, tls.certfile, tls.keyfile) if each)
                raise ValueError(f"the certificates ({files}) cannot be used: {error}") from error

    def __call__(self, address: Address) -> AbstractConnection:
        """A connection to `address`, not yet opened."""
        if not address.port:
            return UnixDomainSocketConnection(path=address.host, **self._common)
        if self._tls is None:
            return TcpConnection(host=address.host, port=address.port, **self._common)
        connection = SSLConnection(host=address.host, port=address.port, **self._common)
        connection.ssl_context = self._tls
        return connection


@contextlib.contextmanager
def _parsing() -> Iterator[None]:
    """What the other side sends is a reply, an error of the library, or InvalidResponse."""
    try:
        yield
    except (RedisError, OSError):  # a TimeoutError is an OSError
        raise
    except Exception as error:
        # Wide: on bytes that no Redis sends the library fails in ways of its own (UnicodeDecodeError for the text of an
        # error, ValueError for where a slot has moved, MemoryError for the length of a list).
        raise InvalidResponse(f"{type(error).__name__}: {error}") from error


class _Wire:
    """One open connection."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.loaded: set[str] = set()
        """SHA-1s of the scripts that were loaded through it."""
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        try:
            with _parsing():
                await self.connection.connect()  # type: ignore[no-untyped-call]
        finally:
            # The library lets go of it when it closes; we abort it, and wait for its end.
            self._writer = self.connection._writer

    @property
    def usable(self) -> bool:
        """Whether the other side has not closed it, nor sent what nobody has asked for."""
        reader = self.connection._reader
        return reader is not None and not reader.at_eof() and reader.exception() is None

    async def exchange(self, commands: Sequence[Words], texts: Mapping[str, str], replies: list[Any]) -> None:
        """Load the scripts that this connection has not loaded, then `commands`, in one write; fill in `replies`.

        By connection, because a new one may lead to a new process that knows none. Loading goes first: with one script
        known and another not, the calls of one write would not be run in order.
        """
        connection = self.connection
        new = [sha for sha in texts if sha not in self.loaded]
        loads: list[Words] = [("SCRIPT", "LOAD", texts[sha]) for sha in new]
        await connection.send_packed_command([pack(each) for each in (*loads, *commands)], check_health=False)
        for sha in new:
            if not isinstance(await self._reply(), ResponseError):
                self.loaded.add(sha)
        for _ in commands:
            replies.append(await self._reply())

    async def _reply(self) -> Any:
        try:
            with _parsing():
                return await self.connection.read_response()
        except ResponseError as error:
            return error

    async def abort(self) -> None:
        """Close at once, whatever the other side does; does not wait."""
        if self._writer is not None:
            self._writer.transport.abort()
        await self.connection.disconnect(nowait=True)

    async def wait_closed(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()


class _Pool:
    """At most `size` connections; who finds none free waits."""

    def __init__(self, size: int, new: Callable[[], _Wire]) -> None:
        self._room = asyncio.Semaphore(size)
        self._new = new
        self._idle: list[_Wire] = []
        self._busy: set[_Wire] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[_Wire]:
        async with self._room:
            wire = await self._free()
            self._busy.add(wire)
            try:
                if wire.connection._writer is None:
                    await wire.open()
                yield wire
            except BaseException:
                # Whatever it was, a reply may still come: nobody else may read it.
                await wire.abort()
                raise
            finally:
                self._busy.discard(wire)
            if self._closed:
                await wire.abort()
            else:
                self._idle.append(wire)

    async def _free(self) -> _Wire:
        while self._idle:
            wire = self._idle.pop()
            if wire.usable:
                return wire
            await wire.abort()
        return self._new()

    async def drop_idle(self) -> list[_Wire]:
        dropped, self._idle = self._idle, []
        for wire in dropped:
            await wire.abort()
        return dropped

    async def close(self) -> None:
        self._closed = True
        wires = [*await self.drop_idle(), *self._busy]
        for wire in wires:
            await wire.abort()
        for wire in wires:
            await wire.wait_closed()


class Server:
    """One server. `trouble` is kept by the link: None while it answers."""

    def __init__(self, address: Address, connect: Connector, *, calls: int, reads: int) -> None:
        self.address = address
        self.trouble: RedisTrouble | None = None
        self.write_key: bytes = b""
        """A key that a refused write named: the writes that test it may name it too."""
        self.write_tested = True
        """Whether the link may find out by itself if the server takes writes again."""
        self.next_write_s = 0.0
        """By the loop's clock, when the next write may be tried while it takes none."""
        self._calls = _Pool(calls, lambda: _Wire(connect(address)))
        self._reads = _Pool(reads, lambda: _Wire(connect(address)))

    async def exchange(
        self,
        commands: Sequence[Words],
        until_s: float,
        *,
        texts: Mapping[str, str] = _NO_TEXTS,
        reload: bool = False,
        waiting: bool = False,
    ) -> list[Any]:
        """Send `commands` in one write and read their replies: one each, in order; raises nothing.

        A reply is raw, or the ResponseError that the server answered with, or a RedisTrouble where no reply came.
        `texts`: the scripts that they run, by SHA-1; `reload`: load them again, somebody has flushed them. `waiting`:
        the command blocks in the server, so that nobody may wait behind it. What passed while this process stood still
        says nothing of the server.
        """
        replies: list[Any] = []
        sent = False
        try:
            async with answered_by(until_s), (self._reads if waiting else self._calls).borrow() as wire:
                sent = True
                if reload:
                    wire.loaded.clear()
                await wire.exchange(commands, texts, replies)
        except (RedisError, OSError, TimeoutError) as error:
            text = TimeoutError("no answer in time") if isinstance(error, TimeoutError) else error
            trouble = trouble_of(text, maybe_done=sent, where=str(self.address))
            replies += [trouble] * (len(commands) - len(replies))
        return replies

    async def drop_idle(self) -> None:
        """Close what is idle: those that come next connect anew."""
        await self._calls.drop_idle()
        await self._reads.drop_idle()

    async def close(self) -> None:
        """End all connections; exchanges under way end as DOWN."""
        await self._calls.close()
        await self._reads.close()
