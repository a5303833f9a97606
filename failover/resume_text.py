"""Continuing by text: the request again, with the text that came put behind its prompt. Not exact, and opt-in only.

Pure. The engine tokenizes that text anew, so tokens at the seam may differ, penalties count from there, and a stop
string that would span it is missed. Everything else of the body stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from failover.features import CHAT, GENERATE

# What SGLang applies where the request names no limit; a chat is limited by its context only.
_COMPLETIONS_OUTPUT_TOKENS = 16
_GENERATE_OUTPUT_TOKENS = 128


class Impossible(Exception):
    """No body continues this request by text; says why, for an operator."""


def body_after_text(path: str, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any]:
    """The body of the attempt that goes on after `text`, for which `tokens` output tokens were spent.

    `text` is all that the model wrote: not for an answer of which a parser took reasoning or tool calls. `path` is one
    of features.PATHS, `body` one engine request without routing fields. Raises Impossible.
    """
    if path == CHAT:
        chat = {**body, "messages": _messages_after(body, text), "continue_final_message": True}
        return _fewer(chat, tokens, ("max_completion_tokens", "max_tokens"), "min_tokens")
    if path == GENERATE:
        params = {"max_new_tokens": _GENERATE_OUTPUT_TOKENS, **(body.get("sampling_params") or {})}
        params = _fewer(params, tokens, ("max_new_tokens",), "min_new_tokens")
        return {**body, "text": _prompt_after(body.get("text"), text), "sampling_params": params}
    if body.get("suffix") or body.get("echo"):
        raise Impossible("with echo or a suffix the answer does not begin where the prompt ends")
    limit = body.get("max_tokens")
    limited = {**body, "max_tokens": _COMPLETIONS_OUTPUT_TOKENS if limit is None else limit}
    longer = {**limited, "prompt": _prompt_after(body.get("prompt"), text)}
    return _fewer(longer, tokens, ("max_tokens",), "min_tokens")


def _messages_after(body: Mapping[str, Any], text: str) -> list[Any]:
    """The chat with the answer so far as its last message, which the engine continues.

    SGLang renders the other messages with the generation prompt, and puts that answer behind it as it is; it takes no
    `add_generation_prompt` in a chat. An answer that the client itself began gets longer.
    """
    if body.get("input_ids") is not None:
        raise Impossible("text cannot be put behind a prompt of token ids")
    messages = list(body["messages"])
    last = messages[-1]
    if last.get("role") != "assistant":
        return [*messages, {"role": "assistant", "content": text}]
    if not body.get("continue_final_message"):
        raise Impossible("the last message is an assistant's, which the engine takes for a user's")
    if not isinstance(last.get("content"), str):
        raise Impossible("the message to continue is not one text")
    return [*messages[:-1], {**last, "content": last["content"] + text}]


def _prompt_after(prompt: Any, text: str) -> str:
    if not isinstance(prompt, str):
        raise Impossible("text cannot be put behind a prompt that is not one text")
    return prompt + text


def _fewer(owner: Mapping[str, Any], tokens: int, most: tuple[str, ...], least: str) -> dict[str, Any]:
    """`owner` with its limits reduced by the tokens that were spent; limits that are not there stay away."""
    reduced = dict(owner)
    for name in most:
        if reduced.get(name) is not None:
            reduced[name] -= tokens
            if reduced[name] < 1:
                raise Impossible(f"{name} leaves no token to generate")
    if reduced.get(least):
        reduced[least] = max(0, reduced[least] - tokens)
    return reduced
