"""A chat written from a completion's events: held to what SGLang's own writers make of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from engines.client_stream import Inexact
from engines.exact_chat import ExactChatStream
from engines.exact_chat_rules import OPENAI_SAMPLING
from engines.sse_frames import EventKind, data_of, event_kind

RECORDED = orjson.loads((Path(__file__).parents[2] / "data/sglang/stream_events.json").read_bytes())
WRITTEN, LOGPROBS = RECORDED["cases"], RECORDED["logprobs"]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "model": "tiny"}


def framed(events: list[str]) -> list[tuple[EventKind, bytes]]:
    frames = [event.encode() for event in events]
    return [(event_kind(frame), frame) for frame in frames]


def stream(**more: Any) -> ExactChatStream:
    return ExactChatStream({**CHAT, **more}, [1, 2, 3], OPENAI_SAMPLING)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: str(case["name"]))
@pytest.mark.parametrize("at_once", [True, False])
def test_its_events_are_those_of_the_engines_chat_byte_for_byte(case: dict[str, Any], at_once: bool) -> None:
    chat, events = stream(), framed(case["completion"])
    got = list(chat.frames(events)) if at_once else [each for event in events for each in chat.frames([event])]
    assert [frame.decode() for _, frame in got] == case["chat"]
    assert got == framed(case["chat"])  # and each is of the kind that it looks like
    assert chat.finished
    assert list(chat.closing(3)) == []


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: str(case["name"]))
def test_what_came_is_known(case: dict[str, Any]) -> None:
    chat = stream()
    chat.frames(framed(case["completion"][:2]))
    events = [orjson.loads(data_of(frame.encode())) for frame in case["completion"][:2]]
    choices = [event["choices"][0] for event in events]
    emitted = chat.emitted()
    assert list(emitted.ids) == [token for choice in choices for token in choice["token_ids"]]
    assert emitted.text == "".join(choice["text"] for choice in choices)
    assert emitted.ids_shown is False


def test_the_body_is_that_of_a_completion_with_everything_written_out() -> None:
    body = stream(max_completion_tokens=7, max_tokens=9, temperature=0, stop=["x"], seed=None).call_body(None)
    assert body == {
        "model": "tiny",
        "stream": True,
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "return_token_ids": True,
    }


def test_a_chat_without_a_limit_has_the_room_that_the_scheduler_gives_it() -> None:
    assert stream().call_body(4096)["max_tokens"] == 4096 - 3 - 2
    with pytest.raises(Inexact, match="room of the engine"):
        stream().call_body(None)


def test_the_room_shrinks_by_what_has_come() -> None:
    chat = stream()
    chat.frames(framed(WRITTEN[0]["completion"][:2]))
    assert chat.go_on([1, 2, 3], lambda ids: "".join({10: " he", 11: "llo"}.get(token, "") for token in ids)) == 2
    body = chat.call_body(4096)
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3, 10, 11], 4096 - 3 - 2 - 2)


def test_a_continued_chat_says_its_role_once() -> None:
    chat = stream()
    got = list(chat.frames(framed(WRITTEN[0]["completion"][:2])))
    chat.go_on([1, 2, 3], lambda ids: "".join({10: " he", 11: "llo"}.get(token, "") for token in ids))
    rest = [event.replace("4114138b", "99999999") for event in WRITTEN[0]["completion"][2:]]
    counted = [event.replace('"prompt_tokens":3,"total_tokens":6,"completion_tokens":3', COUNTED) for event in rest]
    got += chat.frames(framed(counted))
    wanted = [event.replace("4114138b", "99999999") for event in WRITTEN[0]["chat"][3:]]
    assert [frame.decode() for _, frame in got] == [*WRITTEN[0]["chat"][:3], *wanted]


COUNTED = '"prompt_tokens":5,"total_tokens":6,"completion_tokens":1'


def test_one_that_is_finished_is_closed_with_its_counts() -> None:
    chat = stream()
    chat.frames(framed(WRITTEN[0]["completion"][:3]))
    assert chat.finished
    assert [frame.decode() for _, frame in chat.closing(3)] == WRITTEN[0]["chat"][-2:]
    assert list(chat.closing(3)) == []


def test_one_that_has_its_usage_lacks_the_terminator_alone() -> None:
    chat = stream()
    chat.frames(framed(WRITTEN[0]["completion"][:4]))
    assert list(chat.closing(3)) == [(EventKind.DONE, b"data: [DONE]\n\n")]


def test_a_restart_forgets_everything() -> None:
    chat = stream()
    chat.frames(framed(WRITTEN[1]["completion"]))
    chat.restart()
    assert (chat.finished, list(chat.emitted().ids), chat.emitted().text) == (False, [], "")
    assert [frame.decode() for _, frame in chat.frames(framed(WRITTEN[1]["completion"]))] == WRITTEN[1]["chat"]


def test_penalties_of_the_model_itself_cannot_be_continued() -> None:
    chat = ExactChatStream(CHAT, [1, 2, 3], {**OPENAI_SAMPLING, "repetition_penalty": 1.05})
    chat.frames(framed(WRITTEN[0]["completion"][:2]))
    with pytest.raises(Inexact, match="penalties"):
        chat.go_on([1, 2, 3], None)


def test_logprobs_are_told_as_the_engines_chat_tells_them() -> None:
    texts = {int(token): text for token, text in LOGPROBS["token_texts"].items()}
    chat = ExactChatStream({**CHAT, "logprobs": True}, [1, 2, 3], OPENAI_SAMPLING, texts.__getitem__)
    assert chat.call_body(100)["logprobs"] == 0
    assert [frame.decode() for _, frame in chat.frames(framed(LOGPROBS["completion"]))] == LOGPROBS["chat"]
    assert chat.emitted().ids_shown


def test_comments_and_failures_pass() -> None:
    chat = stream()
    events = framed([": ping\n\n", 'data: {"error":{"message":"x"}}\n\n'])
    assert list(chat.frames(events)) == events
