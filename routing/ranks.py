"""DP ranks of a server: which of them was sent which prefix, and which one a request should go to. Pure.

Every rank has its own scheduler, KV pool and prefix cache, so a server of several is as good for a request as its best
rank. What a rank was sent is remembered as long as a cache of its size would keep it; an engine's own index says what
the engine has at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.types import EngineId
from routing.index import NO_HIT, Hit, Match, PrefixIndex

Cost = tuple[float, ...]
"""What a request costs on a rank: compared in order."""


class RankPrefixes:
    """Which blocks every rank was sent; bounded by `capacity_blocks` for each rank."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._ranks: dict[EngineId, int] = {}

    def sent(self, engine_id: EngineId, rank: int, blocks: Sequence[bytes], capacity_blocks: int) -> None:
        """A prompt goes to this rank; `capacity_blocks` is what its cache can keep."""
        seat = _seat(engine_id, rank)
        self._ranks[engine_id] = max(rank + 1, self._ranks.get(engine_id, 0))
        self._index.set_capacity(seat, capacity_blocks)
        self._index.add_held(seat, blocks)

    def forget(self, engine_id: EngineId) -> None:
        """No rank of the server has anything any more."""
        for rank in range(self._ranks.pop(engine_id, 0)):
            self._index.drop_engine(_seat(engine_id, rank))

    def match(self, blocks: Sequence[bytes]) -> Match:
        """How much of a prompt every rank was sent, by names that `hits_of_ranks` knows."""
        return self._index.match(blocks) if self._ranks else {}

    def memory_bytes(self) -> int:
        """An estimate."""
        return self._index.memory_bytes()


def hits_of_ranks(engine_id: EngineId, ranks: int, hit: Hit, match: Match) -> list[Hit]:
    """What each rank has of a prompt of which the engine has `hit`, and of which ranks were sent `match`.

    Nothing on any rank when nobody knows which of them has it: the prompt had come by another gateway.
    """
    if not hit.pending_blocks:
        return [NO_HIT] * ranks
    sent = (match.get(_seat(engine_id, rank), NO_HIT).held_blocks for rank in range(ranks))
    return [Hit(min(hit.held_blocks, blocks), min(hit.pending_blocks, blocks)) for blocks in sent]


def cheapest(costs: Sequence[Cost], first: int) -> int:
    """The rank with the least cost; of equal ones the next from `first` on, in a circle."""
    ranks = len(costs)
    return min(range(ranks), key=lambda rank: (costs[rank], (rank - first) % ranks))


def home(blocks: Sequence[bytes], turn: int) -> int:
    """Where to begin to look for a rank: at the same one in every gateway for prompts that begin alike.

    Prompts shorter than a block take turns.
    """
    return int.from_bytes(blocks[0][:8], "big") if blocks else turn


def _seat(engine_id: EngineId, rank: int) -> EngineId:
    """The name of one rank in the index."""
    return EngineId(f"{engine_id}#{rank}")
