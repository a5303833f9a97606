"""One client's answer: committed with the first output in one write, one identity over attempts, ended one way."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from engines.sse_frames import EventKind, FrameDecoder, data_of, event_kind
from gateway.attempt import CLIENT_PATIENCE_S
from gateway.errors import GatewayError, bad_request
from gateway.live import LiveRequests
from gateway.openai_api import Api, parse
from gateway.reply import MergedSink, Merger, Reply, SingleSink
from tests.fakes import DONE, RID, FakeClient, chat_answer, chat_event, event, now_s, timeless, usage, usage_event

OTHER_RID = "cd" * 16
PUBLIC, CREATED = "ef" * 16, 1_800_000_000


def reply_to(api: Api = Api.CHAT, **body: Any) -> tuple[Reply, FakeClient]:
    prompts = {Api.CHAT: {"messages": [{"role": "user", "content": "hi"}]}, Api.COMPLETIONS: {"prompt": "hi"}}
    base = {"model": "tiny", "stream": True, **prompts.get(api, {"text": "hi"})}
    client = FakeClient()
    return Reply(client, parse(api, orjson.dumps({**base, **body})), PUBLIC, CREATED), client


def frames(*raw: bytes) -> list[tuple[EventKind, bytes]]:
    return [(event_kind(frame), frame) for frame in raw]


def seen(client: FakeClient) -> list[Any]:
    """The client's events, parsed; the terminator as it is."""
    data = [data_of(frame) for frame in FrameDecoder().feed(client.body)]
    return [each if each == b"[DONE]" else orjson.loads(each) for each in data]


def texts(client: FakeClient) -> list[str]:
    return [
        event["choices"][0]["delta"]["content"] for event in seen(client) if event != b"[DONE]" and event["choices"]
    ]


# ---- the commit point ------------------------------------------------------------------------------------------------


async def test_the_role_alone_writes_nothing() -> None:
    reply, client = reply_to()
    await SingleSink(reply).frames(RID, frames(chat_event(None), b": keep-alive\n\n"))
    assert client.calls == []
    assert not reply.committed


async def test_status_role_and_first_content_leave_in_one_call() -> None:
    reply, client = reply_to()
    reply.headers["x-pdgate-attempts"] = "1"
    sink = SingleSink(reply)
    await sink.frames(RID, frames(chat_event(None)))
    await sink.frames(RID, frames(chat_event("a"), chat_event("b")))
    assert client.calls == ["begin"]
    assert texts(client) == ["", "a", "b"]
    assert client.status == 200
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert client.headers["x-pdgate-attempts"] == "1"
    await sink.frames(RID, frames(chat_event("c")))
    assert client.calls == ["begin", "write"]


@pytest.mark.parametrize("first", [chat_event("", finish="stop"), event({"odd": 1})], ids=["finish", "odd"])
async def test_an_end_commits_as_well_as_content(first: bytes) -> None:
    reply, client = reply_to()
    await SingleSink(reply).frames(RID, frames(chat_event(None), first))
    assert client.calls == ["begin"]


@pytest.mark.parametrize("silent", [usage_event(), DONE, usage_event() + DONE], ids=["usage", "done", "both"])
async def test_what_is_no_output_does_not_commit(silent: bytes) -> None:
    reply, client = reply_to(stream_options={"include_usage": True})
    sink = SingleSink(reply)
    await sink.frames(RID, frames(chat_event(None), *FrameDecoder().feed(silent)))
    assert (client.calls, sink.sent, reply.committed, reply.ended) == ([], False, False, False)
    sink.restart()
    await sink.frames(RID, frames(chat_event("a"), chat_event("", finish="stop"), DONE))
    assert texts(client) == ["a", ""]
    assert client.body.count(DONE) == 1


async def test_a_stream_without_output_is_still_sent_whole() -> None:
    reply, client = reply_to(stream_options={"include_usage": True})
    await SingleSink(reply).frames(RID, frames(chat_event(None), usage_event(), DONE))
    await reply.end()
    assert client.calls == ["begin", "end"]
    assert seen(client)[1]["usage"]["prompt_tokens"] == 10
    assert client.body.endswith(DONE)


async def test_a_merged_stream_without_output_is_still_sent_whole() -> None:
    reply, client = reply_to(n=2)
    merger = Merger(reply, 2)
    for index in range(2):
        await MergedSink(merger, index).frames(RID, frames(chat_event(None), usage_event(), DONE))
    await merger.finish()
    assert client.calls == ["begin", "end"]
    assert [each["choices"][0]["index"] for each in seen(client)[:-1]] == [0, 1]
    assert client.body.endswith(DONE)


async def test_a_whole_answer_commits_when_it_is_complete() -> None:
    reply, client = reply_to(stream=False)
    sink = SingleSink(reply)
    await sink.answer(RID, chat_answer("hi", prompt=9, completion=4, cached=2))
    assert client.calls == ["whole"]
    assert client.headers["content-type"] == "application/json"
    answer = orjson.loads(client.body)
    assert (answer["id"], answer["created"]) == (PUBLIC, CREATED)
    assert answer["choices"][0]["message"]["content"] == "hi"
    assert sink.usage is not None
    assert (sink.usage.prompt_tokens, sink.usage.completion_tokens, sink.usage.cached_tokens) == (9, 4, 2)


async def test_an_error_after_the_commit_is_one_event_and_no_terminator() -> None:
    reply, client = reply_to()
    await SingleSink(reply).frames(RID, frames(chat_event("a")))
    await reply.fail(bad_request("boom", param="p", code="c"))
    assert client.calls == ["begin", "write", "end"]
    assert seen(client)[1:] == [
        {"error": {"message": "boom", "type": "invalid_request_error", "param": "p", "code": "c"}}
    ]
    assert b"[DONE]" not in client.body


# ---- the end ---------------------------------------------------------------------------------------------------------


class StuckClient(FakeClient):
    """A client that takes what is begun, and nothing after it."""

    async def stand_still(self, *_: object) -> None:
        await asyncio.Event().wait()

    write = end = whole = stand_still  # type: ignore[assignment]


@pytest.mark.parametrize("how", ["end", "send_whole", "send", "fail"])
@timeless
async def test_a_client_that_takes_nothing_is_waited_for_within_bounds(how: str) -> None:
    reply, _ = reply_to()
    reply.client = StuckClient()
    await reply.send(b"first")
    steps = {
        "end": lambda: reply.end(),
        "send_whole": lambda: reply.send_whole(b"{}"),
        "send": lambda: reply.send(b"more"),
        "fail": lambda: reply.fail(bad_request("boom")),
    }
    began_s = now_s()
    with pytest.raises(ConnectionAbortedError):
        await steps[how]()
    assert now_s() - began_s == pytest.approx(5.0 if how == "fail" else CLIENT_PATIENCE_S)


async def test_nothing_follows_the_terminator() -> None:
    reply, client = reply_to()
    await SingleSink(reply).frames(RID, frames(chat_event("a"), chat_event("", finish="stop"), DONE))
    assert reply.ended
    with pytest.raises(ConnectionAbortedError):
        await reply.fail(bad_request("boom"))
    assert client.body.endswith(DONE)
    assert client.calls == ["begin"]


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_follows_the_end_of_a_merged_answer(stream: bool) -> None:
    reply, client = reply_to(n=2, stream=stream)
    merger = Merger(reply, 2)
    for index in range(2):
        if stream:
            await MergedSink(merger, index).frames(RID, frames(chat_event("a")))
        else:
            await MergedSink(merger, index).answer(RID, chat_answer("a"))
    await merger.finish()
    sent = client.body
    with pytest.raises(ConnectionAbortedError):
        await reply.fail(bad_request("boom"))
    assert client.body == sent


@pytest.mark.parametrize("choices", [1, 2])
async def test_nobody_is_told_of_an_error_after_the_last_finish_reason(choices: int) -> None:
    reply, client = reply_to(n=choices)
    live, merger = LiveRequests(), Merger(reply, choices)
    sinks = [MergedSink(merger, index) for index in range(choices)] if choices > 1 else [SingleSink(reply)]
    steps = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        for sink in sinks:
            await sink.frames(RID, frames(chat_event("a")))
        for sink in sinks[1:]:
            await sink.frames(RID, frames(chat_event("", finish="stop")))
        await steps[0].wait()
        await sinks[0].frames(RID, frames(chat_event("", finish="length")))
        await steps[1].wait()
        for sink in sinks:
            await sink.frames(RID, frames(DONE))
        if choices > 1:
            await merger.finish()

    for last in (False, True):
        task = asyncio.ensure_future(live.run((PUBLIC,), work()))
        await asyncio.sleep(0.01)
        if not last:
            assert live.abort(PUBLIC) == 1, "one choice goes on"
            with pytest.raises(GatewayError):
                await task
            continue
        steps[0].set()
        await asyncio.sleep(0.01)
        assert live.abort(PUBLIC) == live.shut_down() == 0
        steps[1].set()
        await task
    assert client.body.endswith(DONE)


# ---- what is passed on -----------------------------------------------------------------------------------------------


async def test_bytes_are_kept_but_for_identity() -> None:
    reply, client = reply_to()
    odd = b'data: {"id":"%b",  "created":1700000000,"choices":[{"delta":{"content":"\\u00e9"}}]}\n\n' % RID.encode()
    await SingleSink(reply).frames(RID, frames(odd))
    assert client.body == odd.replace(RID.encode(), PUBLIC.encode()).replace(b"1700000000", b"1800000000")


async def test_text_that_looks_like_identity_is_not_touched() -> None:
    reply, client = reply_to()
    text = f'"id":"{RID}","created":1700000000'
    await SingleSink(reply).frames(RID, frames(chat_event(text)))
    assert texts(client) == [text]


@pytest.mark.parametrize("asked", [True, False])
async def test_usage_is_learned_and_given_only_where_asked(asked: bool) -> None:
    reply, client = reply_to(stream_options={"include_usage": asked})
    sink = SingleSink(reply)
    await sink.frames(RID, frames(chat_event("a"), usage_event(12, 7, cached=5), DONE))
    assert sink.usage is not None
    assert (sink.usage.prompt_tokens, sink.usage.completion_tokens, sink.usage.cached_tokens) == (12, 7, 5)
    assert any(each != b"[DONE]" and "usage" in each for each in seen(client)) is asked
    assert seen(client)[-1] == b"[DONE]"


async def test_generate_learns_from_its_finish() -> None:
    reply, client = reply_to(Api.GENERATE)
    sink = SingleSink(reply)
    meta = {"id": RID, "finish_reason": None, "prompt_tokens": 5, "completion_tokens": 1, "cached_tokens": 0}
    last = {**meta, "finish_reason": {"type": "stop"}, "completion_tokens": 2, "cached_tokens": 3}
    await sink.frames(
        RID, frames(event({"text": "a", "meta_info": meta}), event({"text": "ab", "meta_info": last}), DONE)
    )
    assert sink.usage is not None
    assert (sink.usage.completion_tokens, sink.usage.cached_tokens) == (2, 3)
    assert [each["meta_info"]["id"] for each in seen(client)[:-1]] == [PUBLIC, PUBLIC]


# ---- attempts --------------------------------------------------------------------------------------------------------


async def test_what_a_failed_attempt_held_back_is_thrown_away() -> None:
    reply, client = reply_to()
    sink = SingleSink(reply)
    await sink.frames(RID, frames(chat_event(None)))
    sink.restart()
    await sink.frames(OTHER_RID, frames(chat_event(None, OTHER_RID), chat_event("b", OTHER_RID)))
    assert texts(client) == ["", "b"]


async def test_identity_is_the_same_over_attempts() -> None:
    bodies = []
    for rid in (RID, OTHER_RID):
        reply, client = reply_to()
        await SingleSink(reply).frames(rid, frames(chat_event("a", rid), chat_event("", rid, finish="stop"), DONE))
        bodies.append(client.body)
    assert bodies[0] == bodies[1]
    assert {each["id"] for each in seen(client)[:-1]} == {PUBLIC}
    assert {each["created"] for each in seen(client)[:-1]} == {CREATED}


async def test_a_sink_knows_whether_it_has_sent() -> None:
    reply, _ = reply_to()
    sink = SingleSink(reply)
    await sink.frames(RID, frames(chat_event(None)))
    assert not sink.sent
    await sink.frames(RID, frames(chat_event("a")))
    assert sink.sent


# ---- several in one --------------------------------------------------------------------------------------------------


async def test_two_samples_of_a_stream_are_one_stream() -> None:
    reply, client = reply_to(n=2, stream_options={"include_usage": True})
    merger = Merger(reply, 2)
    sinks = [MergedSink(merger, 0), MergedSink(merger, 1)]
    await sinks[0].frames(RID, frames(chat_event(None)))
    await sinks[1].frames(OTHER_RID, frames(chat_event(None, OTHER_RID)))
    assert client.calls == []
    await sinks[1].frames(OTHER_RID, frames(chat_event("b", OTHER_RID)))
    assert client.calls == ["begin"]
    await sinks[0].frames(RID, frames(chat_event("a"), usage_event(10, 3), DONE))
    await sinks[1].frames(OTHER_RID, frames(usage_event(10, 4, OTHER_RID), DONE))
    await merger.finish()
    events = seen(client)
    choices = [(each["choices"][0]["index"], each["choices"][0]["delta"]["content"]) for each in events[:-2]]
    assert choices == [(1, ""), (1, "b"), (0, ""), (0, "a")]
    assert {each["id"] for each in events[:-1]} == {PUBLIC}
    assert (events[-2]["usage"]["prompt_tokens"], events[-2]["usage"]["completion_tokens"]) == (10, 7)
    assert client.body.count(DONE) == 1
    assert client.calls[-1] == "end"


async def test_merged_usage_is_given_only_where_asked() -> None:
    reply, client = reply_to(n=2)
    merger = Merger(reply, 2)
    for index in range(2):
        await MergedSink(merger, index).frames(RID, frames(chat_event("a"), usage_event(), DONE))
    await merger.finish()
    assert b"usage" not in client.body
    assert client.body.endswith(DONE)


async def test_two_samples_of_a_whole_answer_are_one_answer() -> None:
    reply, client = reply_to(n=2, stream=False)
    merger = Merger(reply, 2)
    await MergedSink(merger, 1).answer(OTHER_RID, chat_answer("b", OTHER_RID, prompt=10, completion=4))
    assert client.calls == []
    await MergedSink(merger, 0).answer(RID, chat_answer("a", prompt=10, completion=3))
    await merger.finish()
    answer = orjson.loads(client.body)
    assert client.calls == ["whole"]
    assert (answer["id"], answer["created"]) == (PUBLIC, CREATED)
    assert [(each["index"], each["message"]["content"]) for each in answer["choices"]] == [(0, "a"), (1, "b")]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (10, 7)


async def test_prompts_in_a_list_count_each_of_their_tokens() -> None:
    reply, client = reply_to(Api.COMPLETIONS, prompt=["x", "y"], stream=False)
    merger = Merger(reply, 2)
    for index in range(2):
        body = {"id": RID, "choices": [{"index": 0, "text": "xy"[index]}], "usage": usage(5 + index, 2)}
        await MergedSink(merger, index).answer(RID, orjson.dumps(body))
    await merger.finish()
    answer = orjson.loads(client.body)
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "x"), (1, "y")]
    assert answer["usage"]["prompt_tokens"] == 11


async def test_a_generate_batch_is_a_list_with_an_id_each() -> None:
    reply, client = reply_to(Api.GENERATE, text=["x", "y"], stream=False)
    merger = Merger(reply, 2)
    for index in range(2):
        body = {"text": "xy"[index], "meta_info": {"id": RID, "prompt_tokens": 1}}
        await MergedSink(merger, index).answer(RID, orjson.dumps(body))
    await merger.finish()
    answer = orjson.loads(client.body)
    assert [(each["text"], each["meta_info"]["id"]) for each in answer] == [("x", f"{PUBLIC}_0"), ("y", f"{PUBLIC}_1")]


async def test_a_generate_batch_streams_with_an_index() -> None:
    reply, client = reply_to(Api.GENERATE, text=["x", "y"])
    merger = Merger(reply, 2)
    sink = MergedSink(merger, 1)
    meta = {"id": RID, "finish_reason": None, "prompt_tokens": 5, "completion_tokens": 1}
    await sink.frames(RID, frames(event({"text": "a", "meta_info": meta}), DONE))
    await merger.finish()
    first, last = seen(client)
    assert (first["index"], first["text"], first["meta_info"]["id"]) == (1, "a", f"{PUBLIC}_1")
    assert last == b"[DONE]"
    assert sink.usage is not None


async def test_one_of_several_starts_anew_without_the_others() -> None:
    reply, client = reply_to(n=2)
    merger = Merger(reply, 2)
    first, second = MergedSink(merger, 0), MergedSink(merger, 1)
    await first.frames(RID, frames(chat_event(None)))
    await second.frames(OTHER_RID, frames(chat_event(None), chat_event("b")))
    assert second.sent
    assert not first.sent, "it may still be tried again"
    first.restart()
    await first.frames(RID, frames(chat_event("a")))
    await merger.finish()
    assert [(each["choices"][0]["index"]) for each in seen(client)[:-1]] == [1, 1, 0]


@pytest.mark.parametrize("asked", [True, False])
async def test_the_best_of_several_answer(asked: bool) -> None:
    fields = {"logprobs": 1} if asked else {}
    reply, client = reply_to(Api.COMPLETIONS, stream=False, best_of=3, n=2, **fields)
    merger = Merger(reply, 3)
    for index, value in enumerate((-3.0, -1.0, -2.0)):
        choice = {"index": 0, "text": f"t{index}", "logprobs": {"token_logprobs": [value]}, "finish_reason": "stop"}
        body = {"id": RID, "created": 1, "choices": [choice], "usage": usage(10, 1)}
        await MergedSink(merger, index).answer(RID, orjson.dumps(body))
    await merger.finish()
    answer = orjson.loads(client.body)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "t1"), (1, "t2")]
    assert [choice["logprobs"] is not None for choice in answer["choices"]] == [asked, asked]
    assert (answer["id"], answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (PUBLIC, 3, 10)
