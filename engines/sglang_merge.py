"""Prompt logprobs of an SGLang pair: the prefill alone computes them, so they are put into the decode's output. Pure.

What a client sees is what one plain SGLang server would have answered. Only answers that ask for it are parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from engines.base import Fault, Merge
from engines.sse_frames import FrameDecoder, data_of
from engines.types import FailureKind

Json = dict[str, Any]

_PROMPT_SIDE = "input_"
"""How the names of all that `meta_info` says of a prompt's logprobs begin."""
_PROMPT_TOKENS = "input_token_logprobs"
_FIRST_ROW = "output_token_ids_logprobs"
"""Its row for the first token is not handed from prefill to decode: there it is null."""
_ARRAYS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


def needs_prefill_answer(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the answer to this request holds logprobs that only its prefill knows.

    It may say so once too often: then the prefill's answer adds nothing.
    """
    if path == "/generate":
        beyond_output = body.get("logprob_start_len") not in (None, -1) or bool(body.get("token_ids_logprob"))
        return bool(body.get("return_logprob")) and beyond_output
    return path == "/v1/completions" and bool(body.get("echo")) and bool(body.get("logprobs"))


def merge_of(path: str, prefill_answer: bytes) -> Merge | Fault:
    """What one prefill's answer, whole or a stream, adds to the output of its decode."""
    answer = _first_object(prefill_answer)
    if path == "/generate":
        meta = answer.get("meta_info") if answer is not None else None
        if isinstance(meta, dict) and isinstance(meta.get(_PROMPT_TOKENS), list):
            return GenerateMerge(meta)
    elif answer is not None and (found := _logprobs(answer)) is not None:
        return CompletionMerge(found)
    return Fault(FailureKind.GARBLED, "the prefill's answer has no prompt logprobs")


class GenerateMerge:
    """`/generate`: all that `meta_info` says of the prompt, in the whole answer and in every event of a stream."""

    def __init__(self, prefill_meta: Json) -> None:
        self._prompt_tokens = prefill_meta[_PROMPT_TOKENS]
        prompt_side = {name: value for name, value in prefill_meta.items() if name.startswith(_PROMPT_SIDE)}
        self._prompt_side = {name: orjson.Fragment(orjson.dumps(value)) for name, value in prompt_side.items()}
        rows = prefill_meta.get(_FIRST_ROW)
        self._first_row = rows[0] if isinstance(rows, list) and rows else None

    def frame(self, frame: bytes) -> bytes:
        event = _object(data_of(frame))
        return frame if event is None else _event(self._merged(event))

    def answer(self, body: bytes) -> bytes:
        answer = _object(body)
        return body if answer is None else orjson.dumps(self._merged(answer))

    def _merged(self, answer: Json) -> Json:
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            return answer
        merged = {**meta, **self._prompt_side}
        if meta.get(_PROMPT_TOKENS):
            merged[_PROMPT_TOKENS] = [*self._prompt_tokens, *meta[_PROMPT_TOKENS]]
        rows = meta.get(_FIRST_ROW)
        if isinstance(rows, list) and rows and not rows[0]:
            merged[_FIRST_ROW] = [self._first_row, *rows[1:]]
        return {**answer, "meta_info": merged}


class CompletionMerge:
    """`/v1/completions` with echo: the prompt's entries come before those of the output; once, in a stream's first."""

    def __init__(self, prefill_logprobs: Json) -> None:
        arrays = {name: _list(prefill_logprobs.get(name)) for name in _ARRAYS}
        prompt_tokens = max(0, len(arrays["tokens"]) - 1)  # the last one is the output that a prefill is limited to
        self._prompt = {name: entries[:prompt_tokens] for name, entries in arrays.items()}
        self._told = False

    def frame(self, frame: bytes) -> bytes:
        event = None if self._told else _object(data_of(frame))
        if event is None or not _list(event.get("choices")):
            return frame
        self._told = True
        return _event(self._merged(event))

    def answer(self, body: bytes) -> bytes:
        answer = _object(body)
        return body if answer is None or "choices" not in answer else orjson.dumps(self._merged(answer))

    def _merged(self, answer: Json) -> Json:
        output = _logprobs(answer) or {}
        merged = {**output, **{name: [*self._prompt[name], *_list(output.get(name))] for name in _ARRAYS}}
        choices = [{**choice, "logprobs": merged} for choice in _list(answer["choices"]) if isinstance(choice, dict)]
        return {**answer, "choices": choices}


def _logprobs(answer: Json) -> Json | None:
    """The logprobs of the only choice of a completion."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    found = choices[0].get("logprobs")
    return found if isinstance(found, dict) else None


def _first_object(answer: bytes) -> Json | None:
    """A whole answer, or the first event of a stream: a prefill's output is one token."""
    if not answer.startswith(b"data:"):
        return _object(answer)
    frames = FrameDecoder(len(answer)).feed(answer)
    return _object(data_of(frames[0])) if frames else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(data: bytes) -> Json | None:
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _event(event: Json) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
