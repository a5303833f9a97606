"""A stream that is passed on untouched."""

from __future__ import annotations

import pytest

from engines.client_stream import Inexact
from engines.plain_stream import KEPT_BYTES, PlainStream
from engines.sse_frames import EventKind

ROLE = (EventKind.ROLE_ONLY, b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
CONTENT = (EventKind.CONTENT, b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
TEXT = (EventKind.CONTENT, b'data: {"choices":[{"text":"b"}]}\n\n')
FINISH = (EventKind.FINISH, b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
DONE = (EventKind.DONE, b"data: [DONE]\n\n")


def test_it_passes_everything_and_keeps_it_where_it_is_to() -> None:
    stream = PlainStream("/v1/chat/completions", {"x": 1}, "it has tools", keep=True)
    assert list(stream.frames([CONTENT])) == [CONTENT]
    assert list(stream.frames([FINISH, DONE])) == [FINISH, DONE]
    assert list(stream.kept()) == [CONTENT, FINISH, DONE]
    assert stream.call_body(7) == {"x": 1}
    stream.restart()
    assert (list(stream.kept()), stream.finished) == ([], False)


def test_it_cannot_be_continued_by_ids() -> None:
    stream = PlainStream("/x", {}, "it has tools")
    for ask in (stream.emitted, stream.kept, lambda: stream.go_on([1], None)):
        with pytest.raises(Inexact, match="it has tools"):
            ask()


def test_what_is_too_much_is_not_kept() -> None:
    stream = PlainStream("/x", {}, "", keep=True)
    stream.frames([(EventKind.CONTENT, b"x" * KEPT_BYTES)])
    assert len(stream.kept()) == 1
    stream.frames([CONTENT])
    with pytest.raises(Inexact, match="more than"):
        stream.kept()


def test_the_text_so_far_is_that_of_either_route() -> None:
    stream = PlainStream("/x", {}, "", keep=True)
    stream.frames([ROLE, CONTENT, TEXT])
    assert stream.text_so_far() == ("ab", 2)
    for more in (b'{"tool_calls":[1]}', b'{"reasoning_content":"x"}'):
        stream.restart()
        stream.frames([(EventKind.CONTENT, b'data: {"choices":[{"delta":%b}]}\n\n' % more)])
        with pytest.raises(Inexact, match="more than text"):
            stream.text_so_far()


def test_what_goes_on_by_text_has_its_role_already() -> None:
    stream = PlainStream("/x", {}, "", keep=True)
    stream.frames([ROLE, CONTENT])
    stream.go_on_with({"y": 2})
    assert stream.call_body(None) == {"y": 2}
    assert list(stream.frames([ROLE, TEXT])) == [TEXT]


def test_it_can_be_closed_after_its_finish_reason() -> None:
    stream = PlainStream("/x", {}, "")
    stream.frames([CONTENT])
    assert not stream.finished
    stream.frames([FINISH])
    assert stream.finished
    assert list(stream.closing(3)) == [DONE]
    assert list(stream.closing(3)) == []


def test_where_each_event_repeats_all_output_the_last_is_kept_however_much_came() -> None:
    stream = PlainStream("/generate", {}, "", keep=True, repeats=True)
    events = [(EventKind.CONTENT, b"x" * (KEPT_BYTES // 2) + str(number).encode()) for number in range(9)]
    for event in events:
        stream.frames([event])
    assert list(stream.kept()) == events[-1:]


@pytest.mark.parametrize("frame", [b"data: \xff\n\n", b"data: [1]\n\n", b'data: {"choices":[3]}\n\n'])
def test_what_cannot_be_read_cannot_be_continued_by_text(frame: bytes) -> None:
    stream = PlainStream("/v1/completions", {}, "", keep=True)
    stream.frames([TEXT, (EventKind.CONTENT, frame)])
    with pytest.raises(Inexact, match="cannot be read"):
        stream.text_so_far()
