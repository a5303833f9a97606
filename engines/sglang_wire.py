"""SGLang 0.5.x on the wire: request bodies, rooms and rids, the poison table, what answers mean. Pure.

Everything that a body sent to an SGLang server may hold is decided here. The builder writes the three bootstrap
fields together: a decode that gets a room without a host dies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any, TypeGuard

import orjson

from engines.types import FailureKind

RID_CHARS = 32
_PROCESS_BITS, _COUNTER_BITS, _SLOT_BITS = 20, 33, 10
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
MAX_TOP_LOGPROBS = 128
"""`MetadataBuffers.set_buf` raises above this inside the prefill's scheduler, which ends the process (0.5.23)."""

MAX_DEPTH = 200
"""Levels of a body: the JSON reader takes 1,024 of them, the writer 254."""


# ---- identity of an attempt ------------------------------------------------------------------------------------------


class RoomMaker:
    """Hands out rooms that no other process hands out, each fit for one prefill DP rank.

    A room is 20 bits of process id, a 33-bit counter that starts anywhere, and a 10-bit slot chosen so that
    `room % dp_size == rank` (else random). The counter is never 0, hence no room is; it repeats after 2**33 - 1 rooms.
    """

    def __init__(self, rng: random.Random, process_id: int | None = None) -> None:
        self._rng = rng
        self._process = (rng.getrandbits(_PROCESS_BITS) if process_id is None else process_id) % (1 << _PROCESS_BITS)
        self._counter = rng.getrandbits(_COUNTER_BITS)

    def take_process_id(self, process_id: int) -> None:
        """Make rooms with a process id that was claimed for this process; rooms made before stay good.

        The counter goes on, so none comes twice whichever ids are taken in turn.
        """
        self._process = process_id % (1 << _PROCESS_BITS)

    def next_room(self, dp_size: int = 1, rank: int | None = None) -> int:
        """A new room; `rank` asks for the prefill DP rank that SGLang derives as `room % dp_size`."""
        self._counter = self._counter % ((1 << _COUNTER_BITS) - 1) + 1
        base = ((self._process << _COUNTER_BITS) | self._counter) << _SLOT_BITS
        slot = self._rng.getrandbits(_SLOT_BITS)
        if rank is not None and dp_size > 1:
            slot = self._slot_for(base, dp_size, rank % dp_size, slot)
        return base | slot

    @staticmethod
    def _slot_for(base: int, dp_size: int, rank: int, slot: int) -> int:
        """The slot next to `slot` that gives the wanted remainder; dp sizes are far below the 1,024 slots."""
        first = (rank - base) % dp_size
        steps = ((1 << _SLOT_BITS) - 1 - first) // dp_size + 1
        return first + dp_size * (slot % steps)


def process_of(room: int) -> int:
    """The process id that a room begins with."""
    return room >> (_COUNTER_BITS + _SLOT_BITS)


def new_rid(rng: random.Random) -> str:
    """A request id for one attempt: fixed width, so none is a prefix of another (SGLang aborts by prefix)."""
    return f"{rng.getrandbits(RID_CHARS * 4):0{RID_CHARS}x}"


# ---- what may not be sent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Poison:
    """One row of the poison table: a field that SGLang's PD mode must never get, and why."""

    field: str
    reason: str


_TOP_LOGPROBS = f"at most {MAX_TOP_LOGPROBS} top logprobs can be handed from prefill to decode"
POISON_TABLE = (
    Poison("top_logprobs", _TOP_LOGPROBS),
    Poison("logprobs", _TOP_LOGPROBS),
    Poison("top_logprobs_num", _TOP_LOGPROBS + ", and a list for a single prompt ends a server"),
    Poison("logprob_start_len", "below -1, or a list for a single prompt, ends a server; send one position, or -1"),
    Poison("session_params", "sessions live on one server and cannot be handed from prefill to decode"),
    Poison("input_embeds", "embeddings as input cannot be handed from prefill to decode; send text or input_ids"),
    Poison("return_sampling_mask", "sampling masks are not handed from prefill to decode by default"),
    Poison("input_ids", "the list of token ids is empty; send at least one"),
    Poison("min_p", "min_p above 0 with a seed ends a server in deterministic mode; drop one of the two"),
    Poison("beam_width", "beam search is not supported on a prefill/decode pair; leave it out or send 1"),
    Poison("token ids", "every token id must be one of the model's vocabulary, whose ids begin at 0"),
    Poison("integer", "integers must fit into 64 bits"),
)
_TOKEN_IDS, _INTEGER = POISON_TABLE[-2:]


def poison(body: Mapping[str, Any], vocabulary_tokens: int | None = None) -> tuple[str, str] | None:
    """The first field of `body` that must not reach a PD server, with the reason in words for the client.

    `body` is one engine request of any of the three generation routes; `sampling_params` is looked into.
    `vocabulary_tokens` is the number of ids that the model has, None where it is not known.
    """
    return poisonous_field(body) or poisonous_ids(body, vocabulary_tokens) or poisonous_integer(body)


def poisonous_field(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """`poison` by the named rows of the table alone; its cost does not grow with the body."""
    params = body.get("sampling_params")
    inner: Mapping[str, Any] = params if isinstance(params, dict) else {}
    for source, prefix in ((body, ""), (inner, "sampling_params.")):
        for row in POISON_TABLE:
            if row.field in source and _is_poison(row.field, source[row.field], source, body):
                return prefix + row.field, row.reason
    return None


def poisonous_ids(body: Mapping[str, Any], vocabulary_tokens: int | None) -> tuple[str, str] | None:
    """`poison` by token ids that the model does not have: those of its prompts, and those to stop at.

    `body` may also be a whole batch. Of a prompt only integers are judged; of a stop, whatever the engine makes one of.
    A stop ends a server only where it or a neighbour of its batch has a least length: nobody can tell which will.
    """
    reason = _TOKEN_IDS.reason
    if vocabulary_tokens is not None:
        reason = f"{reason}; it has {vocabulary_tokens}, so {vocabulary_tokens - 1} is the last"
    for name in ("input_ids", "prompt"):
        if _has_foreign_id(body.get(name), vocabulary_tokens):
            return name, reason
    params = body.get("sampling_params")
    inner = [("sampling_params.", each) for each in (params if isinstance(params, list) else [params])]
    for prefix, source in [("", body), *inner]:
        stops = source.get("stop_token_ids") if isinstance(source, Mapping) else None
        if isinstance(stops, list) and _is_foreign(filterfalse(math.isnan, map(_number, stops)), vocabulary_tokens):
            return prefix + "stop_token_ids", reason
    return None


def _has_foreign_id(prompt: Any, vocabulary_tokens: int | None) -> bool:
    """Whether a prompt, or one of a list of prompts, holds an integer that is no token of the vocabulary."""
    if not isinstance(prompt, list):
        return False
    kinds = set(map(type, prompt))
    if int in kinds:
        ids = prompt if len(kinds) == 1 else [each for each in prompt if type(each) is int]
        if _is_foreign(ids, vocabulary_tokens):
            return True
    return list in kinds and any(_has_foreign_id(each, vocabulary_tokens) for each in prompt)


def _is_foreign(ids: Iterable[float], vocabulary_tokens: int | None) -> bool:
    ids = ids if isinstance(ids, list) else [*ids]
    return min(ids, default=0) < 0 or (vocabulary_tokens is not None and max(ids, default=0) >= vocabulary_tokens)


def poisonous_integer(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """`poison` by integers beyond 64 bits, wherever they are in the body: looks at all of it."""
    path = _oversized_integer(body)
    return None if path is None else (path, _INTEGER.reason)


def _is_poison(name: str, value: Any, source: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    match name:
        case "top_logprobs" | "logprobs":
            return _number(value) > MAX_TOP_LOGPROBS
        case "top_logprobs_num":
            return isinstance(value, list) or _number(value) > MAX_TOP_LOGPROBS
        case "beam_width":
            return _number(value) > 1
        case "logprob_start_len":
            return bool(body.get("return_logprob")) and (isinstance(value, list) or _number(value) < -1)
        case "input_ids":
            return isinstance(value, list) and (not value or [] in value)
        case "min_p":
            seeded = source.get("seed") is not None or source.get("sampling_seed") is not None
            return _number(value) > 0 and seeded
        case "return_sampling_mask":
            return bool(value)
        case "token ids" | "integer":
            return False  # no field, but a rule for several
        case _:
            return value is not None


def _number(value: Any) -> float:
    """What the engine may take for a number: its OpenAI routes also read 129.0 and "129" as 129. Else NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _oversized_integer(value: Any, path: str = "") -> str | None:
    """The path of the first integer outside int64. Long flat lists (token ids) are looked at by their extremes."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):  # the JSON parser makes floats of integers beyond 64 bits
        return (path or "body") if abs(value) >= 2**63 else None
    if isinstance(value, int):
        return None if _INT64_MIN <= value <= _INT64_MAX else path or "body"
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        if value and all(type(item) is int for item in value):
            return _oversized_integer(max(value, key=abs), path)
        items = enumerate(value)
    else:
        return None
    for key, item in items:
        if (found := _oversized_integer(item, f"{path}.{key}" if path else str(key))) is not None:
            return found
    return None


def too_deep(body: Mapping[str, Any]) -> bool:
    """Whether `body` is nested deeper than `MAX_DEPTH`; no recursion, unlike the other looks at a body."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        containers = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in containers for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


# ---- bodies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where a decode finds its prefill: the three fields exist together or not at all."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, Any]:
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def rank_fields(rank: int | None, prefill_rank: int | None) -> dict[str, int]:
    """The DP ranks that one leg's body names: its own, and the prefill's; None where a server has only one.

    A prefill gets its rank twice: the second says that the decode knows, else it insists on the room's own rank.
    """
    named = {"routed_dp_rank": rank, "disagg_prefill_dp_rank": prefill_rank}
    return {name: value for name, value in named.items() if value is not None}


def generation_body(body: Mapping[str, Any], rid: str, bootstrap: Bootstrap, *, want_usage: bool) -> bytes:
    """The JSON sent to both legs of one attempt: the client's body, plus rid and bootstrap fields.

    `want_usage` (OpenAI streams) asks for the closing usage event, which the gateway learns from and cuts again when
    the client had not asked.
    """
    patched = {**body, "rid": rid, **bootstrap.fields()}
    if want_usage:
        options = body.get("stream_options")
        patched["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return orjson.dumps(patched)


def abort_body(rid: str) -> bytes:
    """The body of `/abort_request`. An empty rid would once have aborted everything: refused."""
    if len(rid) != RID_CHARS:
        raise ValueError(f"a rid has {RID_CHARS} characters, not {rid!r}")
    return orjson.dumps({"rid": rid})


# ---- answers ---------------------------------------------------------------------------------------------------------


def error_text(body: bytes) -> str:
    """The message inside an error body of any of SGLang's shapes; the raw text where there is none."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:2000].decode(errors="replace")
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        if isinstance(error, str):
            return error
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
        if "detail" in parsed:
            return str(parsed["detail"])
    return body[:2000].decode(errors="replace")


def stream_error(data: bytes) -> tuple[str, int | None, bool]:
    """Message, code, and whether it is an abort, of an in-stream failure: an error event or a finish_reason abort."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        return data[:2000].decode(errors="replace"), None, False
    if (reason := abort_reason(parsed)) is not None:
        return *reason, True
    error = parsed.get("error", parsed)
    code = error.get("code") if isinstance(error, dict) else None
    return error_text(data), code if isinstance(code, int) else None, False


def abort_reason(answer: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """Message and status code when an answer (OpenAI or /generate) ended with finish_reason abort; else None."""
    meta = answer.get("meta_info")
    if isinstance(meta, dict):
        finish = meta.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            code = finish.get("status_code")
            return str(finish.get("message") or "aborted"), code if isinstance(code, int) else None
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return "finish_reason abort", None
    return None


def judge_answer(status: int, body: bytes) -> tuple[FailureKind, str, int | None] | None:
    """What is wrong with a whole non-streamed answer: (kind, message, status), or None for a good one."""
    if status != 200:
        return FailureKind.STATUS, error_text(body), status
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return FailureKind.GARBLED, "the answer is not JSON", status
    if not isinstance(parsed, dict):
        return FailureKind.GARBLED, "the answer is not a JSON object", status
    if (reason := abort_reason(parsed)) is not None:
        return FailureKind.ABORTED, reason[0], reason[1]
    if not (_has_finished_choices(parsed) or isinstance(parsed.get("meta_info"), dict)):
        return FailureKind.GARBLED, "the answer has neither finished choices nor meta_info", status
    return None


def _has_finished_choices(answer: Mapping[str, Any]) -> bool:
    """Whether an OpenAI answer has choices, each of which came to an end."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer; `cached_tokens` is None where the engine does not report it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


def usage_of(answer: Mapping[str, Any]) -> Usage | None:
    """Token counts of a whole answer, of a usage event, or of a /generate chunk; None where none make sense."""
    usage = answer.get("usage")
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return _usage(usage, cached)
    meta = answer.get("meta_info")
    return _usage(meta, meta.get("cached_tokens")) if isinstance(meta, dict) else None


def _usage(counts: Mapping[str, Any], cached: Any) -> Usage | None:
    prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens") or 0
    if not (_is_count(prompt) and _is_count(completion)):
        return None
    return Usage(prompt, completion, cached if _is_count(cached) else None)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def cached_tokens(answer: bytes) -> int | None:
    """The prompt tokens that one answer or stream event says were cached; None where it does not say."""
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    usage = usage_of(parsed) if isinstance(parsed, dict) else None
    return None if usage is None else usage.cached_tokens
