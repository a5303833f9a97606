"""Which chats may be asked for as completions: a case for every row of the table and every rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.exact_chat_rules import FIELDS, OPENAI_SAMPLING, Field, completion_body, sampling_defaults, why_not
from engines.types import ChatFacts, EngineFacts
from tests.fakes import FACTS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
ENGINE: EngineFacts = replace(FACTS, sampling_defaults="openai", context_tokens=4096, chat=ChatFacts())


def objection(engine: EngineFacts = ENGINE, config: Any = None, **more: Any) -> str:
    return why_not({**CHAT, **more}, engine, config)


def test_a_plain_chat_may() -> None:
    assert objection() == ""


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field is Field.SAME])
def test_a_field_that_means_the_same_is_carried_over(name: str) -> None:
    value = {"stream": True, "stream_options": {"include_usage": True}}.get(name, 0.5)
    assert objection(**{name: value}) == ""
    assert completion_body({**CHAT, name: value}, [1], {})[name] == value
    assert name == "stream" or name not in completion_body({**CHAT, name: None}, [1], {})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field is Field.NEUTRAL_ONLY])
def test_a_field_for_chats_only_makes_it_plain_unless_it_is_off(name: str) -> None:
    assert name in objection(**{name: 1})
    for off in (None, False, 0, []):
        assert objection(**{name: off}) == ""
    assert name not in completion_body({**CHAT, name: 0}, [1], {})


@pytest.mark.parametrize(
    "name", [name for name, field in FIELDS.items() if field in (Field.PROMPT, Field.NO_EFFECT) and name != "messages"]
)
def test_a_field_that_is_in_the_prompt_or_has_no_effect_is_left_out(name: str) -> None:
    assert objection(**{name: {"x": 1}}) == ""
    assert name not in completion_body({**CHAT, name: {"x": 1}}, [1], {})


@pytest.mark.parametrize("name", list(OPENAI_SAMPLING))
def test_a_sampling_parameter_is_the_clients_or_the_default(name: str) -> None:
    assert completion_body({**CHAT, name: 0.25}, [1], OPENAI_SAMPLING)[name] == 0.25
    assert completion_body({**CHAT, name: None}, [1], OPENAI_SAMPLING)[name] == OPENAI_SAMPLING[name]


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
    ],
)
def test_the_limit_is_the_newer_field_else_the_older(limits: dict[str, Any], limit: int | None) -> None:
    assert completion_body({**CHAT, **limits}, [1], {}).get("max_tokens") == limit


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"stream": False}, "streamed"),
        ({"stream": None}, "streamed"),
        ({"a_new_field": 1}, "a_new_field"),
        ({"n": 2}, "n is"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{}], "tool_choice": "none"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"session_id": "s"}, "session_id"),
        ({"logprobs": True}, "single tokens"),
        ({"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ({"custom_logit_processor": ["x"]}, "list"),
        ({"lora_path": ["x"]}, "list"),
        ({"chat_template_kwargs": {"spaces_between_special_tokens": False}}, "spaces"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        ({"messages": [{"role": "system", "content": "x", "tools": [{}]}]}, "tools"),
        ({"max_tokens": 4097}, "context"),
    ],
)
def test_what_makes_it_plain(more: dict[str, Any], word: str) -> None:
    assert word in objection(**more)


@pytest.mark.parametrize(
    "more",
    [
        {"a_new_field": None},
        {"n": 1},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"chat_template_kwargs": {"spaces_between_special_tokens": True, "enable_thinking": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"max_tokens": 4096},
    ],
)
def test_what_does_not(more: dict[str, Any]) -> None:
    assert objection(**more) == ""


@pytest.mark.parametrize(
    ("chat", "word"),
    [
        (ChatFacts(reasoning_parser="qwen3"), "reasoning"),
        (ChatFacts(multimodal=True), "media"),
        (ChatFacts(chat_template="chatml"), "template"),
        (ChatFacts(chat_template="/x/y.json"), "template"),
        (ChatFacts(completion_template="qwen_coder"), "completions"),
        (ChatFacts(tokenizer=False), "tokenizer"),
        (ChatFacts(tells_ids=True), "all token ids"),
        (ChatFacts(template_kwargs=True), "names of its own"),
        (ChatFacts(model_kind="gpt_oss GptOssForCausalLM"), "way of its own"),
        (ChatFacts(model_kind="x DeepseekV4ForCausalLM"), "way of its own"),
        (ChatFacts(tool_call_parser="minimax-m3"), "way of its own"),
    ],
)
def test_engines_that_do_more_to_chats(chat: ChatFacts, word: str) -> None:
    assert word in objection(replace(ENGINE, chat=chat))


def test_engines_that_do_not() -> None:
    told = ChatFacts(chat_template="/x/y.jinja", tool_call_parser="qwen25", model_kind="qwen2 Qwen2ForCausalLM")
    assert objection(replace(ENGINE, chat=told)) == ""


def test_logprobs_may_where_the_texts_of_tokens_are_known() -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": 0}
    assert why_not(asked, ENGINE, None, token_texts=True) == ""
    parses = replace(ENGINE, chat=ChatFacts(tool_call_parser="qwen25"))
    assert "tool parser" in why_not(asked, parses, None, token_texts=True)
    assert completion_body(asked, [1], {})["logprobs"] == 0
    assert "logprobs" not in completion_body({**CHAT, "logprobs": False}, [1], {})
    assert objection(logprobs=False) == ""


def test_another_front_end_goes_plain() -> None:
    assert objection(replace(ENGINE, frontend="python")) == ""
    assert "rust front end" in objection(replace(ENGINE, frontend="rust"))


def test_an_engine_of_which_nothing_is_known() -> None:
    assert why_not(CHAT, None, {}) != ""


def test_running_usage_goes_plain_where_chats_tell_cached_tokens() -> None:
    running = {"stream_options": {"continuous_usage_stats": True}}
    assert objection(**running) == ""
    assert objection(replace(ENGINE, cache_report=True), **running) != ""
    assert objection(replace(ENGINE, cache_report=True), stream_options={"include_usage": True}) == ""


def test_the_models_own_defaults_must_be_known() -> None:
    by_model = replace(ENGINE, sampling_defaults="model")
    assert "generation_config" in objection(by_model)
    assert objection(by_model, {}) == ""
    assert objection(by_model, **OPENAI_SAMPLING) == ""
    some = {name: value for name, value in OPENAI_SAMPLING.items() if name != "min_p"}
    assert "generation_config" in objection(by_model, **some)
    assert "not known" in objection(replace(ENGINE, sampling_defaults=""), {})


def test_the_models_own_defaults_are_written_out_where_the_engine_applies_them() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    assert sampling_defaults(ENGINE, config) == OPENAI_SAMPLING
    by_model = replace(ENGINE, sampling_defaults="model")
    assert sampling_defaults(by_model, config) == {**OPENAI_SAMPLING, "temperature": 0.6, "top_k": 20}
