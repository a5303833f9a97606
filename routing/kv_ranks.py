"""What an engine has, from what each of its DP ranks has: a block is lost when the last rank has lost it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from routing.kv_bridge import Change, Cleared, Held, Lost
from routing.ownership import Tier


class RankUnion:
    """Passes the changes of one rank through, and keeps the blocks of every rank where there are several."""

    def __init__(self, ranks: int) -> None:
        self._held: list[dict[Tier, set[bytes]]] = [{tier: set() for tier in Tier} for _ in range(ranks)]

    def apply(self, rank: int, changes: Iterable[Change]) -> Iterator[Change]:
        """The engine's changes that these changes of one rank make; `Cleared` is not among them."""
        for change in changes:
            if len(self._held) == 1 or isinstance(change, Cleared):
                yield change
            elif isinstance(change, Held):
                self._held[rank][change.tier].update(change.blocks)
                yield change
            else:
                self._held[rank][change.tier].difference_update(change.blocks)
                yield from self._nowhere(change.blocks, change.tier)

    def cleared(self, rank: int) -> list[Change] | None:
        """What the engine has lost when a rank has nothing any more; None when it has nothing either."""
        had, self._held[rank] = self._held[rank], {tier: set() for tier in Tier}
        if not any(blocks for held in self._held for blocks in held.values()):
            return None
        return [lost for tier, blocks in had.items() for lost in self._nowhere(blocks, tier)]

    def clear(self) -> None:
        """No rank has anything."""
        self._held = [{tier: set() for tier in Tier} for _ in self._held]

    def _nowhere(self, blocks: Iterable[bytes], tier: Tier) -> Iterator[Lost]:
        """Those of the blocks that no rank has on `tier`."""
        gone = tuple(block for block in blocks if not any(block in held[tier] for held in self._held))
        if gone:
            yield Lost(gone, tier)
