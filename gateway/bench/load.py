"""The open-loop load generator: sends each request of a trace at its time, whatever became of those before.

Shell: sockets and the loop's clock. It speaks the OpenAI chat wire, so that any server with it can be measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engines.errors import UpstreamError
from engines.sse_frames import EventKind, FrameDecoder, data_of, event_kind
from engines.tasks import spawn
from engines.types import FailureKind
from engines.upstream import Exchange, Upstream
from gateway.bench.prompts import PromptScale, prompt_of
from gateway.bench.report import Sample
from gateway.bench.trace import TraceRequest

_ERROR_BODY_BYTES = 1024 * 1024
_DETAIL_CHARACTERS = 300
_OUTPUT = (EventKind.CONTENT, EventKind.FINISH)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where a trace goes, how fast and how large.

    `base_url` is without /v1. `rate_scale` 2 sends twice as fast as the trace. What is beyond `max_in_flight` is held
    back until an earlier request ends. `timeout_s` bounds each request.
    """

    base_url: str
    model: str
    headers: Mapping[str, str]
    scale: PromptScale
    rate_scale: float
    max_in_flight: int
    timeout_s: float


async def replay(
    trace: Sequence[TraceRequest], plan: LoadPlan, on_end: Callable[[Sample], None]
) -> tuple[list[Sample], float]:
    """Send the whole trace and wait for every answer. Returns a sample a request, in order, and the run's seconds.

    `on_end` is called as each ends. A request that fails is a sample with an error, never an exception.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(plan.max_in_flight)
    upstream = Upstream()

    async def send(number: int, request: TraceRequest, due_s: float) -> Sample:
        try:
            sample = await _measure(upstream, plan, number, request, due_s)
        finally:
            slots.release()
        on_end(sample)
        return sample

    sending: list[asyncio.Task[Sample]] = []
    await upstream.start()
    start_s = loop.time()
    try:
        for number, request in enumerate(trace):
            due_s = start_s + request.at_s / plan.rate_scale
            await asyncio.sleep(due_s - loop.time())
            await slots.acquire()
            sending.append(spawn(send(number, request, due_s), f"replay-{number}"))
        return await asyncio.gather(*sending), loop.time() - start_s
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await upstream.close()


async def _measure(upstream: Upstream, plan: LoadPlan, number: int, request: TraceRequest, due_s: float) -> Sample:
    body = _chat_body(plan, number, request)
    sent_s = asyncio.get_running_loop().time()
    answer = _Answer(sent_s)
    try:
        async with asyncio.timeout(plan.timeout_s):
            url = f"{plan.base_url}/v1/chat/completions"
            exchange = await upstream.open("POST", url, body=body, headers=plan.headers)
            try:
                await answer.follow(exchange)
            finally:
                exchange.close()
    except UpstreamError as error:
        answer.fail(error.kind, error.message)
    except TimeoutError:
        answer.fail(FailureKind.TIMEOUT, f"no whole answer in {plan.timeout_s:g} s")
    return answer.sample(number, max(0.0, sent_s - due_s))


def _chat_body(plan: LoadPlan, number: int, request: TraceRequest) -> bytes:
    body = {
        "model": plan.model,
        "messages": [{"role": "user", "content": prompt_of(request, number, plan.scale)}],
        "max_tokens": plan.scale.output_tokens(request),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(body)


class _Answer:
    """What has been seen of one answer."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._end_s: float | None = None
        self._output_events = 0
        self._usage: dict[str, Any] = {}
        self._headers: Mapping[str, str] = {}
        self._error: str | None = None
        self._detail = ""

    def fail(self, kind: str, detail: str) -> None:
        """Note a failure; the first one counts."""
        if self._error is None:
            self._error, self._detail = str(kind), detail[:_DETAIL_CHARACTERS]

    async def follow(self, exchange: Exchange) -> None:
        """Read the stream to its end. Raises UpstreamError when it breaks."""
        self._headers = exchange.headers
        if exchange.status != 200:
            body = await exchange.read(_ERROR_BODY_BYTES)
            self.fail(f"{FailureKind.STATUS}_{exchange.status}", _error_text(body))
            return
        clock = asyncio.get_running_loop().time
        decoder = FrameDecoder()
        async for data in exchange.chunks():
            for frame in decoder.feed(data):
                self._take(frame, clock())
        if self._end_s is None:
            self.fail(FailureKind.TRUNCATED, "the stream ended without [DONE]")

    def _take(self, frame: bytes, now_s: float) -> None:
        kind = event_kind(frame)
        if kind in _OUTPUT:
            self._first_s = self._first_s if self._first_s is not None else now_s
            self._last_s = now_s
            self._output_events += kind is EventKind.CONTENT
        if kind is EventKind.USAGE:
            self._usage = orjson.loads(data_of(frame)).get("usage") or {}
        elif kind is EventKind.DONE:
            self._end_s = now_s
        elif kind is EventKind.ERROR:
            self.fail(FailureKind.STREAM_ERROR, _error_text(data_of(frame)))
        elif kind is EventKind.ABORT:
            self.fail(FailureKind.ABORTED, "finish_reason abort")

    def sample(self, number: int, held_s: float) -> Sample:
        output_tokens = int(self._usage.get("completion_tokens") or self._output_events)
        details = self._usage.get("prompt_tokens_details") or {}
        attempts = self._headers.get("x-pdgate-attempts", "")
        return Sample(
            number=number,
            held_s=held_s,
            ttft_s=None if self._first_s is None else self._first_s - self._sent_s,
            tpot_s=self._tpot_s(output_tokens),
            e2e_s=None if self._end_s is None else self._end_s - self._sent_s,
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=output_tokens,
            prefill=self._headers.get("x-pdgate-prefill", ""),
            decode=self._headers.get("x-pdgate-decode", ""),
            attempts=int(attempts) if attempts.isdecimal() else None,
            error=self._error,
            detail=self._detail,
        )

    def _tpot_s(self, output_tokens: int) -> float | None:
        if self._first_s is None or output_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (output_tokens - 1)


def _error_text(body: bytes) -> str:
    """The message of an OpenAI-shaped error; any other body as it is."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode(errors="replace")
