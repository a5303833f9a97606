"""The emulator's replies against recorded replies of SGLang 0.5.23: same status, same shape, same words.

Shapes are keys and types; texts are compared up to ids and numbers. `emu_transcripts.json` holds the excerpts.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.emu_fleet import EmuFleet, Reply, emu_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "emu_transcripts.json").read_text())
OPTIONAL = frozenset({"cached_tokens_details", "cached_tokens", "bytes"})
"""Null or empty by the state of the prefix cache, or by the token."""
EXACT_WORDS = frozenset(
    {"message", "error", "detail", "finish_reason", "object", "role", "matched_stop", "type", "owned_by"}
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(speed=10.0, arguments=("--model", "tiny"), plain=True) as running:
        yield running


def shape(value: Any, key: str = "") -> Any:
    """What must be equal: keys, types, and the words of a closed vocabulary."""
    if key in OPTIONAL:
        return "optional"
    if isinstance(value, dict):
        return {name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0], key)] if value else []
    if isinstance(value, str) and key in EXACT_WORDS:
        return words(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return type(value).__name__


def words(text: str) -> str:
    """`text` without what differs between two runs: ids, numbers, the line and byte where JSON broke."""
    return re.sub(r"-?\d+(\.\d+)?", "N", re.sub(r"\b[0-9a-f]{32}\b", "ID", text))


def collapsed(events: list[Any]) -> list[Any]:
    """The shapes of a stream's events, runs of equal ones as one."""
    shapes: list[Any] = []
    for event in events:
        one = event if isinstance(event, str) else shape(event)
        if not shapes or shapes[-1] != one:
            shapes.append(one)
    return shapes


async def replay(fleet: EmuFleet, name: str) -> Reply:
    recorded = RECORDED[name]
    request = recorded["request"]
    body = json.loads(request) if request.startswith('{"') else request.encode()
    if name.startswith("single_"):
        return await fleet.call(fleet.extra[0], recorded["method"], recorded["path"], body)
    if isinstance(body, dict) and isinstance(body.get("bootstrap_room"), int) and recorded["status"] == 200:
        del body["bootstrap_room"]
        prefill, decode = await fleet.pair(recorded["path"], body)
        return prefill if name.endswith("_prefill") else decode
    if isinstance(body, dict) and isinstance(body.get("bootstrap_room"), list):
        both = fleet.with_room(body)
        first = both["bootstrap_room"]
        both["bootstrap_room"] = [first + 500_000, first + 500_001]
        both |= {"bootstrap_host": [fleet.prefill.host] * 2, "bootstrap_port": [fleet.prefill.bootstrap_port] * 2}
        prefill, decode = await _both(fleet, recorded["path"], both)
        return prefill if name.endswith("_prefill") else decode
    server = fleet.prefill if "prefill" in name else fleet.decode
    return await fleet.call(server, recorded["method"], recorded["path"], body)


async def _both(fleet: EmuFleet, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
    prefill, decode = await asyncio.gather(fleet.post(fleet.prefill, path, body), fleet.post(fleet.decode, path, body))
    return prefill, decode


@pytest.mark.parametrize("name", sorted(name for name in RECORDED if "server_info" not in name))
async def test_replies_have_the_recorded_shape(fleet: EmuFleet, name: str) -> None:
    recorded = RECORDED[name]
    reply = await replay(fleet, name)
    expected = Reply(recorded["status"], recorded["content_type"], recorded["body"])
    assert reply.status == expected.status, reply.text
    assert expected.content_type in (None, reply.content_type)
    if "event-stream" in (expected.content_type or ""):
        got, want = collapsed(reply.events()), collapsed(expected.events())
        assert [one for one in want if one not in got] == []
        assert [one for one in got if one not in want and not _text_only(one)] == []
        assert (got[0], got[-1]) == (want[0], want[-1])
    elif expected.content_type == "application/json":
        assert shape(reply.json()) == shape(expected.json())
    else:
        assert reply.text == expected.text


def _text_only(one: Any) -> bool:
    """A chunk with text: a recorded stream may have had none, its tokens being halves of characters."""
    choices = one.get("choices") if isinstance(one, dict) else None
    return bool(choices) and choices[0].get("finish_reason") == "NoneType"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_server_info_has_exactly_the_recorded_fields(fleet: EmuFleet, side: str) -> None:
    recorded = RECORDED[f"pd_{side}_server_info"]
    body = await fleet.get(getattr(fleet, side), "/server_info")
    assert sorted(body) == recorded["keys"]
    assert sorted(body["internal_states"][0]) == recorded["state_keys"]
    assert body["disaggregation_mode"] == side
    assert all(isinstance(value, (float, dict)) for value in body["startup_time"].values())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_pair_and_plain_write_the_same_greedy_text(fleet: EmuFleet, path: str) -> None:
    prompt = "The same greedy text, whoever writes it. " * 20
    body: dict[str, Any] = {"text": prompt, "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    if path == "/v1/completions":
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
    elif path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "temperature": 0}

    def text(reply: Reply) -> Any:
        answer = reply.json()
        if "text" in answer:
            return answer["text"]
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    _, decode = await fleet.pair(path, body)
    plain = await fleet.post(fleet.extra[0], path, body)
    assert text(decode) == text(plain) != ""


async def test_streamed_and_whole_text_are_the_same(fleet: EmuFleet) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "temperature": 0}
    _, whole = await fleet.pair("/v1/chat/completions", body)
    _, stream = await fleet.pair("/v1/chat/completions", {**body, "stream": True})
    deltas = [event["choices"][0]["delta"].get("content", "") for event in stream.events()[:-1]]
    assert "".join(deltas) == whole.json()["choices"][0]["message"]["content"]


async def test_sampled_answers_differ(fleet: EmuFleet) -> None:
    body = {"prompt": "x", "max_tokens": 12}
    texts = [(await fleet.pair("/v1/completions", body))[1].json()["choices"][0]["text"] for _ in range(2)]
    assert texts[0] != texts[1]


async def test_n_samples_on_a_plain_server(fleet: EmuFleet) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "ignore_eos": True}
    answer = (await fleet.post(fleet.extra[0], "/v1/completions", body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_scalar_room_counts_upwards_over_a_batch(fleet: EmuFleet) -> None:
    body = fleet.with_room({"prompt": ["a", "b", "c"], "max_tokens": 3}, room=77_000)
    prefill, decode = await _both(fleet, "/v1/completions", body)
    assert (prefill.status, decode.status) == (200, 200)
    recent = (await fleet.get(fleet.decode, "/emulator/requests"))["recent"]
    assert [each["room"] for each in recent[-3:]] == [77_000, 77_001, 77_002]


async def test_too_long_prompts_are_refused_in_the_recorded_words(fleet: EmuFleet) -> None:
    body = fleet.with_room({"input_ids": [5] * 40_000, "sampling_params": {}})
    reply = await fleet.post(fleet.decode, "/generate", body)
    text = "The input (40000 tokens) is longer than the model's context length (32768 tokens)."
    assert (reply.status, reply.json()) == (400, {"error": {"message": text}})


async def test_tokenize_is_what_a_chat_would_use(fleet: EmuFleet) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tokens = (await fleet.post(fleet.decode, "/tokenize", {"messages": messages})).json()
    chat = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = (await fleet.post(fleet.extra[0], "/v1/chat/completions", chat)).json()
    assert answer["choices"][0]["prompt_token_ids"] == tokens["tokens"]
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
    back = (
        await fleet.post(fleet.decode, "/detokenize", {"tokens": tokens["tokens"], "skip_special_tokens": False})
    ).json()
    assert back == {"text": "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"}
