"""A completion's stream: what is asked for, what is cut, how it goes on and how it is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from engines.client_stream import Inexact
from engines.completion_stream import CompletionStream
from engines.sse_frames import EventKind, data_of, event_kind

WRITTEN = orjson.loads((Path(__file__).parents[2] / "data/sglang/stream_events.json").read_bytes())["cases"]
WORDS = {10: " he", 11: "llo", 12: " you"}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}


def framed(events: list[str]) -> list[tuple[EventKind, bytes]]:
    frames = [event.encode() for event in events]
    return [(event_kind(frame), frame) for frame in frames]


def words(ids: Any) -> str:
    return "".join(WORDS.get(token, "") for token in ids)


def choices(frames: Any) -> list[dict[str, Any]]:
    events = [orjson.loads(data_of(frame)) for kind, frame in frames if kind is not EventKind.DONE]
    return [event["choices"][0] for event in events if event["choices"]]


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: str(case["name"]))
def test_the_client_sees_the_engines_bytes_without_the_ids(case: dict[str, Any]) -> None:
    got = CompletionStream(BODY).frames(framed(case["completion"]))
    for (_, frame), event in zip(got, case["completion"], strict=True):
        cut, _, rest = event.partition(',"token_ids":[')
        after = rest.partition("]")[2]
        if after.startswith(',"prompt_token_ids":['):
            after = after.partition("]")[2]
        assert frame.decode() == (cut + after if rest else event)
    assert [kind for kind, _ in got] == [kind for kind, _ in framed(case["completion"])]


def test_a_client_that_asked_for_ids_sees_all_bytes() -> None:
    events = framed(WRITTEN[0]["completion"])
    assert list(CompletionStream({**BODY, "return_token_ids": True}).frames(events)) == events


def test_text_that_looks_like_the_ids_is_no_matter() -> None:
    text = '","logprobs":null,"finish_reason":null,"matched_stop":null,"token_ids":[7]}],"usage":null}'
    event = WRITTEN[0]["completion"][1].replace('"llo"', orjson.dumps(text).decode())
    stream = CompletionStream(BODY)
    stream.frames(framed(WRITTEN[0]["completion"][:1]))
    assert choices(stream.frames(framed([event])))[0]["text"] == text
    assert (list(stream.emitted().ids), stream.emitted().text) == ([10, 11], " he" + text)


def test_an_event_that_begins_in_another_way_is_read_all_the_same() -> None:
    stream = started()
    other = WRITTEN[0]["completion"][1].replace('"model":"tiny"', '"model":"another"')
    assert choices(stream.frames(framed([other])))[0]["text"] == "llo"
    assert stream.emitted().text == " hellollo"


def test_the_first_call_asks_for_ids_and_is_else_the_clients() -> None:
    assert CompletionStream(BODY).call_body(None) == {**BODY, "return_token_ids": True}


def started(events: int = 2, **more: Any) -> CompletionStream:
    stream = CompletionStream({**BODY, **more})
    stream.frames(framed(WRITTEN[0]["completion"][:events]))
    return stream


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"max_tokens": 9}, {"max_tokens": 7}),
        ({"max_tokens": None}, {"max_tokens": 14}),
        ({"min_tokens": 5}, {"min_tokens": 3}),
        ({"min_tokens": 1}, {"min_tokens": 0}),
        ({"min_tokens": None}, {"min_tokens": None}),
        ({"suffix": "end"}, {}),
        ({"temperature": 0.5, "seed": 4}, {"temperature": 0.5, "seed": 4}),
    ],
)
def test_the_next_call_asks_for_the_rest(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    stream = started(**asked)
    assert stream.go_on([1, 2, 3], words) == 2
    body = stream.call_body(None)
    ours = {"prompt": [1, 2, 3, 10, 11], "return_token_ids": True, "echo": False, "max_tokens": 1}
    assert body == {"model": "tiny", "stream": True, **ours, **wanted}


def test_withheld_ids_that_nobody_saw_are_dropped() -> None:
    stream = started()
    half = WRITTEN[0]["completion"][1].replace('"llo"', '""').replace("[11]", "[99]")
    stream.frames(framed([half]))
    assert list(stream.emitted().ids) == [10, 11, 99]
    assert stream.go_on([1, 2, 3], lambda ids: words(ids) + ("\ufffd" if ids[-1] == 99 else "")) == 2


def test_withheld_ids_that_the_client_saw_are_kept() -> None:
    stream = started(max_tokens=9, return_token_ids=True)
    half = WRITTEN[0]["completion"][1].replace('"llo"', '""').replace("[11]", "[99]")
    stream.frames(framed([half]))
    assert stream.go_on([1, 2, 3], lambda ids: words(ids) + _of_two_ids(ids)) == 3
    rest = WRITTEN[0]["completion"][1].replace('"llo"', '""').replace("[11]", "[98]")
    assert [(each["text"], each["token_ids"]) for each in choices(stream.frames(framed([rest])))] == [("!", [98])]


def _of_two_ids(ids: Any) -> str:
    return "" if 99 not in ids else "\ufffd" if ids[-1] == 99 else "!"


@pytest.mark.parametrize(
    ("more", "words_of_it"),
    [
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"echo": True, "prompt": [1, 2, 3]}, "prompt ids"),
        ({"echo": True, "logprobs": 0}, "logprobs of the prompt"),
        ({"max_tokens": 2}, "all the tokens"),
    ],
)
def test_what_cannot_go_on_says_why_and_stays_as_it_is(more: dict[str, Any], words_of_it: str) -> None:
    stream = started(**more)
    before = (stream.call_body(None), stream.emitted())
    with pytest.raises(Inexact, match=words_of_it):
        stream.go_on([1, 2, 3], words)
    assert (stream.call_body(None), stream.emitted()) == before


def test_a_text_that_the_tokenizer_does_not_make_cannot_go_on() -> None:
    with pytest.raises(Inexact, match="tokenizer"):
        started().go_on([1, 2, 3], lambda ids: "other" * len(ids))


def test_neutral_values_forbid_nothing() -> None:
    stream = started(frequency_penalty=0, presence_penalty=None, repetition_penalty=1.0, stop_regex=[])
    assert stream.go_on([1, 2, 3], words) == 2


def test_a_finished_stream_does_not_go_on() -> None:
    with pytest.raises(Inexact, match="finish reason"):
        started(3).go_on([1, 2, 3], words)


def test_the_echo_is_no_output() -> None:
    stream = CompletionStream({**BODY, "echo": True, "prompt": "say"})
    stream.frames(framed([WRITTEN[0]["completion"][0].replace('" he"', '"say he"')]))
    assert stream.emitted().text == " he"
    assert stream.go_on([1, 2, 3], words) == 1
    assert stream.call_body(None)["echo"] is False


def test_a_stop_string_over_the_seam_ends_the_stream_here() -> None:
    stream = started(max_tokens=9, stop=["llo y"])
    assert stream.go_on([1, 2, 3], words) == 2
    over = WRITTEN[0]["completion"][2].replace('"finish_reason":"length"', '"finish_reason":null')
    got = stream.frames(framed([over, over]))
    assert [kind for kind, _ in got] == [EventKind.FINISH, EventKind.USAGE, EventKind.DONE]
    finish = choices(got)[0]
    assert (finish["text"], finish["finish_reason"], finish["matched_stop"]) == ("", "stop", "llo y")
    assert orjson.loads(data_of(got[1][1]))["usage"]["completion_tokens"] == 3
    assert stream.ended_here
    assert stream.finished
    assert list(stream.frames(framed([over]))) == []


def test_a_stop_string_over_the_seam_beats_the_end_that_came_with_it() -> None:
    stream = started(max_tokens=9, stop=["llo y"])
    stream.go_on([1, 2, 3], words)
    got = stream.frames(framed(WRITTEN[0]["completion"][2:3]))
    assert [(kind, choices([each])[0]["finish_reason"]) for each in got for kind in [each[0]]] == [
        (EventKind.FINISH, "stop")
    ]
    assert not stream.ended_here


def going_on(text: str, ids: str, logprobs: str = "null") -> tuple[EventKind, bytes]:
    """An event of an attempt that continues, in its middle."""
    event = (
        WRITTEN[0]["completion"][1].replace("4114138b", "99999999").replace('"logprobs":null', f'"logprobs":{logprobs}')
    )
    return framed([event.replace('"llo"', orjson.dumps(text).decode()).replace("[11]", ids)])[0]


def test_a_stop_string_may_take_several_events_to_be_complete() -> None:
    stream = started(max_tokens=9, stop=["llo you he"])
    stream.go_on([1, 2, 3], words)
    got = stream.frames([going_on(" you", "[12]"), going_on(" he", "[10]")])
    assert [(each["text"], each["matched_stop"]) for each in choices(got[:2])] == [("", None), ("", "llo you he")]
    assert got[1][0] is EventKind.FINISH


def test_ids_and_logprobs_after_the_stop_are_not_told() -> None:
    stream = started(max_tokens=9, stop=["llo y"], return_token_ids=True, logprobs=0)
    stream.go_on([1, 2, 3], words)
    rows = '{"text_offset":[-1,-1],"token_logprobs":[-0.5,-0.25],"tokens":["x","y"],"top_logprobs":[]}'
    got = stream.frames([going_on(" you he", "[12,10]", rows)])
    choice = choices(got[:1])[0]
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == ([12], [-0.5])
    assert choice["logprobs"] == {"text_offset": [-1], "token_logprobs": [-0.5], "tokens": ["x"], "top_logprobs": []}
    assert orjson.loads(data_of(got[1][1]))["usage"]["completion_tokens"] == 3


def test_after_a_seam_the_usual_event_is_not_parsed_either() -> None:
    stream = started(max_tokens=9)
    stream.go_on([1, 2, 3], words)
    stream.frames([going_on(" you", "[12]")])
    frame = going_on(" he", "[10]")[1]
    assert stream._usual(frame) == frame.replace(b',"token_ids":[10]', b"")
    assert list(stream.emitted().ids) == [10, 11, 12, 10]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, False),
        ({"return_token_ids": True}, True),
        ({"logprobs": 0}, True),
        ({"stream_options": {"include_usage": True}}, False),
        ({"stream_options": {"continuous_usage_stats": True}}, True),
    ],
)
def test_what_shows_ids_to_a_client(more: dict[str, Any], shown: bool) -> None:
    assert started(**more).emitted().ids_shown is shown


def test_a_finished_stream_is_closed_in_the_completions_own_form() -> None:
    stream = started(3)
    assert [frame.decode() for _, frame in stream.closing(3)] == WRITTEN[0]["completion"][3:]
    assert list(stream.closing(3)) == []


def test_without_a_tokenizer_it_goes_on_where_text_and_ids_surely_meet() -> None:
    assert started().go_on([1, 2, 3], None) == 2


@pytest.mark.parametrize("text", ["lo ", "\u4f60", ""])
def test_without_a_tokenizer_what_may_be_part_of_more_is_dropped_or_refused(text: str) -> None:
    stream = started()
    stream.frames(framed([WRITTEN[0]["completion"][1].replace('"llo"', orjson.dumps(text).decode())]))
    if text:
        with pytest.raises(Inexact, match="without a tokenizer"):
            stream.go_on([1, 2, 3], None)
    else:
        assert stream.go_on([1, 2, 3], None) == 2


def test_without_a_tokenizer_shown_ids_without_text_are_refused() -> None:
    stream = started(return_token_ids=True, max_tokens=9)
    stream.frames(framed([WRITTEN[0]["completion"][1].replace('"llo"', '""')]))
    with pytest.raises(Inexact, match="without a tokenizer"):
        stream.go_on([1, 2, 3], None)


def test_without_a_tokenizer_a_text_that_was_being_mended_is_not_sure() -> None:
    stream = started(return_token_ids=True, max_tokens=9)
    stream.frames(framed([WRITTEN[0]["completion"][1].replace('"llo"', '""').replace("[11]", "[99]")]))
    stream.go_on([1, 2, 3], lambda ids: words(ids) + _of_two_ids(ids))
    with pytest.raises(Inexact, match="without a tokenizer"):
        stream.go_on([1, 2, 3], None)


def test_without_a_tokenizer_several_ids_at_once_are_not_sure() -> None:
    stream = started()
    stream.frames(framed([WRITTEN[0]["completion"][1].replace("[11]", "[11,12]")]))
    with pytest.raises(Inexact, match="without a tokenizer"):
        stream.go_on([1, 2, 3], None)


def test_logprobs_are_kept_as_they_came() -> None:
    logprobs = '{"text_offset":[-1],"token_logprobs":[-0.5],"tokens":["x"],"top_logprobs":[]}'
    event = WRITTEN[0]["completion"][1].replace('"logprobs":null', f'"logprobs":{logprobs}')
    stream = started(logprobs=0)
    got = stream.frames(framed([event]))
    assert got[0][1].decode() == event.replace(',"token_ids":[11]', "")
    assert stream.emitted().ids_shown
