"""What happened in one run, as frozen data: what clients asked and read, which attempts were made, what was left. Pure.

Times are seconds of one clock, whichever. `to_json` and `from_json` turn a history into plain JSON and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from failover.chaos.plain import FormError, plain, typed

VERSION = 1
"""Of the JSON form; another version is refused."""


class Ending(StrEnum):
    """How what one client reads came to its end."""

    WHOLE = "whole"
    """The body ended as HTTP says that it does."""
    CUT = "cut"
    """The connection broke, or no answer began."""
    LEFT = "left"
    """The client hung up."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one engine request on a pair of servers.

    The prefill draws the first token with its key, the decode all others with its own; both are empty for greedy.
    `ended_s` is when its gateway gave it up or had all of it, None if it never did. `aborted`: its decode said that
    somebody had told it to drop it, and it was not its own gateway. `had_output`: some of an answer came of it.
    `failed_on`: the engine that failed it, where what both engines answered leaves no doubt.
    """

    rid: str
    room: int
    prefill: str
    decode: str
    began_s: float
    ended_s: float | None
    prefill_key: bytes = b""
    decode_key: bytes = b""
    aborted: bool = False
    had_output: bool = False
    failed_on: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an answer: SGLang's sampling parameters of the same names."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    no_stop_trim: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One prompt, or one sample of it: an engine request of its own, with its attempts in order."""

    prompt_ids: tuple[int, ...]
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """An error as a client reads it; `definite`: it says that no engine has done any work."""

    message: str
    kind: str = ""
    code: str = ""
    definite: bool | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream, or a whole body (one for each of its choices); `junk` is what cannot be read as either.

    `role`: it says whose words these are, as the first event of each choice of a chat does.
    """

    at_s: float
    index: int = 0
    text: str = ""
    ids: tuple[int, ...] = ()
    finish: str = ""
    matched: int | str | None = None
    usage: Usage | None = None
    error: Error | None = None
    done: bool = False
    junk: str = ""
    role: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One client: what it asked, and all it read. `status` is None while no answer has begun.

    `ids_shown`: it reads token ids too. `wants_usage`: its answer tells usage, once. `samples` follow one another in
    `choices` for each prompt. `gateway` names the replica that it asked, `kind` what of the load's mix it is.
    `again_s`: its refusal said that asking again is safe, after so long.
    """

    name: str
    asked_s: float
    choices: tuple[Choice, ...]
    limits: Limits
    events: tuple[Event, ...]
    status: int | None
    ending: Ending
    stream: bool = True
    ids_shown: bool = False
    wants_usage: bool = False
    samples: int = 1
    gateway: str = ""
    kind: str = ""
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Whose KV an engine holds at the end, in tokens."""

    engine: str
    by_room: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Death:
    """A replica of the gateway was killed, so that what its clients had asked may have no end."""

    gateway: str
    at_s: float


@dataclass(frozen=True, slots=True)
class History:
    """One run. `left_over` counts what should be gone at its end (bookings, tasks, sockets), by name."""

    requests: tuple[Request, ...]
    ledgers: tuple[Ledger, ...] = ()
    deaths: tuple[Death, ...] = ()
    left_over: Mapping[str, int] = field(default_factory=dict)


def to_json(history: History) -> dict[str, Any]:
    """The history as plain JSON; bytes are hexadecimal."""
    return {"version": VERSION, **plain(history)}


def from_json(value: Mapping[str, Any]) -> History:
    """The inverse of `to_json`; ValueError for another version or form."""
    if value.get("version") != VERSION:
        raise ValueError(f"a history of version {value.get('version')}, not {VERSION}")
    try:
        return typed(History, {name: each for name, each in value.items() if name != "version"})
    except FormError as error:
        raise ValueError(f"not a history: {error}") from error
