"""Prompt logprobs put into a decode's output: equal to what one plain SGLang 0.5.23 answered to the same request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from engines.base import Fault
from engines.sglang_merge import CompletionMerge, GenerateMerge, merge_of, needs_prefill_answer
from engines.sse_frames import FrameDecoder, data_of
from engines.types import FailureKind
from tests.fakes import event

RECORDED = orjson.loads((Path(__file__).parents[2] / "data" / "prompt_logprobs.json").read_bytes())
"""Answers of a prefill, of a decode, and of a plain server (one: of sglang-router 0.3.2); a list is a stream."""
OWN = ("id", "created", "cached_tokens", "cached_tokens_details")
"""What an answer has of its own."""


def wire(answer: Any) -> bytes:
    """An answer as it came."""
    if not isinstance(answer, list):
        return orjson.dumps(answer)
    return b"".join(b"data: [DONE]\n\n" if each == "[DONE]" else event(each) for each in answer)


def without_own(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: without_own(value) for name, value in answer.items() if name not in OWN}
    return [without_own(value) for value in answer] if isinstance(answer, list) else answer


def merged(path: str, prefill: Any, decode: Any) -> Any:
    rule = merge_of(path, wire(prefill))
    assert not isinstance(rule, Fault)
    if not isinstance(decode, list):
        return orjson.loads(rule.answer(wire(decode)))
    data = [data_of(rule.frame(frame)) for frame in FrameDecoder().feed(wire(decode))]
    return ["[DONE]" if each == b"[DONE]" else orjson.loads(each) for each in data]


@pytest.mark.parametrize("row", RECORDED, ids=[row["name"] for row in RECORDED])
def test_a_pair_answers_as_a_plain_server(row: dict[str, Any]) -> None:
    assert needs_prefill_answer(row["path"], row["request"])
    found = merged(row["path"], row["prefill"], row["decode"])
    assert without_own(found) == without_own(row["plain"])
    assert without_own(row["decode"]) != without_own(row["plain"]) or row["name"] == "generate from the end"


@pytest.mark.parametrize("row", RECORDED, ids=[row["name"] for row in RECORDED])
def test_identity_and_counts_stay_the_decodes(row: dict[str, Any]) -> None:
    found, decode = merged(row["path"], row["prefill"], row["decode"]), row["decode"]
    for one, other in zip(found, decode, strict=True) if isinstance(found, list) else [(found, decode)]:
        if one != "[DONE]":
            (mine,), (its,) = (
                [part for part in (a.get("meta_info"), a) if part and "id" in part][:1] for a in (one, other)
            )
            assert [mine.get(name) for name in OWN] == [its.get(name) for name in OWN]


# ---- which requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "needs"),
    [
        ("/generate", {"return_logprob": True, "logprob_start_len": 0}, True),
        ("/generate", {"return_logprob": True, "logprob_start_len": 7}, True),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [5]}, True),
        ("/generate", {"return_logprob": True}, False),
        ("/generate", {"return_logprob": True, "logprob_start_len": -1, "token_ids_logprob": []}, False),
        ("/generate", {"return_logprob": True, "logprob_start_len": None, "top_logprobs_num": 3}, False),
        ("/generate", {"return_logprob": False, "logprob_start_len": 0}, False),
        ("/generate", {"logprob_start_len": 0}, False),
        ("/generate", {"echo": True, "logprobs": 1}, False),
        ("/v1/completions", {"echo": True, "logprobs": 1}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/completions", {"echo": True}, False),
        ("/v1/completions", {"echo": False, "logprobs": 5}, False),
        ("/v1/completions", {"return_logprob": True, "logprob_start_len": 0}, False),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "echo": True}, False),
    ],
)
def test_which_requests_need_the_prefills_answer(path: str, body: dict[str, Any], needs: bool) -> None:
    assert needs_prefill_answer(path, body) is needs


# ---- answers that are not as they should be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/generate", b""),
        ("/generate", b"not JSON"),
        ("/generate", b"[1]"),
        ("/generate", b'{"meta_info":{}}'),
        ("/generate", b'{"meta_info":{"input_token_logprobs":null}}'),
        ("/generate", b'{"choices":[{"logprobs":{"tokens":["a"]}}]}'),
        ("/generate", b"data: [DONE]\n\n"),
        ("/v1/completions", b'{"choices":[]}'),
        ("/v1/completions", b'{"choices":["a"]}'),
        ("/v1/completions", b'{"choices":[{"logprobs":null}]}'),
        ("/v1/completions", b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'),
    ],
)
def test_a_prefill_that_does_not_say_it_has_failed(path: str, answer: bytes) -> None:
    found = merge_of(path, answer)
    assert isinstance(found, Fault)
    assert found.kind is FailureKind.GARBLED


ODD = [
    b": comment\n\n",
    b"data: [DONE]\n\n",
    b"data: x\n\n",
    b"data: [1]\n\n",
    event({"meta_info": 3}),
    event({"a": 1}),
]


@pytest.mark.parametrize("frame", ODD)
def test_what_is_not_understood_is_passed_on(frame: bytes) -> None:
    for rule in (GenerateMerge({"input_token_logprobs": []}), CompletionMerge({"tokens": ["a", "b"]})):
        assert rule.frame(frame) == frame
        data = data_of(frame)
        assert rule.answer(data) == data


def test_odd_choices_of_a_decode_do_not_break_the_merge() -> None:
    prompt = {"tokens": ["p", "o"], "token_logprobs": [None, -1.0]}
    odd = {"choices": ["x", {"index": 0, "logprobs": {"tokens": 3}}]}
    found = orjson.loads(CompletionMerge(prompt).answer(orjson.dumps(odd)))
    assert found["choices"] == [
        {"index": 0, "logprobs": {"tokens": ["p"], "token_logprobs": [None], "text_offset": [], "top_logprobs": []}}
    ]


def test_a_decodes_own_prompt_entries_come_after_the_prefills() -> None:
    rule = GenerateMerge({"input_token_logprobs": [[None, 5, None]]})
    found = orjson.loads(rule.answer(b'{"meta_info":{"input_token_logprobs":[[-1.5,6,null]]}}'))
    assert found["meta_info"]["input_token_logprobs"] == [[None, 5, None], [-1.5, 6, None]]


def test_a_row_that_the_decode_has_stays() -> None:
    """With incremental streams later events begin with rows of their own."""
    rule = GenerateMerge({"input_token_logprobs": [], "output_token_ids_logprobs": [[[-9.0, 5, None]]]})
    found = [
        orjson.loads(rule.answer(orjson.dumps({"meta_info": {"output_token_ids_logprobs": rows}})))
        for rows in ([[[-1.0, 5, None]]], [None], [[], [[-2.0, 5, None]]], [])
    ]
    assert [each["meta_info"]["output_token_ids_logprobs"] for each in found] == [
        [[[-1.0, 5, None]]],
        [[[-9.0, 5, None]]],
        [[[-9.0, 5, None]], [[-2.0, 5, None]]],
        [],
    ]


def test_an_echoed_prompt_is_told_once_in_a_stream() -> None:
    rule = CompletionMerge({"tokens": ["p", "o"], "token_logprobs": [None, -1.0]})
    usage, first, second = ({"choices": choices} for choices in ([], [{"logprobs": None}], [{"logprobs": None}]))
    assert rule.frame(event(usage)) == event(usage)
    assert b'"tokens":["p"]' in rule.frame(event(first))
    assert rule.frame(event(second)) == event(second)
