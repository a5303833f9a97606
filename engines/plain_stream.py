"""A client's stream that is relayed as it is: its ids are not known, but what the client has may be kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engines.client_stream import Emitted, Frames, Inexact, TextOf
from engines.sse_frames import EventKind, data_of

KEPT_BYTES = 4 * 1024 * 1024
"""What a stream may be kept in: about 16,000 events of chat."""


class PlainStream:
    """Any route. `why`: why its output ids are not known, in words for an operator. `keep`: for a replay, or for what
    goes on by text; without it nothing is kept. `repeats`: each event repeats all output, so the last is enough."""

    def __init__(
        self, path: str, body: Mapping[str, Any], why: str, *, keep: bool = False, repeats: bool = False
    ) -> None:
        self.path = path
        self.why = why
        self._first_body = self._body = body
        self._keep, self._repeats = keep, repeats
        self.skip_special_tokens = True
        self.ended_here = False
        self.restart()

    def restart(self) -> None:
        self.finished = False
        self._body = self._first_body
        self._kept: list[tuple[EventKind, bytes]] = []
        self._kept_bytes = 0
        self._told: set[EventKind] = set()
        self._goes_on = False

    def call_body(self, context_tokens: int | None) -> Mapping[str, Any]:
        return self._body

    def frames(self, frames: Frames) -> Frames:
        if self._goes_on:
            frames = [each for each in frames if each[0] is not EventKind.ROLE_ONLY]
        if self._repeats and frames:
            self._kept.clear()
            self._kept_bytes = 0
        for kind, frame in frames:
            self._kept_bytes += len(frame)
            if kind in (EventKind.FINISH, EventKind.USAGE, EventKind.DONE):
                self._told.add(kind)
                self.finished = True
        if self._keep and self._kept_bytes <= KEPT_BYTES:
            self._kept.extend(frames)
        else:
            self._kept.clear()
        return frames

    @property
    def usage_told(self) -> bool:
        """The client has a usage event."""
        return EventKind.USAGE in self._told

    def kept(self) -> Frames:
        """The events that the client has, as they came. Raises Inexact where they were not kept."""
        if not self._keep or self._kept_bytes > KEPT_BYTES:
            raise Inexact(f"what its client has is more than {KEPT_BYTES} bytes" if self._keep else self.why)
        return self._kept

    def text_so_far(self) -> tuple[str, int]:
        """The text that the client has, and in how many events it came: about its tokens. Raises Inexact."""
        texts = [_text(frame) for kind, frame in self.kept() if kind in (EventKind.CONTENT, EventKind.FINISH)]
        return "".join(texts), sum(map(bool, texts))

    def go_on_with(self, body: Mapping[str, Any]) -> None:
        """The next attempt asks for what follows the text so far."""
        self._body, self._goes_on = body, True

    def emitted(self) -> Emitted:
        raise Inexact(self.why)

    def go_on(self, prompt_ids: Sequence[int], text_of: TextOf | None) -> int:
        raise Inexact(self.why)

    def closing(self, prompt_tokens: int | None) -> Frames:
        """The terminator; how many tokens it has is not known."""
        if EventKind.DONE in self._told:
            return []
        self._told.add(EventKind.DONE)
        return [(EventKind.DONE, b"data: [DONE]\n\n")]


def _text(frame: bytes) -> str:
    """What one event of an OpenAI stream says; Inexact for one that says anything but text."""
    try:
        event = orjson.loads(data_of(frame))
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta")
    except (orjson.JSONDecodeError, AttributeError, LookupError):
        raise Inexact("an event of it cannot be read") from None
    if isinstance(delta, dict) and (delta.get("tool_calls") or delta.get("reasoning_content")):
        raise Inexact("it has more than text")
    return str((delta.get("content") if isinstance(delta, dict) else choices[0].get("text")) or "")
