"""A client's stream of `/generate`, whose events hold ids already: all so far, or only what is new. Pure.

Up to a seam its events are passed on as they came. Where they repeat all so far the newest one is all that is kept.
After a seam each is written anew, as if one engine had sent all.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from engines.capture import Capture
from engines.client_stream import Emitted, Frames, Inexact, TextOf
from engines.completion_stream import DONE, frame_of
from engines.seam import Seam, seam_at, stops_of, why_not
from engines.seam_counts import OUTPUT_LISTS, meta_over_seam
from engines.seam_text import SeamText
from engines.sse_frames import EventKind, data_of

_DEFAULT_MAX_NEW_TOKENS = 128
_WITH_OUTPUT = (EventKind.CONTENT, EventKind.ROLE_ONLY, EventKind.FINISH)
_TEXT, _IDS = b'data: {"text":"', b'","output_ids":['

Json = dict[str, Any]


class GenerateStream:
    """One prompt, one sample of `/generate`. `body` is the client's; it is shared, not changed.

    `incremental`: its engines' events hold what is new only (`EngineFacts.incremental_streaming`).
    """

    path = "/generate"

    def __init__(self, body: Mapping[str, Any], *, incremental: bool = False) -> None:
        self._body = body
        params = body.get("sampling_params")
        self._params: Mapping[str, Any] = params if isinstance(params, Mapping) else {}
        self._incremental = incremental
        self.skip_special_tokens = self._params.get("skip_special_tokens") is not False
        self.restart()

    def restart(self) -> None:
        self.finished = False
        self.ended_here = False
        self._capture = Capture()  # of what is new only
        self._newest = b""  # of all so far; as the client got it
        self._prompt_ids: array[int] | None = None
        self._carried_tokens = 0
        self._seam: SeamText | None = None
        self._before: Json = {}  # the client's last event before the seam
        self._text = ""  # what the client has of this attempt
        self._engine_ids = self._engine_chars = 0  # what the engine has sent of it
        self._done_told = False

    def call_body(self, context_tokens: int | None) -> Mapping[str, Any]:
        if self._prompt_ids is None:
            return self._body
        body, params, carried = dict(self._body), dict(self._params), self._carried_tokens
        for name in ("text", "logprob_start_len"):
            body.pop(name, None)
        body["input_ids"] = [*self._prompt_ids, *self._base_ids]
        limit = params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
        if limit is not None:
            params["max_new_tokens"] = max(1, limit - carried)
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - carried)
        return {**body, "sampling_params": params}

    # ---- what the client sees ----------------------------------------------------------------------------------------

    def frames(self, frames: Frames) -> Frames:
        if self._prompt_ids is not None:
            return self._joined(frames)
        for kind, frame in frames:
            if kind in _WITH_OUTPUT:
                self._newest = frame
                if self._incremental:
                    self._keep(frame)
                self.finished = self.finished or kind is EventKind.FINISH
            self._done_told = self._done_told or kind is EventKind.DONE
        return frames

    def _keep(self, frame: bytes) -> None:
        """An event of what is new only; the usual one is not parsed."""
        ids_at = frame.find(_IDS)
        if ids_at > 0 and frame.startswith(_TEXT):
            begin = ids_at + len(_IDS)
            self._capture.add(frame[begin : frame.index(b"]", begin)], frame[len(_TEXT) : ids_at])
        elif (event := _object(frame)) is not None:
            self._capture.add_parsed(event.get("output_ids") or [], event.get("text") or "")

    def _joined(self, frames: Frames) -> Frames:
        out: list[tuple[EventKind, bytes]] = []
        for kind, frame in frames:
            if self.ended_here:
                break
            out += self._rewritten(kind, frame)
        return out

    def _rewritten(self, kind: EventKind, frame: bytes) -> Frames:
        event = _object(frame) if kind in _WITH_OUTPUT else None
        if event is None or not _is_output(event):
            self._done_told = self._done_told or kind is EventKind.DONE
            return [(kind, frame)]
        written = self._write(event)
        if self.ended_here:
            self.finished = self._done_told = True
            return [(EventKind.FINISH, written), DONE]
        self.finished = self.finished or kind is EventKind.FINISH
        return [(kind, written)]

    def _write(self, event: Json) -> bytes:
        if isinstance(text := event.get("text"), str):
            event = self._over_seam(event, text)
        if self._incremental:
            self._capture.add_parsed(event["output_ids"], event.get("text") or "")
        else:
            event["output_ids"] = [*self._base_ids, *event["output_ids"]]
        if event.get("prompt_token_ids") is not None and self._prompt_ids is not None:
            event["prompt_token_ids"] = list(self._prompt_ids)
        earlier = self._before.get("meta_info") or {}
        meta = meta_over_seam(event["meta_info"], earlier, self._carried_tokens, join=not self._incremental)
        self._newest = frame_of({**event, "meta_info": meta})
        return self._newest

    def _over_seam(self, event: Json, text: str) -> Json:
        """The event with the client's text: what it has, or what is new."""
        new_ids, new_text = event["output_ids"], text
        if not self._incremental:
            new_ids, new_text = new_ids[self._engine_ids :], text[self._engine_chars :]
            self._engine_ids, self._engine_chars = len(event["output_ids"]), len(text)
        if self._seam is not None:
            finish = event["meta_info"].get("finish_reason")
            matched = finish.get("matched") if isinstance(finish, dict) else None
            piece = self._seam.add(new_ids, new_text, finish is not None, matched)
            new_text = piece.text
            self._seam = None if self._seam.done else self._seam
            if piece.stop is not None:
                self.ended_here = finish is None
                event = _stopped(event, piece.stop, len(new_ids) - piece.kept_ids)
        self._text += new_text
        return {**event, "text": new_text if self._incremental else self._capture.base_text + self._text}

    # ---- over the seam -----------------------------------------------------------------------------------------------

    @property
    def _base_ids(self) -> Sequence[int]:
        return self._capture.base_ids

    def emitted(self) -> Emitted:
        if self._incremental:
            return Emitted(self._capture.ids(), self._capture.text(), True, self.finished)
        event = self._newest_event()
        return Emitted(event.get("output_ids") or [], event.get("text") or "", True, self.finished)

    def _newest_event(self) -> Json:
        event = _object(self._newest) if self._newest else {}
        if event is None:
            raise Inexact("the engine's events do not read as ids and text")
        return event

    def go_on(self, prompt_ids: Sequence[int], text_of: TextOf | None) -> int:
        if why := why_not(self._params) or self._why_not_body():
            raise Inexact(why)
        emitted, event = self.emitted(), self._newest_event()
        if emitted.finished:
            raise Inexact("it has its finish reason")
        kept_tokens = len(emitted.ids)
        limit = self._params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
        if limit is not None and kept_tokens >= limit:
            raise Inexact("it has all the tokens that it may have")
        seam = self._seam_at(prompt_ids, emitted, event, text_of)
        self._capture = Capture(emitted.ids, emitted.text, seam.whole)
        self._prompt_ids = array("I", prompt_ids)
        self._seam, self._before, self._carried_tokens = seam.text, event, kept_tokens
        self._text = ""
        self._engine_ids = self._engine_chars = 0
        return kept_tokens

    def _seam_at(self, prompt_ids: Sequence[int], emitted: Emitted, event: Json, text_of: TextOf | None) -> Seam:
        if emitted.ids and event.get("text") is None:
            return Seam(len(emitted.ids), None, True)  # the engine has no tokenizer, and the client sees ids alone
        if text_of is None and not self._incremental and emitted.ids:
            raise Inexact("without a tokenizer nobody knows whether part of a character is withheld")
        return seam_at(prompt_ids, emitted, self._capture, stops_of(self._params), text_of)

    def _why_not_body(self) -> str:
        if self._body.get("return_logprob") and self._body.get("logprob_start_len") not in (None, -1):
            return "the prompt that logprobs are wanted of would be longer"
        return ""

    def closing(self, prompt_tokens: int | None) -> Frames:
        if self._done_told:
            return []
        self._done_told = True
        return [DONE]


def _is_output(event: Json) -> bool:
    meta = event.get("meta_info")
    counted = isinstance(meta, dict) and isinstance(meta.get("prompt_tokens"), int)
    return counted and isinstance(event.get("output_ids"), list)


def _stopped(event: Json, stop: str, surplus_ids: int) -> Json:
    """An event that ends its stream at a stop string, without so many ids that came after it."""
    meta = {**event["meta_info"], "finish_reason": {"type": "stop", "matched": stop}}
    meta["completion_tokens"] -= surplus_ids
    if isinstance(meta.get("output_token_logprobs_length"), int):
        meta["output_token_logprobs_length"] -= surplus_ids
    for name in OUTPUT_LISTS:
        if isinstance(meta.get(name), list):
            meta[name] = meta[name][: len(meta[name]) - surplus_ids]
    ids = event["output_ids"]
    return {**event, "output_ids": ids[: len(ids) - surplus_ids], "meta_info": meta}


def _object(frame: bytes) -> Json | None:
    try:
        event = orjson.loads(data_of(frame))
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None
