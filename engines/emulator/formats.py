"""How each API writes an answer: whole bodies, and the events of a stream. Pure but for the moments it is given.

One format object per HTTP request. The hot path is `delta`: one token of a stream, built from bytes prepared once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from engines.emulator.core import End, EndKind
from engines.emulator.live import Live
from engines.emulator.parse import Request
from engines.emulator.tokens import decode
from engines.emulator.wire import DONE, sse, stream_error
from engines.emulator.wire_logprobs import chat_logprobs, completion_logprobs
from engines.token_rule import unpack
from engines.types import Role


@dataclass(frozen=True, slots=True)
class Answering:
    """What the bodies of one HTTP request share; `created_s` is Unix time."""

    request: Request
    role: Role
    created_s: float
    cache_report: bool
    wall_offset_s: float
    incremental: bool = False
    """Whether events of `/generate` hold only what is new."""


class StreamFormat(Protocol):
    """The events of one streamed request. Each method returns whole SSE events, or nothing."""

    def first(self, live: Live) -> bytes:
        """What precedes the first token of one choice."""

    def delta(self, live: Live) -> bytes:
        """The tokens of one choice since the last call."""

    def end(self, live: Live, end: End) -> bytes:
        """The end of one choice."""

    def tail(self, lives: list[Live]) -> bytes:
        """The end of the stream."""


def finish_reason(live: Live, end: End) -> str:
    """OpenAI's word for the end of a choice that did not fail."""
    if end.kind is EndKind.ABORTED:
        return "abort"
    finish = live.output.finish
    return finish.kind if finish is not None else "length"


def matched_stop(live: Live, end: End, role: Role) -> int | str | None:
    """What stopped the choice; a prefill always reports its one token as a length."""
    finish = live.output.finish
    return finish.matched if finish is not None and end.kind is EndKind.FINISHED and role is not Role.PREFILL else None


def usage(answering: Answering, lives: list[Live]) -> dict[str, Any]:
    """The usage object over all choices; a prompt counts once however many samples it has."""
    samples = lives[0].item.sampling.samples
    prompt_tokens = sum(live.job.prompt_tokens for live in lives[::samples])
    completion_tokens = sum(len(live.output.ids) for live in lives)
    cached = {"cached_tokens": sum(live.job.cached_tokens for live in lives[::samples])}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": cached if answering.cache_report else None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def weight_versions(live: Live) -> list[dict[str, Any]]:
    """Which weights wrote which tokens: always the same ones."""
    return [{"version": "default", "start": 0, "end": len(live.output.ids)}]


def _finish_word(answering: Answering, live: Live, end: End) -> str:
    if answering.role is Role.PREFILL and end.kind is EndKind.FINISHED:
        return "length"
    return finish_reason(live, end)


def _envelope(answering: Answering, live_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": live_id,
        "object": kind,
        "created": int(answering.created_s),
        "model": answering.request.model,
    }


def _metadata(lives: list[Live]) -> dict[str, Any]:
    return {"weight_version": "default", "weight_versions": weight_versions(lives[0])}


def chat_body(answering: Answering, lives: list[Live]) -> dict[str, Any]:
    """A whole chat completion."""
    choices = []
    for live in lives:
        end = live.end or End(EndKind.FINISHED)
        choice: dict[str, Any] = {
            "index": live.index,
            "message": {"role": "assistant", "content": live.output.text, "reasoning_content": None},
            "logprobs": chat_logprobs(live, 0) if live.item.sampling.logprobs else None,
            "finish_reason": _finish_word(answering, live, end),
            "matched_stop": matched_stop(live, end, answering.role),
        }
        if answering.request.return_prompt_token_ids:
            choice["prompt_token_ids"] = unpack(live.item.prompt)
        if answering.request.return_token_ids:
            choice["response_token_ids"] = live.output.ids
        choices.append(choice)
    body = _envelope(answering, lives[0].rid, "chat.completion")
    return {**body, "choices": choices, "usage": usage(answering, lives), "metadata": _metadata(lives)}


def completion_body(answering: Answering, lives: list[Live]) -> dict[str, Any]:
    """A whole text completion."""
    choices = []
    for live in lives:
        end = live.end or End(EndKind.FINISHED)
        choice: dict[str, Any] = {
            "index": live.index,
            "text": _echo(answering, live) + live.output.text,
            "logprobs": completion_logprobs(live, 0, _knows_prompt(answering)) if live.item.sampling.logprobs else None,
            "finish_reason": _finish_word(answering, live, end),
            "matched_stop": matched_stop(live, end, answering.role),
        }
        if answering.request.return_token_ids:
            choice["prompt_token_ids"] = unpack(live.item.prompt)
            choice["token_ids"] = live.output.ids
        choices.append(choice)
    body = _envelope(answering, lives[0].rid, "text_completion")
    return {**body, "choices": choices, "usage": usage(answering, lives), "metadata": _metadata(lives)}


def _echo(answering: Answering, live: Live) -> str:
    if not answering.request.echo:
        return ""
    return live.item.text or decode(unpack(live.item.prompt))


def _knows_prompt(answering: Answering) -> bool:
    """A decode has not computed the prompt, and knows no logprobs of it."""
    return answering.role is not Role.DECODE


_AFTER_CHAT_TEXT = b'},"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n'


@dataclass(slots=True)
class _Cursor:
    """How much of one choice was written."""

    tokens: int = 0
    prefix: bytes = b""


@dataclass(slots=True)
class ChatStream:
    """A streamed chat completion."""

    answering: Answering
    rid: str
    _cursors: dict[int, _Cursor] = field(default_factory=dict)

    def first(self, live: Live) -> bytes:
        cursor = self._cursors[live.index] = _Cursor(prefix=self._prefix(live))
        return cursor.prefix + b',"role":"assistant","content":""' + _AFTER_CHAT_TEXT

    def delta(self, live: Live) -> bytes:
        cursor = self._cursors[live.index]
        text = live.output.take_delta()
        start, cursor.tokens = cursor.tokens, len(live.output.ids)
        if not text:
            return b""
        if live.item.sampling.logprobs or self.answering.request.continuous_usage:
            return self._slow_delta(live, text, start)
        return b'%b,"content":%b%b' % (cursor.prefix, encode_basestring(text).encode(), _AFTER_CHAT_TEXT)

    def end(self, live: Live, end: End) -> bytes:
        if end.kind is EndKind.FAILED:
            return stream_error(end.message, end.status or 500)
        body = _envelope(self.answering, self.rid, "chat.completion.chunk")
        choice = {
            "index": live.index,
            "delta": {"reasoning_content": None},
            "logprobs": None,
            "finish_reason": _finish_word(self.answering, live, end),
            "matched_stop": matched_stop(live, end, self.answering.role),
        }
        return sse({**body, "choices": [choice]})

    def tail(self, lives: list[Live]) -> bytes:
        if not self.answering.request.include_usage:
            return DONE
        body = _envelope(self.answering, self.rid, "chat.completion.chunk")
        return sse({**body, "choices": [], "usage": usage(self.answering, lives)}) + DONE

    def _prefix(self, live: Live) -> bytes:
        body = sse(_envelope(self.answering, self.rid, "chat.completion.chunk"))[:-3]
        return body + b',"choices":[{"index":%d,"delta":{"reasoning_content":null' % live.index

    def _slow_delta(self, live: Live, text: str, start: int) -> bytes:
        body = _envelope(self.answering, self.rid, "chat.completion.chunk")
        choice = {
            "index": live.index,
            "delta": {"reasoning_content": None, "content": text},
            "logprobs": chat_logprobs(live, start) if live.item.sampling.logprobs else None,
            "finish_reason": None,
            "matched_stop": None,
        }
        extra = {"usage": usage(self.answering, [live])} if self.answering.request.continuous_usage else {}
        return sse({**body, "choices": [choice], **extra})


@dataclass(slots=True)
class CompletionStream:
    """A streamed text completion: the finish reason comes with the last text."""

    answering: Answering
    rid: str
    _cursors: dict[int, _Cursor] = field(default_factory=dict)

    def first(self, live: Live) -> bytes:
        body = sse(_envelope(self.answering, self.rid, "text_completion"))[:-3]
        prefix = body + b',"choices":[{"index":%d,"text":' % live.index
        self._cursors[live.index] = _Cursor(prefix=prefix)
        return b""

    def delta(self, live: Live) -> bytes:
        if live.output.finish is not None:
            return b""
        cursor = self._cursors[live.index]
        request = self.answering.request
        slow = live.item.sampling.logprobs or request.return_token_ids or request.continuous_usage
        if slow or (request.echo and not cursor.tokens):
            return self._chunk(live, live.output.take_delta(), None)
        text = encode_basestring(live.output.take_delta()).encode()
        cursor.tokens = len(live.output.ids)
        return b'%b%b,"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}\n\n' % (
            cursor.prefix,
            text,
        )

    def end(self, live: Live, end: End) -> bytes:
        if end.kind is EndKind.FAILED:
            return stream_error(end.message, end.status or 500)
        return self._chunk(live, live.output.take_delta(), end)

    def tail(self, lives: list[Live]) -> bytes:
        if not self.answering.request.include_usage:
            return DONE
        body = _envelope(self.answering, self.rid, "text_completion")
        told = {name: value for name, value in usage(self.answering, lives).items() if value is not None}
        return sse({**body, "choices": [], "usage": told}) + DONE

    def _chunk(self, live: Live, text: str, end: End | None) -> bytes:
        cursor = self._cursors.setdefault(live.index, _Cursor())
        start, cursor.tokens = cursor.tokens, len(live.output.ids)
        with_prompt = start == 0 and _knows_prompt(self.answering)
        choice: dict[str, Any] = {
            "index": live.index,
            "text": (_echo(self.answering, live) if start == 0 else "") + text,
            "logprobs": completion_logprobs(live, start, with_prompt) if live.item.sampling.logprobs else None,
            "finish_reason": _finish_word(self.answering, live, end) if end else None,
            "matched_stop": matched_stop(live, end, self.answering.role) if end else None,
        }
        if self.answering.request.return_token_ids:
            choice["token_ids"] = live.output.ids[start:]
            if start == 0:
                choice["prompt_token_ids"] = unpack(live.item.prompt)
        body = _envelope(self.answering, self.rid, "text_completion")
        told = usage(self.answering, [live]) | {"prompt_tokens_details": None}
        return sse({**body, "choices": [choice], "usage": told if self.answering.request.continuous_usage else None})
