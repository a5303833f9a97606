"""One server's finite KV memory and its ledger. Pure.

Every page is free, owned by one owner (a request in a room), or owned by the prefix cache; nothing else exists, so a
leak is a number. Pages are counted, not numbered: which ones they are changes nothing on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.emulator.radix import SHARED, CacheNamespace, RadixCache

_LEAK = -1
"""An owner that no job is."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who owns the pool, in tokens; `used + free == total`, and `used` is the sum over rooms plus the cache."""

    total_tokens: int
    free_tokens: int
    used_tokens: int
    cache_tokens: int
    locked_cache_tokens: int
    by_room: dict[str, int]


def total_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The sums over several pools."""
    by_room: dict[str, int] = {}
    for ledger in ledgers:
        for room, tokens in ledger.by_room.items():
            by_room[room] = by_room.get(room, 0) + tokens
    return Ledger(
        total_tokens=sum(each.total_tokens for each in ledgers),
        free_tokens=sum(each.free_tokens for each in ledgers),
        used_tokens=sum(each.used_tokens for each in ledgers),
        cache_tokens=sum(each.cache_tokens for each in ledgers),
        locked_cache_tokens=sum(each.locked_cache_tokens for each in ledgers),
        by_room=by_room,
    )


class KvPool:
    """Reserves and releases pages for owners; evicts unlocked cached prefixes when free pages run out."""

    def __init__(self, total_tokens: int, page_size_tokens: int, cache: RadixCache | None = None) -> None:
        self.page_size_tokens = page_size_tokens
        self.cache = cache
        self._total_pages = total_tokens // page_size_tokens
        self._free_pages = self._total_pages
        self._pages: dict[int, int] = {}
        self._rooms: dict[int, str] = {}

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens`."""
        return -(-tokens // self.page_size_tokens)

    @property
    def total_tokens(self) -> int:
        return self._total_pages * self.page_size_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that a reservation could get, by eviction if need be."""
        evictable = self.cache.evictable_pages if self.cache else 0
        return (self._free_pages + evictable) * self.page_size_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens that no reservation could get; what SGLang reports as used."""
        return self.total_tokens - self.available_tokens

    def owned_tokens(self, owner: int) -> int:
        return self._pages.get(owner, 0) * self.page_size_tokens

    def reserve(self, owner: int, room: str, pages: int) -> bool:
        """Give `pages` more to `owner`, all or nothing; False when they are not to be had."""
        missing = pages - self._free_pages
        if missing > 0:
            if self.cache is None or self.cache.evictable_pages < missing:
                return False
            self._free_pages += self.cache.evict(missing)
        self._free_pages -= pages
        self._pages[owner] = self._pages.get(owner, 0) + pages
        self._rooms[owner] = room
        return True

    def extend(self, owner: int) -> bool:
        """Give one more page to `owner`, who has some; False when there is none. The decode step's own fast path."""
        if self._free_pages:
            self._free_pages -= 1
            self._pages[owner] += 1
            return True
        return self.reserve(owner, self._rooms[owner], 1)

    def release(self, owner: int) -> None:
        """Free all that `owner` owns; no effect when it owns nothing."""
        self._free_pages += self._pages.pop(owner, 0)
        self._rooms.pop(owner, None)

    def release_into_cache(self, owner: int, packed: bytes, namespace: CacheNamespace = SHARED) -> None:
        """End `owner`: its whole pages of the context `packed` go to the cache where it lacks them, the rest is freed.

        The owner must still hold its lock on the cached prefix it started from.
        """
        if self.cache is None or owner not in self._pages:
            self.release(owner)
            return
        taken = self.cache.insert(packed, namespace)
        self._free_pages -= taken
        self.release(owner)

    def leak(self, tokens: int) -> None:
        """So many tokens, or as many as there are, belong to a room called `leaked` from now on."""
        self.release(_LEAK)
        pages = min(self.pages_for(tokens), self.available_tokens // self.page_size_tokens)
        if pages:
            self.reserve(_LEAK, "leaked", pages)

    def flush_cache(self) -> None:
        """Forget all unlocked cached prefixes."""
        if self.cache is not None:
            self._free_pages += self.cache.flush()

    def ledger(self) -> Ledger:
        """The pool's owners at this moment."""
        by_room: dict[str, int] = {}
        for owner, pages in self._pages.items():
            room = self._rooms[owner]
            by_room[room] = by_room.get(room, 0) + pages * self.page_size_tokens
        cached = self.cache.total_pages if self.cache else 0
        locked = cached - self.cache.evictable_pages if self.cache else 0
        return Ledger(
            total_tokens=self.total_tokens,
            free_tokens=self._free_pages * self.page_size_tokens,
            used_tokens=self.total_tokens - self._free_pages * self.page_size_tokens,
            cache_tokens=cached * self.page_size_tokens,
            locked_cache_tokens=locked * self.page_size_tokens,
            by_room=by_room,
        )
