"""What is asked of a Redis server: scripts, reads of streams, single commands; its words, and one pipeline of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from routing.redis_errors import nonsense
from routing.redis_server import NoScriptError, Server, Words

_KEYLESS = ("CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "INFO", "LATENCY", "PING", "ROLE", "SCAN", "SCRIPT", "TIME")
_KEY_SECOND = ("MEMORY", "OBJECT", "XINFO")


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


Entry = tuple[bytes, dict[bytes, bytes]]
"""One entry of a stream: its id, its fields."""


def load_script(package: str, name: str) -> Script:
    """The script `lua/NAME.lua` of a package (`routing`, `failover`)."""
    text = resources.files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Order:
    """One command, the key that says which server it is for, and what is said when its permission is missing."""

    words: Words
    key: bytes | None
    name: str = ""
    script: Script | None = None


def running(call: ScriptCall) -> Order:
    words = ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    return Order(words, call.keys[0] if call.keys else None, call.script.name, call.script)


def reading(after: Mapping[bytes, bytes], block_s: float, count: int) -> Order:
    block = ("BLOCK", math.ceil(block_s * 1e3)) if block_s > 0 else ()  # BLOCK 0 would wait for ever
    return Order(("XREAD", "COUNT", count, *block, "STREAMS", *after, *after.values()), next(iter(after)), "reading")


def order_of(words: Words) -> Order:
    """A single command; its key is its first argument, or the second of the commands with subcommands."""
    name = words[0].decode() if isinstance(words[0], bytes) else str(words[0])
    at = 2 if name.upper() in _KEY_SECOND else 1
    if name.upper() in _KEYLESS or len(words) <= at:
        return Order(words, None)
    key = words[at]
    return Order(words, key if isinstance(key, bytes) else str(key).encode())


def entries(reply: Any) -> dict[bytes, list[Entry]]:
    """The reply to a read; RedisTrouble where it is none."""
    if reply is None:
        return {}
    try:
        return {_bytes(stream): [_entry(at, flat) for at, flat in new] for stream, new in reply}
    except (TypeError, ValueError):
        raise nonsense("Redis", "XREAD", reply) from None


def _entry(at: Any, flat: Any) -> Entry:
    words = [_bytes(word) for word in flat]
    return _bytes(at), dict(zip(words[::2], words[1::2], strict=True))


def _bytes(word: Any) -> bytes:
    if type(word) is not bytes:
        raise TypeError("no bytes")
    return word


async def exchange(
    server: Server, orders: Sequence[Order], until_s: float, *, asking: bool = False, waiting: bool = False
) -> list[Any]:
    """Carry out orders in one round trip, two if their scripts were flushed; what `Server.exchange` returns.

    `asking`: their slot is on its way to this server.
    """
    replies = await _once(server, orders, until_s, asking=asking, waiting=waiting)
    again = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if again:
        wanted = [orders[at] for at in again]
        repeated = await _once(server, wanted, until_s, asking=asking, waiting=waiting, reload=True)
        for at, reply in zip(again, repeated, strict=True):
            replies[at] = reply
    return replies


async def _once(
    server: Server, orders: Sequence[Order], until_s: float, *, asking: bool, waiting: bool, reload: bool = False
) -> list[Any]:
    texts = {order.script.sha: order.script.text for order in orders if order.script is not None}
    commands: list[Words] = []
    for order in orders:
        commands += [("ASKING",), order.words] if asking else [order.words]
    replies = await server.exchange(commands, until_s, texts=texts, reload=reload, waiting=waiting)
    return replies[1::2] if asking else replies
