"""What the official client gets through pdgate from a pair is what a plain server answers: texts, usage, errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.scenarios.client import Answer
from tests.sglang.fleet import MODEL, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENS = 24
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
PROMPT = "Once upon a time there was a server that never lost a token."
MESSAGES: list[Any] = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def generate_body(stream: bool = False, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0}
    return {"text": PROMPT, "sampling_params": sampling, "stream": stream, **fields}


def meta(answer: Answer) -> dict[str, Any]:
    """Of a whole /generate answer, or of the last chunk of its stream."""
    assert answer.status == 200, answer.body
    return dict((answer.body or answer.events[-1])["meta_info"])


# ---- the same text as from a plain server ------------------------------------------------------------------------


@pytest.mark.smoke
async def test_a_chat(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=MESSAGES, **GREEDY)
    truth = await plain.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.content == truth.choices[0].message.content
    assert answer.choices[0].finish_reason == truth.choices[0].finish_reason
    assert answer.usage is not None
    assert truth.usage is not None
    assert answer.usage.prompt_tokens == truth.usage.prompt_tokens
    assert answer.usage.completion_tokens == truth.usage.completion_tokens == TOKENS


@pytest.mark.smoke
@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, include_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **options, **GREEDY)
    chunks = [chunk async for chunk in stream]
    truth = await plain.chat.completions.create(messages=MESSAGES, **GREEDY)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == truth.choices[0].message.content
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == ([TOKENS] if include_usage else [])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, stream: bool) -> None:
    truth = await plain.completions.create(prompt=PROMPT, **GREEDY)
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    else:
        text = (await client.completions.create(prompt=PROMPT, **GREEDY)).choices[0].text
    assert text == truth.choices[0].text


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True])
async def test_generate(fleet: RealFleet, stream: bool) -> None:
    answer = await fleet.ask(generate_body(stream), GENERATE)
    truth = await fleet.ask_plain(generate_body(), GENERATE)
    last = answer.body or answer.events[-1]
    assert (last["text"], last["output_ids"]) == (truth.body["text"], truth.body["output_ids"])
    assert last["meta_info"]["finish_reason"] == truth.body["meta_info"]["finish_reason"]
    assert answer.done == stream


async def test_n_samples(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(messages=MESSAGES, n=2, **GREEDY)
    truth = await plain.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {truth.choices[0].message.content}
    assert answer.usage is not None
    assert truth.usage is not None
    assert answer.usage.prompt_tokens == truth.usage.prompt_tokens, "counted once"
    assert answer.usage.completion_tokens == 2 * TOKENS


async def test_a_list_of_prompts(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    prompts = ["the quick brown fox", "hello world", PROMPT]
    answer = await client.completions.create(prompt=prompts, **GREEDY)
    truth = [(await plain.completions.create(prompt=prompt, **GREEDY)).choices[0].text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == truth


async def test_the_best_of_some(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, n=1, best_of=3)
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, stream: bool) -> None:
    whole = (await plain.completions.create(prompt=PROMPT, **GREEDY)).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    truth = (await plain.completions.create(prompt=PROMPT, stop=[stop], **GREEDY)).choices[0]
    if stream:
        made = await client.completions.create(prompt=PROMPT, stop=[stop], stream=True, **GREEDY)
        choices = [choice async for chunk in made for choice in chunk.choices]
        text, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        choice = (await client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY)).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (truth.text, "stop")
    assert stop not in text


async def test_a_json_schema(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 100, "response_format": wanted}
    answer = await client.chat.completions.create(messages=MESSAGES, **asked)
    truth = await plain.chat.completions.create(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == truth.choices[0].message.content
    text = "".join((answer.choices[0].message.content or "").split())  # white space is allowed, without end
    assert text.startswith(('{"colour":"red"', '{"colour":"blue"'))


# ---- log probabilities -------------------------------------------------------------------------------------------


async def test_logprobs_of_a_chat(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    wanted = {"logprobs": True, "top_logprobs": 3}
    answer = await client.chat.completions.create(messages=MESSAGES, **wanted, **GREEDY)
    truth = await plain.chat.completions.create(messages=MESSAGES, **wanted, **GREEDY)
    ours, theirs = (each.choices[0].logprobs for each in (answer, truth))
    assert ours is not None
    assert theirs is not None
    assert ours.content
    assert theirs.content
    assert [token.token for token in ours.content] == [token.token for token in theirs.content]
    assert [token.logprob for token in ours.content] == pytest.approx(
        [token.logprob for token in theirs.content], abs=1e-2
    )
    assert all(len(token.top_logprobs) == 3 for token in ours.content)


@pytest.mark.smoke
@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_are_those_of_the_prefill(fleet: RealFleet, stream: bool) -> None:
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answer = meta(await fleet.ask(generate_body(stream, **wanted), GENERATE))
    truth = meta(await fleet.ask_plain(generate_body(**wanted), GENERATE))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        ours, theirs = answer[name], truth[name]
        assert [entry[1] for entry in ours] == [entry[1] for entry in theirs], name
        known = [(one[0], other[0]) for one, other in zip(ours, theirs, strict=True) if other[0] is not None]
        assert [one for one, _ in known] == pytest.approx([other for _, other in known], abs=1e-2)
    assert len(answer["input_top_logprobs"]) == len(truth["input_top_logprobs"]) == answer["prompt_tokens"]


async def test_echo_with_logprobs(client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    answer = (await client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **GREEDY)).choices[0]
    truth = (await plain.completions.create(prompt=PROMPT, echo=True, logprobs=1, **GREEDY)).choices[0]
    assert answer.text == truth.text
    assert answer.logprobs is not None
    assert truth.logprobs is not None
    assert answer.logprobs.tokens == truth.logprobs.tokens


# ---- bodies that are not as they should be -----------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context(fleet: RealFleet, path: str, stream: bool) -> None:
    text = "the quick brown fox " * 2000
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"model": MODEL, "messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"model": MODEL, "prompt": text},
        GENERATE: {"text": text},
    }
    answer = await fleet.ask({**bodies[path], "stream": stream}, path)
    answer.check_refused(400)
    assert "4096" in answer.body["error"]["message"] or "context" in answer.body["error"]["message"]


async def test_unknown_fields_are_no_matter(fleet: RealFleet) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "from_the_future": {"a": [1]}}
    answer = await fleet.ask(body, COMPLETIONS)
    assert answer.status == 200


async def test_an_unknown_sampling_parameter_is_the_callers_fault(fleet: RealFleet) -> None:
    answer = await fleet.ask({"text": PROMPT, "sampling_params": {"from_the_future": 1}}, GENERATE)
    answer.check_refused(400)
    assert "from_the_future" in answer.body["error"]["message"]


async def test_tokenize(fleet: RealFleet) -> None:
    body = {"model": MODEL, "prompt": PROMPT}
    ours, theirs = await fleet.ask(body, "/tokenize"), await fleet.ask_plain(body, "/tokenize")
    assert ours.body["tokens"] == theirs.body["tokens"]
    answer = await fleet.ask({"model": MODEL, "prompt": PROMPT, "max_tokens": 1}, COMPLETIONS)
    assert answer.body["usage"]["prompt_tokens"] == ours.body["count"]


# ---- what must never reach a node --------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": 77},
        {"bootstrap_host": None, "bootstrap_room": None},
        {"bootstrap_host": "10.255.255.1", "bootstrap_port": 1, "bootstrap_room": 5},
        {"routed_dp_rank": 9, "disagg_prefill_dp_rank": 9, "data_parallel_rank": 9},
        {"rid": "mine"},
    ],
    ids=lambda fields: "+".join(fields),
)
async def test_no_client_decides_where_a_decode_looks(fleet: RealFleet, fields: dict[str, Any]) -> None:
    """A room without a host would end the decode, a wrong host stall it."""
    pids = [server.pid for server in fleet.pair]
    answer = await fleet.ask({**generate_body(), **fields}, GENERATE)
    assert answer.status == 200
    assert [server.pid for server in fleet.pair] == pids
    assert all(server.returncode is None for server in fleet.pair)
