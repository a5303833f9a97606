"""The bitset index against a naive one: per engine a set of blocks with the time each was last used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engines.types import EngineId
from routing.index import NO_HIT, PrefixIndex

CAPACITY = 6
ENGINES = st.sampled_from([EngineId(f"p{i}") for i in range(3)])
CHAINS = st.text("ab", min_size=1, max_size=5).map(lambda name: tuple(name[: i + 1].encode() for i in range(len(name))))
PROBES = [tuple(name[: i + 1].encode() for i in range(5)) for name in ("aaaaa", "ababa", "abbbb", "baaab", "bbbbb")]


@dataclass
class Naive:
    """A block's name is its path, so its ancestors are its prefixes."""

    capacity: int = CAPACITY
    used: dict[bytes, int] = field(default_factory=dict)
    pending: Counter[bytes] = field(default_factory=Counter)

    def shrink(self) -> None:
        while len(self.used) > self.capacity:
            leaves = [b for b in self.used if not any(o != b and o.startswith(b) for o in self.used)]
            del self.used[min(leaves, key=self.used.__getitem__)]

    def forget_up_to(self, lost: tuple[bytes, ...]) -> int:
        """All that was used before any of `lost`; within one use, the deeper a block, the older."""

        def age(block: bytes) -> tuple[int, int]:
            return self.used[block], -len(block)

        known = [block for block in lost if block in self.used]
        gone = [block for block in self.used if known and age(block) <= max(map(age, known))]
        for block in gone:
            del self.used[block]
        return len(gone)

    def run(self, blocks: tuple[bytes, ...], *, ahead: bool) -> int:
        for depth, block in enumerate(blocks):
            if block not in self.used and not (ahead and self.pending[block]):
                return depth
        return len(blocks)


class Index(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(CAPACITY)
        self.naive: dict[EngineId, Naive] = {}
        self.time = 0

    def of(self, engine_id: EngineId) -> Naive:
        return self.naive.setdefault(engine_id, Naive())

    @rule(engine_id=ENGINES, blocks=CHAINS)
    def add_held(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.add_held(engine_id, blocks)
        self.hold(engine_id, blocks)

    def hold(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.time += 1
        naive = self.of(engine_id)
        naive.used.update(dict.fromkeys(blocks[: naive.capacity], self.time))
        naive.shrink()

    @rule(engine_id=ENGINES, blocks=CHAINS)
    def add_pending(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.add_pending(engine_id, blocks)
        self.of(engine_id).pending.update(blocks)

    @rule(engine_id=ENGINES, blocks=CHAINS)
    def drop(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.drop(engine_id, blocks)
        naive = self.of(engine_id)
        naive.pending = naive.pending - Counter(blocks)

    @rule(engine_id=ENGINES, blocks=CHAINS)
    def confirm(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.confirm(engine_id, blocks)
        naive = self.of(engine_id)
        naive.pending = naive.pending - Counter(blocks)
        self.hold(engine_id, blocks)

    @rule(engine_id=ENGINES, block=CHAINS.map(lambda chain: chain[-1]))
    def evict_subtree(self, engine_id: EngineId, block: bytes) -> None:
        """As an engine does: with all descendants."""
        naive = self.of(engine_id)
        lost = [held for held in naive.used if held.startswith(block)]
        assert self.index.evict(engine_id, lost) == len(lost)
        for held in lost:
            del naive.used[held]

    @rule(engine_id=ENGINES, blocks=CHAINS, reported=st.integers(0, 5))
    def correct(self, engine_id: EngineId, blocks: tuple[bytes, ...], reported: int) -> None:
        """Followed by the hold of the same request, as the contract says."""
        forgotten = self.index.correct(engine_id, blocks, reported)
        naive = self.of(engine_id)
        assert forgotten == naive.forget_up_to(blocks[reported:])
        self.index.add_held(engine_id, blocks)
        self.hold(engine_id, blocks)

    @rule(engine_id=ENGINES, capacity=st.integers(0, 10))
    def set_capacity(self, engine_id: EngineId, capacity: int) -> None:
        self.index.set_capacity(engine_id, capacity)
        naive = self.of(engine_id)
        naive.capacity = capacity
        naive.shrink()

    @rule(engine_id=ENGINES)
    def drop_engine(self, engine_id: EngineId) -> None:
        self.index.drop_engine(engine_id)
        self.naive.pop(engine_id, None)

    @invariant()
    def matches_agree(self) -> None:
        for blocks in PROBES:
            match = self.index.match(blocks)
            for engine_id, naive in self.naive.items():
                hit = match.get(engine_id, NO_HIT)
                assert hit.held_blocks == naive.run(blocks, ahead=False)
                assert hit.pending_blocks == naive.run(blocks, ahead=True)
            assert set(match) <= set(self.naive)

    @invariant()
    def the_capacity_bounds_it(self) -> None:
        for engine_id, naive in self.naive.items():
            assert self.index.held_blocks(engine_id) == len(naive.used) <= naive.capacity


Index.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestIndex = Index.TestCase
