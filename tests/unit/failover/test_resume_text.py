"""Bodies that continue a request by its text."""

from __future__ import annotations

from typing import Any

import pytest

from failover.features import CHAT, COMPLETIONS, GENERATE
from failover.resume_text import Impossible, body_after_text

Body = dict[str, Any]
USER = {"role": "user", "content": "hello"}


def test_a_chat() -> None:
    body = {"messages": [USER], "max_tokens": 10, "stop": ["X"], "min_tokens": 2, "stream": True}
    assert body_after_text(CHAT, body, "I am", 3) == {
        "messages": [USER, {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
        "max_tokens": 7,
        "min_tokens": 0,
        "stop": ["X"],
        "stream": True,
    }
    assert body["messages"] == [USER]


def test_a_chat_has_two_limits_and_needs_none() -> None:
    both = body_after_text(CHAT, {"messages": [USER], "max_tokens": 5, "max_completion_tokens": 9}, "a", 1)
    assert (both["max_tokens"], both["max_completion_tokens"]) == (4, 8)
    none = body_after_text(CHAT, {"messages": [USER], "max_tokens": None}, "a", 1)
    assert none["max_tokens"] is None
    assert "max_completion_tokens" not in none


def test_an_answer_that_the_client_began_gets_longer() -> None:
    begun = {"role": "assistant", "content": "I ", "name": "x"}
    body = {"messages": [USER, begun], "continue_final_message": True}
    assert body_after_text(CHAT, body, "am", 1)["messages"] == [USER, {**begun, "content": "I am"}]


def test_a_completion() -> None:
    assert body_after_text(COMPLETIONS, {"prompt": "a", "max_tokens": 20}, "b", 4) == {"prompt": "ab", "max_tokens": 16}
    assert body_after_text(COMPLETIONS, {"prompt": "a"}, "b", 4)["max_tokens"] == 12  # the engine's own limit is 16


def test_generate() -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 20, "min_new_tokens": 6, "stop": "X"}}
    assert body_after_text(GENERATE, body, "b", 4) == {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 16, "min_new_tokens": 2, "stop": "X"},
    }
    assert body_after_text(GENERATE, {"text": "a"}, "b", 28)["sampling_params"] == {"max_new_tokens": 100}
    endless = {"text": "a", "sampling_params": {"max_new_tokens": None}}
    assert body_after_text(GENERATE, endless, "b", 500)["sampling_params"] == {"max_new_tokens": None}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, {"messages": [USER], "input_ids": [1]}, "token ids"),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a"}]}, "takes for a user's"),
        (CHAT, {"messages": [{"role": "assistant", "content": []}], "continue_final_message": True}, "not one text"),
        (CHAT, {"messages": [USER], "max_tokens": 3}, "no token"),
        (COMPLETIONS, {"prompt": [1, 2]}, "not one text"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2}, "no token"),
        (GENERATE, {"input_ids": [1]}, "not one text"),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 3}}, "no token"),
    ],
)
def test_what_is_not_possible(path: str, body: Body, why: str) -> None:
    with pytest.raises(Impossible, match=why):
        body_after_text(path, body, "text", 3)
