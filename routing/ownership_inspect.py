"""What lies in Redis of one fleet's ownership, for operators: sizes, numbers, and how far each replica has read.

Reads a consistent picture of nothing: each figure is as it was when it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import SHARDS, Keys
from routing.redis_link import RedisLink, ScriptCall, load_script

_CHUNK_ROWS = 200


@dataclass(frozen=True, slots=True)
class ShardSight:
    """The log of one shard: `seq` and `db_epoch` of its last entry, and what it occupies."""

    shard: int
    seq: int
    db_epoch: str
    log_entries: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class EngineSight:
    """The current boot of one engine: `runs` of `blocks` are held, `pending` runs are promised; `bytes` of its keys."""

    engine_id: EngineId
    shard: int
    number: int
    runs: int
    blocks: int
    pending: int
    bytes: int

    @property
    def bytes_per_block(self) -> float:
        return self.bytes / self.blocks if self.blocks else 0.0


@dataclass(frozen=True, slots=True)
class ReplicaSight:
    """One gateway: when it last said that it is there, and how many entries of the logs it had not read."""

    replica: str
    age_s: float
    lag_by_shard: tuple[int, ...]

    @property
    def lag_entries(self) -> int:
        return sum(self.lag_by_shard)


@dataclass(frozen=True, slots=True)
class Inspection:
    """All of it."""

    shards: tuple[ShardSight, ...]
    engines: tuple[EngineSight, ...]
    replicas: tuple[ReplicaSight, ...]


async def inspect(link: RedisLink, keys: Keys) -> Inspection:
    """Look at everything; raises RedisTrouble. Cost: one pass over all runs."""
    script = load_script("routing", "heads")
    # Replicas first: what they had read by then cannot be more than what the heads say later.
    reports = await _reports(link, keys)
    shards, engines = [], []
    for shard in range(SHARDS):
        head = await link.run(ScriptCall(script, (keys.head(shard), keys.epochs(shard)), (1,)))
        entries = int(await link.command("XLEN", keys.log(shard)))
        size = await _bytes(link, keys.log(shard))
        shards.append(ShardSight(shard, int(head[0]), head[1].decode(), entries, size))
        for engine, number in zip(head[3::2], head[4::2], strict=True):
            engines.append(await _engine(link, keys, EngineId(engine.decode()), shard, int(number)))
    replicas = [
        ReplicaSight(name, age_s, tuple(max(0, shard.seq - seq) for shard, seq in zip(shards, seqs, strict=True)))
        for name, age_s, seqs in reports
    ]
    return Inspection(tuple(shards), tuple(engines), tuple(replicas))


async def _engine(link: RedisLink, keys: Keys, engine_id: EngineId, shard: int, number: int) -> EngineSight:
    script = load_script("routing", "snapshot")
    names = keys.runs(engine_id, number), keys.expiry(engine_id, number), keys.pending(engine_id, number)
    cursor, held, pending = b"0", {}, set()
    while True:
        reply = await link.run(ScriptCall(script, names, (cursor, _CHUNK_ROWS)))
        for field, packed in zip(reply[2::3], reply[3::3], strict=True):
            if field[:1] == log.PENDING_PLACE:
                pending.add(field)
            else:
                held[field] = len(packed) // log.BLOCK_BYTES - 1
        if (cursor := reply[0]) == b"0":
            break
    size = sum([await _bytes(link, name) for name in names])
    return EngineSight(engine_id, shard, number, len(held), sum(held.values()), len(pending), size)


async def _bytes(link: RedisLink, key: bytes) -> int:
    return int(await link.command("MEMORY", "USAGE", key, "SAMPLES", 0) or 0)


async def _reports(link: RedisLink, keys: Keys) -> list[tuple[str, float, list[int]]]:
    """Each replica with the age of its last report and what it had read of each shard."""
    flat = await link.command("HGETALL", keys.replicas())
    seconds, micros = await link.command("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    found = []
    for name, report in zip(flat[::2], flat[1::2], strict=True):
        said_ms, *seqs = map(int, report.split())
        found.append((name.decode(), max(0.0, (now_ms - said_ms) / 1000), seqs))
    return sorted(found)
