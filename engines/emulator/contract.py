"""The JSON contract of `/generate`: what SGLang's generated decoder refuses, in its words. Pure.

It comes after FastAPI's own parse, which converts what it can: numbers in strings, whole floats, booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_I64, _F64, _TEXT, _FLAG, _ANY = "i64", "f64", "a string", "a boolean", ""
_LISTABLE = {"Int64": _I64, "OptionalInt64": _I64, "String": _TEXT, "OptionalString": _TEXT, "Bool": _FLAG}
SAMPLING = {
    "max_new_tokens": _I64,
    "stop": "StringOrList",
    "stop_token_ids": "Int64List",
    "stop_regex": "StringOrList",
    **dict.fromkeys(("temperature", "top_p"), _F64),
    "top_k": _I64,
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _F64),
    **dict.fromkeys(("min_new_tokens", "n"), _I64),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _TEXT),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _FLAG),
    "stream_interval": _I64,
    "logit_bias": _ANY,
    "sampling_seed": _I64,
    "custom_params": _ANY,
    "beam_width": _I64,
    "watermark": _ANY,
    "choice": _ANY,
}
"""The kind of each key of `sampling_params`, in the decoder's order; others are refused."""

_BODY = {
    "rid": "StringOrList",
    "text": "StringOrList",
    "stream": _FLAG,
    "return_logprob": "BoolOrList",
    "logprob_start_len": "Int64OrList",
    "top_logprobs_num": "Int64OrList",
    "return_text_in_logprobs": _FLAG,
    "bootstrap_host": "OptionalStringOrList",
    "bootstrap_port": "OptionalInt64OrList",
    "bootstrap_room": "OptionalInt64OrList",
    "routed_dp_rank": _I64,
    "disagg_prefill_dp_rank": _I64,
    "extra_key": "StringOrList",
    "priority": _I64,
    "cache_salt": "StringOrList",
    "return_prompt_token_ids": _FLAG,
}


def violation(body: Mapping[str, Any]) -> str | None:
    """The first thing in `body` that the decoder refuses, or None."""
    for name, value in body.items():
        if name == "sampling_params":
            found = next(filter(None, map(_sampling, value if isinstance(value, list) else [value])), None)
        else:
            found = _wrong(value, _BODY.get(name, _ANY))
        if found:
            return found
    return None


def out_of_range(params: Mapping[str, Any]) -> str | None:
    """The first number of `params` (the engine's names) that SGLang's `SamplingParams.verify` refuses, in its words."""
    for name, holds, text in _RANGES:
        value = params.get(name)
        if value is not None and not holds(value):
            return f"{name} must be {text}, got {value}."
    low, high = params.get("min_new_tokens") or 0, params.get("max_new_tokens")
    if high is not None and low > high:
        return f"min_new_tokens must be in [0, max_new_tokens({high})], got {low}."
    return None


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda value: 0 <= value < math.inf, "a non-negative finite number"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("top_k", lambda value: value == -1 or value >= 1, "-1 (disable) or at least 1"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("repetition_penalty", lambda value: 0 < value <= 2, "in (0, 2] (1.0 = no penalty)"),
    ("min_new_tokens", lambda value: value >= 0, "in [0, max_new_tokens]"),
    ("max_new_tokens", lambda value: value >= 0, "at least 0"),
    ("sampling_seed", lambda value: -(2**63) <= value < 2**63, "in [-2**63, 2**63 - 1]"),
)


def _sampling(params: Any) -> str | None:
    if params is None:
        return None
    if not isinstance(params, Mapping):
        return _invalid(params, "a value or an array of values for SamplingParamsOrList")
    for name, value in params.items():
        if name not in SAMPLING:
            return f"unknown field `{name}`, expected one of {', '.join(f'`{each}`' for each in SAMPLING)}"
        found = _wrong(value, SAMPLING[name])
        if found:
            return found
    return None


def _wrong(value: Any, kind: str) -> str | None:
    if value is None or not kind:
        return None
    if kind == "Int64List":
        return _wrong_list(value, _I64) if isinstance(value, list) else _invalid(value, "a sequence")
    name = kind.removesuffix("OrList")
    if name != kind:
        if isinstance(value, list):
            return _wrong_list(value, _LISTABLE[name], name.startswith("Optional"))
        return None if _KINDS[_LISTABLE[name]](value) else _invalid(value, f"a value or an array of values for {kind}")
    return None if _KINDS[kind](value) else _invalid(value, kind)


def _wrong_list(values: list[Any], kind: str, optional: bool = False) -> str | None:
    return next(
        (_invalid(each, kind) for each in values if not (_KINDS[kind](each) or (optional and each is None))), None
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_KINDS: dict[str, Callable[[Any], bool]] = {
    _I64: _is_int,
    _F64: lambda value: _is_int(value) or isinstance(value, float),
    _TEXT: lambda value: isinstance(value, str),
    _FLAG: lambda value: isinstance(value, bool),
}


def _invalid(value: Any, expected: str) -> str:
    return f"invalid type: {_shown(value)}, expected {expected}"


def _shown(value: Any) -> str:
    """A value as serde names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value}"'
    if isinstance(value, (list, dict)):
        return "sequence" if isinstance(value, list) else "map"
    return f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
