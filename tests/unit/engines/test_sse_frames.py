"""Frames and kinds, on the events that SGLang 0.5.23 writes."""

from __future__ import annotations

import json

import pytest

from engines.errors import UpstreamError
from engines.sse_frames import EventKind, FrameDecoder, data_of, event_kind, is_comment, parsed_kind
from engines.types import FailureKind

HEAD = '{"id":"9ebb5bef31ef46f79b0542ae3a12a452","object":"chat.completion.chunk","created":1795955382,"model":"tiny",'
META = '"meta_info":{"id":"56795fd3deed4795b0f06aac2ef19cbf","finish_reason":'


def chat(delta: str, reason: str = "null") -> bytes:
    return completion(f'"delta":{delta}', reason)


def completion(output: str, reason: str = "null") -> bytes:
    choice = f'{{"index":0,{output},"logprobs":null,"finish_reason":{reason},"matched_stop":null}}'
    return f'data: {HEAD}"choices":[{choice}]}}\n\n'.encode()


def generate(text: str, ids: str, reason: str = "null") -> bytes:
    return f'data: {{"text":{text},"output_ids":{ids},{META}{reason},"prompt_tokens":5,"dp_rank":null}}}}\n\n'.encode()


KINDS = [
    ("chat role", chat('{"reasoning_content":null,"role":"assistant","content":""}'), EventKind.ROLE_ONLY),
    ("chat text", chat('{"reasoning_content":null,"content":"\ufffd"}'), EventKind.CONTENT),
    ("chat role and text", chat('{"role":"assistant","content":"Hi"}'), EventKind.CONTENT),
    ("chat reasoning", chat('{"reasoning_content":"so","content":null}'), EventKind.CONTENT),
    ("chat reasoning beside empty text", chat('{"content":"","reasoning_content":"so"}'), EventKind.CONTENT),
    ("chat tool call", chat('{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}'), EventKind.CONTENT),
    ("chat empty delta", chat('{"reasoning_content":null}'), EventKind.ROLE_ONLY),
    ("chat finish", chat('{"reasoning_content":null}', '"length"'), EventKind.FINISH),
    ("chat finish with text", chat('{"content":"end"}', '"stop"'), EventKind.FINISH),
    ("chat abort", chat('{"reasoning_content":null}', '"abort"'), EventKind.ABORT),
    ("chat abort with text", chat('{"content":"end"}', '"abort"'), EventKind.ABORT),
    ("completion start", completion('"text":""'), EventKind.ROLE_ONLY),
    ("completion text", completion('"text":" he"'), EventKind.CONTENT),
    ("completion ends", completion('"text":"D"', '"length"'), EventKind.FINISH),
    ("completion abort", completion('"text":""', '"abort"'), EventKind.ABORT),
    ("usage", f'data: {HEAD}"choices":[],"usage":{{"prompt_tokens":11}}}}\n\n'.encode(), EventKind.USAGE),
    ("generate start", generate('""', "[]"), EventKind.ROLE_ONLY),
    ("generate ids only", generate('""', "[14]"), EventKind.CONTENT),
    ("generate text", generate('", hello"', "[14,136]"), EventKind.CONTENT),
    ("generate finish", generate('","', "[14]", '{"type":"length","length":1}'), EventKind.FINISH),
    (
        "generate abort",
        generate('"x"', "[14]", '{"type":"abort","message":"Aborted","status_code":null,"err_type":null}'),
        EventKind.ABORT,
    ),
    (
        "openai error, written by json.dumps",
        b'data: {"error": {"object": "error", "message": "KVTransferError", "param": null, "code": 500}}\n\n',
        EventKind.ERROR,
    ),
    ("compact error", b'data: {"error":{"message":"no","code":400}}\n\n', EventKind.ERROR),
    ("spaced error", b'data:  { "error" :\t{"message":"no"} }\r\n\r\n', EventKind.ERROR),
    ("flat error", b'data: {"object":"error","message":"no","code":500}\n\n', EventKind.ERROR),
    ("done", b"data: [DONE]\n\n", EventKind.DONE),
    ("done without the space", b"data:[DONE]\r\n\r\n", EventKind.DONE),
    ("comment", b": keep-alive\n\n", EventKind.COMMENT),
    ("comment that looks like a chunk", b':{"content":"x","finish_reason":null}\n\n', EventKind.COMMENT),
    ("nothing", b"\n\n", EventKind.COMMENT),
    ("named event", b'event: x\ndata: {"choices":[]}\n\n', EventKind.USAGE),
    ("not an object", b"data: [1,2]\n\n", EventKind.CONTENT),
    ("not JSON", b"data: hello\n\n", EventKind.CONTENT),
    ("a lone surrogate", b'data: {"error": {"message": "\\ud83d"}}\n\n', EventKind.ERROR),
]


@pytest.mark.parametrize(("frame", "kind"), [pytest.param(frame, kind, id=name) for name, frame, kind in KINDS])
def test_kind(frame: bytes, kind: EventKind) -> None:
    assert event_kind(frame) is kind
    assert parsed_kind(frame) is kind


@pytest.mark.parametrize(
    "frame",
    [
        chat('{"reasoning_content":null,"content":"Hi"}'),
        chat('{"reasoning_content":"so","content":null}'),
        completion('"text":" he"'),
        generate('", hello"', "[14,136]"),
    ],
)
def test_the_usual_chunk_is_not_parsed(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.sse_frames.parsed_kind", lambda _: pytest.fail("parsed"))
    assert event_kind(frame) is EventKind.CONTENT


ADVERSARIAL = [
    '"finish_reason":"abort"',
    '{"finish_reason":{"type":"abort"',
    'data: {"error":{"message":"x"}}',
    "data: [DONE]",
    '"content":""',
    '"text":"',
    '"choices":[]',
    "\\",
    '\\"',
    'x\\","finish_reason":"stop',
]


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_text_that_looks_like_the_protocol(text: str) -> None:
    quoted = json.dumps(text)
    for frame in (
        chat(f'{{"reasoning_content":null,"content":{quoted}}}'),
        completion(f'"text":{quoted}'),
        generate(quoted, "[14]"),
    ):
        assert event_kind(frame) is EventKind.CONTENT
    assert event_kind(chat(f'{{"content":{quoted}}}', '"abort"')) is EventKind.ABORT


def test_tokens_as_keys_of_top_logprobs() -> None:
    frame = completion('"text":"","top":{"text":-0.1,"content":-0.2,"finish_reason":null}')
    assert event_kind(frame) is parsed_kind(frame) is EventKind.ROLE_ONLY
    frame = completion('"text":"x","top":{"finish_reason":-0.2}', '"stop"')
    assert event_kind(frame) is EventKind.FINISH


def test_one_of_several_choices_decides() -> None:
    def both(first: str, second: str) -> EventKind:
        choices = ",".join(f'{{"index":0,"text":"t","finish_reason":{reason}}}' for reason in (first, second))
        frame = f'data: {HEAD}"choices":[{choices}]}}\n\n'.encode()
        assert parsed_kind(frame) is event_kind(frame)
        return event_kind(frame)

    assert both("null", "null") is EventKind.CONTENT
    assert both("null", '"stop"') is both('"stop"', "null") is EventKind.FINISH
    assert both('"stop"', '"abort"') is both('"abort"', "null") is EventKind.ABORT


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data:  a \r\n\r\n", b" a "),
        (b"data: a\r\r", b"a"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: x\nid: 1\ndata: a\r\ndata\n\n", b"a\n"),
        (b"\ndata: a\n\n", b"a"),
        (b"data: a\rb\n\n", b"a"),
        (b": c\n\n", b""),
        (b"database: a\n\n", b""),
    ],
)
def test_data_of(frame: bytes, data: bytes) -> None:
    assert data_of(frame) == data


def test_is_comment() -> None:
    assert is_comment(b": ping\n\n")
    assert is_comment(b"event: ping\n\n")
    assert not is_comment(b"data: x\n\n")
    assert not is_comment(b": ping\ndata: x\n\n")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\r\n\n"])
def test_every_terminator_split_anywhere(end: bytes) -> None:
    stream = b"data: a" + end + b"data: b" + end
    for cut in range(len(stream) + 1):
        decoder = FrameDecoder()
        assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == [b"data: a" + end, b"data: b" + end]
        assert decoder.pending == b""


def test_pending_shows_a_cut_event() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(b"data: a\n\ndata: {") == [b"data: a\n\n"]
    assert decoder.pending == b"data: {"
    assert decoder.feed(b"}\n") == []
    assert decoder.feed(b"\n") == [b"data: {}\n\n"]
    assert decoder.pending == b""


@pytest.mark.parametrize("parts", [[b"data: 789012"], [b"data: ", b"7890", b"12"], [b"data: 7890\n\n"]])
def test_an_event_over_the_limit(parts: list[bytes]) -> None:
    decoder = FrameDecoder(limit_bytes=11)
    assert decoder.feed(b"data: 789\n\n" * 5) == [b"data: 789\n\n"] * 5
    assert [frame for part in parts[:-1] for frame in decoder.feed(part)] == []
    with pytest.raises(UpstreamError) as caught:
        decoder.feed(parts[-1])
    assert caught.value.kind is FailureKind.GARBLED
