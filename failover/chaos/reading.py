"""What a client asked and read, and what gateways tell of its attempts, as a request of the checker's history. Pure.

The true prompt, limits and sampling of each choice are those that an emulated engine reads from the same body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.emulator import parse
from engines.emulator.draw import Draw
from engines.emulator.tokens import decode
from engines.token_rule import unpack
from engines.types import FailureKind, Leg
from failover.chaos.answer import DONE, Answer
from failover.chaos.history import Attempt, Choice, Error, Event, Limits, Request, Usage

UNTOLD_ROOM = 2**62
"""Rooms of attempts that nobody tells of are counted from here."""
_ABORTED = re.compile(r"Decode transfer failed.*Aborted by AbortReq", re.DOTALL)
"""What a decode says of a request that it was told to drop while its KV came. Before that it has the same words for a
prefill that it cannot reach."""
_FAILED = re.compile(r"(Prefill|Decode) \w+ failed")
"""Failures on the way; `/generate` tells them as it tells aborts."""
_OF_BOTH = re.compile(
    r"KVPoll|KVTransfer|(Prefill|Decode) \w+ failed|prefill instance|kv chunk|another rank", re.IGNORECASE
)
"""Words of an engine for what was lost between two: either may have failed."""
_PLAIN = frozenset({FailureKind.CONNECT, FailureKind.RESET, FailureKind.TRUNCATED, FailureKind.TIMEOUT})
_FIRST_ERROR_STATUS, _SERVER_ERROR = 400, 500
Told = Sequence[Mapping[str, Any]]
"""Attempts as `/pdgate/explain` shows them."""


@dataclass(frozen=True, slots=True)
class Secret:
    """What the sampling keys of an engine are made of, whichever of its processes makes them."""

    key: bytes
    deterministic: bool


@dataclass(slots=True)
class Truth:
    """What is known of the engines: what fits them, their names by the URLs that gateways know, their secrets."""

    limits: parse.Limits
    names: Mapping[str, str] = field(default_factory=dict)
    secrets: dict[str, Secret] = field(default_factory=dict)

    def name(self, url: str) -> str:
        return self.names.get(url, url)

    def key(self, engine: str, rid: str, draw: Draw) -> bytes | None:
        """What keys the tokens that an engine draws for `rid`; None where its secret is not known."""
        if (secret := self.secrets.get(engine)) is None:
            return b"" if draw.greedy else None
        return draw.key(secret.key, rid, secret.deterministic)


def request(answer: Answer, told: Told | None, truth: Truth) -> Request | None:
    """The request; None for an answer that cannot be judged, as nobody tells (`told` None) how it was drawn."""
    asked = parsed(answer, truth.limits)
    choices, limits = [], Limits(1)
    for index, item in enumerate(asked.items if asked is not None else ()):
        rule, draw = item.sampling.rule, item.sampling.draw
        stops = (rule.stop, tuple(sorted(rule.stop_token_ids)), rule.no_stop_trim)
        limits = Limits(rule.max_new_tokens, rule.min_new_tokens, rule.ignore_eos, *stops)
        tries = _attempts(answer, told, index, draw, truth)
        if tries is None:
            return None
        choices.append(Choice(tuple(unpack(item.prompt)), tries))
    generate = asked is not None and asked.api is parse.Api.GENERATE
    stream = answer.is_stream
    return Request(
        name=name(answer),
        asked_s=answer.sent_s,
        choices=tuple(choices),
        limits=limits,
        events=tuple(Events(asked, stream).of(answer.read)),
        status=answer.status,
        ending=answer.ending,
        stream=stream,
        ids_shown=generate or (asked is not None and asked.return_token_ids),
        wants_usage=asked is not None and (not stream or asked.include_usage or generate),
        samples=asked.items[0].sampling.samples if asked is not None else 1,
        gateway=answer.gateway,
        kind=answer.asked.kind,
        again_s=again_s(answer),
    )


def name(answer: Answer) -> str:
    """What a request is called: its number in the load, and its kind."""
    return f"request {answer.asked.number} ({answer.asked.kind})"


def parsed(answer: Answer, limits: parse.Limits) -> parse.Request | None:
    """The request as an engine reads it; None where it would refuse it."""
    try:
        return parse.parse_request(parse.Api(answer.asked.path), answer.asked.body, limits)
    except (parse.BadRequest, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_sampled(answer: Answer, limits: parse.Limits) -> bool:
    """Whether the answer can only be judged by one who knows its attempts."""
    asked = parsed(answer, limits)
    return asked is not None and not all(item.sampling.draw.greedy for item in asked.items)


def _attempts(answer: Answer, told: Told | None, index: int, draw: Draw, truth: Truth) -> tuple[Attempt, ...] | None:
    if told is None:
        some_text = any(what != DONE and not isinstance(what, bytes) for _, what in answer.read)
        if not draw.greedy and some_text and (answer.status or 0) < _FIRST_ERROR_STATUS:
            return None
        room = UNTOLD_ROOM + answer.asked.number * 1_000 + index
        return (Attempt(f"untold-{answer.asked.number:07d}-{index:03d}", room, "", "", answer.sent_s, None),)
    found = []
    for each in told:
        if each["choice_index"] != index:
            continue
        began_s = answer.sent_s + each["decided_s"]
        ended_s = None if each["ended_s"] is None else answer.sent_s + each["ended_s"]
        prefill, decode_name = truth.name(each["prefill"]), truth.name(each["decode"])
        prefill_key = truth.key(prefill, each["rid"], draw)
        decode_key = truth.key(decode_name, each["rid"], draw)
        if prefill_key is None or decode_key is None:
            return None
        own = (each["rid"], int(each["room"]), prefill, decode_name, began_s, ended_s)
        had_output, failed = each["first_output_s"] is not None, failed_on(each)
        found.append(
            Attempt(*own, prefill_key, decode_key, was_aborted(each), had_output, failed and truth.name(failed))
        )
    return tuple(found)


def was_aborted(told: Mapping[str, Any]) -> bool:
    """Whether a decode said so; a gateway that lets go of an attempt itself notes no failure of it any more."""
    failed = [each for each in told["outcomes"] if each["leg"] == Leg.DECODE]
    return any(
        _ABORTED.search(each["message"])
        or (each["kind"] == FailureKind.ABORTED and not _FAILED.search(each["message"]))
        for each in failed
    )


def failed_on(told: Mapping[str, Any]) -> str:
    """The engine that failed an attempt, by its URL: where it answered with an error of its own, or broke off.

    Empty where engines speak of each other, where both have failed, and for what they refuse as the client's fault.
    """
    engines = {each["engine"] for each in told["outcomes"]}
    plain = all(
        not _OF_BOTH.search(each["message"])
        and (each["kind"] in _PLAIN or (each["kind"] == FailureKind.STATUS and each["status"] >= _SERVER_ERROR))
        for each in told["outcomes"]
    )
    return engines.pop() if plain and len(engines) == 1 else ""


def again_s(answer: Answer) -> float | None:
    """After how long a refused client may ask again, by the headers that client libraries obey; None if it may not."""
    headers = {name.lower(): value for name, value in answer.headers.items()}
    try:
        return float(headers["retry-after"]) if headers["x-should-retry"] == "true" else None
    except (KeyError, ValueError):
        return None


class Events:
    """Reads one answer, of whichever route, as the checker's events."""

    def __init__(self, asked: parse.Request | None, stream: bool) -> None:
        self._asked, self._stream = asked, stream
        self._text: dict[int, str] = {}
        self._ids: dict[int, int] = {}
        self._usage: dict[int, Usage] = {}

    def of(self, read: Sequence[tuple[float, Any]]) -> Iterator[Event]:
        for at_s, what in read:
            if what == DONE:
                yield Event(at_s, done=True)
                continue
            try:
                yield from list(self._events(at_s, what))
            except (KeyError, TypeError, IndexError, AttributeError, ValueError):
                yield Event(at_s, junk=repr(what)[:200])

    def _events(self, at_s: float, what: Any) -> Iterator[Event]:
        if isinstance(what, dict) and "error" in what:
            error = what["error"]
            yield Event(at_s, error=Error(str(error["message"]), str(error.get("type")), str(error.get("code"))))
        elif self._asked is not None and self._asked.api is parse.Api.GENERATE:
            yield from self._generated(at_s, what if isinstance(what, list) else [what])
        else:
            choices = [self._choice(at_s, choice) for choice in what["choices"]]
            usage = _usage(what["usage"]) if what.get("usage") and (not self._stream or not choices) else None
            yield from choices
            if usage is not None:
                yield Event(at_s, usage=usage)

    def _choice(self, at_s: float, choice: Mapping[str, Any]) -> Event:
        owner = choice.get("delta") or choice.get("message")
        text = (owner.get("content") if owner is not None else choice.get("text")) or ""
        index = choice["index"]
        if index not in self._text and self._asked is not None and self._asked.echo:
            text = text.removeprefix(self._echo(index))
        self._text[index] = ""
        ids = choice.get("token_ids") or choice.get("response_token_ids") or ()
        finish, role = choice.get("finish_reason") or "", bool(owner and owner.get("role"))
        return Event(at_s, index, text, tuple(ids), finish, choice.get("matched_stop") if finish else None, role=role)

    def _echo(self, index: int) -> str:
        item = self._asked.items[index] if self._asked is not None else None
        return (item.text or decode(unpack(item.prompt))) if item is not None else ""

    def _generated(self, at_s: float, objects: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """Objects of `/generate`, each of which repeats what came before."""
        for place, body in enumerate(objects):
            index, meta = body.get("index", place), body["meta_info"]
            seen, had = self._text.get(index, ""), self._ids.get(index, 0)
            finish = meta["finish_reason"] or {}
            if not body["text"].startswith(seen):
                yield Event(at_s, index, junk=f"{body['text'][-40:]!r} after {seen[-40:]!r}")
            text, ids = body["text"][len(seen) :], tuple(body["output_ids"][had:])
            self._text[index], self._ids[index] = body["text"], len(body["output_ids"])
            yield Event(at_s, index, text, ids, finish.get("type", ""), finish.get("matched"))
            if finish:
                numbers = meta["prompt_tokens"], meta["completion_tokens"]
                self._usage[index] = Usage(*numbers, sum(numbers), meta["cached_tokens"])
                if self._asked is not None and len(self._usage) == len(self._asked.items):
                    yield Event(at_s, usage=self._total(self._asked.items[0].sampling.samples))

    def _total(self, samples: int) -> Usage:
        prompts = [self._usage[index] for index in sorted(self._usage)][::samples]
        prompt = sum(each.prompt_tokens for each in prompts)
        written = sum(each.completion_tokens for each in self._usage.values())
        return Usage(prompt, written, prompt + written, sum(each.cached_tokens or 0 for each in prompts))


def _usage(told: Mapping[str, Any]) -> Usage:
    details = told.get("prompt_tokens_details") or {}
    return Usage(told["prompt_tokens"], told["completion_tokens"], told["total_tokens"], details.get("cached_tokens"))
