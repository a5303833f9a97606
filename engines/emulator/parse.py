"""A request's body, checked as SGLang checks it and turned into what the engine runs. Pure.

Errors are raised as `BadRequest` with SGLang's own status and body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engines.emulator import contract, wire
from engines.emulator.draw import Draw, drawn
from engines.emulator.output import StopRule
from engines.emulator.radix import SHARED, CacheNamespace
from engines.emulator.tokens import chat_text, encode
from engines.token_rule import TOKEN_BYTES, VOCABULARY_TOKENS, pack, unpack

MAX_ROOM = 2**63 - 1
_DEFAULT_GENERATE_TOKENS = 128
_DEFAULT_COMPLETION_TOKENS = 16


class Api(StrEnum):
    """Which dialect a request speaks."""

    GENERATE = "/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class BadRequest(Exception):
    """The request is refused with `status` and JSON `body`."""

    def __init__(self, body: Mapping[str, Any], status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt and its answer must fit in, and the sampling parameters of a chat that gives none."""

    context_tokens: int
    max_total_tokens: int
    chat_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answer is drawn, when it ends, and what is told of it."""

    rule: StopRule
    draw: Draw
    samples: int
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int = -1
    token_ids_logprob: tuple[int, ...] = ()
    logprob_texts: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a request (or one sample of it) with its room."""

    prompt: bytes
    text: str
    sampling: Sampling
    room: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    namespace: CacheNamespace = SHARED
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def beyond_vocabulary(self) -> bool:
        """Whether the prompt, given as ids, has one that no embedding exists for."""
        return not self.text and max(unpack(self.prompt), default=0) >= VOCABULARY_TOKENS

    @property
    def reusable_tokens(self) -> int:
        """How much of the prompt may come from a cache: the last token, and those with logprobs, must be computed."""
        start = self.sampling.prompt_logprobs_from if self.sampling.logprobs else -1
        return max(0, min(self.prompt_tokens - 1, start if start >= 0 else self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request."""

    api: Api
    items: list[Item]
    rids: list[str] | None
    batch: bool
    stream: bool
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    echo: bool = False


def parse_request(api: Api, body: Mapping[str, Any], limits: Limits) -> Request:
    """Check `body` and build the request; BadRequest where SGLang refuses it."""
    if api is Api.GENERATE:
        _check_contract(body)
    prompts, batch = _prompts(api, body)
    sampling_of = _generate_sampling if api is Api.GENERATE else _openai_sampling
    routed = _dp_rank(api, body, "routed_dp_rank")
    routed = _dp_rank(api, body, "data_parallel_rank") if routed is None else routed
    prefill_rank = _dp_rank(api, body, "disagg_prefill_dp_rank")
    items = []
    for index, (packed, text) in enumerate(prompts):
        sampling = sampling_of(api, body, index, len(packed) // TOKEN_BYTES, limits)
        rooms = {name: _nth(api, body, name, index, kind) for name, kind in _ROOM_FIELDS}
        room, host, port = (rooms[name] for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"))
        item = Item(packed, text, sampling, room, host, port, _namespace(api, body, index), routed, prefill_rank)
        items.extend([item] * sampling.samples)
    options = body.get("stream_options") or {}
    return Request(
        api=api,
        items=items,
        rids=_rids(api, body, len(items), batch),
        batch=batch or len(items) > 1,
        stream=bool(body.get("stream")),
        model=str(body.get("model") or "default"),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        return_prompt_token_ids=bool(body.get("return_prompt_token_ids") or body.get("return_token_ids")),
        echo=bool(body.get("echo")),
    )


_ROOM_FIELDS = (("bootstrap_host", str), ("bootstrap_port", int), ("bootstrap_room", int))


def _nth(api: Api, body: Mapping[str, Any], name: str, index: int, kind: type[Any]) -> Any:
    """The value of a bootstrap field for prompt `index`: a list's entry, or the scalar (rooms count upwards)."""
    value = body.get(name)
    scalar: Any = value
    if isinstance(value, list):
        if index >= len(value):
            raise BadRequest(wire.internal_error("list index out of range"), 500)
        scalar = value[index]
    if scalar is None:
        return None
    scalar = _converted(api, name, scalar, kind, value)
    return scalar if name != "bootstrap_room" else _room(api, scalar if isinstance(value, list) else scalar + index)


def _converted(api: Api, name: str, scalar: Any, kind: type[Any], value: Any) -> Any:
    """`scalar`, part of `value`, as FastAPI converts it: to whole numbers from text, floats and booleans."""
    try:
        whole = kind is int and isinstance(scalar, str | float) and int(scalar) == float(scalar)
        if isinstance(scalar, kind) or (whole and abs(int(scalar)) < 2**63):
            return kind(scalar)
    except (ValueError, OverflowError):
        pass
    raise BadRequest(wire.union_type_error(api.value, name, kind.__name__, value))


def _check_contract(body: Mapping[str, Any]) -> None:
    for name, kind in _ROOM_FIELDS:
        value = body.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                _converted(Api.GENERATE, name, each, kind, value)
    violation = contract.violation(body)
    if violation is not None:
        raise BadRequest({"error": violation})


def _dp_rank(api: Api, body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(wire.union_type_error(api.value, name, "int", value))
    return value


def _namespace(api: Api, body: Mapping[str, Any], index: int) -> CacheNamespace:
    """What keeps the KV of prompt `index` apart; an empty string is the same as none."""
    salt, extra = (_nth(api, body, name, index, str) or "" for name in ("cache_salt", "extra_key"))
    return CacheNamespace(salt, extra) if salt or extra else SHARED


def _room(api: Api, room: int) -> int:
    if not -MAX_ROOM - 1 <= room < 2**64:
        raise BadRequest(wire.value_error(api.value, "bootstrap_room does not fit 64 bits"))
    return room


def _rids(api: Api, body: Mapping[str, Any], count: int, batch: bool) -> list[str] | None:
    rid = body.get("rid")
    if rid is None:
        return None
    if isinstance(rid, list):
        if len(rid) != count:
            raise BadRequest(
                wire.value_error(api.value, "The length of rid list should be the same as the batch size.")
            )
        return [str(each) for each in rid]
    return [f"{rid}_{index}" for index in range(count)] if batch or count > 1 else [str(rid)]


def _prompts(api: Api, body: Mapping[str, Any]) -> tuple[list[tuple[bytes, str]], bool]:
    if api is Api.CHAT:
        return [_chat_prompt(body)], False
    if api is Api.COMPLETIONS:
        if "prompt" not in body:
            raise BadRequest(wire.missing_error(api.value, "prompt", dict(body)))
        return _prompt_list(api, body["prompt"])
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest(wire.value_error(api.value, "Either text, input_ids or input_embeds should be provided."))
    return _prompt_list(api, text if text is not None else ids)


def _prompt_list(api: Api, prompt: Any) -> tuple[list[tuple[bytes, str]], bool]:
    if isinstance(prompt, str):
        return [(encode(prompt), prompt)], False
    if prompt == [] and api is Api.GENERATE:
        raise BadRequest(wire.value_error(api.value, "input_ids cannot be empty."))
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [(_pack(api, prompt), "")], False
        if all(isinstance(each, str) for each in prompt):
            return [(encode(each), each) for each in prompt], True
        if all(isinstance(each, list) for each in prompt):
            return [(_pack(api, each), "") for each in prompt], True
    raise BadRequest(wire.value_error(api.value, "The input must be text or a non-empty list of token ids."))


def _pack(api: Api, ids: list[Any]) -> bytes:
    try:
        return pack(ids)
    except (TypeError, OverflowError) as error:
        raise BadRequest(wire.value_error(api.value, f"input_ids are not token ids: {error}")) from error


def _chat_prompt(body: Mapping[str, Any]) -> tuple[bytes, str]:
    messages = body.get("messages")
    if messages is None:
        raise BadRequest(wire.missing_error(Api.CHAT.value, "messages", {**body, "tool_choice": "none"}))
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise BadRequest(wire.union_type_error(Api.CHAT.value, "messages", "list", messages))
    for index, message in enumerate(messages):
        if not isinstance(message["role"], str) or message["role"].lower() not in wire.ROLES:
            raise BadRequest(wire.role_error(Api.CHAT.value, index, message["role"]))
    if not messages:
        raise BadRequest(wire.value_error(Api.CHAT.value, "Messages cannot be empty."))
    if body.get("input_ids") is not None:
        return _pack(Api.CHAT, body["input_ids"]), ""
    text = chat_text(body)
    return encode(text), text


def _generate_sampling(api: Api, body: Mapping[str, Any], index: int, prompt_tokens: int, limits: Limits) -> Sampling:
    params = body.get("sampling_params") or {}
    if isinstance(params, list):
        params = params[index]
    wanted = params.get("max_new_tokens", _DEFAULT_GENERATE_TOKENS)
    answer_tokens = _answer_tokens(api, wanted, prompt_tokens, limits)
    _check_ranges(api, params)
    rule = StopRule(
        max_new_tokens=answer_tokens,
        min_new_tokens=params.get("min_new_tokens") or 0,
        ignore_eos=bool(params.get("ignore_eos")),
        stop=_stops(params.get("stop")),
        stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
        no_stop_trim=bool(params.get("no_stop_trim")),
    )
    start = _of_prompt(body, "logprob_start_len", index)
    asked = body.get("token_ids_logprob") or ()
    return Sampling(
        rule=rule,
        draw=drawn(params, params.get("sampling_seed"), {}),
        samples=params.get("n") or 1,
        logprobs=bool(_of_prompt(body, "return_logprob", index)),
        top_logprobs=int(_of_prompt(body, "top_logprobs_num", index) or 0),
        prompt_logprobs_from=-1 if start is None else int(start),
        token_ids_logprob=tuple(asked[index] if asked and isinstance(asked[0], list) else asked),
        logprob_texts=bool(body.get("return_text_in_logprobs")),
    )


def _of_prompt(body: Mapping[str, Any], name: str, index: int) -> Any:
    """The value of a logprob field for prompt `index` of a batch: a list's entry, or the one for all."""
    value = body.get(name)
    return value[index] if isinstance(value, list) else value


def _openai_sampling(api: Api, body: Mapping[str, Any], index: int, prompt_tokens: int, limits: Limits) -> Sampling:
    wanted = body.get("max_tokens")
    if api is Api.CHAT and body.get("max_completion_tokens") is not None:
        wanted = body["max_completion_tokens"]
    if api is Api.COMPLETIONS:
        wanted = body.get("max_tokens", _DEFAULT_COMPLETION_TOKENS)
        if wanted is None:
            raise BadRequest(wire.number_error(api.value, "max_tokens", "int", None))
    numbers = (("max_tokens", wanted, "int"), ("temperature", body.get("temperature"), "float"))
    for name, value, kind in (*numbers, ("seed", body.get("seed"), "int")):
        kinds = int if kind == "int" else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise BadRequest(wire.number_error(api.value, name, kind, value))
    if api is Api.CHAT:
        _check_chat(body, wanted, limits)
    answer_tokens = _answer_tokens(api, wanted, prompt_tokens, limits)
    named = {"min_new_tokens": body.get("min_tokens"), "max_new_tokens": wanted, "sampling_seed": body.get("seed")}
    _check_ranges(api, {**body, **named})
    logprobs = body.get("logprobs")
    rule = StopRule(
        max_new_tokens=answer_tokens,
        min_new_tokens=int(body.get("min_tokens") or 0),
        ignore_eos=bool(body.get("ignore_eos")),
        stop=_stops(body.get("stop")),
        stop_token_ids=frozenset(body.get("stop_token_ids") or ()),
        no_stop_trim=bool(body.get("no_stop_trim")),
    )
    return Sampling(
        rule=rule,
        draw=drawn(body, body.get("seed"), limits.chat_defaults if api is Api.CHAT else {}),
        samples=int(body.get("n") or 1),
        logprobs=bool(logprobs) or (api is Api.COMPLETIONS and logprobs is not None),
        top_logprobs=int(body.get("top_logprobs") or 0) if api is Api.CHAT else int(logprobs or 0),
        prompt_logprobs_from=0 if api is Api.COMPLETIONS and body.get("echo") and logprobs else -1,
    )


def _check_ranges(api: Api, params: Mapping[str, Any]) -> None:
    refused = contract.out_of_range(params)
    if refused is not None:
        raise BadRequest(wire.value_error(api.value, refused))


def _check_chat(body: Mapping[str, Any], wanted: int | None, limits: Limits) -> None:
    if wanted is not None and wanted > limits.context_tokens:
        supported = f"This model supports at most {limits.context_tokens} completion tokens."
        raise BadRequest(wire.value_error(Api.CHAT.value, f"max_completion_tokens is too large: {wanted}.{supported}"))
    if not body.get("stream"):
        return
    for name, where in _NOT_STREAMED:
        if body.get(name):
            text = f"{name} is not supported with streaming{where}. Please set stream=false when using {name}=true."
            raise BadRequest({**wire.value_error(Api.CHAT.value, text), "type": "BadRequest"})


_NOT_STREAMED = (
    ("return_prompt_token_ids", ""),
    ("return_token_ids", " on /v1/chat/completions"),
    ("return_meta_info", ""),
)


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(each for each in stop if each)


def _answer_tokens(api: Api, wanted: int | None, prompt_tokens: int, limits: Limits) -> int:
    """How long the answer may be; BadRequest when prompt or answer do not fit the context."""
    context = limits.context_tokens
    if prompt_tokens >= context:
        text = f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        raise BadRequest(wire.value_error(api.value, text))
    if wanted is not None and wanted + prompt_tokens > context:
        raise BadRequest(wire.value_error(api.value, wire.too_many_tokens(context, prompt_tokens, wanted)))
    room = min(context - 1, limits.max_total_tokens - 1) - prompt_tokens - 1  # `init_req_max_new_tokens` of SGLang
    return max(1, room if wanted is None else min(wanted, room))
