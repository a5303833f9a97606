"""The emulated tokenizer, chat template."""

from __future__ import annotations

from typing import Any

import pytest

from engines.emulator.tokens import WORDS, chat_text, decode, encode, render_chat
from engines.token_rule import unpack


def test_words_are_distinct_and_ascii() -> None:
    assert len(set(WORDS)) == len(WORDS) > 1000
    assert all(word.isascii() for word in WORDS)


@pytest.mark.parametrize("text", ["", "hello", "naïve ☃ 😀", "<|im_start|>user\nhi<|im_end|>\n", "a<|b"])
def test_text_comes_back(text: str) -> None:
    assert decode(unpack(encode(text)), skip_special=False) == text


def test_special_strings_are_one_token_and_bytes_one_each() -> None:
    assert unpack(encode("<|im_start|>A<|im_end|>")) == [1, ord("A") + 3, 2]


def test_a_longer_text_extends_the_ids() -> None:
    assert encode("hello world").startswith(encode("hello"))


def test_the_recorded_chat_template() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    assert render_chat(messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    shown = '[{"type":"function","function":{"name":"é","description":null,"parameters":null},"defer_loading":null}]'
    tools = [{"function": {"name": "é", "more": 1}}]
    assert render_chat(messages, tools).startswith(f"<|im_start|>system\n{shown}<|im_end|>\n")


def test_a_chat_is_read_by_the_rules_of_sglang() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    answer = "<|im_start|>assistant\n"
    assert chat_text(asked) == f"<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n{answer}"
    assert chat_text({**asked, "continue_final_message": True}) == f"<|im_start|>user\na<|im_end|>\n{answer}b"
    tools = [{"function": {"name": name}} for name in ("one", "two")]
    assert '"one"' in chat_text({**asked, "tools": tools})
    assert chat_text({**asked, "tools": tools, "tool_choice": "none"}) == chat_text(asked)
    chosen = chat_text({**asked, "tools": tools, "tool_choice": {"function": {"name": "two"}}})
    assert '"two"' in chosen
    assert '"one"' not in chosen
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert "tool\nx y<" in chat_text({"messages": [{"role": "tool", "content": parts}]})
    assert "user\nxy<" in chat_text({"messages": [{"role": "user", "content": parts}]})
