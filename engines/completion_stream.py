"""A client's stream of `/v1/completions`, asked for with output ids that are cut from each event again. Pure.

The usual event costs no parsing: its ids and its text are found as bytes and kept. What is at a seam, and the first and
last events, are parsed.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engines.capture import Capture
from engines.client_stream import Emitted, Frames, Inexact, TextOf
from engines.completion_chunk import (
    Choice,
    choice_of,
    head_of,
    usual_parts,
    without_ids,
    without_usual_ids,
)
from engines.seam import seam_at, stops_of, why_not
from engines.seam_counts import new_usage, usage_over_seam, without_nulls
from engines.seam_text import SeamText
from engines.sse_frames import EventKind, data_of

DONE = (EventKind.DONE, b"data: [DONE]\n\n")
_DEFAULT_MAX_TOKENS = 16
_ENVELOPE = ("id", "object", "created", "model")


class CompletionStream:
    """One prompt, one sample of `/v1/completions`. `body` is the client's; it is shared, not changed."""

    path = "/v1/completions"

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._shows_ids = bool(body.get("return_token_ids"))
        self.skip_special_tokens = body.get("skip_special_tokens") is not False
        self.restart()

    def restart(self) -> None:
        self.finished = False
        self.ended_here = False
        self._capture = Capture()
        self._prompt_ids: array[int] | None = None
        self._seam: SeamText | None = None
        self._carried_tokens = 0
        self._head = b""
        self._envelope: dict[str, Any] = {}
        self._told: set[EventKind] = set()

    # ---- what the engine is asked for --------------------------------------------------------------------------------

    def call_body(self, context_tokens: int | None) -> Mapping[str, Any]:
        body = {**self._body, "return_token_ids": True}
        if self._prompt_ids is None:
            return body
        carried = self._carried_tokens
        body |= {"prompt": [*self._prompt_ids, *self._capture.base_ids], "echo": False}
        body.pop("suffix", None)
        body["max_tokens"] = max(1, self._limit_tokens(context_tokens) - carried)
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - carried)
        return body

    def _limit_tokens(self, context_tokens: int | None) -> int:
        """How many output tokens the stream may have in all."""
        limit = self._body.get("max_tokens")
        return _DEFAULT_MAX_TOKENS if limit is None else int(limit)

    # ---- what the client sees ----------------------------------------------------------------------------------------

    def frames(self, frames: Frames) -> Frames:
        out: list[tuple[EventKind, bytes]] = []
        for kind, frame in frames:
            if self.ended_here:
                break
            if kind is EventKind.CONTENT and self._seam is None and (usual := self._usual(frame)) is not None:
                out.append((kind, usual))
            else:
                out += self._unusual(kind, frame)
        return out

    def _usual(self, frame: bytes) -> bytes | None:
        """The client's event for one that is like most of its attempt; None if it is another."""
        if (parts := usual_parts(frame, self._head)) is None:
            return None
        text_end, ids_begin, ids_end = parts
        self._capture.add(frame[ids_begin:ids_end], frame[len(self._head) : text_end])
        return frame if self._shows_ids else without_usual_ids(frame, ids_begin, ids_end)

    def _unusual(self, kind: EventKind, frame: bytes) -> Frames:
        if kind is EventKind.DONE:
            self._told.add(kind)
            return [(kind, frame)]
        event = _object(frame) if kind not in (EventKind.COMMENT, EventKind.ERROR, EventKind.ABORT) else None
        if event is None:
            return [(kind, frame)]
        if (choice := choice_of(event)) is not None:
            return self._choice(kind, frame, choice)
        if isinstance(event.get("usage"), dict):
            self._told.add(EventKind.USAGE)
            return [self._usage(frame, event)]
        return [(kind, frame)]

    def _choice(self, kind: EventKind, frame: bytes, choice: Choice) -> Frames:
        self._head = self._head or head_of(frame)
        self._envelope = {name: choice.event.get(name) for name in _ENVELOPE}
        text, finish = choice.text, choice.finish
        matched = choice.choice.get("matched_stop")
        if self._seam is not None:
            piece = self._seam.add(choice.ids, text, finish is not None, matched)
            text = piece.text
            if piece.stop is not None:
                self.ended_here = finish is None
                finish, matched = "stop", piece.stop
                choice = choice.through(piece.kept_ids)
            if self._seam.done:
                self._seam = None
            choice.choice.update(text=text, finish_reason=finish, matched_stop=matched)
        self._capture.add_parsed(list(choice.ids), text)
        self.finished = self.finished or finish is not None
        written = self._write(kind, frame, choice, changed=self._prompt_ids is not None)
        return [*written, *self._ending(len(self._prompt_ids or ()))] if self.ended_here else written

    def _write(self, kind: EventKind, frame: bytes, choice: Choice, *, changed: bool) -> Frames:
        """The client's events for one of the engine's; `changed`: its bytes are no longer what is to be said."""
        if not changed:
            return [(kind, frame if self._shows_ids else without_ids(frame))]
        if self._shows_ids:
            choice.choice["token_ids"] = list(choice.ids)
        event = self._counted(choice.event)
        output = EventKind.CONTENT if choice.text else EventKind.ROLE_ONLY
        return [(EventKind.FINISH if self.finished else output, frame_of(event))]

    def _usage(self, frame: bytes, event: Mapping[str, Any]) -> tuple[EventKind, bytes]:
        return EventKind.USAGE, frame if self._prompt_ids is None else frame_of(self._counted(event))

    def _counted(self, event: Mapping[str, Any]) -> dict[str, Any]:
        usage = event.get("usage")
        if not (isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int) and self._carried_tokens):
            return dict(event)
        return {**event, "usage": usage_over_seam(usage, self._carried_tokens)}

    # ---- over the seam -----------------------------------------------------------------------------------------------

    def emitted(self) -> Emitted:
        text = self._capture.text()
        if self._prompt_ids is None:
            text = text.removeprefix(self._echoed())
        return Emitted(self._capture.ids(), text, self._ids_shown, self.finished)

    @property
    def _ids_shown(self) -> bool:
        options = self._body.get("stream_options")
        counted = isinstance(options, dict) and bool(options.get("continuous_usage_stats"))
        return self._shows_ids or counted or self._body.get("logprobs") is not None

    def _echoed(self) -> str:
        prompt = self._body.get("prompt")
        return prompt if self._body.get("echo") and isinstance(prompt, str) else ""

    def go_on(self, prompt_ids: Sequence[int], text_of: TextOf | None) -> int:
        if (why := why_not(self._body)) or (why := self._why_not_echo()):
            raise Inexact(why)
        emitted = self.emitted()
        if emitted.finished:
            raise Inexact("it has its finish reason")
        seam = seam_at(prompt_ids, emitted, self._capture, stops_of(self._body), text_of)
        if self._body.get("max_tokens") is not None and seam.kept_tokens >= self._body["max_tokens"]:
            raise Inexact("it has all the tokens that it may have")
        self._capture = Capture(emitted.ids[: seam.kept_tokens], emitted.text, seam.whole)
        self._prompt_ids = array("I", prompt_ids)
        self._seam = seam.text
        self._carried_tokens = seam.kept_tokens
        self._head = b""
        return seam.kept_tokens

    def _why_not_echo(self) -> str:
        if not self._body.get("echo"):
            return ""
        if not isinstance(self._body.get("prompt"), str):
            return "the engine's own text of the prompt ids is not known"
        return "the echo has logprobs of the prompt" if self._body.get("logprobs") is not None else ""

    def closing(self, prompt_tokens: int | None) -> Frames:
        return self._ending(prompt_tokens)

    def _ending(self, prompt_tokens: int | None) -> Frames:
        missing: list[tuple[EventKind, bytes]] = []
        if EventKind.USAGE not in self._told and prompt_tokens is not None:
            missing.append(self._new_usage(new_usage(prompt_tokens, len(self._capture.ids()))))
        if EventKind.DONE not in self._told:
            missing.append(DONE)
        self._told |= {EventKind.USAGE, EventKind.DONE}
        return missing

    def _new_usage(self, usage: Mapping[str, Any]) -> tuple[EventKind, bytes]:
        return EventKind.USAGE, frame_of({**self._envelope, "choices": [], "usage": without_nulls(usage)})


def frame_of(event: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _object(frame: bytes) -> dict[str, Any] | None:
    try:
        event = orjson.loads(data_of(frame))
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None
