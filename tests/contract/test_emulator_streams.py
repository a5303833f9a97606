"""Streams of the emulator as SGLang writes them: split characters, withheld chunks, increments, places to die at."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.emulator.tokens import decode, encode
from engines.token_rule import (
    FIRST_WORD_TOKEN,
    ContextHash,
    continue_greedily,
    sampling_key,
    seeded_key,
    unpack,
)
from engines.types import Role
from tests.contract.emu_fleet import EmuFleet, Reply, emu_fleet, until
from tests.warm import WarmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "tell"}]
PROMPT = next(
    text
    for text in (f"go on {number}" for number in range(1000))
    if any(token < FIRST_WORD_TOKEN for token in continue_greedily(unpack(encode(text)), 20))
)
"""A prompt whose answer soon has a character of several tokens."""
ANSWER = continue_greedily(unpack(encode(PROMPT)), 40, ignore_eos=True)
FIRST_BYTE_AT = next(at for at, token in enumerate(ANSWER) if token < FIRST_WORD_TOKEN)
CHARACTER_TOKENS = next(count for count in (1, 2, 3, 4) if "�" not in decode(ANSWER[: FIRST_BYTE_AT + count]))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(50.0, plain=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def other() -> AsyncIterator[EmuFleet]:
    """With deterministic inference, incremental output, OpenAI's defaults and a reasoning parser."""
    flags = ("--enable-deterministic-inference", "--incremental-streaming-output", "--sampling-defaults", "openai")
    async with emu_fleet(
        50.0, (*flags, "--reasoning-parser", "qwen3", "--chat-template", "mine"), plain=True
    ) as running:
        yield running


def openai(**fields: Any) -> dict[str, Any]:
    return {"model": "emulated", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True, **fields}


def generate(stream: bool = True, **sampling: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, **sampling}
    return {"text": PROMPT, "sampling_params": sampling, "stream": stream}


async def ask(fleet: EmuFleet, path: str, body: dict[str, Any]) -> list[Any]:
    return (await fleet.post(fleet.extra[0], path, body)).events()


async def test_completions_write_a_chunk_without_text_inside_a_character(fleet: EmuFleet) -> None:
    *events, done = await ask(fleet, COMPLETIONS, openai(prompt=PROMPT, return_token_ids=True))
    choices = [event["choices"][0] for event in events]
    assert done == "[DONE]"
    assert [choice["token_ids"] for choice in choices] == [[token] for token in ANSWER]
    texts = [choice["text"] for choice in choices]
    assert texts[FIRST_BYTE_AT : FIRST_BYTE_AT + CHARACTER_TOKENS - 1] == [""] * (CHARACTER_TOKENS - 1)
    assert len(texts[FIRST_BYTE_AT + CHARACTER_TOKENS - 1]) == 1
    assert "".join(texts) == decode(ANSWER)


async def test_chats_write_none(fleet: EmuFleet) -> None:
    """Nor the logprobs of the tokens whose text it does not hold: SGLang loses them."""
    events = await ask(fleet, CHAT, openai(messages=MESSAGES, max_tokens=400, logprobs=True))
    chunks = [event["choices"][0] for event in events[1:-2]]
    assert all(chunk["delta"]["content"] for chunk in chunks)
    assert not any("�" in chunk["delta"]["content"] for chunk in chunks)
    assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == [1] * len(chunks)
    split = [chunk for chunk in chunks if not chunk["delta"]["content"].isascii()]
    assert split
    assert {chunk["logprobs"]["content"][0]["token"] for chunk in split} == {"�"}
    assert len(chunks) < 400


async def test_generate_repeats_the_text_that_is_whole(fleet: EmuFleet) -> None:
    *events, _ = await ask(fleet, GENERATE, generate())
    for count, event in enumerate(events, 1):
        assert event["output_ids"] == ANSWER[:count]
        assert event["text"] == decode(ANSWER[:count]).rstrip("�")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_is_given_out_at_the_end(fleet: EmuFleet, path: str, stream: bool) -> None:
    if path == GENERATE:
        body = {**generate(stream, max_new_tokens=FIRST_BYTE_AT + 1)}
        reply = await fleet.post(fleet.extra[0], path, body)
        text = (reply.events()[-2] if stream else reply.json())["text"]
    else:
        # A chat whose prompt is given as ids, so that both have one answer.
        prompt = {"input_ids": unpack(encode(PROMPT)), "messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
        body = openai(**prompt, max_tokens=FIRST_BYTE_AT + 1, stream=stream)
        text = openai_text(await fleet.post(fleet.extra[0], path, body), stream)
    assert text == decode(ANSWER[: FIRST_BYTE_AT + 1])
    assert text.endswith("�")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_ends_inside_a_character_loses_it(fleet: EmuFleet, stream: bool) -> None:
    cut = FIRST_BYTE_AT + 1
    body = openai(prompt=[*unpack(encode(PROMPT)), *ANSWER[:cut]], max_tokens=40 - cut, stream=stream)
    text = openai_text(await fleet.post(fleet.extra[0], COMPLETIONS, body), stream)
    assert text == decode(ANSWER)[len(decode(ANSWER[:cut])) :]


def openai_text(reply: Reply, stream: bool) -> str:
    choices = [body["choices"][0] for body in (reply.events()[:-1] if stream else [reply.json()])]
    owners = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return "".join(owner.get("content") or owner.get("text") or "" for owner in owners)


async def test_what_may_begin_a_stop_string_is_not_written_at_all(fleet: EmuFleet) -> None:
    first = decode(ANSWER[:1])
    stop = first + "never"
    *events, _ = await ask(fleet, COMPLETIONS, openai(prompt=PROMPT, return_token_ids=True, stop=[stop], logprobs=0))
    choices = [event["choices"][0] for event in events]
    begins = [at for at, token in enumerate(ANSWER) if any(first.startswith(decode([token])[-n:]) for n in (1, 2, 3))]
    assert 0 in begins
    assert len(choices[0]["token_ids"]) > 1
    assert [token for choice in choices for token in choice["token_ids"]] == ANSWER
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [len(each["token_ids"]) for each in choices]
    assert "".join(choice["text"] for choice in choices) == decode(ANSWER)
    role, *_ = await ask(fleet, CHAT, openai(messages=MESSAGES, stop=["never"]))
    assert role["choices"][0]["delta"]["content"] == ""


async def test_incremental_output(other: EmuFleet) -> None:
    body = {**generate(), "return_logprob": True, "top_logprobs_num": 1}
    *events, _ = await ask(other, GENERATE, body)
    assert [event["output_ids"] for event in events] == [[token] for token in ANSWER]
    assert "".join(event["text"] for event in events) == decode(ANSWER)
    for count, event in enumerate(events, 1):
        meta = event["meta_info"]
        assert [each[1] for each in meta["output_token_logprobs"]] == [ANSWER[count - 1]]
        assert len(meta["output_top_logprobs"]) == 1
        assert (meta["output_token_logprobs_length"], meta["completion_tokens"]) == (count, count)
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    *events, _ = await ask(other, COMPLETIONS, openai(prompt=PROMPT, return_token_ids=True))
    assert [event["choices"][0]["token_ids"] for event in events] == [[token] for token in ANSWER]


async def test_a_server_says_how_it_samples(fleet: EmuFleet, other: EmuFleet) -> None:
    names = ("sampling_defaults", "enable_deterministic_inference", "incremental_streaming_output")
    names = (*names, "reasoning_parser", "chat_template")
    plain, special = [await each.get(each.extra[0], "/server_info") for each in (fleet, other)]
    assert [plain[name] for name in names] == ["model", False, False, None, None]
    assert [special[name] for name in names] == ["openai", True, True, "qwen3", "mine"]


async def sampled(fleet: EmuFleet, path: str, **fields: Any) -> list[int]:
    body = {"return_token_ids": True, **openai(**fields), "stream": False, "temperature": 1}
    if path == GENERATE:
        return list((await fleet.post(fleet.extra[0], path, fields)).json()["output_ids"])
    choice = (await fleet.post(fleet.extra[0], path, body)).json()["choices"][0]
    return list(choice.get("token_ids") or choice["response_token_ids"])


def continued(key: bytes, tokens: int = 40) -> list[int]:
    context, answer = ContextHash(encode(PROMPT), key), []
    for _ in range(tokens):
        answer.append(context.next_token(allow_eos=False))
        context.append(answer[-1])
    return answer


async def test_a_sampled_answer_can_be_checked_with_its_servers_secret(fleet: EmuFleet) -> None:
    said = await fleet.get(fleet.extra[0], "/emulator/secret")
    assert said["deterministic"] is False
    ids = await sampled(fleet, COMPLETIONS, prompt=PROMPT, rid="mine", seed=7)
    assert ids == continued(sampling_key(bytes.fromhex(said["secret"]), "mine"))


async def test_deterministic_answers_depend_on_their_seed_alone(other: EmuFleet) -> None:
    assert (await other.get(other.extra[0], "/emulator/secret"))["deterministic"] is True
    assert await sampled(other, COMPLETIONS, prompt=PROMPT) == continued(seeded_key(42))
    assert await sampled(other, COMPLETIONS, prompt=PROMPT, seed=-7) == continued(seeded_key(-7))
    chat = await sampled(other, CHAT, messages=MESSAGES, input_ids=unpack(encode(PROMPT)), seed=8)
    assert chat == continued(seeded_key(8))
    body = generate(False, temperature=1, sampling_seed=9)
    assert await sampled(other, GENERATE, **body) == continued(seeded_key(9))
    full = {**openai(prompt=PROMPT, return_token_ids=True, seed=10), "temperature": 1, "stream": False}
    pair = await other.pair(COMPLETIONS, full)
    assert pair[1].json()["choices"][0]["token_ids"] == continued(seeded_key(10))
    assert (await other.post(other.extra[0], COMPLETIONS, {**full, "seed": 2**63})).status == 400


async def test_chats_take_the_models_sampling_where_they_give_none(fleet: EmuFleet, other: EmuFleet) -> None:
    model = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "repetition_penalty": 1.0}
    openais = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    short = {"max_tokens": 1}
    asked = (
        (fleet, CHAT, {"messages": MESSAGES, **short}, model),
        (fleet, CHAT, {"messages": MESSAGES, **short, "top_k": 5, "temperature": None}, {**model, "top_k": 5}),
        (fleet, COMPLETIONS, {"prompt": "a", **short}, openais),
        (
            fleet,
            GENERATE,
            {"text": "a", "sampling_params": {"max_new_tokens": 1, "top_p": 0.5}},
            {**openais, "top_p": 0.5},
        ),
        (other, CHAT, {"messages": MESSAGES, **short}, openais),
    )
    for number, (running, path, body, expected) in enumerate(asked):
        await running.post(running.extra[0], path, {**body, "rid": f"sampling-{number}"})
        recent = (await running.get(running.extra[0], "/emulator/requests"))["recent"]
        assert recent[-1]["rid"] == f"sampling-{number}"
        assert recent[-1]["sampling"] == expected


async def test_how_long_answers_are_that_give_no_limit(fleet: EmuFleet) -> None:
    plain = fleet.extra[0]
    completion = await fleet.post(plain, COMPLETIONS, {"prompt": PROMPT, "temperature": 0, "ignore_eos": True})
    assert completion.json()["usage"]["completion_tokens"] == 16
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "ignore_eos": True}}
    assert len((await fleet.post(plain, GENERATE, body)).json()["output_ids"]) == 128
    chat = {"messages": [{"role": "user", "content": "x" * 32_000}], "temperature": 0, "ignore_eos": True}
    usage = (await fleet.post(plain, CHAT, chat)).json()["usage"]
    assert usage["total_tokens"] == 32_768 - 2


async def test_completions_tell_their_usage_all_along(fleet: EmuFleet) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = await ask(fleet, COMPLETIONS, openai(prompt=PROMPT, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == list(range(1, 41))


PLACES = {
    (CHAT, "role_chunk"): lambda events: events[0]["choices"][0]["delta"]["content"] == "" and len(events) == 1,
    (CHAT, "finish_chunk"): lambda events: events[-1]["choices"][0]["finish_reason"] == "length",
    (COMPLETIONS, "finish_chunk"): lambda events: events[-1]["choices"][0]["finish_reason"] == "length",
    (GENERATE, "finish_chunk"): lambda events: events[-1]["meta_info"]["finish_reason"]["type"] == "length",
    (COMPLETIONS, "role_chunk"): lambda events: events == [],
    (COMPLETIONS, "token"): lambda events: len(events) == 7,
}


def body_of(path: str) -> dict[str, Any]:
    if path == GENERATE:
        return generate()
    return openai(messages=MESSAGES) if path == CHAT else openai(prompt=PROMPT)


async def test_a_stream_goes_wrong_at_a_place(fleet: EmuFleet) -> None:
    for number, ((path, at), judge) in enumerate(PLACES.items()):
        rid = f"it-{number}"
        fault = {"fault": "truncate_stream", "at": at, "after_tokens": 7, "rid": rid}
        await fleet.post(fleet.extra[0], "/emulator/fault", fault)
        whole = await ask(fleet, path, {**body_of(path), "rid": "not-it"})
        assert whole[-1] == "[DONE]"
        assert judge(await read_until_cut(fleet, fleet.extra[0], path, {**body_of(path), "rid": rid})), (path, at)
    refused = await fleet.post(fleet.extra[0], "/emulator/fault", {"fault": "stall", "at": "nowhere"})
    assert refused.status == 400


async def read_until_cut(fleet: EmuFleet, server: EmulatedServer, path: str, body: dict[str, Any]) -> list[Any]:
    data = b""
    try:
        async with fleet.http.post(server.url + path, json=body) as reply:
            async for chunk in reply.content.iter_any():
                data += chunk
    except aiohttp.ClientError:
        cut = True
    else:
        cut = False
    assert cut, data
    return [orjson.loads(frame.removeprefix(b"data: ")) for frame in data.split(b"\n\n") if frame]


@pytest.mark.parametrize(("path", "at"), PLACES)
async def test_a_server_dies_at_a_place(fleet: EmuFleet, path: str, at: str) -> None:
    """What was written before is out; the whole server is gone."""
    server = WarmServer(Role.PLAIN, speed=50.0)
    await server.launch()
    try:
        await server.wait_ready()
        await fleet.post(server, "/emulator/fault", {"fault": "die", "at": at, "after_tokens": 7})
        events = await read_until_cut(fleet, server, path, body_of(path))

        async def ended() -> bool:
            return server.returncode is not None

        await until(ended)
        assert server.returncode == -signal.SIGKILL
    finally:
        await server.stop()
    assert PLACES[path, at](events), events


@pytest.mark.parametrize(("path", "at"), [place for place in PLACES if place[1] != "token"])
async def test_a_stream_is_held_at_a_place(fleet: EmuFleet, path: str, at: str) -> None:
    (plain,) = fleet.extra
    hold = await fleet.hold(plain, at)
    data = bytearray()

    async def read() -> None:
        async with fleet.http.post(plain.url + path, json=body_of(path)) as reply:
            async for chunk in reply.content.iter_any():
                data.extend(chunk)

    reading = asyncio.ensure_future(read())
    await fleet.held(plain, hold)

    async def has_come() -> bool:
        events = [orjson.loads(frame.removeprefix(b"data: ")) for frame in bytes(data).split(b"\n\n") if frame]
        return PLACES[path, at](events)

    await until(has_come)
    await asyncio.sleep(0.1)
    assert await has_come(), "no more comes"
    assert not reading.done()
    await fleet.release(plain, hold)
    await reading
    whole = Reply(200, None, data.decode()).events()
    assert whole[-1] == "[DONE]"
    assert len(whole) == len(await ask(fleet, path, body_of(path)))
    assert (await fleet.get(plain, f"/emulator/hold/{hold}"))["state"] == "released"
