"""What the client sees of a stream."""

from __future__ import annotations

import json

import orjson
import pytest

from engines.sse_frames import EventKind, event_kind
from gateway import sse

RID, PUBLIC = b"9ebb5bef31ef46f79b0542ae3a12a452", b"c0ffee00c0ffee00c0ffee00c0ffee00"
CREATED = b"1700000000"
CHAT = (
    b'data: {"id":"9ebb5bef31ef46f79b0542ae3a12a452","object":"chat.completion.chunk","created":1795955382,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"reasoning_content":null,"content":%b},"logprobs":null,'
    b'"finish_reason":null,"matched_stop":null}]}\n\n'
)
GENERATE = (
    b'data: {"text":%b,"output_ids":[14],"meta_info":{"id":"9ebb5bef31ef46f79b0542ae3a12a452",'
    b'"finish_reason":null,"prompt_tokens":5}}\n\n'
)
ODD_TEXTS = [
    "hello",
    '"id":"9ebb5bef31ef46f79b0542ae3a12a452"',
    '"created":1795955382',
    "9ebb5bef31ef46f79b0542ae3a12a452",
    '\\","id":"9ebb5bef31ef46f79b0542ae3a12a452"',
]


def parsed(frame: bytes) -> dict:
    return json.loads(frame.removeprefix(b"data: "))


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_identity_of_a_chat_chunk(text: str) -> None:
    frame = CHAT % orjson.dumps(text)
    patched = sse.patch_identity(frame, RID, PUBLIC, CREATED)
    assert parsed(patched) == {**parsed(frame), "id": PUBLIC.decode(), "created": int(CREATED)}
    assert len(patched) == len(frame)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_identity_behind_the_text(text: str) -> None:
    frame = GENERATE % orjson.dumps(text)
    patched = parsed(sse.patch_identity(frame, RID, PUBLIC, CREATED))
    assert patched["text"] == text
    assert patched["meta_info"]["id"] == PUBLIC.decode()


def test_identity_of_a_whole_body() -> None:
    body = b'{"id":"%b","object":"chat.completion","created":1795955382,"choices":[]}' % RID
    expected = b'{"id":"%b","object":"chat.completion","created":1700000000,"choices":[]}' % PUBLIC
    assert sse.patch_identity(body, RID, PUBLIC, CREATED) == expected


@pytest.mark.parametrize(
    "frame",
    [
        sse.DONE,
        b'data: {"id":"another","created":17959553820}\n\n',
        b'data: {"created":null}\n\n',
        b'data: {"created":"1795955382"}\n\n',
        b'data: {"created":',
        b"data: [1,1795955382]\n\n",
    ],
)
def test_what_is_not_ours_stays(frame: bytes) -> None:
    assert sse.patch_identity(frame, RID, PUBLIC, CREATED) == frame


def test_error_event_is_openai_shaped() -> None:
    frame = sse.error_event('broke "here"\n\n', "engine_error", "engine_lost", "model")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    error = {"message": 'broke "here"\n\n', "type": "engine_error", "param": "model", "code": "engine_lost"}
    assert parsed(frame) == {"error": error}
    assert event_kind(frame) is EventKind.ERROR


def test_error_event_of_an_unsendable_message() -> None:
    assert parsed(sse.error_event("half \ud83d", "a", "b"))["error"]["message"] == "half ?"


def test_kinds_of_what_we_write() -> None:
    assert event_kind(sse.DONE) is EventKind.DONE
