"""Merging the answers of single units: choices in order, prompt tokens once a prompt, ids the public one."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest

from gateway.merge import (
    UsageMerger,
    chat_chunk,
    generate_chunk,
    merge_best,
    merge_chat,
    merge_completions,
    merge_generate,
)
from gateway.merge import merge_usage as merged


def usage(prompt: int, completion: int, cached: int | None = None, reasoning: int | None = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }


def chat(text: str, used: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"engine-{text}",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": used,
        "metadata": {"weight_version": "default"},
    }


def test_chat_choices_are_in_order_under_the_public_id() -> None:
    bodies = [chat(text, usage(11, 4)) for text in "abc"]
    before = copy.deepcopy(bodies)
    answer = merge_chat(bodies, "chatcmpl-1", 77)
    assert (answer["id"], answer["created"], answer["model"]) == ("chatcmpl-1", 77, "tiny")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b", "c"]
    assert answer["metadata"] == {"weight_version": "default"}
    assert bodies == before


def test_prompt_tokens_count_once_a_prompt() -> None:
    """Two prompts of 10 and 20 tokens, three samples each."""
    usages = [usage(10, 1), usage(10, 2), usage(10, 3), usage(20, 4), usage(20, 5), usage(20, 6)]
    total = merged(usages, 3)
    assert total is not None
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (30, 21, 51)


def test_cached_tokens_are_those_of_the_first_sample_of_each_prompt() -> None:
    total = merged([usage(10, 1, 2), usage(10, 1, 9), usage(20, 1, 5), usage(20, 1, 19)], 2)
    assert total is not None
    assert total["prompt_tokens_details"] == {"cached_tokens": 7}


def test_reasoning_tokens_are_summed_over_all_units() -> None:
    total = merged([usage(10, 5, reasoning=3), usage(10, 5, reasoning=0), usage(10, 5, reasoning=None)], 3)
    assert total is not None
    assert total["reasoning_tokens"] == 3
    assert total["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_details_stay_null_when_no_engine_gives_any() -> None:
    total = merged([usage(10, 1), usage(10, 1)], 2)
    assert total is not None
    assert total["prompt_tokens_details"] is None
    assert total["completion_tokens_details"] is None


def test_a_null_count_does_not_stop_the_sum() -> None:
    details = [{"cached_tokens": None, "image_tokens": 3}, {"cached_tokens": 4}]
    total = merged([{**usage(1, 1), "prompt_tokens_details": each} for each in details], 1)
    assert total is not None
    assert total["prompt_tokens_details"] == {"cached_tokens": 4, "image_tokens": 3}


@pytest.mark.parametrize("usages", [[None, None], [{}, None]])
def test_no_usage_at_all_stays_none(usages: list[dict[str, Any] | None]) -> None:
    assert merged(usages, 1) is None


def test_completions_of_two_prompts() -> None:
    bodies = [
        {"id": "e", "created": 1, "choices": [{"index": 0, "text": text}], "usage": usage(tokens, 2)}
        for text, tokens in (("a", 3), ("b", 5))
    ]
    answer = merge_completions(bodies, "cmpl-1", 9, samples=1)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a"), (1, "b")]
    assert answer["usage"]["prompt_tokens"] == 8


def test_generate_is_a_flat_list_with_numbered_public_ids() -> None:
    bodies = [{"text": text, "meta_info": {"id": "rid", "prompt_tokens": 2}} for text in "ab"]
    answer = merge_generate(bodies, "gen-1")
    assert [item["text"] for item in answer] == ["a", "b"]
    assert [item["meta_info"]["id"] for item in answer] == ["gen-1_0", "gen-1_1"]
    assert bodies[0]["meta_info"] == {"id": "rid", "prompt_tokens": 2}


def test_an_item_without_meta_info_passes_as_it_is() -> None:
    assert merge_generate([{"text": "a"}], "gen-1") == [{"text": "a"}]


def test_chunks_carry_the_choice_index() -> None:
    chunk = {"id": "e", "created": 1, "choices": [{"index": 0, "delta": {"content": "x"}}]}
    assert chat_chunk(chunk, 4, "chatcmpl-1", 7) == {
        "id": "chatcmpl-1",
        "created": 7,
        "choices": [{"index": 4, "delta": {"content": "x"}}],
    }
    assert generate_chunk({"text": "x", "meta_info": {"id": "e"}}, 4, "gen-1") == {
        "text": "x",
        "meta_info": {"id": "gen-1_4"},
        "index": 4,
    }


def test_one_usage_chunk_for_all_units_of_a_stream() -> None:
    merger = UsageMerger(units=2, samples=2)
    base = {"id": "e", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    content = {**base, "choices": [{"index": 0, "delta": {"content": "x"}}]}
    assert not merger.add(0, content)
    assert not merger.add(0, {**content, "usage": usage(11, 1)})  # continuous_usage_stats: passes, and counts
    assert merger.add(0, {**base, "choices": [], "usage": usage(11, 4)})
    assert merger.add(1, {**base, "choices": [], "usage": usage(11, 5)})
    event = merger.event("chatcmpl-1", 7)
    assert event is not None
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    chunk = orjson.loads(event[6:])
    assert chunk["id"] == "chatcmpl-1"
    assert (chunk["created"], chunk["object"], chunk["choices"]) == (7, "chat.completion.chunk", [])
    assert chunk["usage"]["prompt_tokens"] == 11
    assert chunk["usage"]["completion_tokens"] == 9


def test_no_usage_chunk_when_none_came() -> None:
    assert UsageMerger(units=2, samples=2).event("chatcmpl-1", 7) is None
    partly = UsageMerger(units=2, samples=2)
    partly.add(0, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}})
    assert partly.event("chatcmpl-1", 7) is None, "part of a sum is no usage"


def test_the_usage_chunk_holds_no_choice_even_if_no_engine_sent_one() -> None:
    merger = UsageMerger(units=1, samples=1)
    merger.add(0, {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": usage(3, 1)})
    event = merger.event("chatcmpl-1", 7)
    assert event is not None
    assert orjson.loads(event[6:])["choices"] == []


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_tokens": "7", "completion_tokens": 1},
        {"prompt_tokens": 7, "completion_tokens": 1.5},
        {"prompt_tokens": 7, "completion_tokens": 1, "reasoning_tokens": "x"},
        "none",
        5,
    ],
)
def test_counts_that_make_no_sense_are_left_out(bad: Any) -> None:
    good = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": "odd"}
    total = merged([good, bad], samples=2)
    assert total is not None
    assert (total["prompt_tokens"], total["completion_tokens"]) == (3, 2)
    assert merged([bad], samples=1) is None


@pytest.mark.parametrize("choices", [5, None, [None], "x"])
def test_choices_that_make_no_sense_are_left_out(choices: Any) -> None:
    assert chat_chunk({"choices": choices}, 0, "id", 1)["choices"] == []


# ---- the best of several ---------------------------------------------------------------------------------------------


def completion(text: str, *logprobs: float | None, generated: int | None = None, **used: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": {"token_logprobs": list(logprobs), "tokens": ["x"] * len(logprobs)}}
    counts = usage(10, len(logprobs) if generated is None else generated)
    return {"id": f"engine-{text}", "created": 1, "choices": [choice], "usage": {**counts, **used}}


def best(*bodies: dict[str, Any], candidates: int, samples: int = 1, with_logprobs: bool = True) -> dict[str, Any]:
    return merge_best(bodies, "cmpl-1", 77, candidates, samples, with_logprobs=with_logprobs)


def chosen(answer: dict[str, Any]) -> list[tuple[int, str]]:
    return [(choice["index"], choice["text"]) for choice in answer["choices"]]


def test_the_best_have_the_highest_mean_per_token() -> None:
    """Not the highest sum: that is the shortest."""
    bodies = completion("short", -2.0), completion("long", -1.0, -1.5, -1.0), completion("bad", -1.0, -9.0)
    before = copy.deepcopy(bodies)
    answer = best(*bodies, candidates=3, samples=2)
    assert chosen(answer) == [(0, "long"), (1, "short")]
    assert (answer["id"], answer["created"]) == ("cmpl-1", 77)
    assert bodies == before


def test_the_best_are_chosen_prompt_by_prompt() -> None:
    bodies = completion("a0", -3.0), completion("a1", -1.0), completion("b0", -2.0), completion("b1", -4.0)
    assert chosen(best(*bodies, candidates=2)) == [(0, "a1"), (1, "b0")]


def test_usage_counts_what_was_thrown_away() -> None:
    answer = best(completion("a", -1.0, -1.0), completion("b", -2.0), completion("c", -3.0, -3.0, -3.0), candidates=3)
    used = answer["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (10, 6, 16)


def test_an_echoed_prompt_does_not_count() -> None:
    """Its log-probabilities are the same for all, but not its share of the mean."""
    prompt = [None, -20.0, -20.0, -20.0]
    bodies = completion("a", *prompt, -2.0, generated=1), completion("b", *prompt, -3.0, -3.0, -3.0, -3.0, generated=4)
    assert chosen(best(*bodies, candidates=2)) == [(0, "a")]


def test_equal_candidates_stay_in_order_and_what_says_nothing_is_last() -> None:
    silent = completion("silent", -0.1)
    silent["choices"][0]["logprobs"] = None
    bodies = (
        silent,
        completion("none", None),
        completion("a", -1.0),
        completion("b", -1.0),
        completion("0", generated=0),
    )
    assert chosen(best(*bodies, candidates=5, samples=5))[:2] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("asked", [True, False])
def test_logprobs_that_the_client_did_not_ask_for_are_cut(asked: bool) -> None:
    (choice,) = best(completion("a", -1.0), completion("b", -2.0), candidates=2, with_logprobs=asked)["choices"]
    assert (choice["logprobs"] is not None) is asked
