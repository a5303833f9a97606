"""Log-probabilities of the emulated model: invented, deterministic, in SGLang's shapes. Pure."""

from __future__ import annotations

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


def completion_logprobs(live: Live, start: int) -> dict[str, Any]:
    """Completions' `logprobs` for the tokens from `start` on."""
    ids, top = live.output.ids[start:], live.item.sampling.top_logprobs
    texts = [decode([token], skip_special=False) for token in ids]
    listed = [{decode([each], False): value for each, value in _alternatives(token, top)} for token in ids]
    return {
        "text_offset": [-1] * len(ids),
        "token_logprobs": [logprob(token) for token in ids],
        "tokens": texts,
        "top_logprobs": listed if top else [],
    }


def generate_logprobs(live: Live, on_decode: bool) -> dict[str, Any]:
    """The `meta_info` entries of `/generate`; prompt logprobs exist only where the prompt was computed."""
    sampling, ids = live.item.sampling, live.output.ids
    start = sampling.prompt_logprobs_from
    prompt = unpack(live.item.prompt)[start:] if start >= 0 and not on_decode else []
    known = [[None if start == 0 and at == 0 else logprob(token), token, None] for at, token in enumerate(prompt)]
    entries: dict[str, Any] = {
        "input_token_logprobs": known,
        "output_token_logprobs": [[logprob(token), token, None] for token in ids],
        "output_token_logprobs_length": len(ids),
    }
    if sampling.top_logprobs:
        top = sampling.top_logprobs
        tops = [[[value, each, None] for each, value in _alternatives(token, top)] for token in ids]
        listed = [[[value, each, None] for each, value in _alternatives(token, top)] for token in prompt]
        entries["input_top_logprobs"] = [None, *listed[1:]] if start == 0 and listed else listed
        entries["output_top_logprobs"] = tops
    return entries
