"""A segment of an engine's pages, of which the bridge's chains are made. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from engines.kv_types import Medium
from routing.ownership import Tier

HASH_BYTES = 8
PAGE_BYTES, SEGMENT_BYTES, FORKS_BYTES = 105, 360, 232
"""Memory of a page (its entry among the pages just grown, its hash), of a segment, and of what parts from one
(CPython 3.11, measured)."""
MEDIA = tuple(Medium)
TIERS = {
    Medium.GPU: Tier.DEVICE,
    Medium.CPU_PINNED: Tier.HOST,
    Medium.DISK: Tier.STORE,
    Medium.EXTERNAL: Tier.STORE,
}
MEDIA_OF = {tier: tuple(at for at, medium in enumerate(MEDIA) if TIERS[medium] is tier) for tier in Tier}


class Segment:
    """Pages of a span, the first at `start`. `before` is the segment they continue: of this span, or the one before.

    `root` begins the chain where there is none before. `present` is a bitset of the segment's pages for each medium.
    `forks` continue it within its span, None where nothing does; `followers` counts all that continue it. Hashes and
    tokens are packed.
    """

    __slots__ = ("all_pages", "before", "blocks", "followers", "forks", "hashes", "present", "root", "start", "tokens")

    def __init__(self, before: Segment | None, root: bytes, start: int, hashes: bytes, tokens: bytes) -> None:
        self.before = before
        self.root = root
        self.start = start
        self.hashes = hashes
        self.tokens = tokens
        self.all_pages = bits(0, len(hashes) // HASH_BYTES)
        self.blocks: tuple[bytes, ...] = ()
        self.present = [0] * len(MEDIA)
        self.forks: dict[Segment, None] | None = None
        self.followers = 0

    @property
    def stop(self) -> int:
        """The page of the span that follows the segment's last."""
        return self.start + len(self.hashes) // HASH_BYTES

    def position(self, page: int) -> int:
        """Where `page` is among the segment's own pages."""
        wanted = array("q", (page,)).tobytes()
        at = self.hashes.find(wanted)
        while at % HASH_BYTES:
            at = self.hashes.find(wanted, at + 1)
        return at // HASH_BYTES

    def run(self, position: int, wanted: bytes) -> int:
        """How many of the pages `wanted` (packed) are the segment's own from `position` on; the first one is."""
        own = self.hashes[position * HASH_BYTES : position * HASH_BYTES + len(wanted)]
        if wanted.startswith(own):
            return len(own) // HASH_BYTES
        starts = range(0, len(own), HASH_BYTES)
        differs = (at for at in starts if own[at : at + HASH_BYTES] != wanted[at : at + HASH_BYTES])
        return next(differs) // HASH_BYTES

    def lengthen(self, hashes: bytes, tokens: bytes) -> None:
        """It has these pages, too, which are nowhere yet."""
        self.hashes += hashes
        self.tokens += tokens
        self.all_pages = bits(0, len(self.hashes) // HASH_BYTES)

    def on(self, tier: Tier) -> int:
        """The segment's own pages that are on `tier`, as a bitset."""
        pages = 0
        for medium in MEDIA_OF[tier]:
            pages |= self.present[medium]
        return pages


def bits(start: int, stop: int) -> int:
    """The pages from `start` to before `stop`, as a bitset."""
    return (1 << stop) - (1 << start)


def span_of(segment: Segment, stop: int) -> Iterator[tuple[Segment, int]]:
    """The pieces of one span before its page `stop`, the last of which is in `segment`; each with where it is cut."""
    now: Segment | None = segment
    while stop and now is not None:
        yield now, stop
        stop = now.start
        now = now.before


def forks_of(segment: Segment) -> Iterator[Segment]:
    """All that continue the segment within its span."""
    for fork in segment.forks or ():
        yield fork
        yield from forks_of(fork)
