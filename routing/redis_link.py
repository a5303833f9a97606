"""One gateway's way to Redis: a single server, fail-over by Sentinel, or a Cluster, over TCP, TLS or a Unix socket.

A shell. Every part that uses Redis goes through one link: it loads scripts, bounds every wait, translates the library's
exceptions once, and keeps the one state that operators are shown. Nothing here knows what the keys mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from routing.redis_errors import RedisTrouble as RedisTrouble
from routing.redis_errors import Trouble as Trouble
from routing.redis_errors import trouble_of
from routing.redis_orders import Entry as Entry
from routing.redis_orders import Order, entries, exchange, order_of, reading, running
from routing.redis_orders import Script as Script
from routing.redis_orders import ScriptCall as ScriptCall
from routing.redis_orders import load_script as load_script
from routing.redis_server import ResponseError, Server, TryAgainError
from routing.redis_topology import Moved, Topology, moved_by
from routing.redis_url import parse

T = TypeVar("T")

_WRITE_TRY_S = 1.0
"""How often a write is let through to a server that takes none."""
_WRITES_REFUSED = (Trouble.READ_ONLY, Trouble.OUT_OF_MEMORY)
_WORST_FIRST = (Trouble.DOWN, Trouble.AUTH, Trouble.SLOW, *_WRITES_REFUSED, Trouble.REFUSED)
_MOVES = 2
"""How often one call follows a slot that has moved."""


class Spawn(Protocol):
    """How tasks are started (`engines.tasks.spawn`)."""

    def __call__(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...


@dataclass(frozen=True, slots=True)
class LinkState:
    """`trouble` is None while Redis answers. `since_s`: by the loop's clock, when that began."""

    trouble: Trouble | None
    message: str
    since_s: float


class RedisLink(Protocol):
    """What users of Redis may do. Every awaitable raises RedisTrouble and nothing else, after `timeout_s` at most."""

    @property
    def is_cluster(self) -> bool:
        """Known after `start`: whether keys of different slots may share one `read`."""

    @property
    def where(self) -> str:
        """The server, for operators: no password in it."""

    @property
    def state(self) -> LinkState: ...

    async def run(self, call: ScriptCall) -> Any:
        """Run one script; its raw reply (integers, bytes, lists)."""

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any | RedisTrouble]:
        """Run scripts in one round trip per server; one reply or trouble for each, in order. Raises nothing."""

    async def read(self, after: Mapping[bytes, bytes], block_s: float, count: int = 256) -> Mapping[bytes, list[Entry]]:
        """Entries of each stream after the given id, waiting up to `block_s` for the first; empty when none came.

        Waits on connections of its own, so that many may read at once and nobody else waits behind them. In a Cluster
        all streams of one call must lie in one slot.
        """

    async def command(self, *words: bytes | str | int) -> Any:
        """Run one command on the server that its first key belongs to (or any); for reading and for inspection."""


StateChanged = Callable[[LinkState], None]


class Link:
    """`RedisLink` over real servers. One task finds them, and tries those that are in trouble.

    - **Down, slow, not let in**: calls to that server fail at once, without touching the network; the task tries it
      again, with a new connection, after pauses that grow from the first to the last of `backoff_s`, half of it chance.
      In a Cluster the other servers work on; the state is that of the worst.
    - **Read-only, out of memory**: `read` and `command` go on. Of the scripts one `run` or `run_all` in a second is let
      through, the others fail at once. The state ends when the server accepts a write: the task sends it an empty one
      (`SETRANGE key 0 ""`, which the server checks like any write and which stores nothing), or, where the user may
      not use that command, when all scripts of a call that was let through succeeded.
    - **A permission is missing** for one script or for reading: calls go on; the state ends when the same succeeds.
    - A refused command (a fault of ours) is not a state.

    `on_change` is called at the end of the first try, and then whenever `state.trouble` has become another; it must be
    quick and raise nothing. ValueError for a bad URL or unreadable certificates.
    """

    def __init__(
        self,
        url: str,
        spawn: Spawn,
        on_change: StateChanged,
        *,
        timeout_s: float = 1.0,
        max_connections: int = 4,
        max_reads: int = 64,
        backoff_s: tuple[float, float] = (0.1, 2.0),
        rng: Random | None = None,
    ) -> None:
        parsed = parse(url)
        self.where = parsed.where
        self._spawn = spawn
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._rng = rng or Random()
        self._topology = Topology(parsed, timeout_s, calls=max_connections, reads=max_reads, rng=self._rng)
        self._denied: dict[str, RedisTrouble] = {}
        self._state = LinkState(Trouble.DOWN, "not started", 0.0)
        self._look = asyncio.Event()
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; waits for the first try, for `timeout_s` at most. Never fails."""
        self._state = LinkState(Trouble.DOWN, "not connected yet", self._now_s())
        self._task = self._spawn(self._keep_well(), "redis-link")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._tried.wait()
        except TimeoutError:
            pass

    async def stop(self) -> None:
        """Close everything; calls under way and later ones fail as DOWN."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._topology.close()

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def is_trying(self) -> bool:
        """Whether the first try has not ended yet."""
        return not self._tried.is_set()

    @property
    def is_cluster(self) -> bool:
        return self._topology.is_cluster

    # ---- calls ---------------------------------------------------------------------------------------------------

    async def run(self, call: ScriptCall) -> Any:
        return _value((await self._scripts((call,)))[0])

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any | RedisTrouble]:
        return await self._scripts(calls) if calls else []

    async def read(self, after: Mapping[bytes, bytes], block_s: float, count: int = 256) -> Mapping[bytes, list[Entry]]:
        if not after:
            return {}
        until_s = self._now_s() + block_s + self._timeout_s
        return entries(_value((await self._carry_out([reading(after, block_s, count)], until_s, waiting=True))[0]))

    async def command(self, *words: bytes | str | int) -> Any:
        until_s = self._now_s() + self._timeout_s
        return _value((await self._carry_out([order_of(words)], until_s))[0])

    async def _scripts(self, calls: Sequence[ScriptCall]) -> list[Any | RedisTrouble]:
        orders = [running(call) for call in calls]
        return await self._carry_out(orders, self._now_s() + self._timeout_s)

    # ---- carrying out --------------------------------------------------------------------------------------------

    async def _carry_out(self, orders: Sequence[Order], until_s: float, *, waiting: bool = False) -> list[Any]:
        """A raw reply or a RedisTrouble for each; whoever answers that a slot has moved is followed."""
        replies: list[Any] = [None] * len(orders)
        left: dict[int, Moved | None] = dict.fromkeys(range(len(orders)))
        for _ in range(1 + _MOVES):
            groups: dict[tuple[Server, bool], list[int]] = {}
            for at, moved in left.items():
                server = self._server_for(orders[at], moved)
                if isinstance(server, RedisTrouble):
                    replies[at] = server
                else:
                    groups.setdefault((server, moved is not None and moved.asking), []).append(at)
            await self._to_servers(groups, orders, replies, until_s, waiting=waiting)
            left = {}
            for (server, _), group in groups.items():
                for at in group:
                    if (moved := moved_by(replies[at], server.address)) is not None and self.is_cluster:
                        left[at] = moved
                        self._topology.follow(moved)
            if not left:
                break
            self._look.set()
        return [trouble_of(each) if isinstance(each, ResponseError) else each for each in replies]

    def _server_for(self, order: Order, moved: Moved | None) -> Server | RedisTrouble:
        if self._stopped:
            return RedisTrouble(Trouble.DOWN, "the link is stopped")
        server = self._topology.at(moved.address) if moved else self._topology.server_of(order.key)
        if isinstance(server, RedisTrouble):
            self._look.set()
        return server

    async def _to_servers(
        self,
        groups: Mapping[tuple[Server, bool], list[int]],
        orders: Sequence[Order],
        replies: list[Any],
        until_s: float,
        *,
        waiting: bool,
    ) -> None:
        """Fill in the replies of each server's orders, all servers at once."""

        async def one(server: Server, asking: bool, group: list[int]) -> None:
            wanted = [orders[at] for at in group]
            got = await self._to_server(server, wanted, until_s, asking=asking, waiting=waiting)
            for at, reply in zip(group, got, strict=True):
                replies[at] = reply

        work = [one(server, asking, group) for (server, asking), group in groups.items()]
        if len(work) == 1:
            await work[0]
        elif work:
            await asyncio.gather(*(self._spawn(each, "redis-link-call") for each in work))

    async def _to_server(
        self, server: Server, orders: Sequence[Order], until_s: float, *, asking: bool, waiting: bool
    ) -> list[Any]:
        writes = any(order.script for order in orders)
        if (closed := self._gate(server, writes)) is not None:
            return [closed] * len(orders)
        replies = await exchange(server, orders, until_s, asking=asking, waiting=waiting)
        self._judge(server, orders, replies)
        return replies

    # ---- state ---------------------------------------------------------------------------------------------------

    def _gate(self, server: Server, writes: bool) -> RedisTrouble | None:
        """Why a call must not be tried now, if so."""
        trouble = server.trouble
        if trouble is None:
            return None
        if trouble.kind in _WRITES_REFUSED:
            if not writes:
                return None
            if self._now_s() >= server.next_write_s:
                server.next_write_s = self._now_s() + _WRITE_TRY_S
                return None
        return RedisTrouble(trouble.kind, trouble.message)

    def _judge(self, server: Server, orders: Sequence[Order], replies: Sequence[Any]) -> None:
        """What the replies say about the server."""
        fine = True
        for order, reply in zip(orders, replies, strict=True):
            if isinstance(reply, RedisTrouble):
                self._in_trouble(server, reply)
            elif isinstance(reply, ResponseError):
                trouble = trouble_of(reply, where=str(server.address))
                if trouble.kind in _WRITES_REFUSED:
                    server.write_key = order.key or b""
                    self._in_trouble(server, trouble)
                elif trouble.kind is Trouble.AUTH:
                    if order.name:
                        self._denied[order.name] = RedisTrouble(trouble.kind, f"{order.name}: {trouble.message}")
                elif trouble.kind is not Trouble.REFUSED and not isinstance(reply, TryAgainError):
                    self._in_trouble(server, trouble)
            else:
                if self._denied:
                    self._denied.pop(order.name, None)
                fine = fine and order.script is not None
                continue
            fine = False
        if fine and server.trouble is not None and server.trouble.kind in _WRITES_REFUSED and not server.write_tested:
            server.trouble = None
        self._tell()

    def _in_trouble(self, server: Server, trouble: RedisTrouble) -> None:
        known = server.trouble
        if known is None or known.kind in _WRITES_REFUSED:
            server.trouble = RedisTrouble(trouble.kind, trouble.message)
            if trouble.kind in _WRITES_REFUSED and (known is None or known.kind is not trouble.kind):
                server.write_tested = True
                server.next_write_s = self._now_s() + _WRITE_TRY_S
        self._look.set()

    def _tell(self, first: bool = False) -> None:
        """Bring the state up to date, and say so if its trouble has become another, or at `first`."""
        if self._stopped or not (first or self._tried.is_set()):
            return
        found = [*self._topology.troubles(), *self._denied.values()]
        worst = min(found, key=lambda each: _WORST_FIRST.index(each.kind), default=None)
        trouble, message = (worst.kind, worst.message) if worst else (None, "")
        changed = trouble is not self._state.trouble
        self._state = LinkState(trouble, message, self._now_s() if changed else self._state.since_s)
        if changed or first:
            self._on_change(self._state)

    # ---- the task ------------------------------------------------------------------------------------------------

    async def _keep_well(self) -> None:
        """Find the servers, and try those that are in trouble until none is."""
        failures = 0
        while True:
            self._look.clear()
            await self._topology.look(self._now_s() + self._timeout_s)
            for server in self._topology.servers_in_trouble():
                await self._try(server)
            self._tell(first=not self._tried.is_set())
            self._tried.set()
            if not self._topology.unsettled:
                fine_since_s = self._now_s()
                await self._look.wait()
                # Short lapses one after the other are one: its pauses grow on.
                if self._now_s() - fine_since_s >= self._backoff_s[1]:
                    failures = 0
            failures += 1
            await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, failures: int) -> float:
        """Half of it is chance, so that the gateways that lost a server do not come back as one."""
        first, longest = self._backoff_s
        return min(longest, first * 2.0 ** min(failures - 1, 10)) * (0.5 + 0.5 * self._rng.random())

    async def _try(self, server: Server) -> None:
        assert server.trouble is not None
        until_s = self._now_s() + self._timeout_s
        await server.drop_idle()  # a name may lead to another server now
        if server.trouble.kind not in _WRITES_REFUSED:
            await self._topology.check(server, until_s)
            return
        (reply,) = await server.exchange([("SETRANGE", server.write_key, 0, b"")], until_s)
        if isinstance(reply, RedisTrouble):
            server.trouble = RedisTrouble(reply.kind, reply.message)
        elif isinstance(reply, ResponseError) and (kind := trouble_of(reply).kind) is not Trouble.REFUSED:
            server.write_tested = kind is not Trouble.AUTH
        else:
            server.trouble = None  # done, or of the wrong type, or moved: it would have written

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _value(reply: Any | RedisTrouble) -> Any:
    if isinstance(reply, RedisTrouble):
        raise RedisTrouble(reply.kind, reply.message, maybe_done=reply.maybe_done)
    return reply
