"""Runs that share a tail and not their length, replies that would be too long, and entries of the log that are none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from routing import ownership_log as log
from routing.ownership import ROOT, RowState, Run, StoreState, Tier, shard_of
from routing.ownership_log import batch_name, pack_ops
from routing.redis_link import ScriptCall, load_script
from tests.contract.ownership_replicas import P0, Replica, a_fleet, alike, chain, replica, until
from tests.redis_servers import RedisServer

LONG = chain(1, 14)
SHORT_RUN, LONG_RUN = Run(LONG[6], LONG[7:]), Run(ROOT, LONG)
TAIL = LONG[-1]
SHORT_CLAIM, LONG_CLAIM = log.claim(SHORT_RUN, 60_000), log.claim(LONG_RUN, 60_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def promoted(run: Run, tier: Tier = Tier.DEVICE) -> log.Op:
    return log.promote(tier, run.tail, len(run.blocks), 60_000)


def held(run: Run, tier: Tier = Tier.DEVICE) -> log.Op:
    return log.hold(tier, run, 60_000)


async def number_of(one: Replica) -> int:
    """The number of the boot of P0, once it has one."""
    await until(lambda: one.store._outbox.lane(P0).settled)
    return int(await one.link.command("HGET", one.keys.epochs(shard_of(P0)), P0))


async def write(one: Replica, *ops: log.Op) -> list[Any]:
    """A batch that another gateway writes; the script's reply."""
    keys, shard, number = one.keys, shard_of(P0), await number_of(one)
    names = (keys.head(shard), keys.log(shard), keys.epochs(shard))
    rows = (keys.runs(P0, number), keys.expiry(P0, number), keys.pending(P0, number))
    args = (10_000, 60_000, "x", 1, 1, batch_name(b"another", 1, number, P0), 0, pack_ops(ops))
    reply: list[Any]
    [_, reply] = await one.link.run(ScriptCall(load_script("routing", "write"), (*names, *rows), args))
    return reply


# -- runs with one tail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize(
    ("before", "run", "found", "blocks"),
    [
        ((SHORT_CLAIM,), SHORT_RUN, True, 7),
        ((SHORT_CLAIM,), LONG_RUN, False, 0),
        ((SHORT_CLAIM, LONG_CLAIM), LONG_RUN, True, 14),
        ((SHORT_CLAIM, LONG_CLAIM), SHORT_RUN, False, 0),
        ((LONG_CLAIM, SHORT_CLAIM), SHORT_RUN, False, 0),
        (("held short", LONG_CLAIM), SHORT_RUN, True, 7),
        (("held long", SHORT_CLAIM), SHORT_RUN, True, 14),
        (("held short",), LONG_RUN, False, 7),
        (("held long",), SHORT_RUN, True, 14),
        ((), SHORT_RUN, False, 0),
    ],
)
async def test_a_promotion_is_of_the_run_that_was_meant(
    server: RedisServer, before: tuple[Any, ...], run: Run, found: bool, blocks: int, tier: Tier
) -> None:
    """And the mirrors that follow, and those that read, have the row that Redis has."""
    rows = {"held short": held(SHORT_RUN, tier), "held long": held(LONG_RUN, tier)}
    async with replica(server.url, a_fleet()) as one:
        for op in before:
            await write(one, rows.get(op, op))
        reply = await write(one, promoted(run, tier))
        assert reply[8:] == ([] if found else [TAIL])
        have = await alike(server.url, one.keys, one)
        assert [len(row[3]) for row in have] == ([blocks] if blocks else [])
        number = await number_of(one)
        assert await one.link.command("ZCARD", one.keys.pending(P0, number)) == 0
        assert await one.link.command("HLEN", one.keys.runs(P0, number)) == len(have)


@pytest.mark.parametrize(
    ("others", "lengths"),
    [([LONG_CLAIM], [7, 7]), ([LONG_CLAIM, promoted(LONG_RUN)], [7, 14]), ([held(LONG_RUN)], [7, 14])],
    ids=["claimed", "promoted", "held"],
)
async def test_another_gateway_has_a_longer_run_with_the_tail_of_ours(
    server: RedisServer, others: list[log.Op], lengths: list[int]
) -> None:
    """It did not know of the blocks that ours begins behind, and we know nothing of it yet when our claim is kept."""
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as follower:
        one.store.hold(P0, 1, LONG[:7], one.now_s())
        claim = one.store.claim_pending(P0, 1, LONG, one.now_s())
        await until(lambda: ("promised", P0, LONG[7:]) in follower.told.seen)
        await number_of(one)
        one.store.confirm(claim, one.now_s())
        await write(one, *others)
        have = await alike(server.url, keys, one, follower)
        assert sorted(len(row[3]) for row in have) == lengths
        assert ("promised", P0, LONG) in follower.told.seen or others[0].kind != log.CLAIM
        for each in (one, follower):
            assert [row for row in each.store.snapshot(each.now_s()) if row.state is RowState.PENDING] == []
        one.store.evict(P0, 1, LONG[:1])
        await until(lambda: one.store.status().queued_bytes == 0)
        have = await alike(server.url, keys, one, follower)
        assert [row[3] for row in have] == ([LONG[7:]] if lengths == [7, 7] else [])


async def test_what_is_read_is_believed_where_it_is_shorter_than_what_we_have(server: RedisServer) -> None:
    """We cut a run that another had cut nearer to its root, and somebody holds a shorter run with our new tail."""
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.store.hold(P0, 1, LONG, one.now_s())
        await until(lambda: one.store.status().queued_bytes == 0)
        await number_of(one)
        one.store.evict(P0, 1, LONG[9:])
        await write(one, log.cut(Tier.DEVICE, TAIL, LONG[3]), held(Run(LONG[6], LONG[7:9])))
        have = await alike(server.url, keys, one)
        assert {row[3] for row in have} == {LONG[:3], LONG[7:9]}
        assert set(LONG[3:7]) <= {each for what in one.told.seen if what[0] == "lost" for each in what[2]}


async def test_what_redis_lost_the_beginning_of_is_written_again(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        one.store.hold(P0, 1, LONG, one.now_s())
        await until(lambda: other.owned(1, 14) == 14)
        number = await number_of(one)
        await one.link.command("HSET", keys.runs(P0, number), b"d" + TAIL, log.pack_run(SHORT_RUN))
        one.store._reader.read(P0, write=True)
        assert {row[3] for row in await alike(server.url, keys, one, other)} == {LONG}


# -- long replies ---------------------------------------------------------------------------------------------------


async def test_what_a_batch_did_not_find_is_told_within_a_bound(server: RedisServer) -> None:
    tails = chain(3, 9000)
    async with replica(server.url, a_fleet()) as one:
        for count in (999, 1000):
            reply = await write(one, log.touch(Tier.DEVICE, tails[:count], 1000))
            assert tuple(reply[8:]) == tails[:count]
        reply = await write(one, log.touch(Tier.DEVICE, tails, 1000), promoted(LONG_RUN))
        assert tuple(reply[8:]) == (*tails[:1000], b"")


async def test_rows_that_redis_lost_are_written_again_however_many(server: RedisServer) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        for seed in range(1100):
            one.store.hold(P0, 1, chain(seed, 1), one.now_s())
        await until(lambda: other.owned(1099, 1) == 1)
        await until(lambda: one.store.status().queued_bytes == 0)
        number = await number_of(one)
        await one.link.command("UNLINK", keys.runs(P0, number), keys.expiry(P0, number))
        for seed in range(1100):
            one.store.refresh(P0, 1, chain(seed, 1), one.now_s() + 400.0)
        assert len(await alike(server.url, keys, one, other)) == 1100


# -- what is no entry -----------------------------------------------------------------------------------------------

_CLAIMED = pack_ops([SHORT_CLAIM])
STRANGE: dict[str, dict[str, bytes]] = {
    "fields of another version": {"z": b"1"},
    "no operations": {"h": b"@h w 1 @n @e"},
    "a boot that is no number": {"h": b"@h w 1 abc @e", "o": b""},
    "void operations that are no numbers": {"h": b"@h w 1 @n @e", "o": b"", "x": b"a b"},
    "an engine that is not UTF-8": {"h": b"@h w 1 @n \xff\xfe", "o": b""},
    "another engine": {"h": b"@h w 1 @n nobody", "o": b""},
    "a boot of the future": {"h": b"@h w 1 99999999999999999999 @e", "o": b""},
    "half an operation": {"h": b"@h w 1 @n @e", "o": _CLAIMED[:20]},
    "kind": {"h": b"@h w 1 @n @e", "o": b"?" + _CLAIMED[1:]},
    "place": {"h": b"@h w 1 @n @e", "o": b"h?" + _CLAIMED[2:]},
    "held on the place of what is pending": {"h": b"@h w 1 @n @e", "o": b"hp" + _CLAIMED[2:]},
    "promoted by its tail alone": {"h": b"@h w 1 @n @e", "o": pack_ops([log.Op(log.PROMOTE, b"d", 9, TAIL)])},
    "a void operation that is not there": {"h": b"@h w 1 @n @e", "o": _CLAIMED, "x": b"7 -1"},
}


async def poison(one: Replica, fields: dict[str, bytes], *, counted: bool) -> None:
    """Write what is no entry into the log of P0's shard; `counted`: the head says that it is one."""
    keys, shard = one.keys, shard_of(P0)
    flat = await one.link.command("HGETALL", keys.head(shard))
    head = dict(zip(flat[::2], flat[1::2], strict=True))
    seq = int(head[b"seq"]) + 1
    place = b"%d %s %s" % (seq, head[b"db_epoch"], head[b"last"])
    words: list[Any] = []
    for name, value in fields.items():
        for mark, meant in ((b"@h", place), (b"@n", b"%d" % await number_of(one)), (b"@e", P0.encode())):
            value = value.replace(mark, meant)
        words += (name, value)
    entry_id = await one.link.command("XADD", keys.log(shard), "*", *words)
    if counted:
        await one.link.command("HSET", keys.head(shard), "seq", seq, "last", entry_id)


async def test_no_entry_ends_a_follower(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    keys = [a_fleet() for _ in STRANGE]

    async def one_after_it(index: int, fields: dict[str, bytes]) -> None:
        async with replica(server.url, keys[index]) as one, replica(server.url, keys[index]) as other:
            one.hold(1)
            await until(lambda: other.owned(1) == 4)
            await poison(one, fields, counted=index % 2 == 0)
            await asyncio.sleep(0.1)
            one.hold(2)
            await until(lambda: other.owned(2) == 4, 8.0, f"after {list(STRANGE)[index]}")
            await until(lambda: other.store.status().state is StoreState.SHARED, 8.0)
            await asyncio.sleep(0.3)
            before = other.store.status().resyncs
            one.hold(3)
            await until(lambda: other.owned(3) == 4, 8.0, f"followed after {list(STRANGE)[index]}")
            assert other.store.status().resyncs <= before + 1

    await asyncio.gather(*(one_after_it(index, fields) for index, fields in enumerate(STRANGE.values())))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_fault_of_one_entry_is_told_once_and_its_shard_read_anew(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        await until(lambda: other.store.status().state is StoreState.SHARED)
        one.hold(1)
        await until(lambda: other.owned(1) == 4)
        apply, failed = other.store._mirror.apply, 0

        def failing(*args: Any, **kwargs: Any) -> bool:
            nonlocal failed
            if args[1] and failed < 2:
                failed += 1
                raise RuntimeError("a fault of ours")
            return apply(*args, **kwargs)

        other.store._mirror.apply = failing  # type: ignore[method-assign]
        one.hold(2)
        await until(lambda: failed == 1)
        assert other.store.status().state is StoreState.BEHIND
        await until(lambda: other.owned(2) == 4, 4.0)
        one.hold(3)
        await until(lambda: failed == 2)
        assert other.store.status().state is StoreState.BEHIND
        await alike(server.url, keys, one, other)
        assert other.store.status().state is StoreState.SHARED
    told = [record for record in caplog.records if record.name == "pdgate.ownership"]
    where = [record.getMessage().split()[0] for record in told]
    assert len(where) == len(set(where)) > 0  # once where entries are taken, and once where one comes as rows are read
    assert told[0].exc_info


@pytest.mark.parametrize("name", ["_resync", "_check_silent"])
async def test_a_fault_of_the_follower_does_not_end_it(
    server: RedisServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    keys = a_fleet()
    async with replica(server.url, keys) as one, replica(server.url, keys) as other:
        await until(lambda: other.store.status().state is StoreState.SHARED)
        follower, failed = other.store._follower, 0
        original = getattr(follower, name)

        async def failing(shards: Any) -> None:
            nonlocal failed
            if failed < 1:
                failed += 1
                raise RuntimeError("a fault of ours")
            await original(shards)

        setattr(follower, name, failing)
        one.hold(1)
        await until(lambda: failed == 1)
        assert other.store.status().state is StoreState.BEHIND
        await until(lambda: other.store.status().state is StoreState.SHARED)
        assert other.owned(1) == 4
    assert [record.name for record in caplog.records if record.exc_info] == ["pdgate.ownership"]


async def test_a_fault_of_one_engine_does_not_end_the_reader(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody wrote what is no time into its rows; when that is mended, it is read."""
    keys = a_fleet()
    async with replica(server.url, keys) as one:
        one.hold(1)
        await until(lambda: one.store.status().queued_bytes == 0)
        epochs, number = keys.epochs(shard_of(P0)), await number_of(one)
        await one.link.command("HSET", epochs, P0, "not a number")
        fresh = replica(server.url, keys, begin=False)
        waiting = asyncio.ensure_future(fresh.__aenter__())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await one.link.command("HSET", epochs, P0, number)
        other = await waiting
        assert other.owned(1) == 4
        await fresh.__aexit__(None, None, None)
    logged = [record.name for record in caplog.records if record.exc_info]
    assert logged in (["pdgate.ownership"], ["pdgate.ownership"] * 2), "once by each replica that came across it"
