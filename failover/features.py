"""What a request asks for beyond plain text, read from its client's own body: what decides how its stream is mended.

Pure. Field names are those of SGLang 0.5 (`protocol.py`, `io_struct.py`, `sampling_params.py`). Null and neutral values
are no feature. A value that the engine will refuse may count as one: such a request never gets a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = (CHAT, COMPLETIONS, GENERATE)

_GREEDY_BELOW = 1e-6
"""SGLang takes a temperature below this for 0 (`_SAMPLING_EPS` in `sampling_params.py`)."""


class Feature(StrEnum):
    """One thing that a request may ask for."""

    TOOLS = "tools"
    REASONING = "reasoning"
    """A chat asks for thinking, in whatever way. Whether the engine parses it is the engine's affair."""
    REQUIRE_REASONING = "require_reasoning"
    GRAMMAR = "grammar"
    PENALTIES = "penalties"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    STOP_STRINGS = "stop_strings"
    STOP_REGEX = "stop_regex"
    SEVERAL_SAMPLES = "several_samples"
    LOGIT_BIAS = "logit_bias"
    MIN_TOKENS = "min_tokens"
    IDS_PROMPT = "ids_prompt"
    """The prompt is token ids, of which the gateway need not know the text."""
    MEDIA = "media"
    EMBEDDINGS = "embeddings"
    SESSIONS = "sessions"
    CUSTOM_LOGIT_PROCESSOR = "custom_logit_processor"
    WATERMARK = "watermark"
    THINKING_BUDGET = "thinking_budget"
    HIDDEN_STATES = "hidden_states"
    ROUTED_EXPERTS = "routed_experts"
    WHOLE_OUTPUT = "whole_output"
    """Its last event is to hold something for every output token: ids, flat logprobs, masks, counts."""
    BEAM = "beam"
    ECHO = "echo"
    SUFFIX = "suffix"


class Sampling(StrEnum):
    """How the next token is chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    SEEDED = "seeded"


_Test = Callable[[Any], bool]
_Fields = Mapping[str, tuple[Feature, _Test]]


def _not_zero(value: Any) -> bool:
    return value not in (None, 0)


def _not_one(value: Any) -> bool:
    return value not in (None, 1)


def _above_one(value: Any) -> bool:
    return isinstance(value, int | float) and value > 1


def _given(value: Any) -> bool:
    return value is not None


def _constrains(response_format: Any) -> bool:
    return bool(response_format) and not (isinstance(response_format, dict) and response_format.get("type") == "text")


def _is_ids(prompt: Any) -> bool:
    """Token ids, or a list of prompts among which are some."""
    return isinstance(prompt, list) and any(isinstance(each, int) or _is_ids(each) for each in prompt)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none where it is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _has_media(messages: Any) -> bool:
    contents = [message.get("content") for message in _objects(messages)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not (isinstance(part, dict) and part.get("type") == "text") for part in parts)


def _thinks(template_kwargs: Any) -> bool:
    switches = ("thinking", "enable_thinking")
    return isinstance(template_kwargs, dict) and any(template_kwargs.get(name) for name in switches)


def _not_off(value: Any) -> bool:
    """A way of thinking other than none at all: an effort, or a switch in one of its shapes."""
    if isinstance(value, dict):
        return value.get("type") != "disabled" and bool(value)
    return value not in (None, "none", False)


_F = Feature
_SAMPLING_FIELDS: _Fields = {
    "frequency_penalty": (_F.PENALTIES, _not_zero),
    "presence_penalty": (_F.PENALTIES, _not_zero),
    "repetition_penalty": (_F.PENALTIES, _not_one),
    "json_schema": (_F.GRAMMAR, bool),
    "regex": (_F.GRAMMAR, bool),
    "ebnf": (_F.GRAMMAR, bool),
    "structural_tag": (_F.GRAMMAR, bool),
    "stop": (_F.STOP_STRINGS, bool),
    "stop_regex": (_F.STOP_REGEX, bool),
    "n": (_F.SEVERAL_SAMPLES, _above_one),
    "logit_bias": (_F.LOGIT_BIAS, bool),
    "min_tokens": (_F.MIN_TOKENS, _not_zero),
    "min_new_tokens": (_F.MIN_TOKENS, _not_zero),
    "beam_width": (_F.BEAM, _above_one),
    "custom_params": (_F.CUSTOM_LOGIT_PROCESSOR, bool),
    "watermark": (_F.WATERMARK, bool),
}
"""In the body of the OpenAI routes, in `sampling_params` of `/generate`."""

_COMMON_FIELDS: _Fields = {
    "session_params": (_F.SESSIONS, _given),
    "custom_logit_processor": (_F.CUSTOM_LOGIT_PROCESSOR, bool),
    "return_hidden_states": (_F.HIDDEN_STATES, bool),
    "return_routed_experts": (_F.ROUTED_EXPERTS, bool),
}
_CHAT_FIELDS: _Fields = {
    "tools": (_F.TOOLS, bool),
    "messages": (_F.MEDIA, _has_media),
    "response_format": (_F.GRAMMAR, _constrains),
    "reasoning": (_F.REASONING, _not_off),
    "reasoning_effort": (_F.REASONING, _not_off),
    "thinking": (_F.REASONING, _not_off),
    "chat_template_kwargs": (_F.REASONING, _thinks),
    "logprobs": (_F.LOGPROBS, bool),
    "input_ids": (_F.IDS_PROMPT, _given),
    "return_input_ids_in_sglext": (_F.WHOLE_OUTPUT, bool),
    "return_output_ids_in_sglext": (_F.WHOLE_OUTPUT, bool),
    "return_spec_tokens_details": (_F.WHOLE_OUTPUT, bool),
    "return_flat_raw_output_top_logprobs": (_F.WHOLE_OUTPUT, bool),
    "return_sampling_mask": (_F.WHOLE_OUTPUT, bool),
}
_COMPLETIONS_FIELDS: _Fields = {
    "best_of": (_F.SEVERAL_SAMPLES, _above_one),
    "response_format": (_F.GRAMMAR, _constrains),
    "logprobs": (_F.LOGPROBS, _given),
    "prompt": (_F.IDS_PROMPT, _is_ids),
    "echo": (_F.ECHO, bool),
    "suffix": (_F.SUFFIX, bool),
    "return_spec_tokens_details": (_F.WHOLE_OUTPUT, bool),
}
_GENERATE_FIELDS: _Fields = {
    "return_logprob": (_F.LOGPROBS, bool),
    "input_ids": (_F.IDS_PROMPT, _given),
    "image_data": (_F.MEDIA, bool),
    "video_data": (_F.MEDIA, bool),
    "audio_data": (_F.MEDIA, bool),
    "input_embeds": (_F.EMBEDDINGS, _given),
    "positional_embed_overrides": (_F.EMBEDDINGS, _given),
    "watermark": (_F.WATERMARK, bool),
    "require_reasoning": (_F.REQUIRE_REASONING, bool),
    "max_thinking_tokens": (_F.THINKING_BUDGET, _given),
    "return_flat_raw_output_top_logprobs": (_F.WHOLE_OUTPUT, bool),
    "return_indexer_topk": (_F.WHOLE_OUTPUT, bool),
    "return_entropy": (_F.WHOLE_OUTPUT, bool),
    "return_sampling_mask": (_F.WHOLE_OUTPUT, bool),
}
_BODY_FIELDS: Mapping[str, _Fields] = {
    CHAT: {**_SAMPLING_FIELDS, **_COMMON_FIELDS, **_CHAT_FIELDS},
    COMPLETIONS: {**_SAMPLING_FIELDS, **_COMMON_FIELDS, **_COMPLETIONS_FIELDS},
    GENERATE: {**_COMMON_FIELDS, **_GENERATE_FIELDS},
}


def features(path: str, body: Mapping[str, Any]) -> frozenset[Feature]:
    """What the body of a client of one of the three routes asks for; `path` is one of PATHS."""
    found = set(_found(body, _BODY_FIELDS[path]))
    if path == GENERATE:
        for params in _sampling_params(body):
            found.update(_found(params, _SAMPLING_FIELDS))
        start = body.get("logprob_start_len")
        starts = start if isinstance(start, list) else [start]
        if body.get("return_logprob") and any(isinstance(each, int) and each >= 0 for each in starts):
            found.add(Feature.PROMPT_LOGPROBS)
    elif path == CHAT and any(message.get("tools") for message in _objects(body.get("messages"))):
        found.add(Feature.TOOLS)  # some models take tools from a message
    elif path == COMPLETIONS and {Feature.ECHO, Feature.LOGPROBS} <= found:
        found.add(Feature.PROMPT_LOGPROBS)
    return frozenset(found)


def sampling(path: str, body: Mapping[str, Any]) -> Sampling:
    """How the tokens of this request are chosen; a temperature that is left to the engine counts as sampled."""
    ways = {_sampling(params) for params in (_sampling_params(body) if path == GENERATE else [body])}
    return ways.pop() if len(ways) == 1 else Sampling.SAMPLED


def _sampling(params: Mapping[str, Any]) -> Sampling:
    temperature = params.get("temperature")
    if params.get("top_k") == 1 or (isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW):
        return Sampling.GREEDY
    seeded = params.get("seed") is not None or params.get("sampling_seed") is not None
    return Sampling.SEEDED if seeded else Sampling.SAMPLED


def _sampling_params(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of `/generate`: one for all prompts, or a list with one for each."""
    params = body.get("sampling_params")
    return _objects(params if isinstance(params, list) else [params]) or [{}]


def _found(owner: Mapping[str, Any], fields: _Fields) -> Iterator[Feature]:
    for name, (feature, is_asked) in fields.items():
        if name in owner and is_asked(owner[name]):
            yield feature
