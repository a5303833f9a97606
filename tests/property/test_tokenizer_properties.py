"""Any JSON as a chat: it has ids, or a reason why not that is one of our rules or of the template, and no other end."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from engines.emulator.tokenizer_files import FOLDER
from gateway.chat_template import ChatTemplate
from gateway.openai_api import Api
from gateway.tokenizer import Tokenizer, Untokenized

TEMPLATES = {file.name: file.read_text() for file in (Path(__file__).parents[1] / "data" / "chat_templates").iterdir()}
MODEL = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TOKENIZERS = [
    Tokenizer(MODEL, ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 1, 1)), None, name)
    for name, source in TEMPLATES.items()
]

leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
known_text = st.sampled_from(["text", "thinking", "tool_reference", "function", "auto", "none", "low", "{}", "[]", "{"])
names = st.sampled_from(["type", "text", "function", "name", "arguments", "parameters", "properties", "effort", "id"])
values = st.recursive(
    leaves | known_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
functions = st.fixed_dictionaries({}, optional=dict.fromkeys(("name", "arguments", "parameters", "strict"), values))
tools = st.fixed_dictionaries({}, optional={"function": functions | values, "type": values, "defer_loading": values})
parts = st.fixed_dictionaries({}, optional={"type": known_text | values, "text": values, "name": values})
fields = {
    "content": st.text(max_size=5) | st.lists(parts | values, max_size=3) | values,
    "tools": st.lists(tools | values, max_size=2) | values,
    "tool_calls": st.lists(tools | values, max_size=2) | values,
    **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "phase", "prefix", "else"), values),
}
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "Tool", "wizard"])
messages = st.fixed_dictionaries({"role": roles}, optional=fields)
kwargs = st.dictionaries(
    st.sampled_from(["thinking", "reasoning_effort", "tools", "self", "documents", "a b", ""]), values
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, min_size=1, max_size=3)},
    optional={
        "tools": st.lists(tools | values, max_size=2) | values,
        "tool_choice": tools | values,
        "chat_template_kwargs": kwargs | values,
        "reasoning": st.fixed_dictionaries({}, optional={"effort": values, "enabled": values}) | values,
        "reasoning_effort": values,
        "continue_final_message": values,
    },
)


def is_taken(tokenizer: Tokenizer, api: Api, body: dict[str, Any]) -> bool:
    reason = ""
    try:
        tokenizer.ids(api, body)
    except Untokenized as error:
        reason = str(error)
    # That one is the net beneath the rules; what falls into it is a rule that does not hold.
    assert not reason.startswith("it cannot be tokenized here"), reason
    return not reason


@given(bodies)
@example({"messages": [{"role": "system", "content": "x", "tools": [{"function": None}]}]})
@example({"messages": [{"role": "assistant", "content": "x", "tool_calls": True}]})
@example({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]})
def test_any_chat_has_ids_or_a_reason(body: dict[str, Any]) -> None:
    for tokenizer in TOKENIZERS:
        is_taken(tokenizer, Api.CHAT, body)


@given(st.text(max_size=20), values)
def test_any_text_has_ids_or_a_reason(text: str, media: Any) -> None:
    assert is_taken(TOKENIZERS[0], Api.GENERATE, {"text": text, "image_data": media}) is (media is None)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: str(tokenizer.fingerprint))
def test_the_templates_take_what_is_right(tokenizer: Tokenizer) -> None:
    assert is_taken(tokenizer, Api.CHAT, {"messages": [{"role": "user", "content": "hi"}]})
