"""What a client of a real fleet read, as a request: bodies as a real SGLang and other gateways write them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from failover.chaos.answer import Answer
from failover.chaos.history import Ending, Event, Usage
from failover.chaos.load import Asked
from failover.chaos.real_reading import request

CHAT = {"model": "m", "max_tokens": 4, "ignore_eos": True, "temperature": 0, "messages": []}
TOLD = [
    {"rid": "a", "room": 5, "choice_index": 0, "prefill": "http://p", "decode": "http://d", "decided_s": 0.1}
    | {"ended_s": None, "outcomes": []},
    {"rid": "b", "room": 6, "choice_index": 1, "prefill": "http://p", "decode": "http://d", "decided_s": 0.2}
    | {"ended_s": 0.4, "outcomes": [{"leg": "decode", "kind": "aborted", "message": "Aborted"}]},
]


def answer(*read: Any, status: int = 200, **body: Any) -> Answer:
    """What came as events of a stream, or as a whole body."""
    asked = Asked(3, 0.0, "stream", "/v1/chat/completions", {**CHAT, "stream": True, **body})
    stream = asked.body["stream"] and status == 200
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    made = Answer(asked, gateway="gateway0", sent_s=2.0, status=status, headers={"content-type": kind})
    for number, each in enumerate(read):
        if stream:
            data = each if isinstance(each, bytes) else b"data: " + orjson.dumps(each) + b"\n\n"
            made.take(2.0 + number, data)
        else:
            made.take_body(2.0, each if isinstance(each, bytes) else orjson.dumps(each))
    made.ended = True
    return made


def chunk(index: int = 0, finish: str | None = None, own_id: str = "x", **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {"id": own_id, "object": "chat.completion.chunk", "model": "m", "choices": [choice], "usage": None}


def events(*read: Any, **others: Any) -> tuple[Event, ...]:
    return request(answer(*read, **others), None, str).events


def test_a_stream() -> None:
    usage = {"id": "x", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}}
    made = request(
        answer(
            *(chunk(role="assistant", content=""), chunk(content="hi"), chunk(finish="length"), usage),
            *(b"data: [DO", b"NE]\n\n"),
            stream_options={"include_usage": True},
        ),
        None,
        str,
    )
    assert made.events == (
        Event(2.0, role=True),
        Event(3.0, text="hi"),
        Event(4.0, finish="length"),
        Event(5.0, usage=Usage(7, 1, 8)),
        Event(7.0, done=True),
    )
    assert (made.name, made.kind, made.gateway, made.asked_s) == ("request 3 (stream)", "stream", "gateway0", 2.0)
    assert (made.stream, made.wants_usage, made.ids_shown, made.ending) == (True, True, False, Ending.WHOLE)
    assert made.limits.max_tokens == 4
    assert not request(answer(), None, str).wants_usage


def test_a_whole_body_with_several_choices() -> None:
    message = {"role": "assistant", "content": "hi"}
    choices = [{"index": n, "message": message, "finish_reason": "stop", "token_ids": [5, 6]} for n in (0, 1)]
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    body = {"id": "x", "choices": choices, "usage": usage}
    made = request(answer(body, stream=False, n=2, return_token_ids=True), None, str)
    assert [(each.index, each.text, each.ids, each.finish) for each in made.events[:2]] == [
        (0, "hi", (5, 6), "stop"),
        (1, "hi", (5, 6), "stop"),
    ]
    assert made.events[2].usage == Usage(7, 4, 11)
    assert (made.stream, made.wants_usage, made.ids_shown, len(made.choices), made.samples) == (False, True, True, 2, 2)


def test_the_attempts_of_each_choice_with_the_names_of_engines() -> None:
    made = request(answer(n=2), TOLD, {"http://p": "prefill0", "http://d": "decode0"}.__getitem__)
    [first], [second] = (choice.attempts for choice in made.choices)
    assert (first.rid, first.room, first.prefill, first.decode) == ("a", 5, "prefill0", "decode0")
    assert (first.began_s, first.ended_s, first.aborted) == (2.1, None, False)
    assert (second.rid, second.began_s, second.ended_s, second.aborted) == ("b", 2.2, 2.4, True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "no room", "type": "overloaded", "code": 503}}, "no room"),
        ({"error": "no room"}, "no room"),
        ({"object": "error", "message": "no room", "type": "BadRequest"}, "no room"),
        ({"detail": "no room"}, "no room"),
        (b"no room", "no room"),
        ({"unlike": "all"}, ""),
        ([], "[]"),
    ],
)
def test_a_refusal_of_any_form(body: Any, words: str) -> None:
    [event] = events(body, status=503)
    assert event.error is not None
    assert event.error.message == words


def test_an_error_within_a_stream() -> None:
    for error in ({"error": {"message": "died"}}, {"error": "died"}):
        *_, event = events(chunk(content="hi"), error)
        assert event.error is not None
        assert event.error.message == "died"


@pytest.mark.parametrize(
    "frame", [b"event: x\n\n", b"data: {half\n\n", b'data: {"choices": 5}\n\n', b'data:{"a":1}\n\n']
)
def test_what_is_no_event_is_junk(frame: bytes) -> None:
    [event] = events(frame)
    assert event.junk


def test_an_id_that_changes_is_another_answer() -> None:
    assert not any(event.junk for event in events(chunk(content="a"), chunk(content="b")))
    found = [event.junk for event in events(chunk(content="a"), chunk(content="b", own_id="y"), chunk(content="c"))]
    assert [bool(each) for each in found] == [False, False, True, False]


def test_a_stream_that_was_asked_for_and_not_given() -> None:
    made = answer(b'{"choices": []}')
    made.headers = {"content-type": "application/json"}
    assert request(made, None, str).stream
