"""Who owns which prefix: the rules, and what every ownership store must do. Pure.

A row says that one boot (epoch) of an engine holds one run of blocks on one tier until some time. A run is the part of
a prompt's chain that was new to the engine: thousands of blocks then cost one row. Rows are `pending` from dispatch,
`held` when the prefill leg succeeded, gone when it failed; an engine's new epoch ends all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from engines.types import EngineId

ROOT = b""
"""The parent of a chain's first block; the namespace is in the block itself."""

ClaimId = NewType("ClaimId", int)


class Tier(StrEnum):
    """Where a block lies, the fastest first."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class RowState(StrEnum):
    """Whether the KV of a row is there, or will be when what was dispatched succeeds."""

    PENDING = "pending"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class OwnershipConfig:
    """How long ownership lives without a hit, and how many blocks one engine may own (its oldest runs go first)."""

    held_s: float = 600.0
    pending_s: float = 120.0
    max_blocks_per_engine: int = 65_536


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a chain (at least one), and the block before them."""

    parent: bytes
    blocks: tuple[bytes, ...]

    @property
    def tail(self) -> bytes:
        """What names the run: no two held runs of one engine share a block."""
        return self.blocks[-1]


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """One run of one boot of an engine; it counts until `expires_s`."""

    engine_id: EngineId
    epoch: int
    run: Run
    state: RowState
    tier: Tier
    expires_s: float


class OwnershipStore(Protocol):
    """Keeps owner rows. Every method but `start` and `stop` is synchronous, quick, and never fails its caller.

    A write that names an older epoch than the engine's latest is refused and counted; one that names a newer epoch
    ends all rows of the older ones first. `blocks` is always a whole chain from its root.
    """

    refused: int
    """Writes refused for their epoch."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def claim_pending(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> ClaimId:
        """Note that `blocks` were dispatched; the id ends in `confirm` or `drop`, or is forgotten by itself.

        A refused claim also has an id, with which nothing happens.
        """
        ...

    def confirm(self, claim: ClaimId, now_s: float, tier: Tier = Tier.DEVICE) -> None:
        """The prefill leg succeeded: the claimed blocks are held. Unknown, ended and outdated claims do nothing."""
        ...

    def drop(self, claim: ClaimId) -> None:
        """The prefill leg failed: the claim is gone. Unknown claims do nothing."""
        ...

    def evict(self, engine_id: EngineId, epoch: int, blocks: Iterable[bytes]) -> None:
        """The engine has forgotten these blocks (in any order): each run ends before the first of them."""
        ...

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        """End all rows and claims of `epoch` and older; the epoch may still be written to."""
        ...

    def refresh(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> None:
        """`blocks` were hit: their runs live on, written only when under half of their time is left."""
        ...

    def owners(self, blocks: Sequence[bytes], now_s: float) -> Mapping[EngineId, int]:
        """How many of `blocks`, unbroken from the first, each engine holds; pending rows and zeros left out."""
        ...

    def snapshot(self, now_s: float) -> Iterator[OwnerRow]:
        """Every row that counts at `now_s`; for warming an index, and for inspection."""
        ...

    def expire(self, now_s: float) -> int:
        """Forget the rows and claims whose time is over; their number."""
        ...


def accepts(known_epoch: int, epoch: int) -> bool:
    """Whether a write of `epoch` may change anything."""
    return epoch >= known_epoch


def needs_refresh(expires_s: float, now_s: float, held_s: float) -> bool:
    """A hit is written only when under half of the time is left: one write per run and half-life, not per hit."""
    return expires_s - now_s < held_s / 2


def unknown_runs(blocks: Sequence[bytes], is_known: Callable[[bytes], bool]) -> tuple[Run, ...]:
    """The parts of a chain that are new: usually its end, or more parts when middle blocks had been lost."""
    runs = []
    start: int | None = None
    for index, block in enumerate(blocks):
        if not is_known(block):
            start = index if start is None else start
        elif start is not None:
            runs.append(_cut(blocks, start, index))
            start = None
    if start is not None:
        runs.append(_cut(blocks, start, len(blocks)))
    return tuple(runs)


def _cut(blocks: Sequence[bytes], start: int, end: int) -> Run:
    return Run(blocks[start - 1] if start else ROOT, tuple(blocks[start:end]))


def truncated(run: Run, lost: Container[bytes]) -> Run | None:
    """What is left of `run`: the blocks before the first lost one; None when it was the first."""
    for index, block in enumerate(run.blocks):
        if block in lost:
            return Run(run.parent, run.blocks[:index]) if index else None
    return run


def full_chains(runs: Iterable[Run]) -> Iterator[tuple[bytes, ...]]:
    """The whole chain that each run of one engine ends, from the root; runs whose ancestors are missing yield nothing.

    What a fresh index is filled with: an index forgets leaf-first, so it wants chains, not runs.
    """
    runs = list(runs)
    place = {block: (run, index) for run in runs for index, block in enumerate(run.blocks)}
    for run in runs:
        parts = [run.blocks]
        parent = run.parent
        while parent != ROOT and (found := place.get(parent)) is not None:
            owner, index = found
            parts.append(owner.blocks[: index + 1])
            parent = owner.parent
        if parent == ROOT:
            yield tuple(block for part in reversed(parts) for block in part)
