"""The emulated model's tokenizer and chat template. Pure.

Prompts become one id a byte (special strings become one id), so a longer text always extends the ids of its start,
and the vocabulary is a Hugging Face ByteLevel BPE without merges. Answers are words, ids the prompt side never makes,
and now and then the bytes of a character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines.token_rule import (
    FIRST_BYTE_TOKEN,
    FIRST_WORD_TOKEN,
    TOKEN_BYTES,
    VOCABULARY_TOKENS,
    WORD_TOKENS,
    pack,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_SPECIAL = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TOKENS) + ")")
_SPECIAL_PACKED = {text: pack([token]) for token, text in enumerate(SPECIAL_TOKENS)}
_BYTE_TO_TOKEN = bytes((byte + FIRST_BYTE_TOKEN) & 0xFF for byte in range(256))
"""The low byte of each byte's id; UTF-8 has no byte of 253 or more, so the high bytes are always 0."""


def _words() -> tuple[str, ...]:
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    pairs = (first + second for first in syllables for second in syllables)
    spaced = [f" {syllable}" for syllable in syllables] + [f" {pair}" for pair in pairs]
    return tuple([*syllables, *spaced][:WORD_TOKENS])


WORDS = _words()


def encode(text: str) -> bytes:
    """The packed ids of `text`."""
    if "<|" not in text:
        return _encode_plain(text)
    return b"".join(_SPECIAL_PACKED.get(piece) or _encode_plain(piece) for piece in _SPECIAL.split(text))


def _encode_plain(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass").translate(_BYTE_TO_TOKEN)
    packed = bytearray(TOKEN_BYTES * len(data))
    packed[0::TOKEN_BYTES] = data
    return bytes(packed)


def contains(packed: bytes, text: str) -> bool:
    """Whether `text` stands in a prompt, however its ids came there."""
    wanted, at = encode(text), -1
    while (at := packed.find(wanted, at + 1)) >= 0:
        if at % TOKEN_BYTES == 0:
            return True
    return False


def decode(token_ids: Iterable[int], skip_special: bool = True) -> str:
    """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
    data = bytearray()
    for token in token_ids:
        if FIRST_BYTE_TOKEN <= token < FIRST_WORD_TOKEN:
            data.append(token - FIRST_BYTE_TOKEN)
        elif FIRST_WORD_TOKEN <= token < VOCABULARY_TOKENS:
            data += WORDS[token - FIRST_WORD_TOKEN].encode()
        elif 0 <= token < FIRST_BYTE_TOKEN and not skip_special:
            data += SPECIAL_TOKENS[token].encode()
    return data.decode("utf-8", "replace")


def chat_text(body: Mapping[str, Any]) -> str:
    """The prompt of a chat completion's body, as SGLang makes it: its rules over `render_chat`."""
    messages, prefix, goes_on = list(body["messages"]), "", False
    last = messages[-1] if messages else {}
    if body.get("continue_final_message") and last.get("role") == "assistant" and isinstance(last.get("content"), str):
        prefix, goes_on = messages.pop()["content"], True
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice == "none":
        tools = None
    elif isinstance(choice, Mapping):
        tools = [tool for tool in tools or () if tool["function"]["name"] == choice["function"]["name"]]
    return render_chat(messages, tools, goes_on=goes_on) + prefix


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    *,
    goes_on: bool = False,
) -> str:
    """The prompt of a chat: ChatML, tools as JSON in a leading system block.

    Where the assistant is asked for, one that has spoken last counts as the user: SGLang's rule, unless the answer is
    begun behind these messages (`goes_on`).
    """
    parts = []
    if tools:
        shown = json.dumps([_shown(tool) for tool in tools], ensure_ascii=False, separators=(",", ":"))
        parts.append(f"<|im_start|>system\n{shown}<|im_end|>\n")
    for index, message in enumerate(messages):
        role, content = message["role"].lower(), message.get("content")
        is_last = index == len(messages) - 1
        if is_last and add_generation_prompt and not goes_on and role == "assistant" and isinstance(content, str):
            role = "user"
        parts.append(f"<|im_start|>{role}\n{_content_text(role, content)}<|im_end|>\n")
    if add_generation_prompt:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def _content_text(role: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or () if part.get("type") == "text"]
    return (" " if role == "tool" and len(texts) == len(content or ()) else "").join(texts)


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as SGLang shows it to a template: its own fields only, the client's order within the function."""
    given, later = tool["function"], tool.get("defer_loading")
    fields = {"description": None, "name": None, "parameters": None, "strict": None, "defer_loading": later, **given}
    function = {name: fields[name] for name in (*given, *_FUNCTION_FIELDS) if name in _FUNCTION_FIELDS}
    if function["defer_loading"] is None:
        function["defer_loading"] = later
    unset = [name for name in ("strict", "defer_loading") if function[name] is None]
    function = {name: value for name, value in function.items() if name not in unset}
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": later}
