"""The index of segments against a naive one: per engine and tier a set of blocks with the time each was last used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engines.types import EngineId
from routing import segments
from routing.index import NO_HIT, Hit, PrefixIndex
from routing.ownership import Tier

CAPACITY = 12
DEPTH = 6
ENGINES = st.sampled_from([EngineId(f"p{i}") for i in range(3)])
TIERS = st.sampled_from([*[Tier.DEVICE] * 4, Tier.HOST, Tier.STORE])


def chain(name: str) -> tuple[bytes, ...]:
    """A block is named by its path, so its ancestors are its prefixes, as with hashes."""
    return tuple(name[: i + 1].encode() for i in range(len(name)))


PATHS = ("aaaaaa", "aaabbb", "abbbbb", "bbbbbb")
"""Few, so that engines meet in the same chains; every block drawn lies on one of them."""
NAMES = st.builds(lambda path, length: path[:length], st.sampled_from(PATHS), st.integers(1, DEPTH))
CHAINS = NAMES.map(chain)
RUNS = st.tuples(NAMES, st.integers(0, DEPTH - 1)).map(lambda drawn: chain(drawn[0])[drawn[1] :])
"""Consecutive blocks that need not begin at the root; also none at all."""
BLOCKS = st.lists(NAMES.map(str.encode), max_size=8)
PROBES = [chain(path) for path in PATHS]


@dataclass
class Naive:
    """What one engine has on one tier, and when it last used it."""

    capacity: int | None = CAPACITY
    used: dict[bytes, int] = field(default_factory=dict)

    def age(self, block: bytes) -> tuple[int, int]:
        """Within one use, the deeper a block, the older."""
        return self.used[block], -len(block)

    def hold(self, blocks: tuple[bytes, ...], time: int) -> None:
        self.used.update(dict.fromkeys(blocks[: self.capacity], time))
        self.shrink()

    def shrink(self) -> None:
        while self.capacity is not None and len(self.used) > self.capacity:
            del self.used[min(self.used, key=self.age)]

    def evict(self, blocks: Iterable[bytes]) -> int:
        return sum(self.used.pop(block, None) is not None for block in blocks)

    def forget_up_to(self, lost: tuple[bytes, ...]) -> list[bytes]:
        """All that was used before any of `lost`, the oldest first."""
        by_age = sorted(self.used, key=self.age)
        gone = by_age[: 1 + max((by_age.index(block) for block in lost if block in self.used), default=-1)]
        self.evict(gone)
        return gone


@dataclass
class NaiveEngine:
    tiers: dict[Tier, Naive] = field(default_factory=lambda: {tier: Naive() for tier in Tier})
    pending: Counter[bytes] = field(default_factory=Counter)

    def hit(self, blocks: tuple[bytes, ...]) -> Hit:
        held = [self.fastest(block) for block in blocks]
        ahead = [tier is not None or self.pending[block] > 0 for tier, block in zip(held, blocks, strict=True)]
        run = held.index(None) if None in held else len(blocks)
        here = Counter(held[:run])
        return Hit(run, (*ahead, False).index(False), here[Tier.HOST], here[Tier.STORE])

    def fastest(self, block: bytes) -> Tier | None:
        return next((tier for tier in Tier if block in self.tiers[tier].used), None)


class Index(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.naive: dict[EngineId, NaiveEngine] = {}
        self.time = 0
        self.patches = ExitStack()

    @initialize(
        segment_blocks=st.sampled_from([3, 256, 256]),
        behind=st.sampled_from([0, 1, 16, 16]),
        sweep_blocks=st.sampled_from([1, 512]),
    )
    def begin(self, segment_blocks: int, behind: int, sweep_blocks: int) -> None:
        self.patches.enter_context(patch.object(segments, "MAX_BEHIND", behind))
        self.patches.enter_context(patch.object(segments, "MAX_SEGMENT_BLOCKS", segment_blocks))
        self.index = PrefixIndex(CAPACITY, sweep_blocks=sweep_blocks)

    def of(self, engine_id: EngineId) -> NaiveEngine:
        return self.naive.setdefault(engine_id, NaiveEngine())

    def hold(self, engine_id: EngineId, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.time += 1
        self.of(engine_id).tiers[tier].hold(blocks, self.time)

    @rule(engine_id=ENGINES, blocks=CHAINS | RUNS, tier=TIERS)
    def add_held(self, engine_id: EngineId, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.index.add_held(engine_id, blocks, tier)
        self.hold(engine_id, blocks, tier)

    @rule(engine_id=ENGINES, blocks=CHAINS | RUNS)
    def add_pending(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.add_pending(engine_id, blocks)
        self.of(engine_id).pending.update(blocks)

    @rule(engine_id=ENGINES, blocks=CHAINS | RUNS)
    def drop(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.drop(engine_id, blocks)
        naive = self.of(engine_id)
        naive.pending = naive.pending - Counter(blocks)

    @rule(engine_id=ENGINES, blocks=CHAINS)
    def confirm(self, engine_id: EngineId, blocks: tuple[bytes, ...]) -> None:
        self.index.drop(engine_id, blocks)
        self.index.add_held(engine_id, blocks)
        naive = self.of(engine_id)
        naive.pending = naive.pending - Counter(blocks)
        self.hold(engine_id, blocks, Tier.DEVICE)

    @rule(engine_id=ENGINES, block=NAMES.map(str.encode), tier=TIERS)
    def evict_subtree(self, engine_id: EngineId, block: bytes, tier: Tier) -> None:
        """As an engine does: with all descendants."""
        naive = self.of(engine_id).tiers[tier]
        lost = [held for held in naive.used if held.startswith(block)]
        assert self.index.evict(engine_id, lost, tier) == naive.evict(lost)

    @rule(engine_id=ENGINES, blocks=BLOCKS, tier=TIERS)
    def evict_any(self, engine_id: EngineId, blocks: list[bytes], tier: Tier) -> None:
        assert self.index.evict(engine_id, blocks, tier) == self.of(engine_id).tiers[tier].evict(blocks)

    @rule(engine_id=ENGINES, blocks=CHAINS, reported=st.integers(0, DEPTH), then_held=st.booleans())
    def correct(self, engine_id: EngineId, blocks: tuple[bytes, ...], reported: int, then_held: bool) -> None:
        forgotten = self.index.correct(engine_id, blocks, reported)
        expected = {tier: each.forget_up_to(blocks[reported:]) for tier, each in self.of(engine_id).tiers.items()}
        assert forgotten == {tier: gone for tier, gone in expected.items() if gone}
        if then_held:
            self.add_held(engine_id, blocks, Tier.DEVICE)

    @rule(engine_id=ENGINES, capacity=st.none() | st.integers(0, 14), tier=TIERS)
    def set_capacity(self, engine_id: EngineId, capacity: int | None, tier: Tier) -> None:
        self.index.set_capacity(engine_id, capacity, tier)
        naive = self.of(engine_id).tiers[tier]
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
            hits = {engine_id: naive.hit(blocks) for engine_id, naive in self.naive.items()}
            assert match == {engine_id: hit for engine_id, hit in hits.items() if hit != NO_HIT}

    @invariant()
    def it_holds_as_much(self) -> None:
        for engine_id, naive in self.naive.items():
            for tier in Tier:
                assert self.index.held_blocks(engine_id, tier) == len(naive.tiers[tier].used)

    @invariant()
    def segments_are_sound(self) -> None:
        """Each block lies in one segment; owners are those who have some of it, partial who has not all; one has."""
        below = self.index._segments
        placed = {}
        for segment in below._segments.values():
            placed.update(dict.fromkeys(segment.blocks, segment.blocks[0]))
            has = {bit: each.holds[segment].blocks for bit, each in below.holders.items() if segment in each.holds}
            assert segment.owners == sum(has)
            assert segment.partial == sum(bit for bit, blocks in has.items() if blocks < len(segment.blocks))
            assert not has or max(has.values()) == len(segment.blocks)
        assert placed == {block: first for table in below._firsts for block, first in table.items()}

    def teardown(self) -> None:
        """Everybody leaves: nothing stays, however little each change sweeps."""
        self.patches.close()
        for engine_id in self.naive:
            self.index.drop_engine(engine_id)
        for _ in range(500):
            self.index.drop_engine(EngineId("nobody"))
            self.index.add_pending(EngineId("other"), ())
        assert self.index.memory_bytes() == 0


Index.TestCase.settings = settings(stateful_step_count=40)
TestIndex = Index.TestCase
