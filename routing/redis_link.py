"""One gateway's way to Redis: a single server, fail-over by Sentinel, or a Cluster, over TCP, TLS or a Unix socket.

A shell. Every part that uses Redis goes through one link: it loads scripts, bounds every wait, translates the library's
exceptions once, and keeps the one state that operators are shown. Nothing here knows what the keys mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Spawn(Protocol):
    """How tasks are started (`engines.tasks.spawn`)."""

    def __call__(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...


class Trouble(StrEnum):
    """Why Redis could not be used."""

    DOWN = "down"
    """No connection, or it broke; also while a server loads its data set or a Cluster has no owner for a slot."""
    SLOW = "slow"
    """No answer in time; what was asked may have been done."""
    READ_ONLY = "read_only"
    OUT_OF_MEMORY = "out_of_memory"
    AUTH = "auth"
    """Password or permissions are not (or no longer) what the server wants."""
    REFUSED = "refused"
    """The server answered with an error that none of the others is: a fault of ours, or of a script."""


class RedisTrouble(Exception):
    """A call to Redis failed. `maybe_done`: the server may have carried it out all the same."""

    def __init__(self, kind: Trouble, message: str, *, maybe_done: bool = False) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.maybe_done = maybe_done


@dataclass(frozen=True, slots=True)
class Script:
    """One Lua file: its name without `.lua`, its text, and the SHA-1 that Redis knows it by."""

    name: str
    text: str
    sha: str


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One run of a script. All keys lie in one Cluster slot."""

    script: Script
    keys: Sequence[bytes]
    args: Sequence[bytes | int | str]


@dataclass(frozen=True, slots=True)
class LinkState:
    """`trouble` is None while Redis answers. `since_s`: by the loop's clock, when that began."""

    trouble: Trouble | None
    message: str
    since_s: float


Entry = tuple[bytes, dict[bytes, bytes]]
"""One entry of a stream: its id, its fields."""


class RedisLink(Protocol):
    """What users of Redis may do. Every awaitable raises RedisTrouble and nothing else, after `timeout_s` at most."""

    is_cluster: bool
    """Known after `start`: whether keys of different slots may share one `read`."""
    where: str
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
