"""A radix cache over packed token ids, as SGLang's: whole pages, locks, least recently used leaves evicted first. Pure.

It counts pages and owns none of the pool's arithmetic: `insert` says how many pages it took over, `evict` how many it
gave back. Edges are byte strings, so that long prompts are compared by memcmp. A `PageLog` is told of every page that
comes or goes; without one nothing is kept for it.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from typing import Protocol

from engines.token_rule import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """What a request's KV is kept apart by; equal tokens of different namespaces share nothing."""

    cache_salt: str = ""
    extra_key: str = ""

    @property
    def slot(self) -> bytes:
        """Stands before the first page of the namespace's prompts."""
        if not self.cache_salt and not self.extra_key:
            return b""
        salt = self.cache_salt.encode("utf-8", "surrogatepass")
        rest = self.extra_key.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(len(salt).to_bytes(8, "little") + salt + rest, digest_size=16).digest()


SHARED = CacheNamespace()
"""The namespace of requests that name none."""


class PageLog(Protocol):
    """Told of every change; a digest names a page together with all before it."""

    def stored(self, parent: bytes | None, packed: bytes, cache_salt: str) -> list[bytes]:
        """New whole pages behind the page `parent` (None: at the start); their digests."""

    def evicted(self, digests: list[bytes]) -> None:
        """These pages are gone."""

    def cleared(self) -> None:
        """All pages are gone."""


class RadixNode:
    """One edge of the tree with what hangs below it; `locks` counts the requests that use it or a descendant."""

    __slots__ = ("children", "digests", "key", "last_used", "locks", "parent", "slot")

    def __init__(self, key: bytes, parent: RadixNode | None, slot: bytes, digests: list[bytes]) -> None:
        """`slot` is the node's name among its siblings; `digests` has one entry a page, or none where nobody logs."""
        self.key = key
        self.slot = slot
        self.digests = digests
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        self.last_used = 0


class RadixCache:
    """Which prefixes are cached, in pages of `page_size_tokens`."""

    def __init__(self, page_size_tokens: int, log: PageLog | None = None) -> None:
        self._page_bytes = page_size_tokens * TOKEN_BYTES
        self._log = log
        self._root = RadixNode(b"", None, b"", [])
        self._uses = 0
        self.total_pages = 0
        self.locked_pages = 0

    @property
    def evictable_pages(self) -> int:
        return self.total_pages - self.locked_pages

    def match(self, packed: bytes, namespace: CacheNamespace = SHARED) -> tuple[RadixNode, int]:
        """The node where the longest cached prefix of `packed` ends, and its length in tokens."""
        node, matched_bytes = self._walk(packed, namespace.slot)
        return node, matched_bytes // TOKEN_BYTES

    def insert(self, packed: bytes, namespace: CacheNamespace = SHARED) -> int:
        """Cache the whole pages of `packed`; how many of them are new here."""
        whole = packed[: len(packed) - len(packed) % self._page_bytes]
        node, matched_bytes = self._walk(whole, namespace.slot)
        rest = whole[matched_bytes:]
        if not rest:
            return 0
        digests = []
        if self._log is not None:
            parent = node.digests[-1] if node.digests else None
            digests = self._log.stored(parent, rest, namespace.cache_salt)
        slot = (namespace.slot if node is self._root else b"") + rest[: self._page_bytes]
        leaf = RadixNode(rest, node, slot, digests)
        leaf.last_used = self._uses
        node.children[slot] = leaf
        pages = self._pages(leaf)
        self.total_pages += pages
        return pages

    def lock(self, node: RadixNode) -> None:
        """Keep the prefix that ends at `node` from eviction until `unlock`."""
        current: RadixNode | None = node
        while current is not None:
            if current.locks == 0:
                self.locked_pages += self._pages(current)
            current.locks += 1
            current = current.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`."""
        current: RadixNode | None = node
        while current is not None:
            current.locks -= 1
            if current.locks == 0:
                self.locked_pages -= self._pages(current)
            current = current.parent

    def evict(self, pages: int) -> int:
        """Forget unlocked leaves, oldest first, until `pages` are gone or none is left; how many went."""
        leaves = [(leaf.last_used, id(leaf), leaf) for leaf in self._evictable_leaves()]
        heapq.heapify(leaves)
        gone = 0
        while gone < pages and leaves:
            _, _, leaf = heapq.heappop(leaves)
            gone += self._drop(leaf, pages - gone)
            parent = leaf.parent
            if parent is not None and parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return gone

    def flush(self) -> int:
        """Forget all that no lock keeps; how many pages went."""
        if self.locked_pages:
            return self.evict(self.evictable_pages)
        pages, self.total_pages = self.total_pages, 0
        self._root.children.clear()
        if self._log is not None:
            self._log.cleared()
        return pages

    def _drop(self, leaf: RadixNode, pages: int) -> int:
        """Cut up to `pages` from the end of `leaf`; the whole leaf when that is all it has."""
        have = self._pages(leaf)
        cut = min(have, pages)
        if cut == have:
            assert leaf.parent is not None
            del leaf.parent.children[leaf.slot]
        else:
            leaf.key = leaf.key[: (have - cut) * self._page_bytes]
        if self._log is not None:
            self._log.evicted(leaf.digests[have - cut :])
            del leaf.digests[have - cut :]
        self.total_pages -= cut
        return cut

    def _walk(self, packed: bytes, slot: bytes) -> tuple[RadixNode, int]:
        self._uses += 1
        node, at = self._root, 0
        while at < len(packed):
            child = node.children.get(slot + packed[at : at + self._page_bytes])
            if child is None:
                break
            slot = b""
            common = self._common_bytes(child.key, packed, at)
            if common < len(child.key):
                child = self._split(child, common)
            child.last_used = self._uses
            node, at = child, at + common
        return node, at

    def _common_bytes(self, key: bytes, packed: bytes, at: int) -> int:
        """How many bytes of whole pages `key` shares with `packed` from `at`; at least one page is known to agree."""
        if packed.startswith(key, at):
            return len(key)
        low, high = 1, len(key) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if packed.startswith(key[: middle * self._page_bytes], at):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split(self, child: RadixNode, at_bytes: int) -> RadixNode:
        parent = child.parent
        assert parent is not None
        pages = at_bytes // self._page_bytes
        upper = RadixNode(child.key[:at_bytes], parent, child.slot, child.digests[:pages])
        upper.locks, upper.last_used = child.locks, child.last_used
        parent.children[upper.slot] = upper
        child.key, child.parent, child.digests = child.key[at_bytes:], upper, child.digests[pages:]
        child.slot = child.key[: self._page_bytes]
        upper.children[child.slot] = child
        return upper

    def _evictable_leaves(self) -> list[RadixNode]:
        found, stack = [], [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and not node.locks and node.parent is not None:
                found.append(node)
        return found

    def _pages(self, node: RadixNode) -> int:
        return len(node.key) // self._page_bytes
