"""Rows of one tier against the plainest model: until when each row has each block. Overlaps, suffixes and middles."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routing.ownership import ROOT, Run
from routing.ownership_rows import TierRows, missing_runs, reach

NAMES = st.text("ab", min_size=1, max_size=7)


def block(name: str) -> bytes:
    """A block whose identity is its whole prefix, as with real hashes."""
    return blake2b(name.encode(), digest_size=16).digest()


def chain(name: str) -> tuple[bytes, ...]:
    return tuple(block(name[: end + 1]) for end in range(len(name)))


class Rows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows = TierRows()
        self.model: dict[bytes, tuple[bytes, ...]] = {}

    def held(self) -> set[bytes]:
        return {each for blocks in self.model.values() for each in blocks}

    def tail(self, pick: int) -> bytes:
        return sorted(self.model)[pick % len(self.model)]

    @rule(name=NAMES, start=st.integers(0, 6))
    def put(self, name: str, start: int) -> None:
        """As another writer does, who knows of none of our rows."""
        start = min(start, len(name) - 1)
        run = Run(block(name[:start]) if start else ROOT, chain(name)[start:])
        known = self.model.get(run.tail, ())
        assert self.rows.put(run, 1.0) == (len(run.blocks) > len(known))
        self.model[run.tail] = max(known, run.blocks, key=len)

    @rule(name=NAMES)
    def put_missing(self, name: str) -> None:
        before = self.held()
        runs = self.rows.put_missing(chain(name), self.rows.spans(chain(name)), 1.0)
        assert [each for run in runs for each in run.blocks] == [each for each in chain(name) if each not in before]
        for run in runs:
            assert run.parent == (ROOT if run.blocks[0] == chain(name)[0] else run.parent)
            self.model[run.tail] = run.blocks

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 99), discard=st.booleans())
    def remove(self, pick: int, discard: bool) -> None:
        tail, before = self.tail(pick), self.held()
        del self.model[tail]
        if discard:
            self.rows.discard(tail)
        else:
            assert set(self.rows.remove(tail)) == before - self.held()

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 99), at=st.integers(0, 6))
    def cut(self, pick: int, at: int) -> None:
        tail, before = self.tail(pick), self.held()
        blocks = self.model[tail]
        first = blocks[at % len(blocks)]
        self.cut_model(tail, {first})
        assert set(self.rows.cut(tail, (first,))) == before - self.held()

    def cut_model(self, tail: bytes, lost: set[bytes]) -> None:
        blocks = self.model.pop(tail)
        left = blocks[: next(at for at, each in enumerate(blocks) if each in lost)]
        if left:
            self.model[left[-1]] = max(self.model.get(left[-1], ()), left, key=len)

    @rule(names=st.lists(NAMES, min_size=1, max_size=3), below=st.booleans())
    def evict(self, names: list[str], below: bool) -> None:
        """Single blocks from anywhere, or (as caches forget) with all that comes after them."""
        lost = {block(name) for name in names}
        if below:
            lost = {each for tail in self.model.values() for each in tail if lost & set(self.line_of(each))} or lost
        expected = {tail for tail, blocks in self.model.items() if lost & set(blocks)}
        found = self.rows.with_any(lost)
        assert set(found) == expected
        assert len(found) == len(expected)
        for tail in found:
            if tail in self.rows.rows and lost & set(self.rows.rows[tail].run.blocks):
                self.rows.cut(tail, lost)
                self.cut_model(tail, lost)
        assert not lost & self.held()

    def line_of(self, wanted: bytes) -> tuple[bytes, ...]:
        return next(line for line in LINES if line[-1] == wanted)

    @rule(name=NAMES)
    def touch(self, name: str) -> None:
        if block(name) in self.model:
            self.rows.touch(block(name), 2.0)
            assert list(self.rows.rows)[-1] == block(name)

    @rule()
    def clear(self) -> None:
        self.rows.clear()
        self.model.clear()

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        assert {tail: row.run.blocks for tail, row in self.rows.rows.items()} == self.model
        assert self.rows.blocks == sum(map(len, self.model.values()))

    @invariant()
    def chains_are_answered_block_by_block(self) -> None:
        held = self.held()
        for line in LONGEST:
            spans = self.rows.spans(line)
            known = [each in held for each in line]
            depth = [*known, False].index(False)
            assert reach(spans) == depth
            assert self.rows.joined(line) <= depth
            missing = {each for run in missing_runs(line, spans) for each in run.blocks}
            assert missing == {each for each in line if each not in held}


ALL = [
    format(number, f"0{size}b").replace("0", "a").replace("1", "b") for size in range(1, 8) for number in range(2**size)
]
LINES = [chain(name) for name in ALL]
LONGEST = [line for line in LINES if len(line) == 7][::9]
Rows.TestCase.settings = settings(stateful_step_count=30)
TestRows = Rows.TestCase
