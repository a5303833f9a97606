"""Who owns which prefix: the rules, what every ownership store must do, and the names of its keys in Redis. Pure.

A row says that one boot (epoch) of an engine holds one run of blocks on one tier until some time. A run is the part of
a prompt's chain that was new to the engine: thousands of blocks then cost one row. Rows are `pending` from dispatch,
`held` when the prefill leg succeeded, gone when it failed; an engine's new epoch ends all its rows.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, count
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


class OwnershipListener(Protocol):
    """Told what *others* have changed, so that an index can follow. Synchronous and quick; raises nothing.

    What this process does itself through the store is not told: it knows.
    """

    def held(self, engine_id: EngineId, run: Run, tier: Tier) -> None:
        """The engine holds this run now. Its ancestors need not be known."""

    def lost(self, engine_id: EngineId, blocks: Sequence[bytes], tier: Tier) -> None:
        """The engine no longer holds these blocks on that tier."""

    def promised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        """Another process dispatched a request that will leave these blocks; ends in one `unpromised`."""

    def unpromised(self, engine_id: EngineId, blocks: Sequence[bytes]) -> None:
        """A promise has ended; where it was kept, `held` came before."""

    def cleared(self, engine_id: EngineId) -> None:
        """The engine holds nothing any more, on any tier."""

    def restart_seen(self, engine_id: EngineId) -> None:
        """Another process has seen a newer boot of this engine than we have: look at it now."""


class StoreState(StrEnum):
    """Whether a store is shared with others at the moment."""

    ALONE = "alone"
    """There is nothing to share: ownership lives in this process."""
    SHARED = "shared"
    BEHIND = "behind"
    """Connected, and reading what it missed."""
    CUT_OFF = "cut_off"
    """What holds the shared truth cannot be used at the moment: ownership goes on in this process."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What an operator is shown of a store. `where` is free of secrets; `trouble` says why it is cut off.

    `queued_bytes` wait to be written; `dropped` writes were given up for want of room; `refused` named an old epoch;
    `resyncs` is how often a shard was read anew.
    """

    kind: str
    state: StoreState = StoreState.ALONE
    where: str = ""
    trouble: str = ""
    blocks: int = 0
    queued_bytes: int = 0
    dropped: int = 0
    refused: int = 0
    resyncs: int = 0


class OwnershipStore(Protocol):
    """Keeps owner rows. Every method but `start` and `stop` is synchronous, quick, and never fails its caller.

    A write that names an older epoch than the engine's latest is refused and counted; one that names a newer epoch
    ends all rows of the older ones first. `blocks` is always a whole chain from its root. Times are the caller's
    clock; stores that share rows share durations, never clocks.
    """

    @property
    def refused(self) -> int:
        """Writes refused for their epoch."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def listen(self, listener: OwnershipListener) -> None:
        """Tell `listener` what others change from now on. Once, before `start`."""

    def begin(self, engine_id: EngineId, epoch: int, fingerprint: str) -> None:
        """The engine was just seen running this boot: `epoch` is our number for it, `fingerprint` everybody's name.

        To be told whenever the epoch is new, before anything else is written for it; telling it again is harmless.
        """
        ...

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

    def hold(
        self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float, tier: Tier = Tier.DEVICE
    ) -> None:
        """The engine itself said that it holds this chain on `tier`: as a claim confirmed at once."""
        ...

    def evict(self, engine_id: EngineId, epoch: int, blocks: Iterable[bytes], tier: Tier | None = None) -> None:
        """The engine has forgotten these blocks (in any order) on `tier`, or on all: each run ends before the first."""
        ...

    def drop_engine(self, engine_id: EngineId, epoch: int) -> None:
        """End all rows and claims of `epoch` and older; the epoch may still be written to."""
        ...

    def refresh(self, engine_id: EngineId, epoch: int, blocks: Sequence[bytes], now_s: float) -> None:
        """`blocks` were hit: their runs live on, written only when under half of their time is left."""
        ...

    def owners(self, blocks: Sequence[bytes], now_s: float) -> Mapping[EngineId, int]:
        """How many of `blocks`, unbroken from the first, each engine holds on any tier; pending and zeros left out."""
        ...

    def snapshot(self, now_s: float) -> Iterator[OwnerRow]:
        """Every row that counts at `now_s`; for warming an index, and for inspection."""
        ...

    def expire(self, now_s: float) -> int:
        """Forget the rows and claims whose time is over; their number."""
        ...

    def status(self) -> StoreStatus:
        """How it is."""
        ...


def accepts(known_epoch: int, epoch: int) -> bool:
    """Whether a write of `epoch` may change anything."""
    return epoch >= known_epoch


def needs_refresh(expires_s: float, now_s: float, held_s: float) -> bool:
    """A hit is written only when under half of the time is left: one write per run and half-life, not per hit."""
    return expires_s - now_s < held_s / 2


def truncated(run: Run, lost: Container[bytes]) -> Run | None:
    """What is left of `run`: the blocks before the first lost one; None when it was the first."""
    end = next(compress(count(), map(lost.__contains__, run.blocks)), None)
    if end is None:
        return run
    return Run(run.parent, run.blocks[:end]) if end else None


# -- names in Redis -------------------------------------------------------------------------------------------------

SHARDS = 16
"""Every script touches one shard, hence one Cluster slot."""


def shard_of(engine_id: EngineId) -> int:
    """The shard that all rows of an engine lie in: CRC-16 (XMODEM, as Redis Cluster's) of its name, modulo SHARDS."""
    return crc_hqx(engine_id.encode(), 0) % SHARDS


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of index, epochs and bookings. `prefix` tells pdgate's keys from others', `fleet` one fleet's."""

    prefix: str
    fleet: str

    def _key(self, part: int | str, *names: object) -> bytes:
        return ":".join((self.prefix, f"{{{self.fleet}:{part}}}", *map(str, names))).encode()

    def epochs(self, shard: int) -> bytes:
        """HASH: engine → number of its latest boot, and what is known of the boots before."""
        return self._key(shard, "epochs")

    def log(self, shard: int) -> bytes:
        """STREAM: what changed, in order; each entry with `seq` and `db_epoch`."""
        return self._key(shard, "log")

    def head(self, shard: int) -> bytes:
        """HASH: `seq`, the number of the last entry of the log, and `db_epoch`, random once per data set."""
        return self._key(shard, "head")

    def runs(self, engine_id: EngineId, number: int) -> bytes:
        """HASH of one boot: tier and run tail → packed run."""
        return self._key(shard_of(engine_id), "runs", number, engine_id)

    def expiry(self, engine_id: EngineId, number: int) -> bytes:
        """ZSET of one boot: tier and tail of held runs → expiry, in Unix milliseconds of Redis's own clock."""
        return self._key(shard_of(engine_id), "expiry", number, engine_id)

    def pending(self, engine_id: EngineId, number: int) -> bytes:
        """ZSET of one boot: tier (the device's) and tail of runs that were dispatched → expiry, as above."""
        return self._key(shard_of(engine_id), "pending", number, engine_id)

    def bookings(self) -> bytes:
        """STREAM: what each replica has promised on each engine, as absolute totals."""
        return self._key("b", "bookings")

    def replicas(self) -> bytes:
        """HASH: replica → when it last said so, and how far it has read each shard's log."""
        return self._key("b", "replicas")
