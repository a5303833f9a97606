"""Which servers there are and which one a key belongs to: one server, the primary that Sentinels name, or a Cluster.

A shell: it asks servers. It never waits for longer than it is told, and keeps what it knew when nobody answers.
"""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from routing.redis_errors import RedisTrouble, Trouble, nonsense, trouble_of
from routing.redis_server import AskError, Connector, MovedError, ResponseError, Server
from routing.redis_url import Address, RedisUrl

SLOTS = 16_384
_PORTS = 65_536


def slot_of(key: bytes) -> int:
    """The Cluster slot of a key: of what is between its first `{` and the next `}`, if that is anything."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    if start >= 0 and end > start + 1:
        key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


@dataclass(frozen=True, slots=True)
class Moved:
    """A server's answer that a slot is elsewhere: for good, or (`asking`) only for this call."""

    slot: int
    address: Address
    asking: bool


def moved_by(reply: Any, asked: Address) -> Moved | None:
    """Where the reply of the server at `asked` leads, if it does."""
    if not isinstance(reply, AskError):  # MovedError is one
        return None
    if not 0 <= reply.slot_id < SLOTS or not 0 < reply.port < _PORTS:
        return None
    return Moved(reply.slot_id, Address(reply.host or asked.host, reply.port), not isinstance(reply, MovedError))


def _slots_in(reply: Any, asked: Address) -> list[Address | None] | None:
    """The owner of each slot by a reply of the server at `asked` to `CLUSTER SLOTS`; None where it is no such reply."""
    if not isinstance(reply, list):
        return None
    slots: list[Address | None] = [None] * SLOTS
    for each in reply:
        match each:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                # A node that does not know its own name is reached as we reached it.
                owner = _address(asked.host.encode() if host in (None, b"", b"?") else host, port)
            case _:
                return None
        if owner is None:
            return None
        slots[first : last + 1] = [owner] * (last + 1 - first)
    return slots


def _address(host: Any, port: Any) -> Address | None:
    """An address as servers name them; None where it is none."""
    try:
        named = Address(host.decode(), int(port))
    except (AttributeError, ValueError):  # a UnicodeDecodeError is a ValueError
        return None
    return named if named.host and 0 < named.port < _PORTS else None


class Topology:
    """The servers of one URL. `look` finds them; before it has, every key is in trouble."""

    def __init__(self, url: RedisUrl, timeout_s: float, *, calls: int, reads: int, rng: Random) -> None:
        self.is_cluster = False
        self._url = url
        self._timeout_s = timeout_s
        self._rng = rng
        self._connect = Connector(url)
        self._connect_sentinel = Connector(url, for_sentinels=True) if url.service else self._connect
        self._size = {"calls": calls, "reads": reads}
        self._servers: dict[Address, Server] = {}
        self._slots: list[Address | None] = []
        self._trouble: RedisTrouble | None = RedisTrouble(Trouble.DOWN, "not connected yet")
        self._stale = False

    # ---- what is known -------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether there is anything to look for or to try again."""
        return self._stale or any(True for _ in self.troubles())

    def troubles(self) -> Iterator[RedisTrouble]:
        if self._trouble is not None:
            yield self._trouble
        for server in self._servers.values():
            if server.trouble is not None:
                yield server.trouble

    def servers_in_trouble(self) -> Sequence[Server]:
        return [server for server in self._servers.values() if server.trouble is not None]

    def server_of(self, key: bytes | None) -> Server | RedisTrouble:
        """The server that a key belongs to; without a key any, the well ones first."""
        if not self._servers:
            assert self._trouble is not None
            return RedisTrouble(self._trouble.kind, self._trouble.message)
        if not self.is_cluster:
            return next(iter(self._servers.values()))
        if key is None:
            return min(self._servers.values(), key=lambda server: server.trouble is not None)
        address = self._slots[slot_of(key)]
        if address is None:
            self._stale = True
            return RedisTrouble(Trouble.DOWN, f"no server of the Cluster serves slot {slot_of(key)}")
        return self.at(address)

    def at(self, address: Address) -> Server:
        """The server at an address, which may be new."""
        if address not in self._servers:
            self._servers[address] = self._new(address)
        return self._servers[address]

    def follow(self, moved: Moved) -> None:
        """A server said that a slot is elsewhere."""
        if not moved.asking:
            self._slots[moved.slot] = moved.address
            self._stale = True

    def _new(self, address: Address) -> Server:
        return Server(address, self._connect, **self._size)

    # ---- finding out ---------------------------------------------------------------------------------------------

    async def look(self, until_s: float) -> None:
        """Find the servers, as far as that is needed."""
        if not self.unsettled:
            return
        if self._url.service:
            await self._ask_sentinels(until_s)
        elif self.is_cluster or self._trouble is not None:
            await self._ask_for_slots(until_s)

    async def check(self, server: Server, until_s: float) -> None:
        """Try a server that could not be used: its trouble ends if it answers as it should."""
        commands: list[tuple[str, ...]] = [("PING",), ("CLUSTER", "INFO")] if self.is_cluster else [("PING",)]
        pong, *info = await server.exchange(commands, until_s)
        if isinstance(pong, RedisTrouble | ResponseError):
            trouble = pong if isinstance(pong, RedisTrouble) else trouble_of(pong, where=str(server.address))
            # A user who may not even PING is let in all the same.
            server.trouble = None if isinstance(pong, ResponseError) and trouble.kind is Trouble.AUTH else trouble
        elif info and isinstance(info[0], bytes) and b"cluster_state:fail" in info[0]:
            server.trouble = RedisTrouble(Trouble.DOWN, f"{server.address}: the Cluster is down")
        else:
            server.trouble = None

    async def _ask(self, address: Address, until_s: float, *words: str, sentinel: bool = False) -> Any:
        """One command to an address: its reply, ResponseError or RedisTrouble."""
        if (server := self._servers.get(address)) is not None and server.trouble is None and not sentinel:
            return (await server.exchange([words], until_s))[0]
        stranger = Server(address, self._connect_sentinel if sentinel else self._connect, calls=1, reads=1)
        try:
            return (await stranger.exchange([words], until_s))[0]
        finally:
            await stranger.close()

    async def _ask_for_slots(self, until_s: float) -> None:
        """`CLUSTER SLOTS`: also how a single server is told from a Cluster."""
        well = [address for address, server in self._servers.items() if server.trouble is None]
        rest = [*(address for address in self._servers if address not in well), *self._url.addresses]
        self._rng.shuffle(well)
        for address in dict.fromkeys([*well, *rest]):
            reply = await self._ask(address, until_s, "CLUSTER", "SLOTS")
            if isinstance(reply, ResponseError):
                trouble = trouble_of(reply, where=str(address))
                if not self.is_cluster and trouble.kind in _SINGLE:
                    self._trouble = None
                    self.at(address)
                    return
            elif isinstance(reply, RedisTrouble):
                trouble = reply
            elif (slots := _slots_in(reply, address)) is not None:
                await self._adopt(slots)
                return
            else:
                trouble = nonsense(address, "CLUSTER SLOTS", reply)
            if not self._servers:
                self._trouble = trouble

    async def _adopt(self, slots: list[Address | None]) -> None:
        """Take over the owners of the slots; let go of servers that own none."""
        self.is_cluster = True
        self._slots = slots
        self._stale = False
        owners = {address for address in slots if address is not None}
        for address in owners:
            self.at(address)
        gone = [address for address in self._servers if address not in owners]
        for server in [self._servers.pop(address) for address in gone]:
            await server.close()
        missing = slots.count(None)
        self._trouble = (
            RedisTrouble(Trouble.DOWN, f"no server serves {missing} slots of the Cluster") if missing else None
        )

    async def _ask_sentinels(self, until_s: float) -> None:
        """The primary by the first Sentinel that names one which is a primary."""
        trouble = RedisTrouble(Trouble.DOWN, "no Sentinel was asked")
        sentinels = self._url.addresses
        share_s = self._timeout_s / len(sentinels)
        for sentinel in sentinels:
            found = await self._primary_by(sentinel, share_s)
            if isinstance(found, RedisTrouble):
                trouble = found
                continue
            if found not in self._servers:
                gone, self._servers = self._servers, {found: self._new(found)}
                for server in gone.values():
                    await server.close()
            self._trouble = None
            return
        if not self._servers:
            self._trouble = trouble

    async def _primary_by(self, sentinel: Address, within_s: float) -> Address | RedisTrouble:
        until_s = asyncio.get_running_loop().time() + within_s
        words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.service)
        named = await self._ask(sentinel, until_s, *words, sentinel=True)
        if isinstance(named, RedisTrouble):
            return RedisTrouble(named.kind, f"Sentinel {named.message}")
        if isinstance(named, ResponseError):
            return trouble_of(named, where=f"Sentinel {sentinel}")
        if named is None:
            return RedisTrouble(Trouble.DOWN, f"Sentinel {sentinel} knows no service {self._url.service!r}")
        match named:
            case [bytes(host), bytes(port)] if (address := _address(host, port)) is not None:
                pass
            case _:
                return nonsense(f"Sentinel {sentinel}", "GET-MASTER-ADDR-BY-NAME", named)
        role = await self._ask(address, until_s, "ROLE")
        if isinstance(role, RedisTrouble):
            return role
        # A user who may not ask for the role is let in all the same.
        if not isinstance(role, ResponseError) and not (isinstance(role, list) and role[:1] == [b"master"]):
            return RedisTrouble(Trouble.DOWN, f"{address}, which Sentinel {sentinel} names, is no primary")
        return address

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


_SINGLE = (Trouble.REFUSED, Trouble.AUTH)
"""How a server that is no Cluster, or does not let us ask, answers to `CLUSTER SLOTS`."""
