"""The emulated tokenizer's files against `tokens.py`: the same ids for any text and chat, the same text for any ids."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engines.emulator.tokenizer_files import FOLDER
from engines.emulator.tokens import SPECIAL_TOKENS, chat_text, decode, encode
from engines.token_rule import VOCABULARY_TOKENS, unpack
from gateway import tokenizer
from gateway.config import TokenizerConfig
from gateway.openai_api import Api

PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TEXTS = st.lists(st.one_of(PLAIN, st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", " ba", "Ġ"])), max_size=8).map("".join)
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
NAMES = st.text(min_size=1, max_size=5).filter(str.isprintable)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": TEXTS},
    optional={
        "description": TEXTS,
        "parameters": st.fixed_dictionaries({"type": st.just("object"), "default": VALUES}),
        "strict": st.none() | st.booleans(),
        "defer_loading": st.none() | st.booleans(),
        "unknown": VALUES,
    },
)
TOOLS = st.fixed_dictionaries(
    {"function": FUNCTIONS}, optional={"type": st.just("function"), "defer_loading": st.none() | st.booleans()}
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]), "content": TEXTS | PARTS},
    optional={"name": TEXTS, "tool_call_id": TEXTS},
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(TOOLS, max_size=2),
        "tool_choice": st.sampled_from(["none", "auto", "required"]),
        "continue_final_message": st.booleans(),
    },
)

FILE = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
OURS = tokenizer.load(TokenizerConfig(str(FOLDER)), lambda: datetime(2026, 1, 1))


@given(TEXTS)
def test_any_text_has_the_same_ids(text: str) -> None:
    assert FILE.encode(text).ids == unpack(encode(text))
    assert OURS is not None
    assert OURS.text_ids(text).tolist() == unpack(encode(text))


@given(st.lists(st.integers(0, VOCABULARY_TOKENS - 1), max_size=30))
def test_any_ids_have_the_same_text(ids: list[int]) -> None:
    assert FILE.decode(ids) == decode(ids)
    assert FILE.decode(ids, skip_special_tokens=False) == decode(ids, skip_special=False)


@given(TEXTS)
def test_a_text_comes_back(text: str) -> None:
    assert FILE.decode(FILE.encode(text).ids, skip_special_tokens=False) == text


@example({"messages": [{"role": "assistant", "content": "a"}] * 2, "continue_final_message": True})
@given(BODIES)
def test_any_chat_has_the_same_ids(body: dict[str, Any]) -> None:
    assert OURS is not None
    assert OURS.ids(Api.CHAT, body).tolist() == unpack(encode(chat_text(body)))
