"""What a body asks for, field by field, on the three routes."""

from __future__ import annotations

from typing import Any

import pytest

from failover.features import CHAT, COMPLETIONS, GENERATE, PATHS, Feature, Sampling, features, sampling

Body = dict[str, Any]
F = Feature
MESSAGES = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, Body] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hello"},
    GENERATE: {"text": "hello"},
}
EVERYWHERE: list[tuple[Body, Feature]] = [
    ({"frequency_penalty": 0.5}, F.PENALTIES),
    ({"presence_penalty": -0.5}, F.PENALTIES),
    ({"repetition_penalty": 1.1}, F.PENALTIES),
    ({"regex": "a*"}, F.GRAMMAR),
    ({"ebnf": "root ::= x"}, F.GRAMMAR),
    ({"json_schema": "{}"}, F.GRAMMAR),
    ({"stop": "X"}, F.STOP_STRINGS),
    ({"stop": ["X"]}, F.STOP_STRINGS),
    ({"stop_regex": "X+"}, F.STOP_REGEX),
    ({"n": 2}, F.SEVERAL_SAMPLES),
    ({"logit_bias": {"5": 1.0}}, F.LOGIT_BIAS),
    ({"watermark": {"key": "k"}}, F.WATERMARK),
    ({"custom_params": {"thinking_budget": 9}}, F.CUSTOM_LOGIT_PROCESSOR),
]
"""In the body of the OpenAI routes, in sampling_params of /generate."""
TOP: list[tuple[Body, Feature]] = [
    ({"custom_logit_processor": "x"}, F.CUSTOM_LOGIT_PROCESSOR),
    ({"session_params": {"id": "s"}}, F.SESSIONS),
    ({"return_hidden_states": True}, F.HIDDEN_STATES),
    ({"return_routed_experts": True}, F.ROUTED_EXPERTS),
]
OWN: list[tuple[str, Body, set[Feature]]] = [
    (CHAT, {"tools": [{"type": "function"}]}, {F.TOOLS}),
    (CHAT, {"messages": [{"role": "system", "content": "s", "tools": [{}]}, *MESSAGES]}, {F.TOOLS}),
    (CHAT, {"response_format": {"type": "json_object"}}, {F.GRAMMAR}),
    (CHAT, {"reasoning_effort": "low"}, {F.REASONING}),
    (CHAT, {"reasoning": {"effort": "low"}}, {F.REASONING}),
    (CHAT, {"thinking": {"type": "adaptive"}}, {F.REASONING}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, {F.REASONING}),
    (CHAT, {"logprobs": True}, {F.LOGPROBS}),
    (CHAT, {"min_tokens": 4}, {F.MIN_TOKENS}),
    (CHAT, {"input_ids": [1]}, {F.IDS_PROMPT}),
    (CHAT, {"return_output_ids_in_sglext": True}, {F.WHOLE_OUTPUT}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, {F.MEDIA}),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, {F.GRAMMAR}),
    (COMPLETIONS, {"logprobs": 0}, {F.LOGPROBS}),
    (COMPLETIONS, {"best_of": 2}, {F.SEVERAL_SAMPLES}),
    (COMPLETIONS, {"echo": True}, {F.ECHO}),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, {F.ECHO, F.LOGPROBS, F.PROMPT_LOGPROBS}),
    (COMPLETIONS, {"suffix": "end"}, {F.SUFFIX}),
    (COMPLETIONS, {"min_tokens": 4}, {F.MIN_TOKENS}),
    (COMPLETIONS, {"prompt": [1, 2]}, {F.IDS_PROMPT}),
    (COMPLETIONS, {"prompt": [[1, 2]]}, {F.IDS_PROMPT}),
    (GENERATE, {"return_logprob": True}, {F.LOGPROBS}),
    (GENERATE, {"return_logprob": True, "logprob_start_len": 0}, {F.LOGPROBS, F.PROMPT_LOGPROBS}),
    (GENERATE, {"return_logprob": True, "logprob_start_len": -1}, {F.LOGPROBS}),
    (GENERATE, {"logprob_start_len": 0}, set()),
    (GENERATE, {"input_ids": [1]}, {F.IDS_PROMPT}),
    (GENERATE, {"input_embeds": [[0.5]]}, {F.EMBEDDINGS}),
    (GENERATE, {"image_data": "http://x"}, {F.MEDIA}),
    (GENERATE, {"require_reasoning": True}, {F.REQUIRE_REASONING}),
    (GENERATE, {"max_thinking_tokens": 0}, {F.THINKING_BUDGET}),
    (GENERATE, {"return_entropy": True}, {F.WHOLE_OUTPUT}),
    (GENERATE, {"sampling_params": {"structural_tag": "{}"}}, {F.GRAMMAR}),
    (GENERATE, {"sampling_params": {"min_new_tokens": 4}}, {F.MIN_TOKENS}),
    (GENERATE, {"sampling_params": {"beam_width": 2}}, {F.BEAM}),
    (GENERATE, {"sampling_params": [{}, {"stop": "X"}]}, {F.STOP_STRINGS}),
    (GENERATE, {"stop": "X", "n": 2}, set()),  # the engine looks into sampling_params only
]
NEUTRAL: Body = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "regex": "",
    "ebnf": None,
    "json_schema": None,
    "stop": [],
    "stop_regex": None,
    "stop_token_ids": [5],
    "n": 1,
    "logit_bias": {},
    "custom_params": None,
    "watermark": None,
    "beam_width": 1,
    "ignore_eos": True,
    "temperature": 0.7,
}


def placed(path: str, fields: Body) -> Body:
    return {**PLAIN[path], "sampling_params": fields} if path == GENERATE else {**PLAIN[path], **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "feature"), EVERYWHERE)
def test_sampling_fields(path: str, fields: Body, feature: Feature) -> None:
    assert features(path, placed(path, fields)) == {feature}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "feature"), TOP)
def test_fields_of_all_bodies(path: str, fields: Body, feature: Feature) -> None:
    assert features(path, {**PLAIN[path], **fields}) == {feature}


@pytest.mark.parametrize(("path", "fields", "found"), OWN)
def test_fields_of_one_route(path: str, fields: Body, found: set[Feature]) -> None:
    assert features(path, {**PLAIN[path], **fields}) == found


@pytest.mark.parametrize("path", PATHS)
def test_neutral_values_are_none(path: str) -> None:
    assert features(path, placed(path, NEUTRAL)) == set()
    assert features(path, {**PLAIN[path], "return_hidden_states": False, "session_params": None}) == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"logprobs": False, "top_logprobs": None},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        {"messages": [{"role": "user", "content": None}]},
        {"min_tokens": 0},
    ],
)
def test_neutral_values_of_a_chat(fields: Body) -> None:
    assert features(CHAT, {"messages": MESSAGES, **fields}) == set()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "way"),
    [
        ({"temperature": 0}, Sampling.GREEDY),
        ({"temperature": 0.0, "seed": 1}, Sampling.GREEDY),
        ({"temperature": 1e-7}, Sampling.GREEDY),
        ({"top_k": 1}, Sampling.GREEDY),
        ({"temperature": 1e-5}, Sampling.SAMPLED),
        ({}, Sampling.SAMPLED),
        ({"temperature": None, "seed": None}, Sampling.SAMPLED),
        ({"seed": 0}, Sampling.SEEDED),
        ({"sampling_seed": 7, "temperature": 1}, Sampling.SEEDED),
    ],
)
def test_sampling(path: str, fields: Body, way: Sampling) -> None:
    assert sampling(path, placed(path, fields)) is way


def test_prompts_that_are_sampled_differently_count_as_sampled() -> None:
    both = [{"temperature": 0}, {"sampling_seed": 1}]
    assert sampling(GENERATE, {"text": ["a", "b"], "sampling_params": both}) is Sampling.SAMPLED
    assert sampling(GENERATE, {"text": ["a", "b"], "sampling_params": both[:1] * 2}) is Sampling.GREEDY
