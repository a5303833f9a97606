"""Runs one attempt: both legs by a strategy, their events merged in order of arrival, each leg ended exactly once.

A shell: it sends, reads and reports. Whether a failure of one leg ends the attempt is not decided here.
Whoever starts a PairRun keeps it until `open_legs` is empty: the end of a leg's own exchange is the only proof that
its server has let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.base import Attempt, Call, Fault, Merge, Order, PairStrategy
from engines.errors import UpstreamError
from engines.sse_frames import FRAME_LIMIT_BYTES, EventKind, FrameDecoder, event_kind
from engines.tasks import spawn
from engines.types import FailureKind, Leg, Outcome, Stage
from engines.upstream import Exchange, Upstream

_log = logging.getLogger("pdgate.pair")
_ANSWER_LIMIT_BYTES = 256 * 1024 * 1024
_UNREAD_OUTPUTS = 16
"""Outputs of the decode that may wait for a slow client before its socket is left unread."""
_ABORT_TIMEOUT_S = 2.0
_FAILURES = (EventKind.ERROR, EventKind.ABORT)
_ANSWERS_TO_ABORT = (FailureKind.STATUS, FailureKind.STREAM_ERROR, FailureKind.ABORTED)
"""What a server says of a request that it was told to drop is no failure of its own."""

Frames = Sequence[tuple[EventKind, bytes]]
"""Events of a stream, whole and as they came, each with its kind."""


@dataclass(frozen=True, slots=True)
class LegOutput:
    """Events of the decode's stream."""

    frames: Frames


@dataclass(frozen=True, slots=True)
class LegAnswer:
    """A leg came to a good end. `body` is its whole answer; empty for a decode's stream."""

    leg: Leg
    body: bytes


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg went wrong. Its exchange may still be open."""

    outcome: Outcome


LegEvent = LegOutput | LegAnswer | LegFailed


class PairRun:
    """Both legs of one attempt. `start()` once; then `next_event()` until the caller has seen enough.

    `on_failure` hears of every failed leg at once, also when nobody asks for events any more. `needs_prefill_answer`:
    the decode's output is whole only through `merged_frames` and `merged_answer`, once the prefill has answered.
    """

    def __init__(
        self,
        attempt: Attempt,
        strategy: PairStrategy,
        upstream: Upstream,
        on_failure: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.attempt = attempt
        self.needs_prefill_answer = strategy.needs_prefill_answer(attempt)
        self._merge: Merge | None = None
        self._on_failure = on_failure
        self._strategy = strategy
        self._upstream = upstream
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self._credits = asyncio.Semaphore(_UNREAD_OUTPUTS)
        self._dropping = False
        self._tasks: dict[Leg, asyncio.Task[None]] = {}
        self._prefill_answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Dispatch the legs in the strategy's order."""
        for leg in (Leg.DECODE, Leg.PREFILL):
            self._tasks[leg] = spawn(self._run_leg(leg), f"leg {leg} {self.attempt.rid}")

    async def next_event(self) -> LegEvent:
        """The next event of either leg. Cancelling loses none."""
        event = await self._events.get()
        if isinstance(event, LegOutput):
            self._credits.release()
        return event

    def merged_frames(self, frames: Frames) -> Frames:
        """Events of the decode's stream as the client is to see them; in order, each once."""
        merge = self._merge
        return frames if merge is None else [(kind, merge.frame(frame)) for kind, frame in frames]

    def merged_answer(self, body: bytes) -> bytes:
        """The decode's whole answer as the client is to see it."""
        return body if self._merge is None else self._merge.answer(body)

    @property
    def open_legs(self) -> tuple[Leg, ...]:
        """The legs whose exchange has not ended; the decode first, as it tells its prefill of an abort."""
        return tuple(leg for leg, task in self._tasks.items() if not task.done())

    def drop_output(self) -> None:
        """Nobody wants the output any more: read on to the end of both exchanges, and throw it away."""
        self._dropping = True
        for _ in range(_UNREAD_OUTPUTS):
            self._credits.release()

    async def wait_ended(self, timeout_s: float) -> bool:
        """Wait until no leg is open, at most `timeout_s`; whether none is."""
        if open_tasks := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(open_tasks, timeout=timeout_s)
        return not self.open_legs

    async def post_abort(self, leg: Leg) -> None:
        """Ask a leg's server to drop the request. Says nothing on whether it did."""
        view = self.attempt.view(leg)
        call = self._strategy.abort_call(view, self.attempt.rid)
        try:
            await self._upstream.fetch(
                "POST", call.url, body=call.body, headers=call.headers, timeout_s=_ABORT_TIMEOUT_S
            )
        except UpstreamError:
            return

    def close(self, leg: Leg) -> None:
        """Drop a leg's connection. Idempotent."""
        if (task := self._tasks.get(leg)) is not None:
            task.cancel()

    # ---- one leg -------------------------------------------------------------------------------------------------

    async def _run_leg(self, leg: Leg) -> None:
        try:
            call = await self._call(leg)
            exchange = await self._upstream.open("POST", call.url, body=call.body, headers=call.headers)
            try:
                await self._read(leg, exchange)
            finally:
                exchange.close()
        except UpstreamError as error:
            self._fail(leg, Fault(error.kind, error.message), definite=error.definite)
        except Exception as error:  # a fault of ours: told as a failure, as silence would last until a deadline
            _log.exception("leg %s of %s", leg, self.attempt.rid)
            self._fail(leg, Fault(FailureKind.GARBLED, f"{type(error).__name__}: {error}"))
        finally:
            if leg is Leg.PREFILL:
                self._prefill_answer.cancel()  # unless it has come; a decode that waits for it ends with it

    async def _call(self, leg: Leg) -> Call:
        if leg is Leg.PREFILL:
            return self._strategy.prefill_call(self.attempt)
        if self._strategy.order is Order.PARALLEL:
            return self._strategy.decode_call(self.attempt, None)
        return self._strategy.decode_call(self.attempt, await self._prefill_answer)

    async def _read(self, leg: Leg, exchange: Exchange) -> None:
        is_stream = exchange.headers.get("content-type", "").startswith("text/event-stream")
        if exchange.status == 200 and self.attempt.stream and is_stream:
            await self._read_stream(leg, exchange)
            return
        body = await exchange.read(_ANSWER_LIMIT_BYTES)
        if exchange.status == 200 and self.attempt.stream:
            self._fail(leg, Fault(FailureKind.GARBLED, "it answered a stream with something else"))
        elif (fault := self._strategy.judge(leg, exchange.status, body)) is not None:
            self._fail(leg, fault)
        else:
            self._answer(leg, body)

    async def _read_stream(self, leg: Leg, exchange: Exchange) -> None:
        """The events of a leg; it has answered, or failed, at its first end, whatever comes after that."""
        decoder = FrameDecoder(self._event_limit_bytes(leg))
        kept: list[bytes] = []
        finished = over = False
        try:
            async for chunk in exchange.chunks():
                frames = [] if over else _until_end(decoder.feed(chunk))
                last, frame = frames[-1] if frames else (EventKind.COMMENT, b"")
                finished = finished or any(kind is EventKind.FINISH for kind, _ in frames)
                if last in _FAILURES:
                    over = True
                    await self._output(leg, frames[:-1], kept)
                    self._fail(leg, self._strategy.frame_fault(frame))
                elif last is EventKind.DONE and not finished:
                    over = True
                    self._fail(leg, Fault(FailureKind.GARBLED, "the stream ended without a finish_reason"))
                else:
                    await self._output(leg, frames, kept)
                    if last is EventKind.DONE:
                        over = True
                        self._answer(leg, b"".join(kept))
        except UpstreamError:
            if not over:  # else the loss is no news
                raise
        if not over:
            self._fail(leg, Fault(FailureKind.TRUNCATED, "the stream ended without [DONE]"))

    async def _output(self, leg: Leg, frames: list[tuple[EventKind, bytes]], kept: list[bytes]) -> None:
        """Pass the decode's output on; a prefill's is one small event, kept for its answer."""
        if not frames:
            return
        if leg is Leg.PREFILL:
            kept.extend(frame for _, frame in frames)
            if sum(map(len, kept)) > self._event_limit_bytes(leg):
                raise UpstreamError(FailureKind.GARBLED, "a prefill's stream without end")
            return
        if not self._dropping:
            await self._credits.acquire()
            self._events.put_nowait(LegOutput(frames))

    def _event_limit_bytes(self, leg: Leg) -> int:
        """A prefill says all it knows of a prompt in one event; asked for that, its stream may be as long as a body."""
        return _ANSWER_LIMIT_BYTES if leg is Leg.PREFILL and self.needs_prefill_answer else FRAME_LIMIT_BYTES

    def _answer(self, leg: Leg, body: bytes) -> None:
        if leg is Leg.PREFILL and self.needs_prefill_answer:
            merge = self._strategy.merge(self.attempt, body)
            if isinstance(merge, Fault):
                self._fail(leg, merge)
                return
            self._merge = merge
        if leg is Leg.PREFILL and not self._prefill_answer.done():
            self._prefill_answer.set_result(body)
        self._events.put_nowait(LegAnswer(leg, body))

    def _fail(self, leg: Leg, fault: Fault, *, definite: bool = False) -> None:
        outcome = Outcome(
            self.attempt.view(leg).engine_id,
            leg,
            fault.kind,
            Stage.DISPATCHED,
            fault.message,
            fault.status,
            definite=definite,
        )
        if not (self._dropping and fault.kind in _ANSWERS_TO_ABORT):
            self._on_failure(outcome)
        self._events.put_nowait(LegFailed(outcome))


def _until_end(frames: Sequence[bytes]) -> list[tuple[EventKind, bytes]]:
    """The events up to the first that ends a stream, well or badly, each with its kind; comments are left out."""
    kinds: list[tuple[EventKind, bytes]] = []
    for frame in frames:
        if (kind := event_kind(frame)) is not EventKind.COMMENT:
            kinds.append((kind, frame))
        if kind is EventKind.DONE or kind in _FAILURES:
            break
    return kinds
