"""What two sides must agree on, and where they do not. Pure: over observations that `sides.py` made.

An observation (JSON) is {"names": {text: its name}, "replies": {leg: reply}, "facts": {name: value}, "order": [...]}.
`reduced` keeps what must agree: statuses, headers that matter, bodies field by field, the events of streams, how a leg
ended and how long it took by class. Numbers with a fraction, times, and what a model writes are compared by type only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

AT_ONCE_S = 0.5
TIMING_CLASSES = (
    (AT_ONCE_S, "at once"),
    (6.8, "poll or heartbeat"),
    (10.0, "bootstrap timeout"),
    (13.0, "waiting timeout"),
    (18.0, "look-up given up"),
)
"""Upper bounds, in seconds, for the time limits of `sides.TIME_LIMITS`."""

HEADERS = ("content-type", "connection", "allow")
_MODEL_TEXT = frozenset({"text", "content", "token", "bytes"})
"""Written by the model: of these only the type is compared."""
_MODEL_IDS = frozenset(
    {"output_ids", "token_ids", "response_token_ids", "output_token_logprobs", "output_top_logprobs"}
    | {"input_top_logprobs", "top_logprobs", "output_token_ids_logprobs", "tokens_top"}
)
"""Ids that the model chose, or that are likeliest by it: of these types and counts are compared."""
_CLOCK = re.compile(r"^(created|timestamp|pid|startup_time|total_prefill_.*)$|(_ts|_time|latency|_us|_throughput)$")
_HEX_ID = re.compile(r"\b[0-9a-f]{32}\b")
_SOURCE_FILE = re.compile(r'File "[^"]*", line \d+')
_GROWING = frozenset({"completion_tokens", "output_token_logprobs_length", "total_tokens", "end", "cached_tokens"})
"""Counts that grow from event to event of a stream; only its last event is held to them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the sides disagree; `missing` stands for nothing there."""

    path: str
    real: Any
    emulated: Any


MISSING = "(nothing)"


def timing_class(elapsed_s: float) -> str:
    """The name of a duration."""
    return next((name for bound_s, name in TIMING_CLASSES if elapsed_s < bound_s), "longer")


def reduced(observation: Mapping[str, Any], loose: Sequence[str] = (), timed: bool = False) -> dict[str, Any]:
    """What of `observation` must agree. Values at paths that match a pattern of `loose` count by their type only, or
    (patterns that begin with `!`) not at all.
    """
    names = observation.get("names", {})
    result: dict[str, Any] = {
        leg: _reply(reply, names, timed) for leg, reply in sorted(observation.get("replies", {}).items())
    }
    if observation.get("facts"):
        result["facts"] = _value(observation["facts"], "", names)
    if observation.get("order"):
        result["order"] = observation["order"]
    return _loosened(result, loose, "") if loose else result


def differences(real: Any, emulated: Any, path: str = "") -> Iterator[Difference]:
    """Where two reduced observations disagree, in order of path."""
    if isinstance(real, dict) and isinstance(emulated, dict):
        for key in sorted({*real, *emulated}):
            inner = f"{path}.{key}" if path else key
            yield from differences(real.get(key, MISSING), emulated.get(key, MISSING), inner)
    elif isinstance(real, list) and isinstance(emulated, list) and len(real) == len(emulated):
        for index, (left, right) in enumerate(zip(real, emulated, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif real != emulated or type(real) is not type(emulated):
        yield Difference(path, real, emulated)


def _reply(reply: Mapping[str, Any], names: Mapping[str, str], timed: bool) -> dict[str, Any]:
    headers = {name: value for name, value in reply["headers"].items() if name in HEADERS}
    if "allow" in headers:
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
    form = "chunked" if reply["headers"].get("transfer-encoding") == "chunked" else "whole"
    result: dict[str, Any] = {"status": reply["status"], "end": reply["end"]}
    if reply["status"] is not None:
        result |= {"headers": headers, "form": form, "body": _body(reply, headers, names)}
    if timed and not reply.get("untimed"):
        result["time"] = timing_class(reply["elapsed_s"])
    return result


def _body(reply: Mapping[str, Any], headers: Mapping[str, str], names: Mapping[str, str]) -> Any:
    text = reply["body"]
    if headers.get("content-type", "").startswith("text/event-stream"):
        return _stream(text, names)
    try:
        return _value(json.loads(text), "", names)
    except ValueError:
        return _words(text, names)


def _stream(text: str, names: Mapping[str, str]) -> dict[str, Any]:
    """A stream's events: their kinds in order (equal ones that follow each other as one), and the last one whole."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    kinds: list[Any] = []
    last: Any = None
    for event in events:
        kind: Any = event
        if event != "[DONE]":
            try:
                last = json.loads(event)
            except ValueError:
                last = event
            kind = _kind(_value(last, "", names))
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
    return {"kinds": kinds, "last": _value(last, "", names)}


def _kind(event: Any, key: str = "") -> Any:
    """An event without the counts that grow."""
    if isinstance(event, dict):
        return {name: _kind(value, name) for name, value in event.items()}
    if isinstance(event, list):
        if event[:1] == ["many"]:
            return ["many", *[_kind(each) for each in event[2:]]]
        return [_kind(each) for each in event]
    return "int" if key in _GROWING and isinstance(event, int) else event


def _value(value: Any, key: str, names: Mapping[str, str], model: bool = False) -> Any:
    """`value` without what differs between two runs. A list of scalars or rows becomes ["many", count, its kinds]."""
    model = model or key in _MODEL_IDS
    if isinstance(value, dict):
        if model and all(isinstance(each, float) for each in value.values()):
            return "logprobs by text"
        return {names.get(name, name): _value(each, name, names, model) for name, each in value.items()}
    if isinstance(value, list):
        if key == "bytes":
            return "bytes"
        rows = [
            "text" if key == "tokens" and isinstance(each, str) else _value(each, "", names, model) for each in value
        ]
        if not model or not rows:
            return rows
        kinds: list[Any] = []
        for row in rows:
            if row not in kinds:
                kinds.append(row)
        return ["many", len(rows), *kinds]
    if isinstance(value, str):
        if key in _MODEL_TEXT or model:
            return "text"
        return "time" if _CLOCK.search(key) else _words(value, names)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return "float"
    return "int" if model or _CLOCK.search(key) else names.get(str(value), value)


def _words(text: str, names: Mapping[str, str]) -> str:
    """`text` without ids, rooms, ports and places in source files."""
    text = _SOURCE_FILE.sub('File "SOURCE", line N', _HEX_ID.sub("ID", text))
    for known in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<!\d){re.escape(known)}(?!\d)", names[known], text)
    return text


def _loosened(value: Any, loose: Sequence[str], path: str) -> Any:
    for pattern in loose:
        if fnmatchcase(path, pattern.removeprefix("!")):
            return "anything" if pattern.startswith("!") else type(value).__name__
    if isinstance(value, dict):
        return {name: _loosened(each, loose, f"{path}.{name}" if path else name) for name, each in value.items()}
    if isinstance(value, list):
        return [_loosened(each, loose, f"{path}[{index}]") for index, each in enumerate(value)]
    return value
