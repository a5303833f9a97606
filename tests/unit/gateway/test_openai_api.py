"""Requests parsed, checked and expanded; engine errors in the one shape that clients parse."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest

from gateway.errors import GatewayError
from gateway.openai_api import (
    MAX_CHOICES,
    MAX_SAMPLES,
    Api,
    ParsedRequest,
    expand,
    openai_models,
    parse,
    served,
)

USER = {"role": "user", "content": "hello"}


def chat(**fields: Any) -> ParsedRequest:
    return parse(Api.CHAT, orjson.dumps({"messages": [USER], **fields}))


def completions(**fields: Any) -> ParsedRequest:
    return parse(Api.COMPLETIONS, orjson.dumps(fields))


def generate(**fields: Any) -> ParsedRequest:
    return parse(Api.GENERATE, orjson.dumps(fields))


def refusal(api: Api, body: Any) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        parse(api, body if isinstance(body, bytes) else orjson.dumps(body))
    assert caught.value.status == 400
    assert caught.value.safe_to_retry is False
    return caught.value


# -- what is read, kept, stripped


def test_a_chat_request_is_read_and_its_unknown_fields_are_kept() -> None:
    raw = orjson.dumps(
        {
            "model": "tiny",
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 9,
            "max_tokens": 5,
            "tools": [{"type": "function"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "never_heard_of": [1, {"deep": None}],
        }
    )
    parsed = parse(Api.CHAT, raw)
    assert parsed.body == orjson.loads(raw)
    assert parsed == ParsedRequest(
        api=Api.CHAT,
        body=parsed.body,
        body_bytes=len(raw),
        stream=True,
        include_usage=True,
        model="tiny",
        samples=1,
        candidates=1,
        prompts=1,
        batched=False,
        max_output_tokens=9,
        client_rid=None,
        stripped=(),
    )


def test_fields_only_the_gateway_may_set_are_stripped() -> None:
    ours = {
        "bootstrap_host": "2.2.2.2",
        "bootstrap_port": 1,
        "bootstrap_room": 0,
        "bootstrap_pair_key": "x",
        "rid": "mine",
        "routed_dp_rank": 1,
        "data_parallel_rank": 1,
        "disagg_prefill_dp_rank": 1,
        "kv_hints": {},
        "x-override-rid": "y",
    }
    parsed = chat(**ours, seed=7)
    assert parsed.body == {"messages": [USER], "seed": 7}
    assert set(parsed.stripped) == set(ours)
    assert parsed.client_rid == "mine"


@pytest.mark.parametrize("rid", [None, "", ["a", "b"], 5])
def test_a_rid_that_is_no_single_name_is_no_alias(rid: Any) -> None:
    assert chat(rid=rid).client_rid is None


def test_a_rid_is_kept_for_long_and_so_is_short() -> None:
    assert chat(rid="r" * 128).client_rid == "r" * 128
    error = refusal(Api.CHAT, {"messages": [USER], "rid": "r" * 129})
    assert error.param == "rid"
    assert "128" in error.message


def test_null_fields_count_as_absent() -> None:
    parsed = chat(stream=None, n=None, model=None, stream_options=None, max_tokens=None)
    assert (parsed.stream, parsed.samples, parsed.model, parsed.include_usage) == (False, 1, None, False)


@pytest.mark.parametrize(
    ("parsed", "limit"),
    [
        (chat(), None),
        (chat(max_tokens=5), 5),
        (chat(max_tokens=5, max_completion_tokens=3), 3),
        (completions(prompt="a"), 16),
        (completions(prompt="a", max_tokens=7), 7),
        (generate(text="a"), 128),
        (generate(text="a", sampling_params={"max_new_tokens": 0}), 0),
        (generate(text=["a", "b"], sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 8}]), 8),
    ],
)
def test_the_limit_the_engine_will_apply(parsed: ParsedRequest, limit: int | None) -> None:
    assert parsed.max_output_tokens == limit


# -- what is refused


@pytest.mark.parametrize("raw", [b"", b"{bad", b'{"a": NaN}', b"[]", b'"text"', b"null"])
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    assert refusal(Api.CHAT, raw).code == "invalid_json"


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        (Api.CHAT, {"messages": None}, "messages"),
        (Api.CHAT, {"messages": []}, "messages"),
        (Api.CHAT, {"messages": "hello"}, "messages"),
        (Api.CHAT, {"messages": [USER, "hello"]}, "messages[1]"),
        (Api.CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (Api.CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (Api.CHAT, {"messages": [USER], "stream": "yes"}, "stream"),
        (Api.CHAT, {"messages": [USER], "stream": 1}, "stream"),
        (Api.CHAT, {"messages": [USER], "stream_options": []}, "stream_options"),
        (Api.CHAT, {"messages": [USER], "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (Api.CHAT, {"messages": [USER], "model": 4}, "model"),
        (Api.CHAT, {"messages": [USER], "n": 0}, "n"),
        (Api.CHAT, {"messages": [USER], "n": 129}, "n"),
        (Api.CHAT, {"messages": [USER], "n": True}, "n"),
        (Api.CHAT, {"messages": [USER], "n": 1.0}, "n"),
        (Api.CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens"),
        (Api.CHAT, {"messages": [USER], "max_completion_tokens": "9"}, "max_completion_tokens"),
        (Api.CHAT, {"messages": [USER], "input_ids": "text"}, "input_ids"),
        (Api.CHAT, {"messages": [USER], "input_ids": [[1]]}, "input_ids"),
        (Api.COMPLETIONS, {}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ""}, "prompt"),
        (Api.COMPLETIONS, {"prompt": []}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [[[1]]]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [1 << 32]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (Api.COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (Api.GENERATE, {}, "text"),
        (Api.GENERATE, {"text": "a", "input_ids": [1]}, "text"),
        (Api.GENERATE, {"text": [1, 2]}, "text"),
        (Api.GENERATE, {"text": [[1, 2]]}, "text"),
        (Api.GENERATE, {"input_ids": "a"}, "input_ids"),
        (Api.GENERATE, {"input_ids": ["a"]}, "input_ids"),
        (Api.GENERATE, {"input_ids": []}, "input_ids"),
        (Api.GENERATE, {"input_ids": [[1], []]}, "input_ids"),
        (Api.GENERATE, {"text": "a", "sampling_params": []}, "sampling_params"),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        (Api.GENERATE, {"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        (Api.GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        (Api.GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        (Api.COMPLETIONS, {"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        (Api.COMPLETIONS, {"prompt": ["a"] * MAX_CHOICES, "n": 2}, "n"),
        (Api.COMPLETIONS, {"prompt": ["a"] * MAX_CHOICES, "best_of": 2}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": MAX_SAMPLES + 1}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": 0}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": 2.0}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": "2"}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (Api.COMPLETIONS, {"prompt": "a", "best_of": 3, "n": 2, "stream": True}, "best_of"),
    ],
)
def test_a_refusal_names_the_field(api: Api, fields: dict[str, Any], param: str) -> None:
    error = refusal(api, fields)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


# -- expanding


def test_a_plain_request_is_one_unit_with_its_own_body() -> None:
    parsed = chat(temperature=0)
    (unit,) = expand(parsed)
    assert unit.body is parsed.body
    assert (unit.prompt_index, unit.sample_index, unit.choice_index) == (0, 0, 0)
    assert unit.prompt_token_ids is None


def test_prompts_times_samples() -> None:
    parsed = completions(prompt=["a", "b"], n=3, seed=1)
    assert (parsed.samples, parsed.prompts, parsed.batched) == (3, 2, True)
    units = expand(parsed)
    assert [unit.choice_index for unit in units] == [0, 1, 2, 3, 4, 5]
    assert [(unit.prompt_index, unit.sample_index) for unit in units] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [unit.body for unit in units] == [{"prompt": p, "seed": 1} for p in "aaabbb"]
    assert parsed.body["n"] == 3


def test_candidates_are_asked_for_one_by_one_and_with_logprobs() -> None:
    parsed = completions(prompt=["a", "b"], n=1, best_of=2, seed=1)
    assert (parsed.samples, parsed.candidates) == (1, 2)
    units = expand(parsed)
    assert [(unit.prompt_index, unit.sample_index, unit.choice_index) for unit in units] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 3),
    ]
    assert [unit.body for unit in units] == [{"prompt": p, "seed": 1, "logprobs": 0} for p in "aabb"]
    assert "logprobs" not in parsed.body


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"best_of": 2, "logprobs": 3}, {"logprobs": 3}),
        ({"best_of": 2, "logprobs": None}, {"logprobs": 0}),
        ({"best_of": 2, "n": 2}, {}),
        ({"best_of": 2, "n": 2, "stream": True}, {"stream": True}),
        ({"best_of": 1}, {}),
        ({"best_of": None}, {}),
    ],
)
def test_logprobs_are_added_only_where_the_best_are_chosen(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    assert expand(completions(prompt="a", **fields))[0].body == {"prompt": "a", **sent}


def test_best_of_is_a_field_of_completions_only() -> None:
    assert chat(best_of=5).candidates == 1
    assert expand(chat(best_of=5))[0].body["best_of"] == 5
    assert generate(text="a", sampling_params={"n": 2}).candidates == 2


def test_a_list_of_one_prompt_is_still_a_batch() -> None:
    parsed = generate(text=["a"])
    assert parsed.batched
    assert expand(parsed)[0].body == {"text": "a"}


@pytest.mark.parametrize(
    ("parsed", "count"), [(completions(prompt=[5, 6]), 2), (generate(input_ids=[5, 6]), 2), (chat(input_ids=[5, 6]), 2)]
)
def test_ids_are_counted_and_hashed_as_little_endian_u32(parsed: ParsedRequest, count: int) -> None:
    assert not parsed.batched
    (unit,) = expand(parsed)
    assert unit.prompt_token_ids == count
    assert unit.prompt_bytes == struct.pack("<2I", 5, 6)


def test_generate_batches_split_what_is_said_prompt_by_prompt() -> None:
    parsed = generate(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"n": 2, "seed": 1}, {"n": 2, "seed": 2}],
        image_data=[["p"], ["q", "r"]],
        return_logprob=True,
        token_ids_logprob=[7, 8],
        cache_salt=["s", "t"],
    )
    units = expand(parsed)
    assert len(units) == 4
    assert units[3].body == {
        "input_ids": [2, 3],
        "sampling_params": {"seed": 2},
        "image_data": ["q", "r"],
        "return_logprob": True,
        "token_ids_logprob": [7, 8],
        "cache_salt": "t",
    }
    assert units[3].prompt_token_ids == 2


def test_token_ids_logprob_by_prompt() -> None:
    units = expand(generate(text=["a", "b"], token_ids_logprob=[[7], [8]]))
    assert [unit.body["token_ids_logprob"] for unit in units] == [[7], [8]]


def test_a_list_by_prompt_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(GatewayError) as caught:
        expand(generate(text=["a", "b"], top_logprobs_num=[1]))
    assert caught.value.param == "top_logprobs_num"


def test_lists_of_a_single_prompt_are_left_alone() -> None:
    (unit,) = expand(generate(text="a", image_data=["p", "q"]))
    assert unit.body["image_data"] == ["p", "q"]


# -- canonical bytes


def prompt_bytes(messages: list[Any], **fields: Any) -> bytes:
    return expand(parse(Api.CHAT, orjson.dumps({"messages": messages, **fields})))[0].prompt_bytes


def test_a_text_prompt_is_its_utf8() -> None:
    assert expand(completions(prompt="Grüße"))[0].prompt_bytes == "Grüße".encode()


def test_a_single_text_part_is_the_same_as_its_text() -> None:
    parts = [{"type": "text", "text": "hello"}]
    assert prompt_bytes([{"role": "user", "content": parts}]) == prompt_bytes([USER])


def test_what_a_template_does_not_render_does_not_count() -> None:
    plain = prompt_bytes([USER])
    assert prompt_bytes([USER], temperature=1, response_format={"type": "json_object"}, n=2, model="m") == plain


def test_null_is_the_same_as_absent() -> None:
    assert prompt_bytes([{**USER, "name": None, "tool_calls": None}]) == prompt_bytes([USER])


def test_tools_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_bytes([USER], tools=tools).endswith(prompt_bytes([USER]))
    assert prompt_bytes([USER], tools=tools) != prompt_bytes([USER])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([USER, USER], [{"role": "user", "content": "hellohello"}]),
        ([USER], [{"role": "user", "content": "hello", "name": "x"}]),
        ([{"role": "user", "content": ["a", "b"]}], [{"role": "user", "content": ["ab"]}]),
        ([{"role": "system", "content": "a"}], [{"role": "user", "content": "a"}]),
        ([{"role": "user", "content": [{"type": "a"}]}], [{"role": "user", "content": '{"type":"a"}'}]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://b"}}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "a" * 999}}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "b" * 999}}]}],
        ),
    ],
)
def test_different_chats_have_different_bytes(left: list[Any], right: list[Any]) -> None:
    assert prompt_bytes(left) != prompt_bytes(right)


def test_an_embedded_image_is_not_a_megabyte_of_prompt() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert len(prompt_bytes([{"role": "user", "content": [image]}])) < 100


# -- models


def test_a_model_nobody_serves_is_refused() -> None:
    served(None, ())
    served("tiny", ("tiny", "big"))
    with pytest.raises(GatewayError) as caught:
        served("nope", ("tiny", "big"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert "big, tiny" in caught.value.message


def test_a_long_name_of_a_model_does_not_hide_what_is_served() -> None:
    with pytest.raises(GatewayError, match="served: tiny") as caught:
        served("m" * 10**7, ("tiny",))
    assert len(caught.value.message) < 300


def test_the_list_of_models() -> None:
    assert openai_models({"tiny": 4096}, 5) == {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "object": "model",
                "created": 5,
                "owned_by": "sglang",
                "root": "tiny",
                "parent": None,
                "max_model_len": 4096,
            }
        ],
    }
