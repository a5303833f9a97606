"""Follows the KV events of one server, all its DP ranks, over ZMQ: whole, in order, or saying what is missing. A shell.

ZMQ reconnects by itself and holds messages while a gap is being filled, up to a high-water mark; what it drops beyond
shows as a gap in the numbers, which is then filled by a replay where the server offers one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio

from engines.kv_event_source import KvAddresses, addresses
from engines.kv_events import (
    KvBatch,
    MalformedKvEvents,
    Order,
    SequenceTracker,
    decode_batch,
    live_frames,
    replay_frames,
    replay_request,
)
from engines.tasks import spawn, stop
from engines.types import KvEventSource

_log = logging.getLogger("pdgate.kv_events")

HELD_BACK_BATCHES = 1_000
"""How many batches of a rank may wait in ZMQ."""
REPLAY_SILENCE_S = 2.0
REPLAY_S = 20.0
QUIET_S = 10.0
_MESSAGE_BYTES = 256 << 20
_HEARTBEAT_MS = 5_000
_RECONNECT_MS = 100
"""No longer: what a restarted server publishes before we are back is lost where it replays nothing."""
_OPEN_AGAIN_S, _OPEN_AGAIN_MOST_S = 0.5, 15.0


class ConditionKind(StrEnum):
    """What a subscriber has to say between the batches of a rank."""

    WHOLE = "whole"
    """Everything that the server's process has published so far was handed on."""
    FILLED = "filled"
    """Batches `first`..`last` had been missed, and were handed on."""
    LOST = "lost"
    """Batches `first`..`last` will never come."""
    MALFORMED = "malformed"
    """Batch `first` cannot be read (or, at -1, a message that is no batch); `detail` says why."""
    RESTARTED = "restarted"
    """Another process of the server publishes now: nothing from before counts."""
    QUIET = "quiet"
    """Nothing has come for a while; said once."""
    NOT_LISTENING = "not_listening"
    """The rank's socket cannot be opened or used, `detail` says why; it is tried again."""
    LISTENING = "listening"
    """It can again; what came meanwhile may be missing."""


@dataclass(frozen=True, slots=True)
class KvCondition:
    """A condition of one rank."""

    kind: ConditionKind
    first: int = -1
    last: int = -1
    detail: str = ""


Handler = Callable[[int, KvBatch | KvCondition], Awaitable[None]]
"""Given the rank and what has come; the next thing of that rank waits until it has returned."""


class KvSubscriber:
    """One server's subscription. `start()` and `stop()` once each; the ZMQ context stays the caller's."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvEventSource,
        server_url: str,
        handle: Handler,
        *,
        name: str = "",
        quiet_s: float = QUIET_S,
        held_back_batches: int = HELD_BACK_BATCHES,
        replay_silence_s: float = REPLAY_SILENCE_S,
    ) -> None:
        """ValueError when the source's addresses are none."""
        places = [addresses(source, server_url, rank) for rank in range(source.dp_size)]
        options = _Options(source.topic.encode(), quiet_s, held_back_batches, replay_silence_s)
        self._name = name or server_url
        self._ranks = [_Rank(context, place, rank, handle, options) for rank, place in enumerate(places)]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow all ranks."""
        self._tasks = [spawn(rank.run(), f"kv-events {self._name} rank {rank.rank}") for rank in self._ranks]

    async def stop(self) -> None:
        """Close every socket; nothing is handed on any more."""
        for task in self._tasks:
            await stop(task)


@dataclass(frozen=True, slots=True)
class _Options:
    topic: bytes
    quiet_s: float
    held_back_batches: int
    replay_silence_s: float


class _Rank:
    """Follows one rank."""

    def __init__(
        self, context: zmq.asyncio.Context, place: KvAddresses, rank: int, handle: Handler, options: _Options
    ) -> None:
        self._context = context
        self._place = place
        self.rank = rank
        self._handle = handle
        self._options = options
        self._numbers = SequenceTracker()
        self._losses = 0
        """Gaps and unreadable batches of the server's present process."""

    async def run(self) -> None:
        wait_s, tried = _OPEN_AGAIN_S, False
        while True:
            try:
                with self._context.socket(zmq.SUB) as socket:
                    self._open(socket)
                    if tried:
                        await self._say(ConditionKind.LISTENING)
                    wait_s = _OPEN_AGAIN_S
                    if self._place.replay and await self._catch_up() and not self._losses:
                        await self._say(ConditionKind.WHOLE)
                    await self._follow(socket)
            except zmq.ZMQError as error:
                await self._say(ConditionKind.NOT_LISTENING, detail=f"cannot {self._verb}: {error}")
            tried = True
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _OPEN_AGAIN_MOST_S)

    @property
    def _verb(self) -> str:
        return f"{'bind' if self._place.bind else 'connect to'} {self._place.subscribe}"

    def _open(self, socket: zmq.asyncio.Socket) -> None:
        _prepare(socket, self._options.held_back_batches)
        socket.subscribe(self._options.topic)
        (socket.bind if self._place.bind else socket.connect)(self._place.subscribe)

    async def _follow(self, socket: zmq.asyncio.Socket) -> None:
        heard = True
        while True:
            if not await socket.poll(int(self._options.quiet_s * 1000)):
                if heard:
                    await self._say(ConditionKind.QUIET)
                heard = False
                if self._place.replay:
                    await self._catch_up()  # the last batches may be what was lost
                continue
            heard = True
            try:
                sequence, payload = live_frames(await socket.recv_multipart())
            except MalformedKvEvents as error:
                await self._say(ConditionKind.MALFORMED, detail=str(error))
                continue
            await self._live(sequence, payload)

    async def _live(self, sequence: int, payload: bytes) -> None:
        """One published batch: handed on when all before it was, or is known to be lost."""
        numbers = self._numbers
        batch = _decoded(sequence, payload)
        time_s = batch.time_s if isinstance(batch, KvBatch) else float("-inf")
        order = numbers.see(sequence, time_s)
        if order is Order.DUPLICATE:
            return
        if order is Order.RESTART:
            numbers.restart()
            self._losses = 0
            await self._say(ConditionKind.RESTARTED)
        first, losses = numbers.expected, self._losses
        if sequence > first:
            if self._place.replay:
                await self._catch_up(sequence)
            if numbers.expected < sequence:
                await self._lose(numbers.expected, sequence)
            elif self._losses == losses:
                await self._say(ConditionKind.FILLED, first, sequence - 1)
        if numbers.expected == sequence:  # a replay may have brought it, too
            await self._accept(sequence, batch)
        if first == 0 and not self._losses:
            await self._say(ConditionKind.WHOLE)

    async def _accept(self, sequence: int, batch: KvBatch | MalformedKvEvents) -> None:
        if isinstance(batch, KvBatch):
            self._numbers.accept(sequence, batch.time_s)
            try:
                await self._handle(self.rank, batch)
            except Exception as error:  # whatever a server sends, the rank is followed on
                _log.exception("%s: batch %d cannot be taken", self._place.subscribe, sequence)
                await self._malformed(sequence, f"batch {sequence} cannot be taken: {error!r}")
        else:
            self._numbers.skip_to(sequence + 1)
            await self._malformed(sequence, str(batch))

    async def _malformed(self, sequence: int, why: str) -> None:
        self._losses += 1
        await self._say(ConditionKind.MALFORMED, sequence, sequence, why)

    async def _lose(self, first: int, until: int) -> None:
        self._numbers.skip_to(until)
        self._losses += 1
        await self._say(ConditionKind.LOST, first, until - 1)

    async def _say(self, kind: ConditionKind, first: int = -1, last: int = -1, detail: str = "") -> None:
        await self._handle(self.rank, KvCondition(kind, first, last, detail))

    # ---- replay ------------------------------------------------------------------------------------------------------

    async def _catch_up(self, until: int | None = None) -> bool:
        """Hand on what a replay brings from the expected number on; whether the server has answered to the end.

        Replays have holes where they are faster than ZMQ: they are then asked for again from the hole on.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + REPLAY_S
        while True:
            begun = self._numbers.expected
            try:
                ended = await self._replay_once(end_s)
            except zmq.ZMQError:  # no socket for it, or no address
                ended = False
            if ended or self._numbers.expected == begun or loop.time() > end_s:
                return ended
            if until is not None and self._numbers.expected >= until:
                return True

    async def _replay_once(self, end_s: float) -> bool:
        """Hand on one replay as far as it has no hole and comes by `end_s`; whether it was whole."""
        numbers = self._numbers
        socket = self._context.socket(zmq.DEALER)
        with socket:
            _prepare(socket, self._options.held_back_batches)
            socket.connect(self._place.replay)
            await socket.send_multipart(replay_request(numbers.expected))
            is_first = True
            while await socket.poll(int(self._options.replay_silence_s * 1000)):
                try:
                    reply = replay_frames(await socket.recv_multipart())
                except MalformedKvEvents as error:
                    await self._say(ConditionKind.MALFORMED, detail=str(error))
                    return False
                if reply is None:
                    return True
                sequence, payload = reply
                if sequence > numbers.expected:
                    if not is_first:
                        return False
                    await self._lose(numbers.expected, sequence)  # no longer kept
                is_first = False
                if sequence == numbers.expected:
                    await self._accept(sequence, _decoded(sequence, payload))
                if asyncio.get_running_loop().time() > end_s:
                    return False
            return False


def _decoded(sequence: int, payload: bytes) -> KvBatch | MalformedKvEvents:
    try:
        return decode_batch(sequence, payload)
    except MalformedKvEvents as error:
        return error


def _prepare(socket: zmq.asyncio.Socket, most_messages: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, most_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
