"""A real decode is killed under a stream: another goes on with it, and the answer is the undisturbed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from engines.tasks import spawn
from tests.scenarios.client import CHAT, COMPLETIONS, GENERATE, Answer, ask
from tests.scenarios.cluster import GatewayProcess
from tests.sglang.fleet import MODEL, RealFleet, grown

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 1000
KILLED_AFTER = 40
PROMPT = "Who goes on when the one who spoke has died?"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class TwoDecodes:
    """The fleet with a second decode, and the gateway that knows of both."""

    fleet: RealFleet
    gateway: GatewayProcess

    async def ask(self, path: str, body: dict[str, Any], answer: Answer | None = None) -> Answer:
        return await ask(self.fleet.http, self.gateway.url, body, path, answer)

    async def attempts(self, answer: Answer) -> list[dict[str, Any]]:
        told = await self.fleet.get(f"{self.gateway.url}/pdgate/explain/{answer.request_id}")
        return list(told["attempts"])

    async def broken(self, path: str, body: dict[str, Any]) -> Answer:
        """A stream whose decode is killed when its client has some of it."""
        answer = Answer()
        asking = spawn(self.ask(path, body, answer), "a stream")
        await grown(answer, KILLED_AFTER)
        decode = (await self.attempts(answer))[-1]["decode"]
        (victim,) = (server for server in self.fleet.servers if server.url == decode)
        await victim.kill()
        assert not answer.over, "it was killed too late"
        await asyncio.wait_for(asking, 60.0)
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_decodes(shared_fleet: RealFleet) -> AsyncIterator[TwoDecodes]:
    async with shared_fleet.second_decode() as decode:
        gateway = await shared_fleet.add_gateway(decodes=[decode.url], pairs=2)
        yield TwoDecodes(shared_fleet, gateway)
        await gateway.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def two(two_decodes: TwoDecodes) -> AsyncIterator[TwoDecodes]:
    """Both decodes, as new."""
    await two_decodes.fleet.ready(two_decodes.gateway, pairs=2)
    yield two_decodes
    await two_decodes.fleet.heal()


def body_of(path: str, **sampling: Any) -> dict[str, Any]:
    """A long stream by any of the three routes; greedy, unless `sampling` says otherwise."""
    if path == GENERATE:
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
        return {"text": PROMPT, "sampling_params": params, "stream": True}
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
    usage = {"stream_options": {"include_usage": True}}
    length = {"max_tokens": TOKENS, "ignore_eos": True}
    return {"model": MODEL, **prompt, **length, **usage, "temperature": 0, "stream": True, **sampling}


def usage_of(path: str, answer: Answer) -> tuple[dict[str, int], int]:
    """Tokens of prompt and answer, and how many of the prompt were found in the prefill's cache."""
    if path == GENERATE:
        meta = answer.events[-1]["meta_info"]
        return {name: meta[name] for name in ("prompt_tokens", "completion_tokens")}, meta["cached_tokens"]
    usage = dict(answer.events[-1]["usage"])
    return usage, usage.pop("prompt_tokens_details")["cached_tokens"]


def check_whole(answer: Answer) -> None:
    assert (answer.status, answer.errors, answer.done, answer.ended) == (200, [], 1, True), bytes(answer.raw[-500:])


async def check_resumed(two: TwoDecodes, answer: Answer) -> None:
    """It went on on the other decode, which began where the first had ended."""
    assert answer.comments == ["pdgate resumes: the decode server failed (reset)"]
    first, second = await two.attempts(answer)
    assert (first["verdict"], first["on_failure"]) == ("continue", "resume")
    assert second["emitted_tokens"] >= KILLED_AFTER // 2
    assert first["decode"] != second["decode"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_a_greedy_answer_is_the_undisturbed_one(two: TwoDecodes, path: str) -> None:
    body = body_of(path)
    await two.fleet.ask(body, path)  # so that the prefill knows the prompt both times
    truth = await two.fleet.ask(body, path)
    answer = await two.broken(path, body)
    check_whole(answer)
    await check_resumed(two, answer)
    if path == CHAT:
        assert (await two.attempts(answer))[0]["engine_route"] == COMPLETIONS
    if path == GENERATE:
        assert answer.events[-1]["text"] == truth.events[-1]["text"]
        assert answer.events[-1]["output_ids"] == truth.events[-1]["output_ids"]
    else:
        assert answer.text() == truth.text()
    (told, cached_tokens), (true, true_cached_tokens) = usage_of(path, answer), usage_of(path, truth)
    assert told == true
    assert told["completion_tokens"] == TOKENS
    assert true_cached_tokens <= cached_tokens <= told["prompt_tokens"], "what went on may have found more of it"


async def test_a_sampled_chat_is_whole(two: TwoDecodes) -> None:
    answer = await two.broken(CHAT, body_of(CHAT, temperature=1.0))
    check_whole(answer)
    await check_resumed(two, answer)
    assert usage_of(CHAT, answer)[0]["completion_tokens"] == TOKENS
    finishes = [choice["finish_reason"] for event in answer.events for choice in event["choices"]]
    assert [reason for reason in finishes if reason] == ["length"]
    assert len({event["id"] for event in answer.events}) == 1


async def test_a_chat_with_tools_ends_with_one_error(two: TwoDecodes) -> None:
    """No token ids are known of it."""
    body = body_of(CHAT, tools=[TOOL])
    truth = await two.fleet.ask(body, CHAT)
    answer = await two.broken(CHAT, body)
    answer.check_broken(truth.text())
    assert "asking again is safe" in answer.errors[0]["message"]
    (attempt,) = await two.attempts(answer)
    assert (attempt["engine_route"], attempt["on_failure"]) == (CHAT, "error")
