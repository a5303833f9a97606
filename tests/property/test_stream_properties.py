"""A stream that is cut anywhere, also several times, reads as the undisturbed one: text, ids, end, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from engines.client_stream import ClientStream, Emitted, Frames, Inexact, TextOf
from engines.completion_stream import CompletionStream
from engines.exact_chat import ExactChatStream
from engines.exact_chat_rules import OPENAI_SAMPLING
from engines.generate_stream import GenerateStream
from engines.seam import candidates, seam_at, stops_of
from engines.sse_frames import EventKind, data_of
from tests.property.fake_sglang import EOS, PIECES, FakeSGLang, Stutter, decode

PROMPT = [1, 2, 4, 1, 2, 3]
CONTEXT_TOKENS = 4096
TOKENS = st.integers(1, len(PIECES) - 1)
SPOKEN = st.one_of(TOKENS, st.sampled_from([PIECES.index(piece) for piece in (b"S", b"T", b"ST", b"OP", b"TO", b"aS")]))
STOPS = st.sampled_from([[], ["STOP"], ["STOP", "ab"], ["TO"], ["\u00e9"], [" \u00e9"], ["S\u4f60"], ["aa", "STO"]])


@dataclass
class Play:
    """One request, the answer that the model gives to it, and where its streams break: how many events each brings."""

    answer: list[int]
    stop: list[str]
    no_stop_trim: bool
    limit: int
    cuts: list[int]
    intervals: list[int]


@st.composite
def plays(draw: st.DrawFn) -> Play:
    answer = draw(st.lists(SPOKEN, min_size=1, max_size=18))
    return Play(
        answer=[*answer, EOS],
        stop=draw(STOPS),
        no_stop_trim=draw(st.booleans()),
        limit=draw(st.integers(1, len(answer) + 3)),
        cuts=draw(st.lists(st.integers(0, 5), max_size=3)),
        intervals=draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)),
    )


Serve = Callable[[FakeSGLang, Mapping[str, Any]], list[tuple[EventKind, bytes]]]


def read(stream: ClientStream, play: Play, serve: Serve, text_of: TextOf | None = decode) -> list[dict[str, Any]]:
    """What a client reads of a stream whose attempts break as the play says; checks what holds for every stream."""
    got: list[tuple[EventKind, bytes]] = []
    for attempt, interval in enumerate(play.intervals):
        body = orjson.loads(orjson.dumps(stream.call_body(CONTEXT_TOKENS)))
        engine = FakeSGLang(PROMPT, play.answer, f"rid-{attempt}", interval, cached_tokens=len(body_ids(body)) - 1)
        frames = spoken(serve, engine, body)
        cut = play.cuts[attempt] if attempt < len(play.cuts) else len(frames)
        for frame in frames[:cut]:
            got += stream.frames([frame])
        if stream.ended_here or (stream.finished and cut >= len(frames)):
            break
        if stream.finished:
            got += stream.closing(len(PROMPT))
            break
        emitted = stream.emitted()
        if not emitted.ids:
            got.clear()
            stream.restart()
            continue
        kept = stream.go_on(PROMPT, text_of)
        assert kept <= len(emitted.ids)
        if emitted.ids_shown:
            assert kept == len(emitted.ids)
    else:
        raise AssertionError("it broke more often than the play says")
    assert got[-1] == (EventKind.DONE, b"data: [DONE]\n\n")
    assert [kind for kind, _ in got].count(EventKind.FINISH) == 1
    return [orjson.loads(data_of(frame)) for _, frame in got[:-1]]


def spoken(serve: Serve, engine: FakeSGLang, body: Mapping[str, Any]) -> list[tuple[EventKind, bytes]]:
    try:
        return serve(engine, body)
    except Stutter:
        reject()


def body_ids(body: Mapping[str, Any]) -> list[int]:
    ids: list[int] = body.get("prompt") or body["input_ids"]
    return ids


@dataclass
class Expected:
    """What the undisturbed stream brings. `more`: what of the stop string may have been shown before it was known."""

    text: str
    more: str
    ids: list[int]
    finish: str
    matched: int | str | None


def expected(play: Play) -> Expected:
    ids: list[int] = []
    for token in play.answer:
        ids.append(token)
        text = decode(ids)
        for stop in play.stop:
            if (at := text.find(stop)) >= 0:
                end = at + len(stop) if play.no_stop_trim else at
                return Expected(text[:end], text[end : at + len(stop)], ids, "stop", stop)
        if token == EOS:
            return Expected(text, "", ids, "stop", EOS)
        if len(ids) == play.limit:
            return Expected(text, "", ids, "length", None)
    raise AssertionError("the answer has no end")


def check_text(text: str, wanted: Expected) -> None:
    assert text.startswith(wanted.text), (text, wanted)
    assert wanted.more.startswith(text[len(wanted.text) :]), (text, wanted)


def completion_body(play: Play, **more: Any) -> dict[str, Any]:
    stopping = {"stop": play.stop, "no_stop_trim": play.no_stop_trim}
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": play.limit, "stream": True, **stopping, **more}


def serve_completion(engine: FakeSGLang, body: Mapping[str, Any]) -> list[Any]:
    return engine.completion(body)


def check_usage(usage: Mapping[str, Any], completion_tokens: int) -> None:
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == completion_tokens
    assert usage["total_tokens"] == len(PROMPT) + completion_tokens
    assert ((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0) <= len(PROMPT)


def check_completion(events: Sequence[Mapping[str, Any]], wanted: Expected, *, ids: bool, logprobs: bool) -> None:
    chunks, (last,) = [each for each in events if each["choices"]], [each for each in events if not each["choices"]]
    choices = [chunk["choices"][0] for chunk in chunks]
    check_text("".join(choice["text"] for choice in choices), wanted)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [wanted.finish]
    assert choices[-1]["matched_stop"] == wanted.matched
    check_usage(last["usage"], len(wanted.ids))
    assert [choice for choice in choices if "token_ids" in choice] == (choices if ids else [])
    if ids:
        assert [token for choice in choices for token in choice["token_ids"]] == wanted.ids
        assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT] + [None] * (len(choices) - 1)
    else:
        assert not any("prompt_token_ids" in choice for choice in choices)
    if logprobs:
        told = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        assert told == [-0.25 * token for token in wanted.ids]


SEVERAL_HALVES = Play(
    [1, 1, *(PIECES.index(piece) for piece in (b" \xc3", b"O\xc3", b"\xe4\xbd\xa0\xe4")), EOS],
    [],
    False,
    6,
    [5],
    [1] * 4,
)
"""Three tokens in a row end inside characters, and the last shows the text of all."""


@example(SEVERAL_HALVES, False, False)
@given(plays(), st.booleans(), st.booleans())
def test_a_completion_reads_as_one(play: Play, ids: bool, logprobs: bool) -> None:
    asked = {"return_token_ids": True} if ids else {}
    asked |= {"logprobs": 0} if logprobs else {}
    events = read(CompletionStream(completion_body(play, **asked)), play, serve_completion)
    check_completion(events, expected(play), ids=ids, logprobs=logprobs)


@given(plays())
def test_running_usage_grows_over_the_seam(play: Play) -> None:
    body = completion_body(play, stream_options={"continuous_usage_stats": True})
    events = read(CompletionStream(body), play, serve_completion)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    for event in events:
        check_usage(event["usage"], event["usage"]["completion_tokens"])


def chat_body(play: Play, **more: Any) -> dict[str, Any]:
    body = completion_body(play, messages=[{"role": "user", "content": "aabab"}], **more)
    del body["prompt"]
    return body


@given(plays(), st.booleans(), st.booleans())
def test_a_chat_reads_as_one(play: Play, running: bool, logprobs: bool) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}} if running else {}
    body = chat_body(play, **options, logprobs=logprobs)
    stream = ExactChatStream(body, PROMPT, OPENAI_SAMPLING, lambda token: decode([token]))
    events, wanted = read(stream, play, serve_completion), expected(play)
    chunks, (last,) = [each for each in events if each["choices"]], [each for each in events if not each["choices"]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {"reasoning_content": None}
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == (wanted.finish, wanted.matched)
    assert all(choice["delta"]["content"] and not choice["finish_reason"] for choice in choices[1:-1])
    check_text("".join(choice["delta"]["content"] for choice in choices[:-1]), wanted)
    check_usage(last["usage"], len(wanted.ids))
    assert all(("usage" in chunk) == running for chunk in chunks[1:-1])
    for chunk in chunks[1:-1] if running else ():
        check_usage(chunk["usage"], chunk["usage"]["completion_tokens"])
    told = iter(-0.25 * token for token in wanted.ids)
    for choice in choices[1:-1]:
        assert (choice["logprobs"] is not None) == logprobs
        for token in choice["logprobs"]["content"] if logprobs else ():
            assert token["logprob"] in told  # in order, each once; those of events without text are not told


@given(plays(), st.booleans())
def test_an_undisturbed_chat_is_the_engines_own_byte_for_byte(play: Play, running: bool) -> None:
    options = {"stream_options": {"continuous_usage_stats": True}} if running else {}
    stream = ExactChatStream(chat_body(play, **options), PROMPT, OPENAI_SAMPLING)
    engine = FakeSGLang(PROMPT, play.answer, interval=play.intervals[0])
    body = stream.call_body(CONTEXT_TOKENS)
    assert list(stream.frames(spoken(serve_completion, engine, body))) == engine.completion(body, chat=True)


def generate_body(play: Play, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": play.limit, "stop": play.stop, "no_stop_trim": play.no_stop_trim}
    return {"input_ids": PROMPT, "sampling_params": params, "stream": True, **more}


@pytest.mark.parametrize("incremental", [False, True])
@given(play=plays(), logprobs=st.booleans())
def test_a_generate_stream_reads_as_one(incremental: bool, play: Play, logprobs: bool) -> None:
    stream = GenerateStream(generate_body(play, return_logprob=logprobs), incremental=incremental)
    events = read(stream, play, lambda engine, body: engine.generate(body, incremental))
    wanted, last = expected(play), events[-1]
    ids: list[int] = []
    text = ""
    for event in events:
        ids = [*ids, *event["output_ids"]] if incremental else event["output_ids"]
        grown = text + event["text"] if incremental else event["text"]
        assert grown.startswith(text)
        text = grown
        meta = event["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(ids))
        assert meta["cached_tokens"] <= len(PROMPT)
        if logprobs:
            assert [token for _, token, _ in meta["output_token_logprobs"]] == event["output_ids"]
            assert meta["output_token_logprobs_length"] == len(ids)
    assert ids == wanted.ids
    check_text(text, wanted)
    finish = last["meta_info"]["finish_reason"]
    assert (finish["type"], finish.get("matched")) == (wanted.finish, wanted.matched)
    assert finish.get("length") == (play.limit if wanted.finish == "length" else None)
    if "weight_versions" in last["meta_info"]:
        assert last["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": len(ids)}]


@given(plays())
def test_without_a_tokenizer_it_is_exact_or_says_so(play: Play) -> None:
    try:
        events = read(CompletionStream(completion_body(play)), play, serve_completion, text_of=None)
    except Inexact:
        return
    check_completion(events, expected(play), ids=False, logprobs=False)


@given(plays())
def test_the_candidates_are_enough_where_nothing_is_mended(play: Play) -> None:
    known: dict[tuple[int, ...], str] = {}

    def text_of(ids: Sequence[int]) -> str:
        if tuple(ids) not in known:
            raise Inexact("not asked for")  # of whoever counts ids, who does without
        return known[tuple(ids)]

    class Asking(CompletionStream):
        def go_on(self, prompt_ids: Sequence[int], text_of: TextOf | None) -> int:
            emitted = self.emitted()
            known.update({tuple(ids): decode(ids) for ids in candidates(prompt_ids, emitted)})
            seam = seam_at(prompt_ids, emitted, self._capture, stops_of(self._body), decode)
            if not seam.whole:
                reject()
            return super().go_on(prompt_ids, text_of)

    events = read(Asking(completion_body(play)), play, serve_completion, text_of)
    check_completion(events, expected(play), ids=False, logprobs=False)


def test_what_a_stream_says_it_has() -> None:
    play = Play([1, 2, 1, EOS], [], False, 9, [2], [1])
    stream = CompletionStream(completion_body(play))
    frames: Frames = FakeSGLang(PROMPT, play.answer).completion(stream.call_body(None))[:2]
    stream.frames(frames)
    assert stream.emitted() == Emitted([1, 2], "ab", False, False)
