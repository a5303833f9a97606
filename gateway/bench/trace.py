"""Traces: when requests came, how long they were, and which blocks of their prompts were shared.

Pure: lines in, requests out. Formats: Mooncake's JSON lines (FAST'25 release; one hash id per 512 prompt tokens) and
Azure's CSV (AzurePublicDataset; no prefixes), told apart by the first line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import Any

BLOCK_TOKENS = 512
"""Prompt tokens that one hash id of a Mooncake trace stands for."""

_TIME, _PROMPT, _OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
_FORMATS = "a Mooncake JSON line with timestamp, input_length, output_length and hash_ids, or the Azure CSV header"


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names file, line, field, and what is expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; `at_s` counts from the first one.

    `blocks` has one id per BLOCK_TOKENS prompt tokens, the last block may be partial; empty: nothing is shared.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(lines: Iterable[str], name: str, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests (None: all) in order of time. `name` stands for the file in a TraceError."""
    numbered = ((number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{name}: the trace is empty")
    if first[1].startswith("{"):
        requests = _mooncake(chain([first], numbered), name)
    elif _TIME in first[1]:
        requests = _azure(first[1], numbered, name)
    else:
        raise TraceError(f"{name}:{first[0]}: expected {_FORMATS} {_TIME},{_PROMPT},{_OUTPUT}")
    found = sorted(islice(requests, limit), key=lambda request: request.at_s)
    if not found:
        raise TraceError(f"{name}: the trace has a header and no request")
    return [_shifted(request, found[0].at_s) for request in found]


def _mooncake(lines: Iterator[tuple[int, str]], name: str) -> Iterator[TraceRequest]:
    for number, line in lines:
        where = f"{name}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{where}: expected {_FORMATS}")
        prompt_tokens = _count(row, "input_length", where)
        yield TraceRequest(
            _count(row, "timestamp", where, least=0) / 1000,
            prompt_tokens,
            _count(row, "output_length", where),
            _blocks(row, prompt_tokens, where),
        )


def _blocks(row: dict[str, Any], prompt_tokens: int, where: str) -> tuple[int, ...]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise TraceError(f"{where}: hash_ids: expected a list of integers, got {_shown(ids)}")
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if len(ids) != needed:
        raise TraceError(
            f"{where}: hash_ids: expected {needed} ids, one per {BLOCK_TOKENS} of input_length {prompt_tokens}, "
            f"got {len(ids)}"
        )
    return tuple(ids)


def _azure(header: str, lines: Iterator[tuple[int, str]], name: str) -> Iterator[TraceRequest]:
    fields = next(csv.reader([header]))
    for wanted in (_TIME, _PROMPT, _OUTPUT):
        if wanted not in fields:
            raise TraceError(f"{name}:1: {wanted}: no such column among {', '.join(fields)}")
    for number, line in lines:
        where = f"{name}:{number}"
        values = next(csv.reader([line]))
        if len(values) != len(fields):
            raise TraceError(f"{where}: expected {len(fields)} values, got {len(values)}")
        row = dict(zip(fields, values, strict=True))
        yield TraceRequest(_moment_s(row[_TIME], where), _count(row, _PROMPT, where), _count(row, _OUTPUT, where))


def _moment_s(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise TraceError(
            f"{where}: {_TIME}: expected a time like 2023-11-16 18:15:46.68, got {_shown(text)}"
        ) from error
    # Differences only: no time zone of this machine may move them.
    return (moment.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()


def _count(row: dict[str, Any], field: str, where: str, least: int = 1) -> int:
    value = row.get(field)
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if type(count) is not int or count < least:
        raise TraceError(f"{where}: {field}: expected an integer of at least {least}, got {_shown(value)}")
    return count


def _shown(value: object) -> str:
    return repr(value)[:60] if value is not None else "nothing"


def _shifted(request: TraceRequest, start_s: float) -> TraceRequest:
    return TraceRequest(round(request.at_s - start_s, 6), request.prompt_tokens, request.output_tokens, request.blocks)
