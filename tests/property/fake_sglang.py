"""The part of an SGLang server that a stream's text, ids and end depend on: stop rules, detokenizer, the three writers.

Written after `Req` (`schedule_batch.py`), `OutputStreamer.accept`, `DetokenizerManager._decode_batch_token_id_output`,
`find_printable_text`, `serving_completions.py`, `serving_chat.py` and `http_server.py` of SGLang 0.5.23. The model is a
script: it writes the tokens of one fixed answer, and fails where its prompt is not the prompt and a part of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engines.sse_frames import EventKind, event_kind

EOS = 0
PIECES: tuple[bytes, ...] = (
    b"",
    *(b"a", b"b", b"ab", b" ", b" a", b"S", b"T", b"ST", b"OP", b"aS", b"TO", b"\n", b'"', b"\\"),
    *(b"\xf0\x9f", b"\x98\x80", b"\x98", b"\x80", b"\xc3", b"\xa9", b" \xc3", b"a\xe4\xbd", b"\xa0", b"\xe4\xbd\xa0"),
    *(b"\xa0S", b"O\xc3", b"\xe4\xbd\xa0\xe4"),
)
"""What each token stands for: letters, parts of a stop string, bytes of characters, whole and mixed."""


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")


def _is_cjk(char: str) -> bool:
    return 0x4E00 <= ord(char) <= 0x9FFF


def printable(text: str) -> str:
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


class Stutter(Exception):
    """SGLang would show some text twice: bytes that are no characters follow half a character behind a CJK one."""


@dataclass
class Detokenizer:
    """One request's text, as far as it may be shown."""

    ids: list[int]
    read: int
    surrogate: int = 0
    text: str = ""
    sent: int = 0

    def add(self, new: Sequence[int], finish: Mapping[str, Any] | None, trim: bool) -> str:
        self.ids += new
        matched = finish.get("matched") if finish else None
        ids = self.ids[self.surrogate :]
        if isinstance(matched, int) and trim:
            ids = ids[:-1]
        fresh = decode(ids)[len(decode(self.ids[self.surrogate : self.read])) :]
        if finish is None:
            return self._streaming(fresh)
        text = self.text + fresh
        if isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[: at if trim else at + len(matched)]
        return text[self.sent :]

    def _streaming(self, fresh: str) -> str:
        pending = self.sent - len(self.text)
        if fresh and not fresh.endswith("\ufffd"):
            self.text += fresh
            self.surrogate, self.read, self.sent = self.read, len(self.ids), len(self.text)
            return fresh[pending:]
        shown = printable(fresh)
        if len(shown) < pending:
            raise Stutter
        self.sent = len(self.text) + len(shown)
        return shown[pending:]


@dataclass
class Event:
    """What the server's HTTP side learns at once: new ids, new text, and the end."""

    ids: list[int]
    text: str
    finish: dict[str, Any] | None = None


@dataclass
class FakeSGLang:
    """One request on one server. `interval`: it sends every so many tokens, as `stream_interval` says."""

    prompt: Sequence[int]
    answer: Sequence[int]
    rid: str = "r1"
    interval: int = 1
    cached_tokens: int = 0
    seen_prompt: list[int] = field(default_factory=list)

    def events(self, ids: Sequence[int], limit: int, stops: Sequence[str], trim: bool) -> Iterator[Event]:
        """The answer to a prompt of these ids, of at most `limit` tokens."""
        self.seen_prompt = list(ids)
        begun = len(ids) - len(self.prompt)
        assert list(ids) == [*self.prompt, *self.answer[:begun]], "the prompt is not what the client had so far"
        detokenizer = Detokenizer(list(ids[-5:]), len(ids[-5:]))
        output: list[int] = []
        unsent: list[int] = []
        for token in self.answer[begun:]:
            output.append(token)
            unsent.append(token)
            tail = decode(output)
            finish = self._finish(token, tail, len(output), limit, stops)
            due = len(unsent) >= self.interval or len(output) == len(unsent)
            if finish is None and (not due or _may_stop(tail, stops)):
                continue
            yield Event(unsent, detokenizer.add(unsent, finish, trim), finish)
            unsent = []
            if finish is not None:
                return
        raise AssertionError("the answer has no end")

    def _finish(self, token: int, tail: str, count: int, limit: int, stops: Sequence[str]) -> dict[str, Any] | None:
        for stop in stops:
            if stop in tail:
                return {"type": "stop", "matched": stop}
        if token == EOS:
            return {"type": "stop", "matched": EOS}
        return {"type": "length", "length": limit} if count >= limit else None

    # ---- the writers -------------------------------------------------------------------------------------------------

    def completion(self, body: Mapping[str, Any], chat: bool = False, logprobs: bool = False) -> list[Any]:
        """The events of `/v1/completions`, or those of the chat that is this completion, each with its kind."""
        stops, trim = _stops(body)
        events = list(self.events(body["prompt"], body["max_tokens"], stops, trim))
        frames: list[bytes] = []
        sent = 0
        running = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        for number, event in enumerate(events):
            sent += len(event.ids)
            usage = self._usage(sent, None) if running else None
            if chat:
                frames += self._chat_event(event, number == 0, usage)
                continue
            finish = event.finish or {}
            choice = {
                "index": 0,
                "text": event.text,
                "logprobs": _logprobs(event.ids) if body.get("logprobs") is not None else None,
                "finish_reason": finish.get("type"),
                "matched_stop": finish.get("matched"),
                "token_ids": event.ids,
            }
            if number == 0:
                choice["prompt_token_ids"] = self.seen_prompt
            frames.append(_frame({**self._envelope("text_completion"), "choices": [choice], "usage": usage}))
        if chat:
            finish = events[-1].finish or {}
            frames.append(_frame(self._chat({}, finish["type"], finish.get("matched"))))
        usage = self._usage(sent, self.cached_tokens)
        kind = "chat.completion.chunk" if chat else "text_completion"
        told = usage if chat else {name: value for name, value in usage.items() if value is not None}
        frames.append(_frame({**self._envelope(kind), "choices": [], "usage": told}))
        return _kinds([*frames, b"data: [DONE]\n\n"])

    def _chat_event(self, event: Event, first: bool, usage: Any) -> Iterator[bytes]:
        if first:
            yield _frame(self._chat({"role": "assistant", "content": ""}))
        if event.text:
            yield _frame({**self._chat({"content": event.text}), **({"usage": usage} if usage else {})})

    def _chat(self, delta: dict[str, Any], finish: str | None = None, matched: Any = None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": matched,
        }
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def generate(self, body: Mapping[str, Any], incremental: bool) -> list[Any]:
        """The events of `/generate`, each with its kind."""
        params = body["sampling_params"]
        stops, trim = _stops(params)
        ids: list[int] = []
        text = ""
        frames = []
        for event in self.events(body["input_ids"], params["max_new_tokens"], stops, trim):
            ids, text = [*ids, *event.ids], text + event.text
            shown = event.ids if incremental else ids
            meta: dict[str, Any] = {
                "id": self.rid,
                "finish_reason": event.finish,
                "prompt_tokens": len(self.seen_prompt),
                "weight_version": "v1",
                "completion_tokens": len(ids),
                "cached_tokens": self.cached_tokens,
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[-0.5, token, None] for token in shown]
                meta["output_token_logprobs_length"] = len(ids)
            if event.finish is not None:
                meta["weight_versions"] = [{"version": "v1", "start": 0, "end": len(ids)}]
            frames.append(_frame({"text": event.text if incremental else text, "output_ids": shown, "meta_info": meta}))
        return _kinds([*frames, b"data: [DONE]\n\n"])

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.rid, "object": kind, "created": 1795955801, "model": "tiny"}

    def _usage(self, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
        prompt_tokens = len(self.seen_prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None if not cached_tokens else {"cached_tokens": cached_tokens},
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }


def _may_stop(tail: str, stops: Sequence[str]) -> bool:
    """`check_match_stop_str_prefix`."""
    return any(tail.endswith(stop[:length]) for stop in stops for length in range(1, len(stop) + 1))


def _stops(params: Mapping[str, Any]) -> tuple[list[str], bool]:
    return list(params.get("stop") or ()), not params.get("no_stop_trim")


def _logprobs(ids: Sequence[int]) -> dict[str, Any]:
    logprobs = [-0.25 * token for token in ids]
    return {
        "text_offset": [-1 for _ in ids],
        "token_logprobs": logprobs,
        "tokens": [decode([token]) for token in ids],
        "top_logprobs": [],
    }


def _frame(event: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _kinds(frames: Sequence[bytes]) -> list[tuple[EventKind, bytes]]:
    return [(event_kind(frame), frame) for frame in frames]
