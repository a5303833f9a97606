"""Ownership as a state machine against the plainest model: a dictionary of blocks per engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engines.types import EngineId
from routing.ownership import ClaimId, OwnershipConfig, RowState
from routing.ownership_memory import MemoryOwnership

CONFIG = OwnershipConfig(held_s=100.0, pending_s=30.0, max_blocks_per_engine=1000)
ENGINES = st.sampled_from([EngineId("p0"), EngineId("p1")])
EPOCHS = st.integers(1, 3)
NAMES = st.text("ab", min_size=1, max_size=5)


def chain_of(name: str) -> tuple[bytes, ...]:
    """Blocks whose identity is their whole prefix, as with real hashes."""
    return tuple(name[: i + 1].encode() for i in range(len(name)))


CHAINS = NAMES.map(chain_of)


@dataclass
class Model:
    """One engine: its latest epoch, and until when each block is held."""

    epoch: int = 0
    held: dict[bytes, float] = field(default_factory=dict)
    claims: dict[ClaimId, tuple[tuple[bytes, ...], float]] = field(default_factory=dict)


class Ownership(RuleBasedStateMachine):
    claims: Bundle[tuple[EngineId, ClaimId]] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryOwnership(CONFIG)
        self.models = {EngineId("p0"): Model(), EngineId("p1"): Model()}
        self.now_s = 0.0
        self.refused = 0

    def admitted(self, engine_id: EngineId, epoch: int) -> Model | None:
        model = self.models[engine_id]
        if epoch < model.epoch:
            self.refused += 1
            return None
        if epoch > model.epoch:
            model = self.models[engine_id] = Model(epoch)
        return model

    @rule(target=claims, engine_id=ENGINES, epoch=EPOCHS, blocks=CHAINS)
    def claim(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...]) -> tuple[EngineId, ClaimId]:
        claim = self.store.claim_pending(engine_id, epoch, blocks, self.now_s)
        if (model := self.admitted(engine_id, epoch)) is not None:
            model.claims[claim] = (blocks, self.now_s + CONFIG.pending_s)
        return engine_id, claim

    @rule(claimed=consumes(claims))
    def confirm(self, claimed: tuple[EngineId, ClaimId]) -> None:
        engine_id, claim = claimed
        self.store.confirm(claim, self.now_s)
        model = self.models[engine_id]
        blocks, expires_s = model.claims.pop(claim, ((), 0.0))
        if expires_s > self.now_s:
            for block in blocks:
                if model.held.get(block, 0.0) <= self.now_s:
                    model.held[block] = self.now_s + CONFIG.held_s

    @rule(claimed=consumes(claims))
    def drop(self, claimed: tuple[EngineId, ClaimId]) -> None:
        engine_id, claim = claimed
        self.store.drop(claim)
        self.models[engine_id].claims.pop(claim, None)

    @rule(engine_id=ENGINES, epoch=EPOCHS)
    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        self.store.drop_engine(engine_id, epoch)
        if self.admitted(engine_id, epoch) is not None:
            self.models[engine_id] = Model(epoch)

    @rule(engine_id=ENGINES, epoch=EPOCHS, name=NAMES, start=st.integers(0, 4))
    def evict_subtree(self, engine_id: EngineId, epoch: int, name: str, start: int) -> None:
        """As a radix cache does: a block goes only with all its descendants."""
        model = self.admitted(engine_id, epoch)
        lost = {block for block in (model.held if model else ()) if block.startswith(name.encode())}
        self.store.evict(engine_id, epoch, lost | {name.encode()})
        if model is not None:
            model.held = {block: until_s for block, until_s in model.held.items() if block not in lost}

    @rule(engine_id=ENGINES, epoch=EPOCHS, blocks=CHAINS)
    def refresh(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...]) -> None:
        self.store.refresh(engine_id, epoch, blocks, self.now_s)
        self.admitted(engine_id, epoch)

    @rule(later_s=st.floats(0.0, 60.0))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now_s)

    @invariant()
    def no_row_is_of_an_older_epoch(self) -> None:
        assert self.store.refused == self.refused
        for row in self.store.snapshot(self.now_s):
            assert row.epoch == self.models[row.engine_id].epoch

    @invariant()
    def a_block_has_one_held_row_an_engine(self) -> None:
        seen = [
            (row.engine_id, block)
            for row in self.store.snapshot(self.now_s)
            if row.state is RowState.HELD
            for block in row.run.blocks
        ]
        assert len(seen) == len(set(seen))

    @invariant()
    def held_is_what_was_confirmed_and_not_taken_away(self) -> None:
        """Refreshing keeps blocks longer than the model does, never shorter."""
        rows = [row for row in self.store.snapshot(self.now_s) if row.state is RowState.HELD]
        for engine_id, model in self.models.items():
            held = {block for row in rows if row.engine_id == engine_id for block in row.run.blocks}
            live = {block for block, until_s in model.held.items() if until_s > self.now_s}
            assert live <= held <= set(model.held)

    @invariant()
    def pending_are_the_live_claims(self) -> None:
        for engine_id, model in self.models.items():
            claimed = {b for blocks, until_s in model.claims.values() if until_s > self.now_s for b in blocks}
            pending = {
                block
                for row in self.store.snapshot(self.now_s)
                if row.engine_id == engine_id and row.state is RowState.PENDING
                for block in row.run.blocks
            }
            assert pending <= claimed

    @invariant()
    def owners_agree_with_the_rows(self) -> None:
        rows = [row for row in self.store.snapshot(self.now_s) if row.state is RowState.HELD]
        for name in ("aaaaa", "ababa", "bbb"):
            owners = self.store.owners(chain_of(name), self.now_s)
            for engine_id in self.models:
                held = {block for row in rows if row.engine_id == engine_id for block in row.run.blocks}
                blocks = chain_of(name)
                run = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
                assert owners.get(engine_id, 0) == run


Ownership.TestCase.settings = settings(stateful_step_count=30)
TestOwnership = Ownership.TestCase
