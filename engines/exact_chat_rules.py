"""Which chats can be asked for as completions of token ids without a difference, and as which completion. Pure.

One table says what becomes of every field of a chat. A field that is not in it, a value that only chats understand, or
an engine that does more to chats than it says, make the chat go the plain way. Read from SGLang 0.5.23:
`ChatCompletionRequest.to_sampling_params`, `_convert_to_internal_request` of `serving_chat.py` and
`serving_completions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from engines.types import ChatFacts, EngineFacts


class Field(StrEnum):
    """What becomes of a field of a chat in the completion."""

    SAME = "same"
    """Both routes treat it alike."""
    SAMPLING = "sampling"
    """Where it is absent a chat has the model's default, a completion OpenAI's: always written out."""
    LIMIT = "limit"
    """`max_completion_tokens`, else `max_tokens`; where both are absent, the room of the context."""
    LOGPROBS = "logprobs"
    """The same values, told otherwise: it takes the text of single tokens to write them as a chat does."""
    PROMPT = "prompt"
    """It is in the prompt ids."""
    NO_EFFECT = "no effect"
    """It changes nothing in a chat that goes this way."""
    NEUTRAL_ONLY = "neutral only"
    """Off (false, 0, empty) it has no effect; on, only a chat understands it."""


FIELDS: Mapping[str, Field] = {
    "model": Field.SAME,  # also as model:adapter
    "stream": Field.SAME,
    "stream_options": Field.SAME,
    "frequency_penalty": Field.SAME,
    "presence_penalty": Field.SAME,
    "logit_bias": Field.SAME,
    "seed": Field.SAME,
    "stop": Field.SAME,
    "stop_token_ids": Field.SAME,
    "stop_regex": Field.SAME,
    "no_stop_trim": Field.SAME,
    "ignore_eos": Field.SAME,
    "min_tokens": Field.SAME,
    "skip_special_tokens": Field.SAME,
    "lora_path": Field.SAME,
    "custom_logit_processor": Field.SAME,
    "custom_params": Field.SAME,
    "watermark": Field.SAME,
    "extra_key": Field.SAME,
    "cache_salt": Field.SAME,
    "priority": Field.SAME,
    "user": Field.SAME,
    "temperature": Field.SAMPLING,
    "top_p": Field.SAMPLING,
    "top_k": Field.SAMPLING,
    "min_p": Field.SAMPLING,
    "repetition_penalty": Field.SAMPLING,
    "max_tokens": Field.LIMIT,
    "max_completion_tokens": Field.LIMIT,
    "messages": Field.PROMPT,
    "input_ids": Field.PROMPT,
    "chat_template_kwargs": Field.PROMPT,
    "continue_final_message": Field.PROMPT,
    "reasoning": Field.PROMPT,
    "reasoning_effort": Field.PROMPT,
    "thinking": Field.PROMPT,
    "separate_reasoning": Field.NO_EFFECT,  # there is no reasoning parser
    "stream_reasoning": Field.NO_EFFECT,
    "parallel_tool_calls": Field.NO_EFFECT,  # there are no tools
    "metadata": Field.NO_EFFECT,
    "store": Field.NO_EFFECT,
    "service_tier": Field.NO_EFFECT,
    "safety_identifier": Field.NO_EFFECT,
    "prompt_cache_key": Field.NO_EFFECT,
    "tools": Field.NEUTRAL_ONLY,
    "logprobs": Field.LOGPROBS,
    "top_logprobs": Field.NEUTRAL_ONLY,
    "regex": Field.NEUTRAL_ONLY,
    "ebnf": Field.NEUTRAL_ONLY,
    "return_hidden_states": Field.NEUTRAL_ONLY,
    "return_routed_experts": Field.NEUTRAL_ONLY,
    "return_cached_tokens_details": Field.NEUTRAL_ONLY,
    "return_spec_tokens_details": Field.NEUTRAL_ONLY,
    "return_prompt_token_ids": Field.NEUTRAL_ONLY,
    "return_token_ids": Field.NEUTRAL_ONLY,
    "return_meta_info": Field.NEUTRAL_ONLY,
    "return_input_ids_in_sglext": Field.NEUTRAL_ONLY,
    "return_output_ids_in_sglext": Field.NEUTRAL_ONLY,
    "return_sampling_mask": Field.NEUTRAL_ONLY,
    "return_flat_raw_output_top_logprobs": Field.NEUTRAL_ONLY,
    "use_audio_in_video": Field.NEUTRAL_ONLY,
}

OPENAI_SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""`_DEFAULT_SAMPLING_PARAMS` of SGLang's chats."""

# Models and parsers for which SGLang encodes or reads chats in code of its own, also chats without tools.
_OWN_MODELS = ("gpt_oss", "gemma4", "minimax_m3_vl", "deepseek_v41", "DeepseekV4", "KimiK3", "Inkling")
_OWN_TOOL_PARSERS = frozenset({"beam", "deepseekv32", "deepseekv4", "deepseekv41", "gpt-oss", "kimi_k3", "minimax-m3"})


def why_not(
    body: Mapping[str, Any],
    facts: EngineFacts | None,
    generation_config: Mapping[str, Any] | None,
    *,
    token_texts: bool = False,
) -> str:
    """Why this chat must go the plain way, in words for an operator; "" where it can be asked for as a completion.

    `facts` are those of the decode. `generation_config` is the model's own, None where it is not known. `token_texts`:
    the texts of single tokens are known here.
    """
    if facts is None:
        return "what the engine does to chats is not known yet"
    if facts.frontend not in ("", "python"):
        return f"the engine's {facts.frontend} front end may treat completions in another way"
    return (
        _why_not_engine(facts.chat)
        or _why_not_body(body)
        or _why_not_limit(body, facts)
        or _why_not_usage(body, facts)
        or _why_not_logprobs(body, facts.chat, token_texts)
        or _why_not_sampling(body, facts, generation_config)
    )


def _why_not_engine(chat: ChatFacts) -> str:
    if chat.reasoning_parser:
        return f"the engine parses reasoning ({chat.reasoning_parser})"
    if chat.multimodal:
        return "the model takes media, and its own processor tokenizes chats"
    if chat.chat_template and not chat.chat_template.endswith(".jinja"):
        return f"the engine's chat template {chat.chat_template} may have stop strings of its own"
    if chat.completion_template:
        return f"the engine renders completions ({chat.completion_template})"
    if chat.template_kwargs:
        return "the engine gives its chat template names of its own"
    if chat.tells_ids:
        return "the engine ends chats with all token ids"
    if not chat.tokenizer:
        return "the engine has no tokenizer"
    if any(name in chat.model_kind for name in _OWN_MODELS) or chat.tool_call_parser in _OWN_TOOL_PARSERS:
        return "the engine encodes or reads the chats of this model in a way of its own"
    return ""


def _why_not_body(body: Mapping[str, Any]) -> str:
    if not body.get("stream"):
        return "it is not streamed"
    for name, value in body.items():
        if value is None or _is_neutral(name, value):
            continue
        field = FIELDS.get(name)
        if field is None or (field is Field.NEUTRAL_ONLY and value):
            return f"{name} is for chats only"
    if isinstance(body.get("custom_logit_processor"), list) or isinstance(body.get("lora_path"), list):
        return "a list where a completion takes a single value"
    template = body.get("chat_template_kwargs")
    if isinstance(template, dict) and template.get("spaces_between_special_tokens", True) is not True:
        return "spaces_between_special_tokens is for chats only"
    if isinstance(template, dict) and "chat_template" in template:
        return "it brings a chat template, which the engine may refuse"
    return _why_not_messages(body.get("messages"))


def _is_neutral(name: str, value: Any) -> bool:
    match name:
        case "n":
            return bool(value == 1)
        case "tool_choice":
            return value in ("none", "auto")
        case "response_format":
            return isinstance(value, dict) and value.get("type") == "text"
        case _:
            return False


def _why_not_messages(messages: Any) -> str:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if any(not (isinstance(part, dict) and part.get("type") == "text") for part in parts):
            return "it has media"
        if message.get("tools"):
            return "a message has tools"
    return ""


def _why_not_limit(body: Mapping[str, Any], facts: EngineFacts) -> str:
    limit = _limit(body)
    return "its max_tokens are more than the context" if limit is not None and limit > facts.context_tokens else ""


def _why_not_usage(body: Mapping[str, Any], facts: EngineFacts) -> str:
    options = body.get("stream_options")
    running = isinstance(options, dict) and options.get("continuous_usage_stats")
    return "the running usage of completions has no cached tokens" if running and facts.cache_report else ""


def _why_not_logprobs(body: Mapping[str, Any], chat: ChatFacts, token_texts: bool) -> str:
    if not body.get("logprobs"):
        return ""
    if chat.tool_call_parser:
        return "an engine with a tool parser tells logprobs of what has no text too"
    return "" if token_texts else "the texts of single tokens, for its logprobs, are not known here"


def _why_not_sampling(body: Mapping[str, Any], facts: EngineFacts, generation_config: Mapping[str, Any] | None) -> str:
    if facts.sampling_defaults == "openai" or all(body.get(name) is not None for name in OPENAI_SAMPLING):
        return ""
    if facts.sampling_defaults != "model":
        return "the engine's sampling defaults are not known"
    return "" if generation_config is not None else "the model's generation_config.json is not known here"


def sampling_defaults(facts: EngineFacts, generation_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The sampling parameters of a chat that names none (`get_default_sampling_params` of SGLang's model config)."""
    if facts.sampling_defaults != "model" or generation_config is None:
        return OPENAI_SAMPLING
    told = {name: generation_config.get(name) for name in OPENAI_SAMPLING}
    return {**OPENAI_SAMPLING, **{name: value for name, value in told.items() if value is not None}}


def completion_body(body: Mapping[str, Any], prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The completion that is this chat. It names no `max_tokens` where the chat is limited by its context only."""
    same = {name: body[name] for name, field in FIELDS.items() if field is Field.SAME and body.get(name) is not None}
    chosen = {name: default if body.get(name) is None else body[name] for name, default in sampling.items()}
    limit = _limit(body)
    limits = {} if limit is None else {"max_tokens": limit}
    logprobs = {"logprobs": 0} if body.get("logprobs") else {}
    return {**same, **chosen, **limits, **logprobs, "prompt": list(prompt_ids)}


def _limit(body: Mapping[str, Any]) -> int | None:
    return body.get("max_completion_tokens") or body.get("max_tokens") or None
