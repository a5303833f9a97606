"""KV events over real ZMQ sockets: emulated servers publish, the subscriber follows, the feed rebuilds our chain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
import uvloop
import zmq
import zmq.asyncio

from engines import sglang_facts as about
from engines.emulator.kv_event_log import KvEventLog
from engines.emulator.kv_publisher import KvEventsConfig, KvPublisher
from engines.emulator.process import EmulatedServer, free_ports
from engines.emulator.tokens import encode
from engines.kv_events import KvBatch
from engines.kv_subscriber import ConditionKind, KvCondition, KvSubscriber
from engines.tasks import spawn, stop
from engines.token_rule import pack, unpack
from engines.types import EngineId, EngineSpec, EngineView, FleetSnapshot, Health, KvEventSource, Role
from gateway.kv_engine_feed import FeedMode, Hashing
from gateway.kv_feed import KvFeed
from routing.ownership import Tier
from routing.prefix import Namespace, id_blocks, root_hash
from tests.contract.emu_fleet import EmuFleet, emu_fleet
from tests.machine import Stopwatch
from tests.warm import WarmServer

BLOCK = 16
LOCAL = "http://127.0.0.1:1"


def chain_root(model: str, salt: str | None, lora: str | None) -> bytes:
    return root_hash(Namespace(salt or "", model, lora=lora or ""))


def chain(text: str, salt: str | None = None) -> tuple[bytes, ...]:
    """Our own chain of a prompt."""
    return id_blocks(chain_root("emulated", salt, None), unpack(encode(text)), BLOCK)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    watch = Stopwatch()
    while not condition():
        assert not watch.passed(within_s), "condition did not come true in time"
        await asyncio.sleep(0.005)


# ---- the subscriber --------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """What a subscriber handed on."""

    got: list[tuple[int, KvBatch | KvCondition]] = field(default_factory=list)

    async def handle(self, rank: int, what: KvBatch | KvCondition) -> None:
        self.got.append((rank, what))

    @property
    def sequences(self) -> list[int]:
        return [what.sequence for _, what in self.got if isinstance(what, KvBatch)]

    @property
    def conditions(self) -> list[tuple[str, int, int]]:
        return [(what.kind.value, what.first, what.last) for _, what in self.got if isinstance(what, KvCondition)]

    def said(self, kind: ConditionKind) -> bool:
        return any(said == kind for said, _, _ in self.conditions)


def payload(number: int, time_s: float | None = None) -> bytes:
    log = KvEventLog(1)
    log.stored(None, pack([number]), "")
    taken = log.take(1000.0 + number if time_s is None else time_s)
    assert taken is not None
    return taken


class Wire:
    """A PUB socket in a test's hand: sends what it is told, any number and any bytes."""

    def __init__(self, address: str, connect: bool = False) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        (self.socket.connect if connect else self.socket.bind)(address)

    def send(self, number: int, time_s: float | None = None) -> None:
        self.socket.send_multipart([b"", number.to_bytes(8, "big"), payload(number % 1000, time_s)])

    async def heard_by(self, recorder: Recorder) -> None:
        """Send number 0 until the subscriber's subscription has come through; repetitions count once."""
        while not recorder.sequences:
            self.send(0)
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@asynccontextmanager
async def subscribed(source: KvEventSource, **options: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    context = zmq.asyncio.Context()
    subscriber = KvSubscriber(context, source, LOCAL, recorder.handle, **options)
    subscriber.start()
    try:
        yield recorder
    finally:
        await subscriber.stop()
        context.term()  # returns only when no socket is left open


async def test_a_gap_without_replay_is_lost_and_a_lower_number_is_a_restart() -> None:
    (port,) = free_ports(1)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    async with subscribed(KvEventSource(f"tcp://*:{port}", 1), quiet_s=0.3) as seen:
        await wire.heard_by(seen)
        for number in (1, 2, 5, 6, 6, 2):
            wire.send(number)
        wire.send(0, time_s=5000.0)
        wire.send(1, time_s=5001.0)
        await until(lambda: len(seen.sequences) == 7)
        assert seen.sequences == [0, 1, 2, 5, 6, 0, 1]
        assert seen.conditions == [
            ("whole", -1, -1),
            ("lost", 3, 4),
            ("restarted", -1, -1),
            ("whole", -1, -1),
        ]
        await until(lambda: seen.said(ConditionKind.QUIET))
        await asyncio.sleep(0.7)
        assert [kind for kind, _, _ in seen.conditions].count("quiet") == 1
    wire.close()


async def test_what_came_before_a_late_subscriber_is_lost_and_it_is_never_called_whole() -> None:
    (port,) = free_ports(1)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    async with subscribed(KvEventSource(f"tcp://*:{port}", 1)) as seen:
        while not seen.sequences:
            wire.send(3)
            await asyncio.sleep(0.01)
        wire.send(4)
        await until(lambda: seen.sequences == [3, 4])
        assert seen.conditions == [("lost", 0, 2)]
    wire.close()


async def test_what_is_no_batch_is_said_and_the_next_one_counts() -> None:
    (port,) = free_ports(1)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    async with subscribed(KvEventSource(f"tcp://*:{port}", 1)) as seen:
        await wire.heard_by(seen)
        bad = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "x"}], 0])
        wire.socket.send_multipart([b"", (1).to_bytes(8, "big"), bad])
        wire.socket.send_multipart([b"", (2).to_bytes(8, "big"), b"\xc1"])
        wire.socket.send_multipart([b"", b"short", payload(3)])
        wire.socket.send_multipart([b"alone"])
        wire.send(3)
        await until(lambda: seen.sequences == [0, 3])
        malformed = [(first, last) for kind, first, last in seen.conditions if kind == "malformed"]
        assert malformed == [(1, 1), (2, 2), (-1, -1), (-1, -1)]
        assert not seen.said(ConditionKind.LOST)
    wire.close()


async def test_where_the_server_connects_we_listen_and_try_again_while_the_port_is_taken() -> None:
    (port,) = free_ports(1)
    taken = Wire(f"tcp://127.0.0.1:{port}")
    async with subscribed(KvEventSource(f"tcp://127.0.0.1:{port}", 1)) as seen:
        await until(lambda: seen.said(ConditionKind.NOT_LISTENING))
        (reason,) = {what.detail for _, what in seen.got if isinstance(what, KvCondition)}
        assert f"cannot bind tcp://127.0.0.1:{port}" in reason
        assert "in use" in reason
        taken.close()
        wire = Wire(f"tcp://127.0.0.1:{port}", connect=True)
        await wire.heard_by(seen)
        wire.send(1)
        await until(lambda: seen.sequences == [0, 1])
        assert [kind for kind, _, _ in seen.conditions[-2:]] == ["listening", "whole"]
        wire.close()


async def test_nothing_that_a_server_sends_ends_a_rank() -> None:
    """Numbers beyond all, times that are none, replays that are none, a batch that the handler cannot take."""
    port, replay = free_ports(2)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    router = wire.context.socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{replay}")
    source = KvEventSource(f"tcp://*:{port}", 1, replay_endpoint=f"tcp://*:{replay}")

    class Choking(Recorder):
        async def handle(self, rank: int, what: KvBatch | KvCondition) -> None:
            if isinstance(what, KvBatch) and what.sequence == 7:
                raise OverflowError("too much")
            await super().handle(rank, what)

    seen = Choking()
    context = zmq.asyncio.Context()
    subscriber = KvSubscriber(context, source, LOCAL, seen.handle, replay_silence_s=0.05, quiet_s=0.1)
    subscriber.start()
    await wire.heard_by(seen)
    for number, time_s in ((2**64 - 1, 2000.0), (2**64 - 2, 2000.0), (2**63, 2000.0), (1, float("inf"))):
        wire.send(number, time_s)
    wire.send(2)
    wire.send(7)
    wire.send(2**63 - 1, 3000.0)
    await asyncio.sleep(0.3)  # a replay is asked for from there
    wire.send(0, 4000.0)
    await until(lambda: seen.sequences == [0, 2, 2**63 - 1, 0])
    malformed = [(first, last) for kind, first, last in seen.conditions if kind == "malformed"]
    assert malformed == [(-1, -1)] * 3 + [(1, 1), (7, 7)]
    assert seen.said(ConditionKind.RESTARTED)
    await subscriber.stop()
    context.term()
    router.close(0)
    wire.close()


async def test_an_address_that_zmq_refuses_is_said_and_tried_again() -> None:
    source = KvEventSource("ipc://" + "x" * 500, 1, bind=True)
    async with subscribed(source) as seen:
        await until(lambda: [kind for kind, _, _ in seen.conditions] == ["not_listening"] * 2)
        assert all(
            "cannot connect to ipc://xxx" in what.detail for _, what in seen.got if isinstance(what, KvCondition)
        )


async def test_a_replay_address_that_zmq_refuses_is_as_good_as_none() -> None:
    (port,) = free_ports(1)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    async with subscribed(KvEventSource(f"tcp://*:{port}", 1, replay_endpoint="ipc://" + "x" * 500)) as seen:
        await wire.heard_by(seen)
        wire.send(2)
        await until(lambda: seen.sequences == [0, 2])
        assert seen.conditions == [("whole", -1, -1), ("lost", 1, 1)]
    wire.close()


@asynccontextmanager
async def publishing(config: KvEventsConfig) -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(config)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


@asynccontextmanager
async def swallowing(port: int, new_port: int, swallowed: range) -> AsyncIterator[None]:
    """A proxy between publisher and subscriber that loses some batches."""
    context = zmq.asyncio.Context()
    source, sink = context.socket(zmq.SUB), context.socket(zmq.PUB)
    source.subscribe(b"")
    source.connect(f"tcp://127.0.0.1:{port}")
    sink.bind(f"tcp://127.0.0.1:{new_port}")

    async def carry() -> None:
        while True:
            frames = await source.recv_multipart()
            if int.from_bytes(frames[1], "big") not in swallowed:
                await sink.send_multipart(frames)

    task = spawn(carry(), "swallowing")
    try:
        yield
    finally:
        await stop(task)
        source.close(0)
        sink.close(0)
        context.term()


async def replayed(kept: int) -> None:
    port, replay, proxy = free_ports(3)
    config = KvEventsConfig("zmq", f"tcp://*:{port}", None, f"tcp://*:{replay}", buffer_steps=kept, topic="t")
    source = KvEventSource(f"tcp://*:{proxy}", 1, "t", replay_endpoint=f"tcp://*:{replay}")
    async with publishing(config) as publisher, swallowing(port, proxy, range(kept + 10, kept + 20)):
        for number in range(kept):
            publisher.publish(payload(number))
        async with subscribed(source, replay_silence_s=0.2, quiet_s=0.3) as seen:
            await until(lambda: seen.said(ConditionKind.WHOLE))
            assert seen.sequences == list(range(kept))
            await asyncio.sleep(0.1)
            for number in range(kept, kept + 40):
                publisher.publish(payload(number))
                await asyncio.sleep(0.002)
            await until(lambda: seen.sequences == list(range(kept + 40)))
            assert [each for each in seen.conditions if each[0] in ("lost", "malformed", "restarted")] == []
            assert ("filled", kept + 10, kept + 19) in seen.conditions
        async with subscribed(source, replay_silence_s=0.2) as late:  # the first 40 are no longer kept
            await until(lambda: len(late.sequences) == kept)
            assert late.sequences == list(range(40, kept + 40))
            assert late.conditions == [("lost", 0, 39)]


async def test_a_replay_fills_gaps_and_serves_late_subscribers() -> None:
    await replayed(kept=100)


def test_the_same_under_uvloop() -> None:
    uvloop.run(replayed(kept=300))


async def test_a_replay_with_a_hole_is_asked_for_again_from_there() -> None:
    port, replay = free_ports(2)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{replay}")
    asked = []

    async def answer() -> None:
        for numbers in ([0, 1, 4, 5], [2, 3], [4, 5]):  # as where the replay is faster than ZMQ; the first end is lost
            client, empty, first = await router.recv_multipart()
            asked.append(int.from_bytes(first, "big"))
            for number in numbers:
                await router.send_multipart([client, empty, b"", number.to_bytes(8, "big"), payload(number)])
        await router.send_multipart([client, empty, b"", b"\xff" * 8, b""])

    task = spawn(answer(), "holes")
    source = KvEventSource(f"tcp://*:{port}", 1, replay_endpoint=f"tcp://*:{replay}")
    async with subscribed(source, replay_silence_s=0.2) as seen:
        await until(lambda: seen.said(ConditionKind.WHOLE))
        assert seen.sequences == [0, 1, 2, 3, 4, 5]
        assert asked == [0, 2, 4]
        assert seen.conditions == [("whole", -1, -1)]
    await task
    router.close(0)
    context.term()


async def test_a_replay_that_does_not_answer_is_given_up() -> None:
    port, nobody = free_ports(2)
    wire = Wire(f"tcp://127.0.0.1:{port}")
    source = KvEventSource(f"tcp://*:{port}", 1, replay_endpoint=f"tcp://*:{nobody}")
    async with subscribed(source, replay_silence_s=0.1) as seen:
        await wire.heard_by(seen)
        wire.send(4)
        wire.send(5)
        await until(lambda: seen.sequences == [0, 4, 5])
        assert ("lost", 1, 3) in seen.conditions
    wire.close()


# ---- the feed --------------------------------------------------------------------------------------------------------

P = EngineId("p")


@dataclass
class Sink:
    """What a decider was told."""

    blocks: set[tuple[Tier, bytes]] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)
    live: bool | None = None

    def engine_held(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.calls.append("held")
        self.epochs.add(epoch)
        self.blocks |= {(tier, block) for block in blocks}

    def engine_lost(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        self.calls.append("lost")
        self.blocks -= {(tier, block) for block in blocks}

    def engine_cleared(self, engine_id: EngineId, epoch: int) -> None:
        self.calls.append("cleared")
        self.blocks.clear()

    def events_live(self, engine_id: EngineId, live: bool) -> None:
        self.live = live

    def events_elsewhere(self, engine_id: EngineId, elsewhere: bool) -> None:
        """Nobody else is there."""

    def has(self, *chains: tuple[bytes, ...]) -> bool:
        return self.blocks == {(Tier.DEVICE, block) for each in chains for block in each}


@dataclass
class OneFleet:
    """A fleet of one prefill, as its probe would see it."""

    view: EngineView

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(1, (self.view,))


async def seen_view(fleet: EmuFleet, server: EmulatedServer, epoch: int = 1) -> EngineView:
    facts = about.facts_of(await fleet.get(server, "/server_info"), await fleet.get(server, "/model_info"))
    return EngineView(EngineSpec(P, server.url, Role.PREFILL), Health.READY, epoch, facts)


HASHING = Hashing(lambda model: True, chain_root, lambda model: BLOCK)


@asynccontextmanager
async def feeding(view: EngineView, **options: Any) -> AsyncIterator[tuple[Sink, KvFeed, OneFleet]]:
    sink, fleet = Sink(), OneFleet(view)
    feed = KvFeed(fleet, sink, HASHING, look_every_s=0.02, **options)
    feed.start()
    try:
        yield sink, feed, fleet
    finally:
        await feed.stop()


def publish_args(replay: bool, **more: object) -> tuple[str, ...]:
    port, replay_port = free_ports(2)
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", **more}
    config |= {"replay_endpoint": f"tcp://*:{replay_port}"} if replay else {}
    return ("--kv-events-config", orjson.dumps(config).decode())


@asynccontextmanager
async def plain_fleet(arguments: tuple[str, ...]) -> AsyncIterator[EmuFleet]:
    """One plain server in the place of a pair: half as many processes to start."""
    server = WarmServer(Role.PLAIN, speed=50.0, arguments=arguments)
    async with server, aiohttp.ClientSession() as http:
        yield EmuFleet(server, server, http)


async def ask(fleet: EmuFleet, text: str, **more: object) -> None:
    """Have the prompt cached: an answer of one token adds nothing to it."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **more}
    is_pair = fleet.prefill is not fleet.decode
    replies = await fleet.pair("/generate", body) if is_pair else [await fleet.post(fleet.prefill, "/generate", body)]
    for reply in replies:
        assert reply.status == 200, reply.text


@pytest.mark.parametrize("page", [1, 4])
async def test_events_rebuild_our_own_chains(page: int) -> None:
    pool = ("--max-total-tokens", "1024", "--page-size", str(page), *publish_args(replay=True))
    first, second = "the same beginning of two prompts, " + "a" * 100, "the same beginning of two prompts, " + "b" * 60
    salted, last = "another prompt that is salted, and long enough", "c" * 900

    def whole(text: str, salt: str | None = None) -> tuple[bytes, ...]:
        tokens = len(unpack(encode(text))) // page * page
        return chain(text, salt)[: tokens // BLOCK]

    async with plain_fleet(pool) if page == 1 else emu_fleet(50.0, pool) as fleet:
        view = await seen_view(fleet, fleet.prefill)
        if page != 1:
            decode = (await seen_view(fleet, fleet.decode)).facts
            assert decode is not None
            assert decode.kv_events is None
        await ask(fleet, first)  # before anybody listens
        async with feeding(view) as (sink, feed, _):
            await until(lambda: sink.has(whole(first)) and sink.live is True)
            await ask(fleet, second)
            await until(lambda: sink.has(whole(first), whole(second)))
            await ask(fleet, salted, cache_salt="mine")
            await until(lambda: sink.has(whole(first), whole(second), whole(salted, "mine")))
            await ask(fleet, last)  # the pool holds little else
            await until(lambda: "lost" in sink.calls and {(Tier.DEVICE, each) for each in whole(last)} <= sink.blocks)
            cached = (await fleet.ledger(fleet.prefill))["cache_tokens"]
            assert len(sink.blocks) * BLOCK <= cached < len(sink.blocks) * BLOCK + 5 * max(BLOCK, page)
            stats = feed.stats()[P]
            assert (stats.mode, stats.lost) == (FeedMode.EVENTS, 0)
            assert 0 <= stats.pages - cached // page < 3 * BLOCK  # the gone pages of blocks that are there in part
            assert (await fleet.call(fleet.prefill, "POST", "/flush_cache")).status == 200
            await until(lambda: sink.calls[-1] == "cleared" and not sink.blocks)
            await ask(fleet, first)
            await until(lambda: sink.has(whole(first)))
            assert sink.live is True
        assert sink.live is False


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restart_clears_and_is_followed_from_its_start(replay: bool) -> None:
    first, second = "x" * 50, "y" * 70
    restarts: list[EngineId] = []
    async with plain_fleet(publish_args(replay)) as fleet:
        view = await seen_view(fleet, fleet.prefill)
        async with feeding(view, restart_seen=restarts.append) as (sink, feed, one):
            await asyncio.sleep(0.2)  # a publisher's first batch is lost to who has not subscribed yet
            await ask(fleet, first)
            await until(lambda: sink.has(chain(first)) and sink.live is True)
            await fleet.prefill.restart()
            one.view = await seen_view(fleet, fleet.prefill, epoch=2)
            await until(lambda: sink.live is replay)
            sink.blocks.clear()  # as a decider does when the epoch changes
            await asyncio.sleep(0.5)  # ZMQ connects again
            await ask(fleet, second)
            await until(lambda: sink.has(chain(second)) and sink.live is True)
            assert sink.epochs == {1, 2}
            assert restarts == ([] if replay else [P])
            assert feed.stats()[P].lost == 0


async def test_a_late_subscriber_without_replay_is_approximate_until_the_cache_is_cleared() -> None:
    first, second = "x" * 50, "y" * 70
    async with plain_fleet(publish_args(replay=False)) as fleet:
        await ask(fleet, first)
        async with feeding(await seen_view(fleet, fleet.prefill)) as (sink, feed, _):
            await asyncio.sleep(0.3)
            await ask(fleet, second)
            await until(lambda: sink.has(chain(second)))
            stats = feed.stats()[P]
            assert (sink.live, stats.mode, stats.lost, stats.gaps) == (False, FeedMode.APPROXIMATE, 1, 1)
            assert "batches 0 to 0 are lost" in stats.trouble
            await fleet.call(fleet.prefill, "POST", "/flush_cache")
            await until(lambda: sink.live is True and not sink.blocks)


async def test_a_server_that_connects_is_listened_to_and_one_without_events_is_left_alone() -> None:
    (port,) = free_ports(1)
    config = orjson.dumps({"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv"}).decode()
    async with plain_fleet(("--kv-events-config", config)) as fleet:
        info = await fleet.get(fleet.prefill, "/server_info")
        assert info["kv_events_config"] == config
        assert info["kv_events"] == {
            **{"publisher": "zmq", "endpoint_host": "127.0.0.1", "endpoint_port_base": port, "topic": "kv"},
            **{"block_size": 1, "dp_size": 1},
        }
        view = await seen_view(fleet, fleet.prefill)
        async with feeding(view) as (sink, feed, one):
            texts = [f"{number} " + "z" * 40 for number in range(40)]
            for text in texts:  # connecting takes ZMQ a moment, and its first message is lost
                await ask(fleet, text)
                if sink.blocks:
                    break
                await asyncio.sleep(0.05)
            await until(lambda: {(Tier.DEVICE, block) for block in chain(text)} <= sink.blocks)
            assert view.facts is not None
            one.view = replace(view, facts=replace(view.facts, kv_events=None))
            await until(lambda: feed.stats()[P].mode is FeedMode.OFF)


def test_a_message_of_the_emulator_is_sglangs_own_byte_for_byte() -> None:
    recorded = (
        "93cb41dac3084e49c60a9187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657394cf5c61d0ee38563babcf7b9dbe93"
        "ecaa02f8d3ddf1eaaee8c4705bcf62700b9e9abd42f4b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0040050607"
        "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f40"
        "41424344aa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da347505500"
    )
    log = KvEventLog(16)
    log.stored(None, pack(range(5, 69)), "")
    assert log.take(1795957049.1527123) == bytes.fromhex(recorded)
    log.cleared()
    assert log.take(1795957049.279558) == bytes.fromhex(
        "93cb41dac3084e51e4479181a474797065b0416c6c426c6f636b73436c656172656400"
    )
