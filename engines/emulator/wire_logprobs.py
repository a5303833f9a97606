"""Log-probabilities of the emulated model: invented, deterministic, in SGLang's shapes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines.emulator.live import Live
from engines.emulator.tokens import decode
from engines.token_rule import FIRST_WORD_TOKEN, WORD_TOKENS, unpack

_STEPS = 997
_STEP = 1 / 256


def logprob(token: int, rank: int = 0) -> float:
    """The log-probability of `token` at `rank` among the likeliest."""
    return -(0.125 + rank * 4.0 + (token * 31 % _STEPS) * _STEP)


def _alternatives(token: int, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens: `token` itself, then its neighbours."""
    others = [FIRST_WORD_TOKEN + (token + rank) % WORD_TOKENS for rank in range(1, count)]
    return [(each, logprob(each, rank)) for rank, each in enumerate([token, *others][:count])]


def _chat_entry(token: int, value: float) -> dict[str, Any]:
    text = decode([token], skip_special=False)
    return {"token": text, "bytes": list(text.encode()), "logprob": value}


def chat_logprobs(live: Live, start: int) -> dict[str, Any]:
    """Chat's `logprobs` for the tokens from `start` on."""
    top = live.item.sampling.top_logprobs
    content = []
    for token in live.output.ids[start:]:
        listed = [_chat_entry(each, value) for each, value in _alternatives(token, top)]
        content.append({**_chat_entry(token, logprob(token)), "top_logprobs": listed})
    return {"content": content}


def completion_logprobs(live: Live, start: int, with_prompt: bool = False) -> dict[str, Any]:
    """Completions' `logprobs` for the tokens from `start` on, after those of an echoed prompt where it was computed."""
    ids, top = live.output.ids[start:], live.item.sampling.top_logprobs
    prompt = _asked_prompt(live) if with_prompt else []
    values = [None if at == 0 and prompt else logprob(token) for at, token in enumerate([*prompt, *ids])]
    listed = [{_text(each): value for each, value in _alternatives(token, top)} for token in [*prompt, *ids]]
    return {
        "text_offset": [-1] * len(values),
        "token_logprobs": values,
        "tokens": [_text(token) for token in [*prompt, *ids]],
        "top_logprobs": [None if value is None else row for value, row in zip(values, listed, strict=True)]
        if top
        else [],
    }


def generate_logprobs(live: Live, on_decode: bool) -> dict[str, Any]:
    """The `meta_info` entries of `/generate`; prompt logprobs exist only where the prompt was computed."""
    sampling, ids = live.item.sampling, live.output.ids
    prompt = [] if on_decode else _asked_prompt(live)
    shown = _text if sampling.logprob_texts else lambda token: None

    def alternatives(token: int) -> list[Any]:
        return [[value, each, shown(each)] for each, value in _alternatives(token, sampling.top_logprobs)]

    def asked(token: int) -> list[Any]:
        return [[_logprob_of(each, token), each, shown(each)] for each in sampling.token_ids_logprob]

    known = [[None if at == 0 else logprob(token), token, shown(token)] for at, token in enumerate(prompt)]
    entries: dict[str, Any] = {
        "input_token_logprobs": known,
        "output_token_logprobs": [[logprob(token), token, shown(token)] for token in ids],
        "output_token_logprobs_length": len(ids),
    }
    if sampling.top_logprobs > 0:
        entries["input_top_logprobs"] = _rows(prompt, alternatives)
        entries["output_top_logprobs"] = [alternatives(token) for token in ids]
    if sampling.token_ids_logprob:
        rows = [asked(token) for token in ids]
        entries["input_token_ids_logprobs"] = _rows(prompt, asked)
        entries["output_token_ids_logprobs"] = [None, *rows[1:]] if on_decode and rows else rows
    return entries


def _asked_prompt(live: Live) -> list[int]:
    """The ids of the prompt whose logprobs were asked for."""
    start = live.item.sampling.prompt_logprobs_from
    return unpack(live.item.prompt)[start:] if start >= 0 else []


def _rows(prompt: list[int], row: Callable[[int], list[Any]]) -> list[Any]:
    """One row for each token of a prompt; what comes before the first is not known."""
    return [None, *(row(token) for token in prompt[1:])] if prompt else []


def _logprob_of(asked: int, token: int) -> float:
    """The log-probability of another token than the one that came."""
    return logprob(asked, int(asked != token))


def _text(token: int) -> str:
    return decode([token], skip_special=False)
