"""How one engine request of a client runs, over all its attempts: what its engine is asked, what its client is told.

Whether a broken stream could go on, and how, is settled before it begins: what must be kept for that is kept from its
first token, and a chat is asked for with token ids.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from engines.client_stream import ClientStream, Emitted, Frames, Inexact, TextOf
from engines.plain_stream import PlainStream
from engines.seam import candidates
from engines.sse_frames import EventKind
from failover.recovery import Mode
from failover.resume_text import Impossible, body_after_text
from gateway import routes
from gateway.context import Gateway
from gateway.decider import Decision
from gateway.openai_api import Api, Unit
from gateway.prompt import Prompt, continued, request_view
from gateway.replaying import ReplayFilter
from gateway.reply import UnitSink
from gateway.story import Story
from routing.prefix import BlockKind
from routing.types import RequestView

KEEP_ALIVE_S = 5.0
"""While a replay catches up, a comment tells its client so often that the stream lives."""


class StreamOver(Exception):
    """The client's stream has come to its whole end before that of its engine."""


class Course:
    """One engine request under way; the sink of its attempts, of which one lives at a time.

    `plan` is what happens if the stream breaks. `stream` is None where the client waits for a whole answer.
    `emitted_tokens`: so many ids at the end of `prompt` are output.
    """

    def __init__(self, gw: Gateway, story: Story, unit: Unit, sink: UnitSink, prompt: Prompt) -> None:
        self._gw, self._story = gw, story
        self.unit, self.sink, self.prompt = unit, sink, prompt
        self._first_prompt = prompt
        self.stream: ClientStream | None = None
        self.why_plain, self.plan = routes.plan(gw, story, unit, prompt)
        if story.request.stream:
            self.stream = routes.open_stream(gw, story, unit, prompt, self.why_plain, self.plan.mode)
        self._replay: ReplayFilter | None = None
        self.emitted_tokens = 0
        self._shown = self._shown_before = 0
        self._told_s = 0.0

    # ---- what the engine is asked --------------------------------------------------------------------------------

    def view(self) -> RequestView:
        """The next attempt, as routing sees it."""
        gw, story = self._gw, self._story
        times = (story.arrival_s, story.deadline_s)
        view = request_view(gw, story.request, self.unit, story.model, self.prompt, *times, self.emitted_tokens)
        return replace(view, goes_on=self.sink.sent)

    @property
    def path(self) -> str:
        return self.stream.path if self.stream is not None else self._story.request.api.value

    def body(self, decision: Decision) -> Mapping[str, Any]:
        """What the attempt on this pair asks for, without routing fields."""
        if self.stream is None:
            return self.unit.body
        facts = decision.decode.facts
        return self.stream.call_body(facts.context_tokens if facts is not None else None)

    # ---- what the client is told ---------------------------------------------------------------------------------

    async def frames(self, rid: str, frames: Frames) -> None:
        """Pass on what the client is to see of these events. Raises StreamOver; GatewayError where a replay errs."""
        assert self.stream is not None
        if self._replay is not None:
            frames = self._replay.frames(frames)
        shown = self.stream.frames(frames)
        if not shown and self._replay is not None:
            await self._keep_alive()
        if shown:
            self._shown += 1
            await self.sink.frames(rid, shown)
        if self.stream.ended_here:
            raise StreamOver

    async def _keep_alive(self) -> None:
        """What is generated again is not sent again: a client may take that for a stream that hangs."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._told_s + KEEP_ALIVE_S:
            self._told_s = now_s
            await self._story.reply.comment("pdgate replays")

    async def answer(self, rid: str, body: bytes) -> None:
        await self.sink.answer(rid, body)

    @property
    def lacks_its_end_only(self) -> bool:
        """The client has its finish reason, and the rest can be written here. A replay may yet tell its usage."""
        if self.stream is None or not self.stream.finished:
            return False
        if self.plan.mode is Mode.REPLAY and isinstance(self.stream, PlainStream):
            return self.stream.usage_told or not self._story.request.include_usage
        return True

    def restart(self) -> None:
        """The client has nothing yet: what the failed attempt had held back is thrown away."""
        self.sink.restart()
        if self.stream is not None:
            self.stream.restart()

    def progressed(self) -> bool:
        """Whether the client got something since this was asked last."""
        before, self._shown_before = self._shown_before, self._shown
        return self.sink.sent and self._shown > before

    # ---- after it broke ------------------------------------------------------------------------------------------

    async def close(self, rid: str) -> None:
        """Write what a finished stream lacks: usage, where it is known, and the terminator."""
        assert self.stream is not None
        try:
            prompt_tokens = len(await self._prompt_ids())
        except Inexact:
            prompt_tokens = None
        await self.sink.frames(rid, self.stream.closing(prompt_tokens))

    async def resume(self) -> None:
        """The next attempt goes on after the output that the client has. Raises Inexact."""
        assert self.stream is not None
        gw, story = self._gw, self._story
        prompt_ids = await self._prompt_ids()
        emitted = self.stream.emitted()
        self.emitted_tokens = await self._seam(self.stream, prompt_ids, emitted)
        ids = array("I", [*prompt_ids, *emitted.ids[: self.emitted_tokens]])
        self.prompt = continued(gw, story.request.api, self.unit, story.model, self._first_prompt, ids)

    def replay(self) -> None:
        """The next attempt begins anew; the client gets what it lacks of it. Raises Inexact."""
        assert isinstance(self.stream, PlainStream)
        incremental = routes.streams_increments(self._gw, self._story.model)
        sent = [frame for kind, frame in self.stream.kept() if kind not in (EventKind.COMMENT, EventKind.DONE)]
        self._replay = ReplayFilter(self.path, sent, incremental=incremental)
        self._told_s = asyncio.get_running_loop().time()

    def resume_text(self) -> None:
        """The next attempt continues the text that the client has. Raises Inexact."""
        assert isinstance(self.stream, PlainStream)
        text, tokens = self.stream.text_so_far()
        try:
            body = body_after_text(self.path, self.unit.body, text, tokens)
        except Impossible as why:
            raise Inexact(str(why)) from why
        self.stream.go_on_with(body)

    async def _seam(self, stream: ClientStream, prompt_ids: array[int], emitted: Emitted) -> int:
        """By the tokenizer that is here; else without any, where that is provable; else by what an engine decodes."""
        if (text_of := self._text_of()) is not None:
            return stream.go_on(prompt_ids, text_of)
        try:
            return stream.go_on(prompt_ids, None)
        except Inexact:
            lists, skip = candidates(prompt_ids, emitted), stream.skip_special_tokens
            told = await self._gw.engine_tokens.text_of(self._story.model, lists, skip_special_tokens=skip)
        return stream.go_on(prompt_ids, told)

    async def _prompt_ids(self) -> array[int]:
        """The ids of the client's prompt: known, or asked of an engine. Raises Inexact."""
        if (ids := self._first_prompt.ids) is None:
            text = self.unit.body.get("prompt" if self._story.request.api is Api.COMPLETIONS else "text")
            if not isinstance(text, str):
                raise Inexact("the token ids of its prompt are not known")
            ids = array("I", await self._gw.engine_tokens.of_text(self._story.model, text))
        return ids

    def _text_of(self) -> TextOf | None:
        """How ids read, by the tokenizer that is here, where engines agree with it."""
        tokenizer = self._gw.tokenizer
        if tokenizer is None or self._gw.joins.of(self._story.model).kind is not BlockKind.IDS:
            return None
        assert self.stream is not None
        return partial(tokenizer.text_of, skip_special_tokens=self.stream.skip_special_tokens)

    def shown(self) -> dict[str, Any]:
        """What `explain` shows of it, for the attempt that begins."""
        return {
            "engine_route": self.path,
            "plain_chat_reason": self.why_plain or None,
            "on_failure": self.plan.mode.value,
            "on_failure_reason": self.plan.reason,
            "emitted_tokens": self.emitted_tokens,
        }
