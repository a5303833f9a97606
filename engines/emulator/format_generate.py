"""How `/generate` writes an answer: objects with `meta_info`, whole or cumulative in a stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

import orjson

from engines.emulator.core import End, EndKind
from engines.emulator.formats import Answering, weight_versions
from engines.emulator.live import Live
from engines.emulator.wire import DONE, sse
from engines.emulator.wire_logprobs import generate_logprobs
from engines.token_rule import unpack
from engines.types import Role

_TOKENS_UNSEEN = 50
"""SGLang's tokenizer hears of an answer that is not streamed every so many tokens; a shorter one has no pace."""
_SHORTEST_S = 1e-6
"""Of a pace: a busy machine may make several tokens in one moment of our clock."""


def finish_object(live: Live, end: End, role: Role) -> dict[str, Any]:
    """`meta_info.finish_reason` of an ended request."""
    if end.kind is not EndKind.FINISHED:
        return {"type": "abort", "message": end.message, "status_code": end.status, "err_type": end.err_type}
    if role is Role.PREFILL:
        return {"type": "length", "length": 0}
    finish = live.output.finish
    if finish is not None and finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "length", "length": len(live.output.ids)}


_INCREMENTAL_META = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""What of `meta_info` holds only what is new in an incremental stream."""


def generate_object(answering: Answering, live: Live, end: End | None) -> dict[str, Any]:
    """The `/generate` object of an ended request."""
    return _object(answering, live, end, live.output.text, live.output.ids)


def _object(answering: Answering, live: Live, end: End | None, text: str, ids: list[int]) -> dict[str, Any]:
    body: dict[str, Any] = {"text": text, "output_ids": ids}
    if answering.request.return_prompt_token_ids:
        body["prompt_token_ids"] = unpack(live.item.prompt)
    if answering.request.batch and answering.request.stream:
        body["index"] = live.index
    body["meta_info"] = _meta(answering, live, end)
    return body


def _meta(answering: Answering, live: Live, end: End | None) -> dict[str, Any]:
    job, offset_s = live.job, answering.wall_offset_s
    started = job.started_s > 0.0
    meta: dict[str, Any] = {
        "id": live.rid,
        "finish_reason": finish_object(live, end, answering.role) if end else None,
        "prompt_tokens": job.prompt_tokens,
        "weight_version": "default",
        "num_retractions": job.retractions,
    }
    if started and answering.role is not Role.DECODE:
        meta |= {"storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0}
    if started:
        meta["forward_entry_time"] = job.started_s + offset_s
        if answering.role is not Role.DECODE:
            meta["prefill_finished_time"] = live.first_token_s + offset_s
    meta["queue_time"] = max(0.0, job.started_s - job.arrived_s) if started else 0.0
    if live.item.sampling.logprobs:
        meta |= generate_logprobs(live, answering.role is Role.DECODE)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(live.output.ids), "cached_tokens": job.cached_tokens}
    if end:
        meta["weight_versions"] = weight_versions(live)
    meta["cached_tokens_details"] = {"device": job.cached_tokens, "host": 0} if job.cached_tokens else None
    meta["dp_rank"] = live.dp_rank
    if end:
        meta |= _times(live, answering)
    return meta


def _times(live: Live, answering: Answering) -> dict[str, float]:
    offset_s = answering.wall_offset_s
    first_s = (live.first_token_s or live.finished_s) - live.received_s
    times = {
        "e2e_latency": live.finished_s - live.received_s,
        "request_received_ts": live.received_s + offset_s,
        "first_token_latency": first_s,
        "api_server_dispatch_finish_ts": live.dispatched_s + offset_s,
        "request_finished_ts": live.finished_s + offset_s,
        "response_sent_to_client_ts": live.finished_s + offset_s,
    }
    decoding_s = max(live.finished_s - live.first_token_s, _SHORTEST_S)
    tokens, seen_early = len(live.output.ids), answering.role is Role.PLAIN or answering.request.stream
    if tokens > 1 and (seen_early or tokens > _TOKENS_UNSEEN):
        times["decode_throughput"] = (tokens - 1) / decoding_s
    return times


@dataclass(slots=True)
class _Written:
    """One choice as written so far: cumulative text and ids as JSON, and the unchanging parts around them."""

    text: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    before_count: bytes = b""
    after_count: bytes = b""


@dataclass(slots=True)
class GenerateStream:
    """A streamed `/generate`: every event repeats text and ids from the start, unless the server is incremental."""

    answering: Answering
    _written: dict[int, _Written] = field(default_factory=dict)

    def first(self, live: Live) -> bytes:
        return b""

    def delta(self, live: Live) -> bytes:
        if live.output.finish is not None:
            return b""
        written = self._written.setdefault(live.index, _Written())
        if self.answering.incremental:
            return sse(self._increment(live, written, None))
        first = written.tokens == 0
        for token in live.output.ids[written.tokens :]:
            written.ids += b",%d" % token
        written.tokens = len(live.output.ids)
        written.text += encode_basestring(live.output.take_delta())[1:-1].encode()
        if first or live.item.sampling.logprobs:
            return self._slow_delta(live, written, first)
        return b'data: {"text":"%b","output_ids":[%b]%b%d%b' % (
            bytes(written.text),
            bytes(written.ids[1:]),
            written.before_count,
            written.tokens,
            written.after_count,
        )

    def _slow_delta(self, live: Live, written: _Written, first: bool) -> bytes:
        """An event made whole; the first also carries its sending time, and prepares those that follow."""
        text = orjson.loads(b'"' + written.text + b'"')
        body = _object(self.answering, live, None, text, live.output.ids)
        if first:
            rest = orjson.dumps({key: value for key, value in body.items() if key not in ("text", "output_ids")})
            before, after = rest[1:].split(b'"completion_tokens":%d' % written.tokens)
            written.before_count = b"," + before + b'"completion_tokens":'
            written.after_count = after + b"\n\n"
            body["meta_info"]["response_sent_to_client_ts"] = live.first_token_s + self.answering.wall_offset_s
        return sse(body)

    def end(self, live: Live, end: End) -> bytes:
        if self.answering.incremental:
            return sse(self._increment(live, self._written.setdefault(live.index, _Written()), end))
        return sse(generate_object(self.answering, live, end))

    def _increment(self, live: Live, written: _Written, end: End | None) -> dict[str, Any]:
        """An event with what is new."""
        start, written.tokens = written.tokens, len(live.output.ids)
        body = _object(self.answering, live, end, live.output.take_delta(), live.output.ids[start:])
        meta = body["meta_info"]
        meta |= {name: meta[name][start:] for name in _INCREMENTAL_META if name in meta}
        if start == 0 and not end:
            meta["response_sent_to_client_ts"] = live.first_token_s + self.answering.wall_offset_s
        return body

    def tail(self, lives: list[Live]) -> bytes:
        return DONE
