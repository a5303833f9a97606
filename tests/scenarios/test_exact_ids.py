"""A gateway that tokenizes as its engines do: it predicts exactly what they find in their cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.emulator.tokenizer_files import FOLDER
from engines.emulator.tokens import chat_text, encode
from engines.token_rule import TOKEN_BYTES, VOCABULARY_TOKENS
from tests.scenarios.client import CHAT, COMPLETIONS, GENERATE, chat, completion, new_prompt
from tests.scenarios.cluster import Cluster, GatewayProcess, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE_TOKENS = 64


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def exact() -> AsyncIterator[Cluster]:
    engine = ("--page-size", str(PAGE_TOKENS), "--enable-cache-report")
    async with Cluster(2, 2, gateway=("--tokenizer-path", str(FOLDER)), engine=engine) as started:
        await joined(started)
        yield started


async def joined(cluster: Cluster) -> None:
    """Wait until prompts are looked up by their ids."""

    async def missing() -> str:
        await post(cluster, CHAT, chat("hello", 1))
        shown = await cluster.last_attempt()
        return "" if shown["prompt_index"] == "ids" else str(shown["prompt_index_reason"])

    await eventually(missing, 10.0)


async def post(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with cluster.http.post(cluster.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return dict(await reply.json())


async def predicted_and_found(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt tokens, predicted hit and reported hit of one request."""
    answer = await post(cluster, path, body)
    told = answer.get("usage") or answer["meta_info"]
    details = told.get("prompt_tokens_details") or {}
    found = details.get("cached_tokens", told.get("cached_tokens", 0))
    shown = await cluster.last_attempt()
    assert (shown["prompt_index"], shown["prompt_index_reason"]) == ("ids", None)
    assert shown["prompt_tokens"] == told["prompt_tokens"], "exact, before the engine has seen it"
    return told["prompt_tokens"], shown["hit_tokens"], found


@pytest.mark.parametrize("length", [100, 300, 2000, 9000])
async def test_a_repeated_chat_hits_what_was_predicted(exact: Cluster, length: int) -> None:
    body = chat(new_prompt(length), 5)
    tokens, predicted, found = await predicted_and_found(exact, CHAT, body)
    assert (predicted, found) == (0, 0)
    assert tokens == len(encode(chat_text(body))) // TOKEN_BYTES
    assert await predicted_and_found(exact, CHAT, body) == (tokens, (tokens - 1) // 64 * 64, (tokens - 1) // 64 * 64)


async def test_the_next_turn_hits_the_turns_before(exact: Cluster) -> None:
    first = {"role": "user", "content": new_prompt(700)}
    body = {**chat("", 5), "messages": [first]}
    await predicted_and_found(exact, CHAT, body)
    answer = {"role": "assistant", "content": "naïve answer 😀"}
    longer = {**body, "messages": [first, answer, {"role": "user", "content": "and then?" * 30}]}
    tokens, predicted, found = await predicted_and_found(exact, CHAT, longer)
    assert predicted == found > 600
    assert tokens > 900


async def test_apis_share_what_is_cached(exact: Cluster) -> None:
    body = chat(new_prompt(1000), 5)
    tokens, *_ = await predicted_and_found(exact, CHAT, body)
    text = chat_text(body)
    hit = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert await predicted_and_found(exact, COMPLETIONS, completion(text, 5)) == (tokens, hit, hit)
    generate = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    assert await predicted_and_found(exact, GENERATE, generate) == (tokens, hit, hit)


BEYOND = [5, VOCABULARY_TOKENS]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, {"input_ids": BEYOND}, "input_ids"),
        (GENERATE, {"input_ids": [[5, 6], BEYOND]}, "input_ids"),
        (GENERATE, {"input_ids": [5, -1]}, "input_ids"),
        (GENERATE, {"text": "a", "sampling_params": {"stop_token_ids": BEYOND}}, "sampling_params.stop_token_ids"),
        (COMPLETIONS, completion(BEYOND), "prompt"),
        (COMPLETIONS, completion([[5, 6], BEYOND]), "prompt"),
        (CHAT, chat("hello", input_ids=BEYOND), "input_ids"),
    ],
)
async def test_ids_that_the_model_lacks_reach_no_server(
    exact: Cluster, path: str, body: dict[str, Any], field: str
) -> None:
    """A prefill would die of them."""
    before = [server.pid for server in exact.servers]
    async with exact.http.post(exact.url + path, json=body) as reply:
        assert reply.status == 400, await reply.text()
        error = (await reply.json())["error"]
    assert error["param"] == field
    assert -1 in body.get("input_ids", ()) or f"it has {VOCABULARY_TOKENS}" in error["message"]
    assert [server.pid for server in exact.servers if server.returncode is None] == before
    await post(exact, COMPLETIONS, completion([5, VOCABULARY_TOKENS - 1], 3))


async def test_a_gateway_that_cannot_read_the_files_says_which(tmp_path: Path) -> None:
    fleet = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:19", "--redis-url", "memory")
    gateway = GatewayProcess((*fleet, "--tokenizer-path", "/nowhere"), tmp_path / "log")
    try:
        await gateway.launch()
        assert await gateway.wait(20.0) == 2
        said = gateway.log_tail()
        assert said.startswith("pdgate serve: error: --tokenizer-path /nowhere: ")
        assert said.count("\n") == 1
    finally:
        await gateway.stop()
