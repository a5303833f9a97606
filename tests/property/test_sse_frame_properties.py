"""However bytes come split, the frames are the same; however odd the text, the quick kind is the parsed kind."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from engines.sse_frames import EventKind, FrameDecoder, data_of, event_kind, parsed_kind

ODD_TEXT = st.sampled_from(
    [
        '"finish_reason":"abort"',
        '"finish_reason":null',
        '"finish_reason":{"type":"abort"}',
        'finish_reason":',
        '"content":"x',
        '"text":"',
        '{"error":',
        "data: [DONE]\n\n",
        "\n\n",
        "\r\n\r\n",
        "\\",
        '\\"',
        '"',
        "\ud83d",
        "é",
    ]
)
TEXT = st.lists(st.one_of(ODD_TEXT, st.text(max_size=8)), max_size=4).map("".join)
REASON = st.sampled_from([None, None, None, "stop", "length", "tool_calls", "abort"])
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": st.one_of(st.none(), TEXT),
        "reasoning_content": st.one_of(st.none(), TEXT),
        "tool_calls": st.one_of(
            st.none(), st.builds(lambda text: [{"index": 0, "function": {"name": text, "arguments": text}}], TEXT)
        ),
    },
)
LOGPROBS = st.one_of(
    st.none(),
    st.builds(lambda text: {"content": [{"token": text, "logprob": -0.5, "top_logprobs": []}]}, TEXT),
    st.builds(lambda text: {"tokens": [text], "top_logprobs": [{text: -0.5}], "text_offset": [0]}, TEXT),
)
CHAT_CHOICE = st.builds(
    lambda delta, logprobs, reason: {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason},
    DELTA,
    LOGPROBS,
    REASON,
)
TEXT_CHOICE = st.builds(
    lambda text, logprobs, reason: {"index": 1, "text": text, "logprobs": logprobs, "finish_reason": reason},
    TEXT,
    LOGPROBS,
    REASON,
)
USAGE = st.one_of(st.none(), st.just({"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}))
OPENAI = st.builds(
    lambda choices, usage: {"id": "0" * 32, "created": 1795955382, "choices": choices, "usage": usage},
    st.one_of(st.lists(CHAT_CHOICE, max_size=3), st.lists(TEXT_CHOICE, max_size=3)),
    USAGE,
)
GENERATE_REASON = st.one_of(
    st.none(),
    st.just({"type": "length", "length": 4}),
    st.builds(lambda text: {"type": "stop", "matched": text}, TEXT),
    st.builds(lambda text: {"type": "abort", "message": text, "status_code": 500}, TEXT),
)
GENERATE = st.builds(
    lambda text, ids, reason: {"text": text, "output_ids": ids, "meta_info": {"id": "0", "finish_reason": reason}},
    TEXT,
    st.lists(st.integers(0, 500), max_size=3),
    GENERATE_REASON,
)
ERRORS = st.builds(lambda text: {"error": {"message": text, "code": 500}}, TEXT)
EVENTS = st.one_of(OPENAI, OPENAI, GENERATE, ERRORS)


def compact(event: Any) -> bytes:
    try:
        return orjson.dumps(event)
    except orjson.JSONEncodeError:  # a lone surrogate
        return json.dumps(event, separators=(",", ":")).encode()


def spaced(event: Any) -> bytes:
    return json.dumps(event).encode()


DATA = st.one_of(
    st.builds(lambda write, event: write(event), st.sampled_from([compact, compact, spaced]), EVENTS),
    st.just(b"[DONE]"),
)
FRAMES = st.one_of(DATA.map(lambda data: b"data: " + data + b"\n\n"), st.just(b": keep-alive\n\n"))


def expected(event: Any) -> EventKind:
    """Said again and more simply, for one event that is JSON."""
    if "error" in event:
        return EventKind.ERROR
    reasons = [choice["finish_reason"] for choice in event["choices"]] if "choices" in event else []
    if "meta_info" in event:
        reason = event["meta_info"]["finish_reason"]
        reasons = [reason["type"] if reason else None]
        output = bool(event["output_ids"] or event["text"])
    else:
        outputs = [{**choice.get("delta", {}), "text": choice.get("text")} for choice in event["choices"]]
        output = any(value for each in outputs for key, value in each.items() if key != "role")
    if not reasons:
        return EventKind.USAGE
    if "abort" in reasons:
        return EventKind.ABORT
    if any(reasons):
        return EventKind.FINISH
    return EventKind.CONTENT if output else EventKind.ROLE_ONLY


@given(EVENTS, st.sampled_from([compact, spaced]))
def test_quick_kind_is_the_parsed_kind(event: Any, write: Any) -> None:
    frame = b"data: " + write(event) + b"\n\n"
    assert event_kind(frame) is parsed_kind(frame) is expected(event)


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 4000), max_size=12))
def test_any_split_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frames)
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder()
    got = [frame for begin, end in itertools.pairwise(borders) for frame in decoder.feed(stream[begin:end])]
    assert got == frames
    assert decoder.pending == b""


LINES = st.sampled_from([b"data: a", b"data:", b": c", b"event: e", b""])
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINES, LINE_ENDS), max_size=12), st.data())
def test_any_line_ends_and_byte_by_byte(lines: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(line + end for line, end in lines)
    at_once, by_byte = FrameDecoder(), FrameDecoder()
    whole = at_once.feed(stream)
    assert [frame for at in range(len(stream)) for frame in by_byte.feed(stream[at : at + 1])] == whole
    assert by_byte.pending == at_once.pending
    assert b"".join(whole) + at_once.pending == stream
    cut = data.draw(st.integers(0, len(stream)))
    halves = FrameDecoder()
    assert halves.feed(stream[:cut]) + halves.feed(stream[cut:]) == whole


@given(st.lists(TEXT.map(lambda text: compact({"text": text})), min_size=1, max_size=4), LINE_ENDS)
def test_data_comes_back(parts: list[bytes], end: bytes) -> None:
    frame = b"".join(b"data: " + part + end for part in parts) + end
    assert data_of(frame) == b"\n".join(parts)
