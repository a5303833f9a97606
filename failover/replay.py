"""Continuing a broken stream by a new run of the same request: what comes again is compared, the rest is passed on.

Pure. What the client was sent is folded into its parts: reasoning, content, name and arguments of each tool call, text,
output ids, the tokens that logprobs are of. The new run must repeat every part; nothing leaves before all are repeated,
and then only what goes beyond. So the client ends up with exactly the new run's answer, or with an error. Ids, times
and the borders of chunks mean nothing. Memory: one copy of what was sent, and `MAX_HELD_EVENTS`.

Logprobs are cut by their tokens, whose names must come again like any text; the client keeps the values it has. A chat
stream leaves out the logprobs of a token that has no text of its own, such as half a character, unless it travels with
another. Where two runs differ in this their logprobs cannot be joined, and they count as diverged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from failover.features import GENERATE

MAX_HELD_EVENTS = 256
"""Parsers emit the parts of one step in an order of their own, so a run may be ahead in one part while it is behind in
another, by a few chunks. Far more means that the other part will not come."""

Event = dict[str, Any]
_Pieces = TypeVar("_Pieces", str, list[Any])


class Diverged(Exception):
    """The new run is not what the client was sent; the text says where, for an operator."""


class Replay:
    """One new run of a request, event by event, against what its client was sent before.

    Events are the JSON of a stream's data, all of one choice. `sent` are those that the client has, read once. The
    caller keeps back errors, aborts, comments and the terminator, and puts the client's id and time into what leaves.
    `incremental`: `/generate` events hold what is new (`--incremental-streaming-output`) rather than all output again;
    asked only where `sent` is too short to show it.
    """

    def __init__(self, path: str, sent: Iterable[Mapping[str, Any]], *, incremental: bool = False) -> None:
        self._walk = _generate_event if path == GENERATE else _openai_event
        client = _Client()
        for event in sent:
            self._walk(event, client)
        if client.whole is None:
            client.whole = not incremental
        self._run = _Run(client)
        self._held: list[Event] = []

    @property
    def caught_up(self) -> bool:
        """All that the client has has come again: what comes now is new."""
        return self._run.caught_up

    @property
    def finished(self) -> bool:
        """The finish reason of the new run was fed; usage may follow."""
        return self._run.finished

    @property
    def passing(self) -> bool:
        """Every further event leaves as it came, and need not be fed."""
        return self._run.caught_up and self._run.is_plain

    def feed(self, event: Mapping[str, Any]) -> list[Event]:
        """The events that the client gets for the next one of the new run. Raises Diverged."""
        run, passed = self._run, self.passing
        run.next_event()
        left = self._walk(event, run)
        run.check()
        if passed:
            return [dict(event)]
        if run.replaces:
            self._held.clear()
        if run.adds or run.tells:
            self._held.append(left)
        if not run.caught_up:
            if len(self._held) > MAX_HELD_EVENTS:
                raise Diverged("a part of what the client has does not come again")
            return []
        ready, self._held = self._held, []
        return ready


class _Visitor(Protocol):
    """What is done with the things that an event holds; each answers with what of it the client lacks."""

    def form(self, whole: bool) -> bool:
        """Whether an event of `/generate` repeats all output, given how it looks; a first one looks like both."""

    def has(self, part: Hashable) -> bool: ...

    def piece(self, part: Hashable, new: _Pieces, *, whole: bool = False) -> _Pieces:
        """More of a part, or with `whole` all of it again."""

    def once(self, name: Hashable, value: Any) -> Any:
        """A thing that a stream holds once."""

    def finish(self, reason: str) -> None:
        """The finish reason."""


class _Client:
    """What the client has; as a visitor it takes in what it is sent."""

    def __init__(self) -> None:
        self._pieces: dict[Hashable, list[Any]] = {}
        self.seen: set[Hashable] = set()
        self.reason: str | None = None
        self.whole: bool | None = None
        """The form of `/generate` events; None as long as both look the same."""

    def form(self, whole: bool) -> bool:
        self.whole = whole if self._pieces else None
        return whole

    def has(self, part: Hashable) -> bool:
        return False

    def piece(self, part: Hashable, new: _Pieces, *, whole: bool = False) -> _Pieces:
        pieces = self._pieces.setdefault(part, [])
        if whole:
            pieces.clear()
        pieces.append(new)
        return new

    def once(self, name: Hashable, value: Any) -> Any:
        self.seen.add(name)
        return value

    def finish(self, reason: str) -> None:
        self.reason = reason

    def parts(self) -> dict[Hashable, Any]:
        """Each part in one."""
        return {
            part: "".join(pieces) if isinstance(pieces[0], str) else list(chain.from_iterable(pieces))
            for part, pieces in self._pieces.items()
        }


class _Run:
    """The new run; as a visitor it compares what comes with what the client has, and leaves the rest."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._sent = client.parts()
        self._repeated = dict.fromkeys(self._sent, 0)
        self._due = set(client.seen)
        self._form_is_open = True
        self.finished = False
        self.next_event()

    def next_event(self) -> None:
        self.adds = False
        """Output that the client lacks."""
        self.tells = False
        """Anything else that it lacks."""
        self.replaces = False

    @property
    def caught_up(self) -> bool:
        repeated = all(self._repeated[part] == len(sent) for part, sent in self._sent.items())
        return repeated and (self._client.reason is None or self.finished)

    @property
    def is_plain(self) -> bool:
        """Nothing that the client has can come once more: no role, no id of a tool call."""
        return not self._due and not any(isinstance(part, tuple) for part in self._sent)

    def check(self) -> None:
        """Raises Diverged where one answer has ended and the other goes on."""
        if self.adds and self._client.reason is not None:
            raise Diverged("it goes on where the client has the end of its answer")
        if self.finished and not self.caught_up:
            raise Diverged("it ends before what the client has")

    def form(self, whole: bool) -> bool:
        if whole is not self._client.whole and not self._form_is_open:
            raise Diverged("its events are of another form than the client's: some repeat all output, some do not")
        self._form_is_open = False
        return bool(self._client.whole)

    def has(self, part: Hashable) -> bool:
        return part in self._sent

    def piece(self, part: Hashable, new: _Pieces, *, whole: bool = False) -> _Pieces:
        self.replaces = self.replaces or whole
        rest = new
        if part in self._sent:
            begin = 0 if whole else self._repeated[part]
            again = self._sent[part][begin : begin + len(new)]
            if new[: len(again)] != again:
                raise Diverged(f"{part}: {_clipped(new)} came where the client has {_clipped(again)}")
            self._repeated[part] = begin + len(again)
            rest = new[len(again) :]
        self.adds = self.adds or bool(rest)
        return rest

    def once(self, name: Hashable, value: Any) -> Any:
        if name in self._client.seen:
            self._due.discard(name)
            return None
        self.tells = True
        return value

    def finish(self, reason: str) -> None:
        self.finished = True
        if self._client.reason is None:
            self.tells = True
        elif reason != self._client.reason:
            raise Diverged(f"it ends with {reason!r} where the client has {self._client.reason!r}")


def _clipped(piece: Sequence[Any], limit: int = 40) -> str:
    return repr(piece[:limit]) + ("…" if len(piece) > limit else "")


# ---- the OpenAI streams ----------------------------------------------------------------------------------------------

_IDENTITY = ("id", "object", "created", "model", "choices")


def _openai_event(event: Mapping[str, Any], visit: _Visitor) -> Event:
    choices = event.get("choices") or []
    if not choices:  # usage, or what an engine adds; each kind once
        visit.once(frozenset(name for name, value in event.items() if value and name not in _IDENTITY), True)
    return {**event, "choices": [_choice(choice, visit) for choice in choices]}


def _choice(choice: Mapping[str, Any], visit: _Visitor) -> Event:
    left = dict(choice)
    if isinstance(delta := choice.get("delta"), dict):
        left["delta"] = _delta(delta, visit)
    for name in ("text", "token_ids"):
        if choice.get(name):
            left[name] = visit.piece(name, choice[name])
    if choice.get("prompt_token_ids") is not None:
        left["prompt_token_ids"] = visit.once("prompt_token_ids", choice["prompt_token_ids"])
    if isinstance(logprobs := choice.get("logprobs"), dict):
        left["logprobs"] = _logprobs(logprobs, visit)
    if choice.get("finish_reason") is not None:
        visit.finish(choice["finish_reason"])
    return left


def _delta(delta: Mapping[str, Any], visit: _Visitor) -> Event:
    left: Event = {}
    for name, value in delta.items():
        if not value:
            left[name] = value
        elif name == "tool_calls":
            if calls := [call for each in value if (call := _tool_call(each, visit)) is not None]:
                left[name] = calls
        elif name in ("role", "hidden_states"):
            if (rest := visit.once(name, value)) is not None:
                left[name] = rest
        elif isinstance(value, str):
            left[name] = visit.piece(name, value) or None
        elif rest := visit.piece(name, [value]):
            left[name] = rest[0]
    return left


def _tool_call(call: Mapping[str, Any], visit: _Visitor) -> Event | None:
    """What the client lacks of a tool call, None for nothing; the id that it has of a call stays the only one."""
    part = ("tool call", call.get("index") or 0)
    begun = visit.has((*part, "name")) or visit.has((*part, "arguments"))
    function = dict(call.get("function") or {})
    for name in ("name", "arguments"):
        if function.get(name):
            function[name] = visit.piece((*part, name), function[name])
    if not begun:
        return {**call, "function": function}
    function["name"] = function.get("name") or None
    return {**call, "id": None, "function": function} if any(function.values()) else None


def _logprobs(logprobs: Mapping[str, Any], visit: _Visitor) -> Event | None:
    """A chat's, a list of entries, or a completion's, several lists side by side; None when nothing is left."""
    if isinstance(entries := logprobs.get("content"), list):
        rest = visit.piece("logprobs", [entry.get("token") for entry in entries])
        return {**logprobs, "content": entries[len(entries) - len(rest) :]} if rest else None
    tokens = logprobs.get("tokens") or []
    rest = visit.piece("logprobs", tokens)
    known = len(tokens) - len(rest)
    return (
        {name: values[known:] if isinstance(values, list) else values for name, values in logprobs.items()}
        if rest
        else None
    )


# ---- the stream of /generate -----------------------------------------------------------------------------------------

_OUTPUT_LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def _generate_event(event: Mapping[str, Any], visit: _Visitor) -> Event:
    """Its events repeat all output; those of `--incremental-streaming-output` hold fewer ids than are counted."""
    meta = dict(event.get("meta_info") or {})
    ids = event.get("output_ids") or []
    whole = visit.form(len(ids) >= (meta.get("completion_tokens") or 0))
    left: Event = {**event, "meta_info": meta}
    for name in ("text", "output_ids"):
        if event.get(name):
            rest = visit.piece(name, event[name], whole=whole)
            left[name] = event[name] if whole else rest
    if entries := meta.get("output_token_logprobs"):
        rest = visit.piece("logprobs", [entry[1] for entry in entries], whole=whole)
        known = 0 if whole else len(entries) - len(rest)
        meta.update({name: meta[name][known:] for name in _OUTPUT_LOGPROBS if meta.get(name)})
    if isinstance(reason := meta.get("finish_reason"), dict):
        visit.finish(str(reason.get("type")))
    return left
