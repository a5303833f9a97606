"""Server-sent events as raw frames: where one ends, what it carries, without decoding the usual one.

Pure. A frame keeps its bytes, terminator included, so that it can be relayed untouched. The kinds are those of SGLang's
OpenAI streams and of its `/generate` stream; vLLM's OpenAI streams read the same.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

import orjson

from engines.errors import UpstreamError
from engines.types import FailureKind

FRAME_LIMIT_BYTES = 16 * 1024 * 1024
"""More than any event seen: 128 K tokens of cumulative ids and text are about 2 MiB."""

# An empty line. CR alone followed by LF would need a look-ahead that holds frames back; the LF then opens the next
# frame, where it is an empty line of no effect.
_END = re.compile(rb"\n\n|\n\r\n|\r\r")
_LONGEST_END_BYTES = 3
_LINE_END = re.compile(rb"\r\n|\n|\r")

_QUOTE = ord('"')
_REASON = b'finish_reason":'
_CONTENT = b'content":"'
_TEXT = b'text":"'


class EventKind(StrEnum):
    """What an event means for the request. One of several choices decides: abort, then finish, then content."""

    COMMENT = "comment"
    """No data at all: a keep-alive."""
    ROLE_ONLY = "role_only"
    """The start of an answer, without any output."""
    CONTENT = "content"
    """Output; also whatever is not understood, which is relayed like output."""
    FINISH = "finish"
    """A finish reason other than abort, possibly with the last output."""
    USAGE = "usage"
    """After the finish: no choices, only usage or other extras."""
    ABORT = "abort"
    """Finish reason abort: a failure under a status of 200."""
    ERROR = "error"
    """An error object instead of an answer."""
    DONE = "done"
    """The end of the stream, `[DONE]`."""


class FrameDecoder:
    """Cuts a byte stream into frames: the same frames however the bytes come split."""

    __slots__ = ("_carriage_returns", "_limit_bytes", "_pending")

    def __init__(self, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pending = bytearray()
        self._carriage_returns = False

    @property
    def pending(self) -> bytes:
        """What has come of an event that is not complete; not empty at the end of the stream means it was cut."""
        return bytes(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises UpstreamError (GARBLED) at an event over the limit."""
        self._carriage_returns = self._carriage_returns or b"\r" in data
        buffer: bytes | bytearray = data
        scan_from = 0
        if self._pending:
            scan_from = max(0, len(self._pending) - _LONGEST_END_BYTES + 1)
            self._pending += data
            buffer = self._pending
        frames: list[bytes] = []
        begin = 0
        while (end := self._end_after(buffer, scan_from)) >= 0:
            frames.append(bytes(buffer[begin:end]))
            self._check(end - begin)
            begin = scan_from = end
        self._keep(buffer, begin)
        return frames

    def _end_after(self, buffer: bytes | bytearray, scan_from: int) -> int:
        if not self._carriage_returns:
            at = buffer.find(b"\n\n", scan_from)
            return at + 2 if at >= 0 else -1
        match = _END.search(buffer, scan_from)
        return match.end() if match else -1

    def _keep(self, buffer: bytes | bytearray, begin: int) -> None:
        self._check(len(buffer) - begin)
        if buffer is self._pending:
            del self._pending[:begin]
        elif begin < len(buffer):
            self._pending += memoryview(buffer)[begin:]

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise UpstreamError(FailureKind.GARBLED, f"an event of more than {self._limit_bytes} bytes")


def data_of(frame: bytes) -> bytes:
    """The data of an event: its `data:` lines joined by newlines, empty when it has none."""
    if frame.startswith(b"data: ") and frame.find(b"\n") == len(frame) - 2 and b"\r" not in frame:
        return frame[6:-2]
    return b"\n".join(_data_lines(frame))


def is_comment(frame: bytes) -> bool:
    """Whether an event has no data line, and hence means nothing to a client."""
    return not frame.startswith(b"data:") and not _data_lines(frame)


def event_kind(frame: bytes) -> EventKind:
    """What an event means; the usual content chunk is recognised without parsing, in about a microsecond.

    It has one finish reason, null, and text that is not empty. A quote inside a JSON string is escaped, so the patterns
    match the ends of keys and never generated text; where a completion's `top_logprobs` have tokens for keys, the
    values are numbers.
    """
    at = frame.rfind(_REASON)
    if (
        at > 0
        and frame.startswith(b"null", at + len(_REASON))
        and frame.startswith(b"data: {")
        and frame.find(_REASON, 0, at) < 0
        and _has_text(frame, at)
    ):
        return EventKind.CONTENT
    return parsed_kind(frame)


def parsed_kind(frame: bytes) -> EventKind:
    """What `event_kind` says, always by parsing the whole event: its definition."""
    if is_comment(frame):
        return EventKind.COMMENT
    data = data_of(frame).strip()
    if data == b"[DONE]":
        return EventKind.DONE
    event = _json(data)
    if not isinstance(event, dict):
        return EventKind.CONTENT
    if isinstance(choices := event.get("choices"), list):
        return _kind_of_choices([choice for choice in choices if isinstance(choice, dict)])
    if isinstance(meta := event.get("meta_info"), dict):
        return _kind(_is_abort(meta), meta.get("finish_reason"), event.get("output_ids") or event.get("text"))
    if "error" in event or event.get("object") == "error":
        return EventKind.ERROR
    return EventKind.CONTENT


def _has_text(frame: bytes, end: int) -> bool:
    at = frame.find(_CONTENT, 0, end)
    if at >= 0:
        return frame[at + len(_CONTENT)] != _QUOTE
    at = frame.find(_TEXT, 0, end)
    return at >= 0 and frame[at + len(_TEXT)] != _QUOTE


def _kind_of_choices(choices: list[dict[str, Any]]) -> EventKind:
    if not choices:
        return EventKind.USAGE
    return _kind(
        any(_is_abort(choice) for choice in choices),
        any(choice.get("finish_reason") is not None for choice in choices) or None,
        any(_has_output(choice) for choice in choices),
    )


def _kind(abort: bool, reason: object, output: object) -> EventKind:
    if abort:
        return EventKind.ABORT
    if reason is not None:
        return EventKind.FINISH
    return EventKind.CONTENT if output else EventKind.ROLE_ONLY


def _is_abort(answer: dict[str, Any]) -> bool:
    reason = answer.get("finish_reason")
    return reason == "abort" or (isinstance(reason, dict) and reason.get("type") == "abort")


def _has_output(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for key, value in delta.items() if key != "role")
    return bool(choice.get("text"))


def _data_lines(frame: bytes) -> list[bytes]:
    lines = (line.partition(b":") for line in _LINE_END.split(frame))
    return [value.removeprefix(b" ") for field, _, value in lines if field == b"data"]


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)  # takes the lone surrogates and NaN that Python servers write
    except ValueError:
        return None
