"""A TCP proxy in one link, by rules that may change at any moment. A shell.

What it cannot show: a connection that nobody answers is accepted here all the same, and one to a server that is gone is
accepted and then broken, where it would have been refused (`refuse` does that).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from random import Random

from engines.tasks import spawn, stop
from failover.chaos.proxy_flow import Connection, Direction, abort_when_closed
from failover.chaos.world import PLAIN, LinkRule

HOST = "127.0.0.1"
_BACKLOG = 1024
_PAUSE_S = 0.1
"""Until the next try to accept, when there are no descriptors left."""


class TcpProxy:
    """`world.Link`: listens on one address and passes on to a target; forth is towards the target.

    A flow holds `MAX_HELD_BYTES` at most, so that a delay bounds the bandwidth as a TCP window does.
    """

    def __init__(self, target_host: str, target_port: int, rng: Random) -> None:
        self._target = (target_host, target_port)
        self._host = HOST
        self._rng = rng
        self._forth, self._back = Direction(), Direction()
        self._imposed: dict[int, tuple[LinkRule, LinkRule, bool]] = {}
        self._count = 0
        self._audible = asyncio.Event()
        self._audible.set()
        self._holder: socket.socket | None = None
        """Keeps the port while nobody listens on it."""
        self._listener: socket.socket | None = None
        self._opening: dict[socket.socket, asyncio.Task[None]] = {}
        self._open: dict[Connection, None] = {}
        self.connections_total = 0

    @property
    def connections(self) -> int:
        """How many are open, those included that reach nobody yet."""
        return len(self._open) + len(self._opening)

    @property
    def bytes_forth(self) -> int:
        return self._forth.bytes

    @property
    def bytes_back(self) -> int:
        return self._back.bytes

    async def start(self, port: int = 0, host: str = HOST) -> int:
        """Listen, on a free port by default; the port. OSError where that cannot be."""
        self._host = host
        self._holder = _bound(host, port)
        self._listen()
        return int(self._holder.getsockname()[1])

    async def stop(self) -> None:
        """Close everything; what is under way is lost."""
        self._listen(False)
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        for task in list(self._opening.values()):
            await stop(task)
        for connection in list(self._open):
            connection.close()

    def impose(self, forth: LinkRule = PLAIN, back: LinkRule = PLAIN, *, refuse: bool = False) -> Callable[[], None]:
        if refuse:
            self._accept()  # those who were first
        self._count += 1
        number = self._count
        self._imposed[number] = (forth, back, refuse)
        self._change()

        def lift() -> None:
            if self._imposed.pop(number, None) is not None:
                self._change()

        return lift

    def cut(self) -> int:
        """Connections that reach nobody yet are closed at once."""
        count = self.connections
        for task in self._opening.values():
            task.cancel()
        for connection in list(self._open):
            connection.cut()
        return count

    def reset(self) -> int:
        count = self.connections
        for client, task in self._opening.items():
            abort_when_closed(client)
            task.cancel()
        for connection in list(self._open):
            connection.reset()
        return count

    @property
    def refused(self) -> bool:
        """Whether new connections are."""
        return any(refuse for _, _, refuse in self._imposed.values())

    def take(self, client: socket.socket) -> None:
        """Pass on a connection that was accepted, here or by another listener; it is ours from now on.

        While connections are refused it is broken: more cannot be done any more.
        """
        if self.refused:
            abort_when_closed(client)
            client.close()
            return
        _prepare(client)
        self.connections_total += 1
        self._opening[client] = task = spawn(self._connect(client), "chaos-proxy-connect")

        def never_begun(_: object) -> None:
            """A task that is cancelled before its first step closes nothing itself."""
            if self._opening.pop(client, None) is not None:
                client.close()

        task.add_done_callback(never_begun)

    def _change(self) -> None:
        rules = self._imposed.values()
        self._forth.rule = _sum(forth for forth, _, _ in rules)
        self._back.rule = _sum(back for _, back, _ in rules)
        self._forth.free_s = self._back.free_s = 0.0
        if self._forth.rule.silent or self._back.rule.silent:
            self._audible.clear()
        else:
            self._audible.set()
        if self._holder is not None:
            self._listen(not self.refused)
        for connection in list(self._open):
            connection.change()

    def _listen(self, listening: bool = True) -> None:
        loop = asyncio.get_running_loop()
        if listening and self._listener is None and self._holder is not None:
            self._listener = _bound(self._host, self._holder.getsockname()[1])
            self._listener.listen(_BACKLOG)
            loop.add_reader(self._listener, self._accept)
        elif not listening and self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_S, self._accept_again, self._listener)
                return
            self.take(client)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    async def _connect(self, client: socket.socket) -> None:
        """Reach the target as soon as the link lets a connection through; who cannot be served is told by RST."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(self._opening.pop, client)
            undo.callback(client.close)
            await self._audible.wait()
            target: socket.socket | None = None
            try:
                found = await loop.getaddrinfo(*self._target, type=socket.SOCK_STREAM)
                target = socket.socket(found[0][0], socket.SOCK_STREAM)
                undo.callback(target.close)
                _prepare(target)
                await loop.sock_connect(target, found[0][4])
            except OSError:
                abort_when_closed(client)
                return
            undo.pop_all()
            del self._opening[client]
            connection = Connection(client, target, self._forth, self._back, self._rng, self._open.pop)
            self._open[connection] = None
            connection.change()


def _sum(rules: Iterable[LinkRule]) -> LinkRule:
    """Rules that are on at once as one."""
    total = PLAIN
    for rule in rules:
        limits = [each for each in (total.bytes_per_s, rule.bytes_per_s) if each is not None]
        total = LinkRule(
            total.delay_s + rule.delay_s,
            total.jitter_s + rule.jitter_s,
            min(limits, default=None),
            total.silent or rule.silent,
        )
    return total


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to `port`, which others of ours may be bound to too."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _prepare(each: socket.socket) -> None:
    each.setblocking(False)
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
