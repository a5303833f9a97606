"""What replicas owe each other through one Redis, and what it does to them when data is trimmed, flushed or lost."""

from __future__ import annotations

import asyncio
import bisect
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from routing.ownership import Keys, OwnershipConfig, RowState, Tier, shard_of
from routing.ownership_inspect import inspect
from routing.ownership_log import HOLD, batch_name, clear, pack_ops, unpack_ops
from routing.redis_link import Entry, ScriptCall, load_script
from routing.redis_orders import entries
from tests.contract.ownership_replicas import P0, P1, Replica, a_fleet, alike, chain, replica, until
from tests.machine import time_limit
from tests.redis_servers import RedisServer, single


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def keys_of(server: RedisServer, keys: Keys, kind: str) -> list[bytes]:
    return list(server.ask("KEYS", f"{keys.prefix}:*{keys.fleet}:*:{kind}*"))


# -- each other's owners --------------------------------------------------------------------------------------------


async def test_owners_are_seen_by_the_other_replica_at_once(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        await until(lambda: one.store.status().state == other.store.status().state == "shared")
        delays = []
        for seed in range(60):
            one.hold(seed)
            delays.append(await until(lambda seed=seed: other.owned(seed) == 4))  # type: ignore[misc]
        assert statistics.quantiles(delays, n=100)[98] <= 0.1


async def test_what_we_write_is_not_read_back_and_what_others_write_meanwhile_is_seen_at_once(
    server: RedisServer,
) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        await until(lambda: one.store.status().state == other.store.status().state == "shared")
        readings = Readings(one)
        for seed in range(40):
            one.hold(seed)
            await asyncio.sleep(0.01)
        await until(lambda: not one.store._outbox.has_work() and not one.store._outbox.lane(P0).unread)
        assert len(readings.writes_s) > 2
        assert readings.own_with_writes == []
        assert min(readings.pauses_before_waits_s(), default=1.0) > 0.029, "our own next write would end that wait"
        delays = []
        for seed in range(100, 160):
            for each, engine_id in ((one, P0), (other, P1), (one, P1), (other, P0)):
                each.hold(seed + 1000 * (each is one) + 2000 * (engine_id == P1), engine_id=engine_id)
            delays.append(await until(lambda seed=seed: one.owned(seed) == 4))  # type: ignore[misc]
        assert statistics.median(delays) <= 0.1
        assert len(await alike(server.url, keys, one, other)) == 40 + 240
        assert one.store.status().resyncs == other.store.status().resyncs == 0
        assert one.told.kinds() == ["held"] * 120


class Readings:
    """How a replica reads the logs from now on: with its writes, or by waiting on them when it has none."""

    def __init__(self, one: Replica) -> None:
        self.own_with_writes: list[bytes] = []
        """Its own entries that came back with later writes."""
        self.writes_s: list[float] = []
        """When each write with which logs were read was over."""
        self._waits_s: list[float] = []
        read, run_all = one.link.read, one.link.run_all
        mine = b" %s " % one.store._replica.encode()

        async def noting_read(*args: Any) -> Any:
            self._waits_s.append(one.now_s())
            return await read(*args)

        async def noting_run_all(calls: Sequence[ScriptCall]) -> Any:
            replies = await run_all(calls)
            for call, reply in zip(calls, replies, strict=True):
                if call.script.name == "write" and isinstance(reply, list):
                    self.writes_s.append(one.now_s())
                    streams: Mapping[bytes, list[Entry]] = entries(reply[0])
                    self.own_with_writes += [
                        at for new in streams.values() for at, fields in new if mine in fields[b"h"]
                    ]
            return replies

        one.link.read, one.link.run_all = noting_read, noting_run_all  # type: ignore[method-assign, assignment]

    def pauses_before_waits_s(self) -> list[float]:
        """How long before each wait the last such write was over."""
        before = [bisect.bisect(self.writes_s, at_s) for at_s in self._waits_s]
        return [at_s - self.writes_s[found - 1] for at_s, found in zip(self._waits_s, before, strict=True) if found]


async def test_one_engine_whose_rows_redis_refuses_holds_up_no_other(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        one.hold(1)
        one.hold(1, engine_id=P1)
        await until(lambda: other.owned(1) == other.owned(1, engine_id=P1) == 4)
        [runs] = {each for each in keys_of(server, keys, "runs") if P0.encode() in each}
        server.ask("DEL", runs)
        server.ask("SET", runs, "no hash")
        for seed in range(2, 5):
            for engine_id in (P0, P1):
                one.hold(seed, engine_id=engine_id)
            await until(lambda seed=seed: other.owned(seed, engine_id=P1) == 4)  # type: ignore[misc]
        assert P0 in one.store._refusals
        assert P1 not in one.store._refusals
        server.ask("DEL", runs)
        await until(lambda: not one.store._refusals)
        await until(lambda: all(other.owned(seed) == 4 for seed in range(2, 5)))


async def test_no_rows_stay_for_ever(server: RedisServer) -> None:
    """Whatever made the keys: the first batch, one that ended all there was, or one after that."""
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        steps: list[Callable[[], Any]] = [
            lambda: one.hold(1),
            lambda: one.store.evict(P0, 1, chain(1)),
            lambda: one.hold(2),
            lambda: one.store.drop_engine(P0, 1),
            lambda: one.hold(3),
            lambda: one.store.claim_pending(P0, 1, chain(4), one.now_s() - 1.0),
            lambda: one.hold(5),
        ]
        for step in steps:
            step()
            await asyncio.sleep(0.01)
            await until(lambda: not one.store._outbox.has_work())
            rows = [each for kind in ("runs", "expiry", "pending") for each in keys_of(server, keys, kind)]
            assert all(server.ask("PTTL", each) > 0 for each in rows)


async def test_what_others_do_is_told_and_what_we_do_is_not(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        claim = one.store.claim_pending(P0, 1, chain(1), one.now_s())
        await until(lambda: other.told.seen == [("promised", P0, chain(1))])
        one.store.confirm(claim, one.now_s())
        held = ("held", P0, chain(1), Tier.DEVICE)
        await until(lambda: other.told.seen[1:] == [held, ("unpromised", P0, chain(1))])
        one.store.evict(P0, 1, chain(1)[2:])
        await until(lambda: other.told.seen[3:] == [("lost", P0, chain(1)[2:], Tier.DEVICE)])
        dropped = one.store.claim_pending(P0, 1, chain(2), one.now_s())
        await until(lambda: len(other.told.seen) == 5)
        one.store.drop(dropped)
        await until(lambda: other.told.seen[5:] == [("unpromised", P0, chain(2))])
        one.store.drop_engine(P0, 1)
        await until(lambda: other.told.seen[6:] == [("cleared", P0)])
        assert one.told.seen == []


async def test_the_bytes_of_a_run_are_sent_once(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.store.confirm(one.store.claim_pending(P0, 1, chain(1, 100), one.now_s()), one.now_s())
        await until(lambda: one.store.status().queued_bytes == 0)
        claim = one.store.claim_pending(P0, 1, chain(2, 100), one.now_s())
        await until(lambda: keys_of(server, keys, "pending"))  # claims that end sooner than 0.1 s are not told
        one.store.confirm(claim, one.now_s())
        await alike(server.url, keys, one)
        [log] = keys_of(server, keys, "log")
        sent = [dict(zip(flat[::2], flat[1::2], strict=True))[b"o"] for _, flat in server.ask("XRANGE", log, "-", "+")]
        assert sum(ops.count(chain(2)[0]) for ops in sent) == 1
        assert len(sent[-1]) < 40


async def test_a_claim_that_ends_soon_is_written_once_and_one_that_fails_never(
    server: RedisServer,
) -> None:
    keys, now_s = a_fleet(), asyncio.get_running_loop().time()
    async with replica(server.url, keys, clock=lambda: now_s) as one:  # both end soon, however long that takes here
        failed = one.store.claim_pending(P0, 1, chain(1, 50), now_s)
        kept = one.store.claim_pending(P0, 1, chain(2, 100), now_s)
        await asyncio.sleep(0.03)
        one.store.drop(failed)
        one.store.confirm(kept, one.now_s())
        await asyncio.sleep(0.25)
        await alike(server.url, keys, one)
        [log] = keys_of(server, keys, "log")
        entries = server.ask("XRANGE", log, "-", "+")
        sent = [op for _, flat in entries for op in unpack_ops(dict(zip(flat[::2], flat[1::2], strict=True))[b"o"])]
        assert [op.kind for op in sent] == [HOLD]


async def test_a_fresh_replica_is_told_all_there_is_the_oldest_first(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.hold(1, 3)
        await until(lambda: one.store.status().queued_bytes == 0)
        one.hold(2, 3)
        await until(lambda: one.store.status().queued_bytes == 0)
        one.store.hold(P0, 1, chain(1, 9), one.now_s())  # its parent is older
        one.store.claim_pending(P1, 1, chain(5), one.now_s())
        await until(lambda: keys_of(server, keys, "pending"))
        async with replica(server.url, keys, begin=False) as fresh:
            held = [what for what in fresh.told.seen if what[0] == "held"]
            assert [what[2] for what in held] == [chain(1, 3), chain(2, 3), chain(1, 9)[3:]]
            assert ("promised", P1, chain(5)) in fresh.told.seen
            assert fresh.owned(1, 9) == 9
            assert fresh.rows() == one.rows()
            pending = [row for row in fresh.store.snapshot(fresh.now_s()) if row.state is RowState.PENDING]
            assert [row.run.blocks for row in pending] == [chain(5)]
            assert all(
                row.expires_s - fresh.now_s() > 590 for row in fresh.store.snapshot(fresh.now_s()) if row not in pending
            )


async def test_warm_rows_become_ours_when_the_same_boot_is_seen_here(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.hold(1)
        await until(lambda: one.store.status().queued_bytes == 0)
        async with replica(server.url, keys, begin=False) as fresh:
            fresh.store.begin(P0, 7, f"{P0} boot 1")
            await until(lambda: fresh.store.status().state == "shared")
            assert fresh.owned(1) == 4
            fresh.store.evict(P0, 7, chain(1)[1:])
            await until(lambda: one.owned(1) == 1)


async def test_rows_end_by_themselves(server: RedisServer) -> None:
    keys = a_fleet()
    config = OwnershipConfig(held_s=2.0, pending_s=1.5)
    async with replica(server.url, keys, config=config) as one, replica(server.url, keys, config=config) as other:
        one.hold(1)
        one.store.claim_pending(P0, 1, chain(2), one.now_s())
        await until(lambda: other.owned(1) == 4 and "promised" in other.told.kinds())
        await until(lambda: other.rows() == one.rows() == set())
        assert other.store.expire(other.now_s()) == 2
        assert other.told.kinds().count("unpromised") == 1
        async with time_limit(5.0):
            while True:
                one.hold(3)  # any write clears out what is over
                found = await inspect(other.link, keys)
                if [(each.runs, each.pending) for each in found.engines if each.engine_id == P0] == [(1, 0)]:
                    break
                await asyncio.sleep(0.05)
        await until(lambda: other.owned(3) == 4)


async def test_two_writers_of_one_run(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        claims = [each.store.claim_pending(P0, 1, chain(1), each.now_s()) for each in (one, other)]
        await asyncio.sleep(0.1)
        one.store.confirm(claims[0], one.now_s())
        other.store.drop(claims[1])
        assert len(await alike(server.url, keys, one, other)) == 1
        for each in (one, other):
            each.store.hold(P0, 1, chain(2), each.now_s())
        assert len(await alike(server.url, keys, one, other)) == 2
        assert one.owned(1) == other.owned(2) == 4


async def test_an_eviction_ends_overlapping_runs_of_both_writers(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        await until(lambda: one.store.status().state == other.store.status().state == "shared")
        one.hold(1, 6)
        other.hold(1, 9)  # neither knows of the other's: blocks 0 to 5 are in two rows
        assert len(await alike(server.url, keys, one, other)) == 2
        one.store.evict(P0, 1, chain(1, 9)[4:])
        await alike(server.url, keys, one, other)
        assert one.owned(1, 9) == other.owned(1, 9) == 4


async def test_an_eviction_ends_what_another_wrote_at_the_same_time(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        for round_ in range(10):
            one.hold(round_, 6)
            await until(lambda round_=round_: other.owned(round_, 6) == 6)  # type: ignore[misc]
            longer = (*chain(round_, 6), b"%08d    more" % round_)
            one.store.hold(P0, 1, longer, one.now_s())
            await asyncio.sleep(0.01)  # written before the eviction, and not heard of when that begins
            other.store.evict(P0, 1, {*chain(round_, 6)[3:], longer[-1]})
            await alike(server.url, keys, one, other)
            assert one.owned(round_, 6) == 3
            assert longer[-1] not in {block for row in one.rows() for block in row[3]}


# -- boots ----------------------------------------------------------------------------------------------------------


async def test_an_old_boot_that_writes_late_is_refused_in_the_script(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as late, replica(server.url, keys) as one:
        late.hold(1)
        await until(lambda: one.owned(1) == 4)
        one.store.begin(P0, 2, "boot 2")
        late.hold(2)
        one.hold(3, epoch=2)
        await until(lambda: "restart_seen" in late.told.kinds())
        assert late.told.kinds()[-2:] == ["cleared", "restart_seen"] or "cleared" in late.told.kinds()
        late.hold(4)  # still the old one
        await until(lambda: late.owned(3) == 4)
        held = await alike(server.url, keys, one, late)
        assert {row[3] for row in held} == {chain(3)}
        assert late.store.refused >= 1
        late.store.begin(P0, 2, "boot 2")
        late.hold(5, epoch=2)
        await until(lambda: one.owned(5) == 4)
        assert late.owned(3) == 4


async def test_the_script_itself_refuses_other_boots_and_changes_nothing(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.hold(1)
        await until(lambda: one.store.status().queued_bytes == 0)
        found = await inspect(one.link, keys)
        [number] = [engine.number for engine in found.engines if engine.engine_id == P0]
        shard = shard_of(P0)
        for wrong, code in ((number - 1, 0), (number + 1, -1)):
            names = (keys.head(shard), keys.log(shard), keys.epochs(shard))
            rows = (keys.runs(P0, wrong), keys.expiry(P0, wrong), keys.pending(P0, wrong))
            args = (10_000, 10_000, "x", 1, 1, batch_name(b"late", 1, wrong, P0), 1, pack_ops([clear()]))
            [_, reply] = await one.link.run(ScriptCall(load_script("routing", "write"), (*names, *rows), args))
            assert reply == [code, number]
        again = await inspect(one.link, keys)
        assert [shard.seq for shard in again.shards] == [shard.seq for shard in found.shards]


async def test_a_boot_that_is_read_again_after_a_refusal_wins(server: RedisServer) -> None:
    """Somebody registered an old fingerprint last; the engine still runs ours."""
    keys = a_fleet()
    async with replica(server.url, keys) as right, replica(server.url, keys) as wrong:
        right.hold(1)
        await until(lambda: wrong.owned(1) == 4)
        wrong.store.begin(P0, 2, "read long ago")
        wrong.hold(2, epoch=2)
        await until(lambda: "restart_seen" in right.told.kinds())
        right.store.begin(P0, 1, f"{P0} boot 1")
        right.hold(3)
        await until(lambda: "restart_seen" in wrong.told.kinds())
        wrong.store.begin(P0, 3, f"{P0} boot 1")
        assert {row[3] for row in await alike(server.url, keys, right, wrong)} == {chain(3)}


async def test_the_keys_of_an_old_boot_go(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.hold(1)
        await until(lambda: len(keys_of(server, keys, "runs")) == 1)
        one.store.begin(P0, 2, "boot 2")
        await until(lambda: not keys_of(server, keys, "runs"))
        one.hold(2, epoch=2)
        await until(lambda: len(keys_of(server, keys, "runs")) == 1)


async def test_only_the_last_boots_are_remembered(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        for epoch in range(2, 14):
            one.store.begin(P0, epoch, f"boot {epoch}")
            await until(lambda: one.store._outbox.lane(P0).settled)
        await until(lambda: one.store.status().state == "shared")
        [epochs] = {each for each in keys_of(server, keys, "epochs") if server.ask("HEXISTS", each, P0)}
        boots = server.ask("HGET", epochs, f"{P0}\nboots").decode().splitlines()
        numbers = [int(boot.split()[1]) for boot in boots]
        assert len(numbers) == 8
        assert numbers == sorted(numbers)
        assert int(server.ask("HGET", epochs, P0)) == numbers[-1]


# -- data that is trimmed, flushed, lost ----------------------------------------------------------------------------


async def test_a_trimmed_log_is_noticed_within_seconds_and_read_anew(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        one.hold(1)
        await until(lambda: other.owned(1) == 4)
        [log] = keys_of(server, keys, "log")
        one.hold(2)
        for _ in range(40):  # before the other can read it, often enough
            server.ask("XTRIM", log, "MAXLEN", 0)
            await asyncio.sleep(0.001)
        one.hold(3)
        await alike(server.url, keys, one, other)
        assert other.owned(2) == other.owned(3) == 4


async def test_flushall_under_load(server: RedisServer) -> None:
    keys = a_fleet()
    with single() as own:
        async with replica(own.url, keys) as one, replica(own.url, keys) as other:
            for step in range(60):
                (one, other)[step % 2].hold(step, engine_id=(P0, P1)[step % 3 % 2])
                claim = one.store.claim_pending(P0, 1, chain(1000 + step), one.now_s())
                if step == 30:
                    own.ask("FLUSHALL")
                await asyncio.sleep(0.01)
                one.store.confirm(claim, one.now_s())
            held = await alike(own.url, keys, one, other, within_s=8.0)
            assert {row[3] for row in held} >= {chain(seed) for seed in range(60)} | {
                chain(1000 + s) for s in range(60)
            }
            assert one.store.status().state == "shared"


async def test_a_restart_with_an_empty_data_set(server: RedisServer) -> None:
    keys = a_fleet()
    with single() as own:
        async with replica(own.url, keys) as one, replica(own.url, keys) as other:
            one.hold(1)
            claim = other.store.claim_pending(P1, 1, chain(9), other.now_s())
            await until(lambda: other.owned(1) == 4)
            own.kill()
            one.hold(2)
            other.hold(3)
            await until(lambda: one.store.status().state == "cut_off", 3.0)
            own.restart(empty=True)
            await until(lambda: one.told.kinds().count("promised") >= 1, 8.0)
            held = await alike(own.url, keys, one, other, within_s=8.0)
            assert {row[3] for row in held} == {chain(1), chain(2), chain(3)}
            async with replica(own.url, keys, begin=False) as fresh:
                assert ("promised", P1, chain(9)) in fresh.told.seen
            other.store.confirm(claim, other.now_s())
            await until(lambda: one.owned(9, engine_id=P1) == 4)


async def test_a_promoted_server_that_lost_the_last_writes(server: RedisServer) -> None:
    """The replica was stopped for a while, so it lacks a boot, rows and evictions when it becomes the primary."""
    keys = a_fleet()
    with single() as primary, single(replica_of=primary) as standby:
        await until(lambda: standby.info("replication")["master_link_status"] == "up")
        async with replica(primary.url, keys) as one, replica(primary.url, keys) as other:
            one.hold(1)
            await until(lambda: other.owned(1) == 4)
            await until(lambda: standby.info("keyspace"))
            primary.ask("WAIT", 1, 1000)
            standby.ask("REPLICAOF", "NO", "ONE")
            one.store.begin(P0, 2, "boot 2")
            one.hold(2, epoch=2)
            other.hold(5, engine_id=P1)
            await until(lambda: other.owned(2) == 4)
            other.store.begin(P0, 2, "boot 2")
            await until(lambda: one.owned(5, engine_id=P1) == 4)
            standby.ask("SAVE")
            dump = (standby.folder / "dump.rdb").read_bytes()
            primary.kill()
            (primary.folder / "dump.rdb").write_bytes(dump)
            primary.start()
            held = await alike(primary.url, keys, one, other, within_s=10.0)
            assert {row[3] for row in held} == {chain(2), chain(5)}


# -- size -----------------------------------------------------------------------------------------------------------


async def filled(server: RedisServer, blocks: int, engines: int) -> tuple[int, int]:
    """Fill a fleet with runs of 188 blocks; a fresh replica reads them. Blocks, and bytes of all keys."""
    keys = a_fleet()
    config = OwnershipConfig(max_blocks_per_engine=200_000)
    names = [type(P0)(f"http://e{index}:30000") for index in range(engines)]
    async with replica(server.url, keys, config=config) as one:
        for name in names:
            one.store.begin(name, 1, "boot")
        for seed in range(blocks // 188):
            one.store.hold(names[seed % engines], 1, chain(seed, 188), one.now_s())
            await until(lambda: one.store.status().queued_bytes < 2 << 20)
        await until(lambda: one.store.status().queued_bytes == 0)
        assert one.store.status().dropped == 0
        async with replica(server.url, keys, config=config, begin=False) as fresh:
            await until(lambda: fresh.store.status().blocks == one.store.status().blocks, 60.0)
            assert fresh.rows() == one.rows()
        found = await inspect(one.link, keys)
    assert sum(engine.blocks for engine in found.engines) == one.store.status().blocks
    return one.store.status().blocks, sum(engine.bytes for engine in found.engines)


async def test_many_blocks(server: RedisServer) -> None:
    blocks, size = await filled(server, 50_000, 4)
    assert blocks == 50_000 // 188 * 188
    assert size / blocks <= 30


@pytest.mark.long
async def test_a_million_blocks(server: RedisServer) -> None:
    blocks, size = await filled(server, 1_000_000, 8)
    assert size / blocks <= 30


# -- being looked at ------------------------------------------------------------------------------------------------


async def test_inspection(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        one.hold(1)
        one.store.hold(P0, 1, chain(2, 6), one.now_s(), Tier.HOST)
        one.store.claim_pending(P0, 1, chain(3), one.now_s())
        await until(lambda: other.owned(2, 6) == 6)
        async with time_limit(2.5):
            while True:
                found = await inspect(one.link, keys)
                if [sum(each.lag_by_shard) for each in found.replicas] == [0, 0]:
                    break
                await asyncio.sleep(0.05)
        assert len(found.shards) == 16
        [engine] = [each for each in found.engines if each.engine_id == P0]
        assert (engine.runs, engine.blocks, engine.pending) == (2, 10, 1)
        assert engine.bytes_per_block == engine.bytes / 10
        assert engine.number > 1_700_000_000_000
        busy = [shard for shard in found.shards if shard.seq]
        assert all(shard.db_epoch and shard.log_entries and shard.log_bytes for shard in busy)
        assert [each.lag_entries for each in found.replicas] == [0, 0]
        assert all(each.age_s < 2.5 for each in found.replicas)
        assert (await inspect(one.link, a_fleet())).engines == ()


async def test_nothing_waits_for_redis_in_the_step_of_a_caller(server: RedisServer) -> None:
    """No method of the request path touches the link: it only ever runs in tasks of its own."""
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        await until(lambda: one.store.status().state == "shared")
        touched = []
        for name in ("run", "run_all", "read", "command"):
            original = getattr(one.link, name)

            def counted(*args: object, _name: str = name, _original: object = original, **kwargs: object) -> object:
                touched.append((_name, asyncio.current_task().get_name()))  # type: ignore[union-attr]
                return _original(*args, **kwargs)  # type: ignore[operator]

            setattr(one.link, name, counted)
        store, now_s = one.store, one.now_s()
        begun = asyncio.current_task()
        assert begun is not None
        for seed in range(50):
            claims = [store.claim_pending(P0, 1, chain(seed + offset), now_s) for offset in (0, 100)]
            store.confirm(claims[0], now_s)
            store.drop(claims[1])
            store.hold(P1, 1, chain(seed), now_s, Tier.HOST)
            store.evict(P0, 1, chain(seed)[2:])
            store.refresh(P0, 1, chain(seed), now_s + 500.0)
            store.owners(chain(seed), now_s)
            store.begin(P0, 1, f"{P0} boot 1")
        assert touched == []
        await until(lambda: store.status().queued_bytes == 0)
        assert touched
        assert begun.get_name() not in {task for _, task in touched}
