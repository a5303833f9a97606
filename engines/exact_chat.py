"""A client's chat stream, asked for as a completion of token ids: so its output ids are known. Pure.

The engine's chat streams never tell ids. Here the engine's completion events are written as the chat events that the
same engine would have sent, byte for byte but for id and time (`build_sse_content` and `_generate_chat_stream` of
SGLang). The usual event is a splice of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from engines.client_stream import Frames, Inexact
from engines.completion_chunk import UNSAID, Choice, usual_parts
from engines.completion_stream import CompletionStream, frame_of
from engines.exact_chat_rules import completion_body
from engines.seam_counts import new_usage
from engines.seam_text import REPLACEMENT
from engines.sse_frames import EventKind

_MARGIN_TOKENS = 2
"""A scheduler limits output to `max_req_len - prompt - 1`, and `max_req_len` is one less than the context."""

_BEFORE_CONTENT = b',"content":'
_AFTER_DELTA = b"}," + UNSAID + b"}]"
_USUAL_AFTER = b'"' + _AFTER_DELTA + b"}\n\n"
_EMPTY_USAGE = new_usage(0, 0)


class ExactChatStream(CompletionStream):
    """One sample of `/v1/chat/completions`, of a body for which `exact_chat_rules.why_not` has no objection.

    `sampling` are the parameters that the engine applies where the body names none (`sampling_defaults`). `token_text`
    is the text of one token alone, special ones shown: needed for logprobs only.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        self._chat_prompt_tokens = len(prompt_ids)
        self._token_text = token_text
        super().__init__(completion_body(body, prompt_ids, sampling))

    def restart(self) -> None:
        super().restart()
        self._role_told = False
        self._before_text = b""

    def call_body(self, context_tokens: int | None) -> Mapping[str, Any]:
        body = dict(super().call_body(context_tokens))
        body.setdefault("max_tokens", max(1, self._limit_tokens(context_tokens)))
        return body

    def _limit_tokens(self, context_tokens: int | None) -> int:
        if (limit := self._body.get("max_tokens")) is not None:
            return int(limit)
        if context_tokens is None:
            raise Inexact("the room of the engine is not known, which limits the answer")
        return context_tokens - self._chat_prompt_tokens - _MARGIN_TOKENS

    def _usual(self, frame: bytes) -> bytes | None:
        if (parts := usual_parts(frame, self._head)) is None:
            return None
        text_end, ids_begin, ids_end = parts
        text = frame[len(self._head) : text_end]
        self._capture.add(frame[ids_begin:ids_end], text)
        return self._before_text + text + _USUAL_AFTER

    def _write(self, kind: EventKind, frame: bytes, choice: Choice, *, changed: bool) -> Frames:
        self._envelope["object"] = "chat.completion.chunk"
        start = frame_of(self._envelope)[:-3] + b',"choices":[{"index":0,"delta":{"reasoning_content":null'
        self._before_text = start + _BEFORE_CONTENT + b'"'
        written: list[tuple[EventKind, bytes]] = []
        if not self._role_told:
            self._role_told = True
            written.append((EventKind.ROLE_ONLY, start + b',"role":"assistant","content":' + b'"' + _USUAL_AFTER))
        if choice.text:
            content = start + _BEFORE_CONTENT + orjson.dumps(choice.text) + self._after_delta(choice)
            written.append((EventKind.CONTENT, content + self._running_usage(choice.event) + b"}\n\n"))
        if self.finished:
            said = (choice.choice["finish_reason"], choice.choice.get("matched_stop"))
            finish = b'},"logprobs":null,"finish_reason":%b,"matched_stop":%b}]}\n\n' % tuple(map(orjson.dumps, said))
            written.append((EventKind.FINISH, start + finish))
        return written

    def _after_delta(self, choice: Choice) -> bytes:
        logprobs = choice.choice.get("logprobs")
        if not isinstance(logprobs, dict) or self._token_text is None:
            return _AFTER_DELTA
        said = [
            _logprob(self._token_text(token), text, value)
            for token, text, value in zip(choice.ids, logprobs["tokens"], logprobs["token_logprobs"], strict=False)
        ]
        return _AFTER_DELTA.replace(b'"logprobs":null', b'"logprobs":' + orjson.dumps({"content": said}))

    def _running_usage(self, event: Mapping[str, Any]) -> bytes:
        usage = self._counted(event).get("usage")
        return b',"usage":' + orjson.dumps(usage) if isinstance(usage, dict) else b""

    def _usage(self, frame: bytes, event: Mapping[str, Any]) -> tuple[EventKind, bytes]:
        return self._new_usage(self._counted(event)["usage"])

    def _new_usage(self, usage: Mapping[str, Any]) -> tuple[EventKind, bytes]:
        return EventKind.USAGE, frame_of({**self._envelope, "choices": [], "usage": {**_EMPTY_USAGE, **usage}})


def _logprob(alone: str, told: str, value: float | None) -> dict[str, Any]:
    """One token as a chat tells it; `told` is its text in a completion, where part of a character is bytes as latin-1.

    `alone` is how it reads by itself, as a chat shows it (`_build_token_logprobs_from_raw`, `_lossless_token_text`).
    """
    is_part = REPLACEMENT in alone and told != alone
    token, raw = (alone, told.encode("latin-1", "replace")) if is_part else (told, told.encode())
    return {"token": token, "bytes": list(raw), "logprob": value, "top_logprobs": []}
