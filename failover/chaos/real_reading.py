"""What a client of a real fleet read, as a request of the history. Pure.

No prompt tokens and no keys are known of a real model: what can be judged from this has `client_checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from failover.chaos.answer import Answer
from failover.chaos.history import Attempt, Choice, Error, Event, Limits, Request
from failover.chaos.reading import Events, Told, name, was_aborted

_FIRST_ERROR_STATUS = 400
_SHOWN_CHARS = 200


def request(answer: Answer, told: Told | None, name_of: Callable[[str], str]) -> Request:
    """The request, with the attempts that a gateway has `told` of; `name_of` names engines by their URLs."""
    body, asked_stream = answer.asked.body, bool(answer.asked.body.get("stream"))
    stream = asked_stream if answer.status == 200 else answer.is_stream
    usage = not asked_stream or bool(body.get("stream_options", {}).get("include_usage"))
    choices = tuple(Choice((), tuple(_attempts(answer, told, at, name_of))) for at in range(samples(body)))
    return Request(
        name=name(answer),
        asked_s=answer.sent_s,
        choices=choices,
        limits=Limits(int(body["max_tokens"]), stop=tuple(body.get("stop", ())), ignore_eos=bool(body["ignore_eos"])),
        events=tuple(_events(answer, stream)),
        status=answer.status,
        ending=answer.ending,
        stream=stream,
        ids_shown=bool(body.get("return_token_ids")),
        wants_usage=usage,
        samples=samples(body),
        gateway=answer.gateway,
        kind=answer.asked.kind,
    )


def samples(body: Mapping[str, Any]) -> int:
    """How many choices an answer has."""
    return int(body.get("n", 1))


def _attempts(answer: Answer, told: Told | None, index: int, name_of: Callable[[str], str]) -> Iterator[Attempt]:
    for each in told or ():
        if each["choice_index"] == index:
            ended_s = None if each["ended_s"] is None else answer.sent_s + each["ended_s"]
            pair, began_s = (name_of(each["prefill"]), name_of(each["decode"])), answer.sent_s + each["decided_s"]
            yield Attempt(each["rid"], int(each["room"]), *pair, began_s, ended_s, aborted=was_aborted(each))


def _events(answer: Answer, stream: bool) -> Iterator[Event]:
    """An error is whatever body has a status of one: not every gateway has OpenAI's form for it."""
    if (answer.status or 0) >= _FIRST_ERROR_STATUS and not answer.is_stream:
        yield from (Event(at_s, error=_refusal(what)) for at_s, what in answer.read)
        return
    events, own_id = Events(None, stream), None
    for at_s, what in answer.read:
        if isinstance(what, dict) and isinstance(what.get("error"), str):
            what = {"error": {"message": what["error"]}}
        yield from events.of([(at_s, what)])
        if isinstance(what, dict) and "id" in what:
            own_id = own_id or what["id"]
            if what["id"] != own_id:
                yield Event(at_s, junk=f"the id {what['id']!r:.{_SHOWN_CHARS}} in an answer with the id {own_id!r:.50}")


def _refusal(what: Any) -> Error:
    """Forms: OpenAI's, SGLang's own (its fields at the top), FastAPI's `detail`, or any text."""
    inner = what.get("error", what) if isinstance(what, dict) else what
    if isinstance(inner, dict):
        words = inner.get("message") or inner.get("detail") or ""
        return Error(str(words), str(inner.get("type", "")), str(inner.get("code", "")))
    text = inner.decode(errors="replace") if isinstance(inner, bytes) else str(inner)
    return Error(text[:_SHOWN_CHARS])
