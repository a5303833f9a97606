"""What the parts that gateways share through Redis need of the way there; `gateway/replicas.py` gives it.

Each of them works without Redis as if this gateway were alone, and none is ever waited for by a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Entry = tuple[bytes, dict[bytes, bytes]]
"""One entry of a stream: its id, its fields."""

RETRY_S = 0.25
"""The pause after a call that failed."""


class LinkTrouble(Exception):
    """A call to Redis failed; it may have been carried out all the same."""


class Link(Protocol):
    """The way to Redis. Every method raises LinkTrouble and nothing else, within a bounded time."""

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[bytes | int | str]) -> Any:
        """Run `failover/lua/SCRIPT.lua`; its raw reply."""

    async def read(self, after: Mapping[bytes, bytes], block_s: float) -> Mapping[bytes, list[Entry]]:
        """Entries of each stream after the given id, waiting up to `block_s` for the first."""

    async def command(self, *words: bytes | str | int) -> Any:
        """Run one command; its raw reply."""
