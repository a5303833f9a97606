"""The official `openai` package, and plain HTTP, against a gateway: answers, usage, errors, hanging up, odd bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from engines.types import Role
from tests.scenarios.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MODEL,
    Answer,
    ask,
    chat,
    check_error,
    completion,
    continued,
    expected_text,
    new_prompt,
)
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import TOKENS, noticed

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
PAYLOAD_BYTES = 100_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_fleet() -> AsyncIterator[Cluster]:
    flags = ("--max-payload-size", str(PAYLOAD_BYTES))
    async with Cluster(2, 2, gateway=flags, engine=("--enable-cache-report",)) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(shared_fleet: Cluster) -> AsyncIterator[Cluster]:
    yield shared_fleet
    await shared_fleet.heal()


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def user(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


# ---- answers -----------------------------------------------------------------------------------------------------


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt()
    answer = await client.chat.completions.create(messages=user(prompt), **GREEDY)
    assert answer.choices[0].message.content == expected_text(prompt, TOKENS)
    assert (answer.choices[0].finish_reason, answer.model) == ("length", MODEL)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + TOKENS


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat_has_usage_only_when_asked(client: openai.AsyncOpenAI, include_usage: bool) -> None:
    prompt = new_prompt()
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    stream = await client.chat.completions.create(messages=user(prompt), stream=True, **options, **GREEDY)
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected_text(prompt, TOKENS)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == ([TOKENS] if include_usage else [])
    assert all(chunk.choices for chunk in chunks) is not include_usage


async def test_two_samples(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt()
    answer = await client.chat.completions.create(messages=user(prompt), n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {expected_text(prompt, TOKENS)}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * TOKENS
    assert answer.usage.prompt_tokens < 2 * len(prompt)


async def test_two_samples_streamed(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt()
    options = {"include_usage": True}
    stream = await client.chat.completions.create(
        messages=user(prompt), n=2, stream=True, stream_options=options, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == expected_text(prompt, TOKENS)
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [2 * TOKENS]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts(fleet: Cluster, stream: bool) -> None:
    prompts = [new_prompt(length) for length in (50, 120, 300)]
    answer = await ask(fleet.http, fleet.url, completion(prompts, n=2, stream=stream), COMPLETIONS)
    assert (answer.status, answer.done, answer.errors) == (200, int(stream), [])
    for index in range(6):
        assert answer.text(index) == continued(prompts[index // 2], TOKENS)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt()
    answer = await client.completions.create(prompt=prompt, **GREEDY)
    assert answer.choices[0].text == continued(prompt, TOKENS)
    stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == continued(prompt, TOKENS)


async def test_tools_reach_the_template(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt()
    with_tools = await client.chat.completions.create(messages=user(prompt), tools=[TOOL], **GREEDY)
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens > len(prompt) + len(orjson.dumps([TOOL]))
    assert with_tools.choices[0].message.content != expected_text(prompt, TOKENS)


async def test_a_second_turn_finds_its_prefix(client: openai.AsyncOpenAI) -> None:
    prompt = new_prompt(2_000)
    first = await client.chat.completions.create(messages=user(prompt), **GREEDY)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    turns: list[Any] = [*user(prompt), said, *user("go on")]
    second = await client.chat.completions.create(messages=turns, **GREEDY)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= len(prompt)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]


async def test_generate(fleet: Cluster) -> None:
    text = new_prompt()
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": text, "sampling_params": params}
    whole = await ask(fleet.http, fleet.url, body, GENERATE)
    assert whole.body["text"] == continued(text, TOKENS)
    stream = await ask(fleet.http, fleet.url, {**body, "stream": True}, GENERATE)
    assert (stream.done, stream.events[-1]["text"]) == (1, continued(text, TOKENS))
    assert stream.events[-1]["meta_info"]["id"] == stream.request_id


async def test_sampled_answers_are_those_of_one_attempt(client: openai.AsyncOpenAI) -> None:
    """Without temperature 0 answers differ; each is as long as asked for."""
    sampled = {**GREEDY, "temperature": 1.0}
    answers = [await client.chat.completions.create(messages=user("hello"), **sampled) for _ in range(2)]
    assert answers[0].choices[0].message.content != answers[1].choices[0].message.content
    assert {answer.usage.completion_tokens for answer in answers if answer.usage} == {TOKENS}


# ---- cancellation --------------------------------------------------------------------------------------------------


async def test_closing_a_stream_frees_both_sides(client: openai.AsyncOpenAI, fleet: Cluster) -> None:
    endless = {**GREEDY, "max_tokens": 20_000}
    stream = await client.chat.completions.create(messages=user(new_prompt()), stream=True, **endless)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    await fleet.settled(1.0)


async def test_a_client_timeout_frees_both_sides(client: openai.AsyncOpenAI, fleet: Cluster) -> None:
    holds = await fleet.hold_any(Role.PREFILL, "prefill_chunk", 2)
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.5).chat.completions.create(messages=user(new_prompt()), **GREEDY)
    assert [await fleet.state(hold) for hold in holds].count("armed") == 1, "it was held when the client gave up"
    await fleet.settled(1.0)


# ---- errors ------------------------------------------------------------------------------------------------------


async def test_what_is_wrong_with_a_request_raises_bad_request(client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="messages") as empty:
        await create(messages=[], **GREEDY)
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(messages=user("hi " * 500), **{**GREEDY, "max_tokens": 32_700})
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is too large"):
        await create(messages=user("hi"), **{**GREEDY, "max_tokens": 40_000})
    with pytest.raises(openai.BadRequestError) as poison:
        await create(messages=user("hi"), logprobs=True, top_logprobs=129, **GREEDY)
    assert poison.value.param == "top_logprobs"


async def test_a_stream_that_is_refused_raises_too(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(messages=user("hi"), stream=True, **{**GREEDY, "max_tokens": 40_000})


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await client.chat.completions.create(messages=user("hi"), **{**GREEDY, "model": "no-such-model"})


async def test_an_outage_is_a_503(client: openai.AsyncOpenAI, fleet: Cluster) -> None:
    for server in fleet.decodes:
        await fleet.kill(server)
    for server in fleet.decodes:
        await noticed(fleet, server)
    with pytest.raises(openai.APIStatusError) as outage:
        await client.chat.completions.create(messages=user("hi"), **GREEDY)
    assert outage.value.status_code == 503


async def test_a_stream_that_breaks_raises_after_its_text(client: openai.AsyncOpenAI, fleet: Cluster) -> None:
    for server in fleet.decodes:
        await fleet.fault(server, "error_event", after_tokens=8)
    prompt = new_prompt()
    stream = await client.chat.completions.create(messages=user(prompt), stream=True, **GREEDY)
    texts = []

    async def read() -> None:
        async for chunk in stream:
            texts.extend(choice.delta.content or "" for choice in chunk.choices)

    with pytest.raises(openai.APIError, match="decode server failed"):
        await read()
    assert expected_text(prompt, TOKENS).startswith("".join(texts))
    assert "".join(texts)


# ---- plain HTTP ----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, bytes, int]] = {
    "no JSON": (CHAT, b'{"model": "emulated", ', 400),
    "no body": (CHAT, b"", 400),
    "a list": (CHAT, b"[1, 2]", 400),
    "not UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    "no messages": (CHAT, b"{}", 400),
    "messages of a wrong type": (CHAT, b'{"messages": "hello"}', 400),
    "a message of a wrong type": (CHAT, b'{"messages": ["hello"]}', 400),
    "content of a wrong type": (CHAT, b'{"messages": [{"role": "user", "content": 7}]}', 400),
    "max_tokens of a wrong type": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}',
        400,
    ),
    "temperature of a wrong type": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
        400,
    ),
    "stream of a wrong type": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', 400),
    "n of zero": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400),
    "70 bits": (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "seed": 1180591620717411303424}', 400),
    "an empty list of prompts": (COMPLETIONS, b'{"prompt": []}', 400),
    "an empty prompt": (COMPLETIONS, b'{"prompt": ""}', 400),
    "no prompt": (GENERATE, b"{}", 400),
    "two prompts": (GENERATE, b'{"text": "a", "input_ids": [1]}', 400),
    "too large a body": (CHAT, b'{"messages": "' + b"x" * PAYLOAD_BYTES + b'"}', 413),
    "an unknown route": ("/v1/nothing", b"{}", 404),
    "a route not for pairs": ("/v1/embeddings", b"{}", 501),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
async def test_wrong_requests_get_clear_answers(fleet: Cluster, what: str) -> None:
    path, body, status = WRONG[what]
    answer = await ask(fleet.http, fleet.url, body, path)
    answer.check_refused(status)
    assert answer.headers["x-should-retry"] == "false"


async def test_a_wrong_method_names_the_right_one(fleet: Cluster) -> None:
    async with fleet.http.get(fleet.url + CHAT) as reply:
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        check_error((await reply.json())["error"])


async def test_a_large_body_without_a_length_is_refused(fleet: Cluster) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * (PAYLOAD_BYTES // 10)

    async with fleet.http.post(fleet.url + CHAT, data=pieces()) as reply:
        assert reply.status == 413
        check_error((await reply.json())["error"])


async def test_unknown_fields_reach_the_engine(fleet: Cluster) -> None:
    """`return_token_ids` is SGLang's own: its effect shows that the field came through."""
    body = chat(new_prompt(), 5, return_token_ids=True, some_field_of_tomorrow={"deep": [1, 2]})
    answer = await ask(fleet.http, fleet.url, body)
    assert len(answer.body["choices"][0]["response_token_ids"]) == 5


async def test_fields_of_the_gateway_are_stripped(fleet: Cluster) -> None:
    prompt = new_prompt()
    fields = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7, "rid": "mine", "kv_hints": {}}
    answer = await ask(fleet.http, fleet.url, chat(prompt, **fields))
    answer.check_whole(expected_text(prompt, TOKENS), attempts=1)
    assert answer.body["id"] == answer.request_id
    assert (await fleet.explain("mine"))["request_id"] == answer.request_id


async def test_a_late_reader_gets_all_of_it(fleet: Cluster) -> None:
    """It reads on only when the engines have long finished."""
    prompt, tokens = new_prompt(), 3_000
    answer = Answer()
    async with fleet.http.post(fleet.url + CHAT, json=chat(prompt, tokens, stream=True)) as reply:
        first = await reply.content.readany()
        await eventually(lambda: _engines_are_done(fleet), 20.0)
        rest = await reply.content.read()
    frames = (first + rest).split(b"\n\n")
    answer.events = [orjson.loads(frame[6:]) for frame in frames if frame and frame != b"data: [DONE]"]
    assert answer.text() == expected_text(prompt, tokens)


async def _engines_are_done(cluster: Cluster) -> str:
    live = [len((await cluster.requests(server))["live"]) for server in cluster.servers]
    return f"{live} requests are live" if any(live) else ""
