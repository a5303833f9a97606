"""Canonical prompts: append-only, and different for different chats; expansion covers every choice once."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine_errors import engine_error_to_openai
from gateway.openai_api import Api, canonical_chat, expand, parse

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, texts),
    texts,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.one_of(st.none(), texts, st.lists(parts, max_size=3)),
        "name": texts,
        "tool_calls": st.lists(st.fixed_dictionaries({"id": texts}), min_size=1, max_size=2),
    },
)
chats = st.lists(messages, min_size=1, max_size=5)
tools = st.none() | st.lists(st.fixed_dictionaries({"name": texts}), max_size=2)


@given(chats, tools, st.data())
def test_a_chat_begins_with_the_bytes_of_its_beginning(chat: list[Any], tools: Any, data: st.DataObject) -> None:
    turns = data.draw(st.integers(1, len(chat)))
    whole = canonical_chat({"messages": chat, "tools": tools})
    assert whole.startswith(canonical_chat({"messages": chat[:turns], "tools": tools}))


def _meaning(chat: list[Any]) -> list[Any]:
    """What of a chat is rendered: a text is one text part, null and absent are the same."""

    def parts_of(content: Any) -> list[Any]:
        listed = [content] if isinstance(content, str) else content or []
        return [part["text"] if isinstance(part, dict) and "text" in part else part for part in listed] or [""]

    return [
        (
            message["role"],
            parts_of(message.get("content")),
            [(name, message[name]) for name in message if name not in ("role", "content")],
        )
        for message in chat
    ]


@given(chats, chats)
def test_equal_bytes_are_equal_chats(left: list[Any], right: list[Any]) -> None:
    same = canonical_chat({"messages": left}) == canonical_chat({"messages": right})
    assert same == (_meaning(left) == _meaning(right))


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_longer_last_message_begins_like_the_shorter(start: str, rest: str) -> None:
    short = canonical_chat({"messages": [{"role": "user", "content": start}]})
    long = canonical_chat({"messages": [{"role": "user", "content": start + rest}]})
    assert long.startswith(short)


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_choice_is_asked_for_once(samples: int, prompts: list[list[int]]) -> None:
    units = expand(parse(Api.COMPLETIONS, orjson.dumps({"prompt": prompts, "n": samples})))
    assert sorted(unit.choice_index for unit in units) == list(range(samples * len(prompts)))
    for unit in units:
        assert unit.choice_index == unit.prompt_index * samples + unit.sample_index
        assert unit.body == {"prompt": prompts[unit.prompt_index]}
        assert unit.prompt_token_ids == len(prompts[unit.prompt_index])
        assert len(unit.prompt_bytes) == 4 * len(prompts[unit.prompt_index])


@given(st.binary(max_size=60))
def test_no_bytes_whatever_crash_the_parser_of_engine_errors(body: bytes) -> None:
    assert engine_error_to_openai(500, body).message
