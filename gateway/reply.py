"""The answer that one client gets, put together from the outputs of one engine request or of several.

A shell towards the client's connection. It owns the commit point: nothing is written before the first event that
carries output, and status line, role event and first content leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson

from engines.pair import Frames
from engines.sglang_wire import Usage, usage_of
from engines.sse_frames import EventKind, data_of
from gateway import live, merge, sse
from gateway.attempt import CLIENT_PATIENCE_S, Sink
from gateway.errors import GatewayError
from gateway.openai_api import Api, ParsedRequest

_SILENT = (EventKind.ROLE_ONLY, EventKind.COMMENT, EventKind.USAGE, EventKind.DONE)
"""What is no output and no end of one: an attempt that brings nothing else may still be tried again."""
_LAST_WORDS_S = 5.0
"""How long a client may take to read that its stream has failed."""
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_JSON_HEADERS = {"content-type": "application/json"}


class Client(Protocol):
    """The client's connection. Every method may raise ConnectionError when the client has gone."""

    async def begin(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        """Status line, headers and the first bytes of a stream, in one write."""

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...


class Reply:
    """One answer. `headers` may be completed until it is committed; `public_id` and `created` never change.

    `held` is what waits for the first output. `ended`: its last bytes were handed over, so it can only be whole or
    broken off. A client that takes nothing for CLIENT_PATIENCE_S is reported as ConnectionAbortedError.
    """

    def __init__(self, client: Client, request: ParsedRequest, public_id: str, created: int) -> None:
        self.client = client
        self.request = request
        self.public_id = public_id
        self.created = created
        self.headers: dict[str, str] = {}
        self.held: list[bytes] = []
        self.committed = False
        self.ended = False

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Stream bytes; the first call commits, the `last` one ends."""
        if last:
            self._ends()
        async with _patience(CLIENT_PATIENCE_S):
            if self.committed:
                await self.client.write(data)
                return
            self.committed = True
            await self.client.begin(200, {**_STREAM_HEADERS, **self.headers}, data)

    async def send_whole(self, body: bytes) -> None:
        """The one body of an answer that is not streamed; it commits and ends it."""
        self.committed = True
        self._ends()
        async with _patience(CLIENT_PATIENCE_S):
            await self.client.whole(200, {**_JSON_HEADERS, **self.headers}, body)

    async def end(self) -> None:
        """The stream was whole, even if it brought no output."""
        self._ends()
        if self.held or not self.committed:
            held, self.held = self.held, []
            await self.send(b"".join(held))
        async with _patience(CLIENT_PATIENCE_S):
            await self.client.end()

    async def fail(self, error: GatewayError) -> None:
        """End a committed stream with one clear error event, and no terminator: that one means whole.

        Raises ConnectionAbortedError where nothing may follow what was sent, or the client does not read.
        """
        if self.ended:
            raise ConnectionAbortedError("the answer broke off at its very end")
        async with _patience(_LAST_WORDS_S):
            await self.client.write(sse.error_event(error.message, error.kind, error.code, error.param))
            await self.client.end()

    async def comment(self, text: str) -> None:
        """One comment in a stream, which client libraries skip: what befell it, for whoever looks at the bytes."""
        if self.committed and not self.ended:
            await self.send(sse.comment(text))

    def _ends(self) -> None:
        self.ended = True
        live.ending()


@asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[None]:
    """One write to a client; ConnectionAbortedError when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ConnectionAbortedError(f"the client has read nothing for {seconds:g} s") from None


class UnitSink(Sink, Protocol):
    """Where one engine request's outputs go. `sent`: the client has some; `usage`: what the engine counted."""

    sent: bool
    usage: Usage | None

    def restart(self) -> None:
        """A new attempt begins: what the failed one had held back is thrown away."""


class SingleSink:
    """Relays the answer of a request that is one engine request: its bytes, but for identity and unasked usage."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._public_id = reply.public_id.encode()
        self._created = str(reply.created).encode()
        self.sent = False
        self.usage: Usage | None = None

    async def frames(self, rid: str, frames: Frames) -> None:
        passed = []
        commits = last = False
        for kind, frame in frames:
            if kind is EventKind.USAGE or (kind is EventKind.FINISH and self._reply.request.api is Api.GENERATE):
                self.usage = _usage_in(frame)
            if kind is EventKind.USAGE and not self._reply.request.include_usage:
                continue
            passed.append(sse.patch_identity(frame, rid.encode(), self._public_id, self._created))
            commits = commits or kind not in _SILENT
            last = last or kind is EventKind.DONE
            if kind is EventKind.FINISH:
                live.ending()
        if not (commits or self.sent):
            self._reply.held.extend(passed)
        elif passed:
            self.sent = True
            held, self._reply.held = self._reply.held, []
            await self._reply.send(b"".join([*held, *passed]), last=last)

    async def answer(self, rid: str, body: bytes) -> None:
        self.usage = usage_of(orjson.loads(body))
        self.sent = True
        await self._reply.send_whole(sse.patch_identity(body, rid.encode(), self._public_id, self._created))

    def restart(self) -> None:
        self._reply.held.clear()


class Merger:
    """Puts the answers of several engine requests together under one identity."""

    def __init__(self, reply: Reply, units: int) -> None:
        self.reply = reply
        self.usages = merge.UsageMerger(units, reply.request.candidates)
        self.bodies: list[dict[str, Any]] = [{} for _ in range(units)]
        self.held: list[list[bytes]] = [[] for _ in range(units)]
        self._unfinished = set(range(units))

    def finished(self, choice_index: int) -> None:
        """A choice has its finish reason: with those of all nothing is left of the answer but its last words."""
        self._unfinished.discard(choice_index)
        if not self._unfinished:
            live.ending()

    async def finish(self) -> None:
        """Every unit is whole: send what belongs to all of them."""
        request, reply = self.reply.request, self.reply
        if request.stream:
            usage = self.usages.event(reply.public_id, reply.created)
            held = b"".join(frame for frames in self.held for frame in frames)
            await reply.send(
                held + (usage if usage is not None and request.include_usage else b"") + sse.DONE, last=True
            )
            await reply.end()
            return
        merged: Any
        if request.api is Api.CHAT:
            merged = merge.merge_chat(self.bodies, reply.public_id, reply.created)
        elif request.candidates > request.samples:
            merged = merge.merge_best(
                self.bodies,
                reply.public_id,
                reply.created,
                request.candidates,
                request.samples,
                with_logprobs=request.body.get("logprobs") is not None,
            )
        elif request.api is Api.COMPLETIONS:
            merged = merge.merge_completions(self.bodies, reply.public_id, reply.created, request.samples)
        else:
            merged = merge.merge_generate(self.bodies, reply.public_id)
        await reply.send_whole(orjson.dumps(merged))


class MergedSink:
    """One of several engine requests of a client's request: its choices get their place in the merged answer."""

    def __init__(self, merger: Merger, choice_index: int) -> None:
        self._merger = merger
        self._index = choice_index
        self._held = merger.held[choice_index]
        self.sent = False
        self.usage: Usage | None = None

    async def frames(self, rid: str, frames: Frames) -> None:
        reply = self._merger.reply
        passed = []
        commits = False
        for kind, frame in frames:
            if kind in (EventKind.DONE, EventKind.COMMENT):
                continue
            chunk = _parsed(frame)
            if chunk is None:
                continue  # nothing of several answers can be put together with what is no JSON object
            if (found := usage_of(chunk)) is not None:
                self.usage = found
            if reply.request.api is Api.GENERATE:
                chunk = merge.generate_chunk(chunk, self._index, reply.public_id)
            elif self._merger.usages.add(self._index, chunk):
                continue
            else:
                chunk = merge.chat_chunk(chunk, self._index, reply.public_id, reply.created)
            passed.append(b"data: " + orjson.dumps(chunk) + b"\n\n")
            commits = commits or kind not in _SILENT
            if kind is EventKind.FINISH:
                self._merger.finished(self._index)
        if not (commits or self.sent):
            self._held.extend(passed)
        elif passed:
            self.sent = True
            passed = [*self._held, *passed]
            self._held.clear()
            await reply.send(b"".join(passed))

    async def answer(self, rid: str, body: bytes) -> None:
        parsed = orjson.loads(body)
        self.usage = usage_of(parsed)
        self._merger.bodies[self._index] = parsed

    def restart(self) -> None:
        self._held.clear()


def _parsed(frame: bytes) -> dict[str, Any] | None:
    try:
        parsed = orjson.loads(data_of(frame))
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _usage_in(frame: bytes) -> Usage | None:
    parsed = _parsed(frame)
    return None if parsed is None else usage_of(parsed)
