"""A `/generate` stream: passed on as it comes, written anew after a seam."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engines.client_stream import Frames, Inexact
from engines.generate_stream import GenerateStream
from engines.sse_frames import EventKind, data_of, event_kind

WORDS = {10: " he", 11: "llo", 12: " you"}
BODY: dict[str, Any] = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 9}}


def words(ids: Any) -> str:
    return "".join(WORDS.get(token, "") for token in ids)


def event(ids: list[int], finish: Any = None, text: str | None = "", **meta: Any) -> tuple[EventKind, bytes]:
    told = {"id": "r", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": len(ids), **meta}
    shown = {} if text is None else {"text": text or words(ids)}
    frame = b"data: " + orjson.dumps({**shown, "output_ids": ids, "meta_info": told}) + b"\n\n"
    return event_kind(frame), frame


DONE = (EventKind.DONE, b"data: [DONE]\n\n")


def read(frames: Frames) -> list[dict[str, Any]]:
    return [orjson.loads(data_of(frame)) for kind, frame in frames if kind is not EventKind.DONE]


def started(*frames: tuple[EventKind, bytes], incremental: bool = False, **more: Any) -> GenerateStream:
    stream = GenerateStream({**BODY, **more}, incremental=incremental)
    stream.frames(frames or [event([10]), event([10, 11])])
    return stream


def test_before_a_seam_it_is_passed_on() -> None:
    frames = [event([10]), event([10, 11]), event([10, 11], {"type": "length", "length": 2}), DONE]
    stream = GenerateStream(BODY)
    assert list(stream.frames(frames)) == frames
    assert stream.finished
    assert list(stream.closing(3)) == []
    assert stream.call_body(None) == BODY


def test_the_newest_event_says_what_came() -> None:
    emitted = started().emitted()
    assert (list(emitted.ids), emitted.text, emitted.ids_shown, emitted.finished) == ([10, 11], " hello", True, False)


def test_events_of_what_is_new_are_added_up() -> None:
    emitted = started(event([10]), event([11, 12], completion_tokens=3), incremental=True).emitted()
    assert (list(emitted.ids), emitted.text) == ([10, 11, 12], " hello you")


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"max_new_tokens": 9}, {"max_new_tokens": 7}),
        ({}, {"max_new_tokens": 126}),
        ({"max_new_tokens": None}, {"max_new_tokens": None}),
        ({"min_new_tokens": 5}, {"max_new_tokens": 126, "min_new_tokens": 3}),
        ({"min_new_tokens": 1}, {"max_new_tokens": 126, "min_new_tokens": 0}),
        ({"temperature": 0}, {"max_new_tokens": 126, "temperature": 0}),
    ],
)
def test_the_next_call_asks_for_the_rest(params: dict[str, Any], wanted: dict[str, Any]) -> None:
    stream = started(sampling_params=params, return_logprob=True, logprob_start_len=-1)
    assert stream.go_on([1, 2, 3], words) == 2
    ours = {"input_ids": [1, 2, 3, 10, 11], "stream": True, "return_logprob": True}
    assert stream.call_body(None) == {**ours, "sampling_params": wanted}


def test_after_a_seam_an_event_holds_all_and_counts_all() -> None:
    rows = [[-0.5, 10, None], [-0.5, 11, None]]
    lists = {"output_token_logprobs": rows, "output_top_logprobs": [[rows[0]], [rows[1]]]}
    before = event([10, 11], **lists, output_token_logprobs_length=2, weight_version="v1")
    stream = started(before)
    stream.go_on([1, 2, 3], words)
    new = {"output_token_logprobs": [[-0.25, 12, None]], "output_top_logprobs": [None]}
    after = event(
        [12],
        {"type": "length", "length": 1},
        **{"prompt_tokens": 5, "cached_tokens": 4, "cached_tokens_details": {"device": 3, "host": 1}},
        **new,
        output_token_logprobs_length=1,
        weight_versions=[{"version": "v1", "start": 0, "end": 1}],
    )
    got = stream.frames([after, DONE])
    assert [kind for kind, _ in got] == [EventKind.FINISH, EventKind.DONE]
    assert read(got) == [
        {
            "text": " hello you",
            "output_ids": [10, 11, 12],
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": "length", "length": 3},
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "cached_tokens": 3,
                "cached_tokens_details": {"device": 3, "host": 0},
                "output_token_logprobs": [*rows, [-0.25, 12, None]],
                "output_top_logprobs": [*lists["output_top_logprobs"], None],
                "output_token_logprobs_length": 3,
                "weight_versions": [{"version": "v1", "start": 0, "end": 3}],
            },
        }
    ]


def test_a_second_seam_joins_as_the_first() -> None:
    stream = started()
    stream.go_on([1, 2, 3], words)
    stream.frames([event([12]), event([12, 10])])
    assert (list(stream.emitted().ids), stream.emitted().text) == ([10, 11, 12, 10], " hello you he")
    assert stream.go_on([1, 2, 3], words) == 4
    assert stream.call_body(None)["input_ids"] == [1, 2, 3, 10, 11, 12, 10]
    got = read(stream.frames([event([11], prompt_tokens=7)]))[0]
    assert (got["text"], got["output_ids"]) == (" hello you hello", [10, 11, 12, 10, 11])
    assert (got["meta_info"]["prompt_tokens"], got["meta_info"]["completion_tokens"]) == (3, 5)


def test_weights_that_changed_in_between_are_told() -> None:
    stream = started(event([10], weight_version="v1"))
    stream.go_on([1, 2, 3], words)
    spans = [{"version": "v2", "start": 0, "end": 1}]
    got = read(stream.frames([event([12], {"type": "stop", "matched": 7}, weight_versions=spans)]))
    assert got[0]["meta_info"]["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 1},
        {"version": "v2", "start": 1, "end": 2},
    ]


def test_the_prompt_ids_are_those_of_the_prompt() -> None:
    stream = started()
    stream.go_on([1, 2, 3], words)
    told = orjson.loads(data_of(event([12])[1]))
    frame = b"data: " + orjson.dumps({**told, "prompt_token_ids": [1, 2, 3, 10, 11]}) + b"\n\n"
    assert read(stream.frames([(EventKind.CONTENT, frame)]))[0]["prompt_token_ids"] == [1, 2, 3]


def test_a_stop_string_over_the_seam_ends_the_stream_here() -> None:
    stream = started(sampling_params={"stop": ["llo y"]})
    stream.go_on([1, 2, 3], words)
    rows = {"output_token_logprobs": [[-1, 12, None], [-1, 10, None]], "output_token_logprobs_length": 2}
    got = stream.frames([event([12, 10], **rows), event([12, 10, 11])])
    assert [kind for kind, _ in got] == [EventKind.FINISH, EventKind.DONE]
    last = read(got)[0]
    assert (last["text"], last["output_ids"]) == (" hello", [10, 11, 12])
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "llo y"}
    assert last["meta_info"]["completion_tokens"] == 3
    assert last["meta_info"]["output_token_logprobs_length"] == 3
    assert stream.ended_here
    assert list(stream.closing(3)) == []


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"sampling_params": {"presence_penalty": 1}}, "penalties"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprobs"),
        ({"sampling_params": {"max_new_tokens": 2}}, "all the tokens"),
    ],
)
def test_what_cannot_go_on_says_why(more: dict[str, Any], word: str) -> None:
    stream = started(**more)
    with pytest.raises(Inexact, match=word):
        stream.go_on([1, 2, 3], words)
    assert stream.call_body(None) == {**BODY, **more}


def test_without_a_tokenizer_only_a_stream_without_text_goes_on() -> None:
    with pytest.raises(Inexact, match="without a tokenizer"):
        started().go_on([1, 2, 3], None)
    stream = started(event([10, 11], text=None))
    assert stream.go_on([1, 2, 3], None) == 2
    assert read(stream.frames([event([12], text=None)]))[0]["output_ids"] == [10, 11, 12]


def test_a_finished_stream_lacks_its_terminator_alone() -> None:
    stream = started(event([10], {"type": "length", "length": 1}))
    assert list(stream.closing(3)) == [DONE]
    with pytest.raises(Inexact, match="finish reason"):
        stream.go_on([1, 2, 3], words)


def test_a_restart_forgets_everything() -> None:
    stream = started()
    stream.go_on([1, 2, 3], words)
    stream.restart()
    assert stream.call_body(None) == BODY
    assert (list(stream.emitted().ids), stream.emitted().text) == ([], "")
