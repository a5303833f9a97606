"""Logprobs of prompts through a pair are those of one plain server; `best_of` gives the best; failures as before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.sse_frames import FrameDecoder, data_of
from engines.tasks import spawn
from engines.types import Leg, Role
from tests.machine import time_limit
from tests.scenarios.client import COMPLETIONS, GENERATE, check_error, completion, new_prompt
from tests.scenarios.cluster import SPEED, Cluster
from tests.scenarios.phases import TRANSFER

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
OWN = {"id", "created", "cached_tokens", "cached_tokens_details", "storage_prefetch_wait", "storage_staging_wait"}
"""What an answer has of its own, besides its times."""
_ids = itertools.count(10)


def generate(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": SHORT, "return_logprob": True, "logprob_start_len": 0, **fields}


def ids() -> list[int]:
    """A prompt that no server has seen."""
    return [next(_ids) for _ in range(7)]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ids": (GENERATE, generate(input_ids=ids())),
    "text": (GENERATE, generate(text="some text", return_text_in_logprobs=True)),
    "from the fourth": (GENERATE, generate(input_ids=ids(), logprob_start_len=3)),
    "top": (GENERATE, generate(input_ids=ids(), top_logprobs_num=3)),
    "asked ids": (GENERATE, generate(input_ids=ids(), token_ids_logprob=[5, 9])),
    "asked ids of the output": (GENERATE, generate(input_ids=ids(), token_ids_logprob=[5], logprob_start_len=-1)),
    "list": (
        GENERATE,
        generate(input_ids=[ids(), ids()], logprob_start_len=[0, 5], top_logprobs_num=2, token_ids_logprob=[[5], [6]]),
    ),
    "samples": (GENERATE, generate(input_ids=ids(), sampling_params={**SHORT, "n": 3})),
    "echo": (COMPLETIONS, completion("say it again", 5, echo=True, logprobs=2)),
    "echo of ids": (COMPLETIONS, completion([100, 101, 102], 5, echo=True, logprobs=1)),
    "echo of one": (COMPLETIONS, completion("just one", 1, echo=True, logprobs=1)),
    "echo with ids": (COMPLETIONS, completion("say it", 5, echo=True, logprobs=1, return_token_ids=True)),
    "echo of a list": (COMPLETIONS, completion(["one prompt", "and another"], 5, echo=True, logprobs=1)),
    "echo of samples": (COMPLETIONS, completion("several", 5, echo=True, logprobs=1, n=2)),
    "echo alone": (COMPLETIONS, completion("only text", 5, echo=True)),
    "logprobs alone": (COMPLETIONS, completion("only logprobs", 5, logprobs=2)),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain() -> AsyncIterator[EmulatedServer]:
    """One server that does it all."""
    server = EmulatedServer(Role.PLAIN, speed=SPEED)
    try:
        await server.launch()
        await server.wait_ready()
        yield server
    finally:
        await server.stop()


async def post(cluster: Cluster, url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status, and the answer: of a stream the list of its events."""
    async with cluster.http.post(url + path, json=body) as reply:
        raw = await reply.read()
        if not raw.startswith(b"data:"):
            return reply.status, orjson.loads(raw)
        data = [data_of(frame) for frame in FrameDecoder().feed(raw)]
        assert data[-1] == b"[DONE]", raw
        return reply.status, [orjson.loads(each) for each in data[:-1]]


def said(answer: Any) -> Any:
    """What an answer says, whoever gave it."""
    if isinstance(answer, dict):
        return {
            name: said(value)
            for name, value in answer.items()
            if name not in OWN and not name.endswith(("_time", "_ts", "_latency", "decode_throughput"))
        }
    return [said(each) for each in answer] if isinstance(answer, list) else answer


def folded(events: list[Any]) -> Any:
    """A stream by choice, whatever its chunks are: the last of cumulative events, all of what comes in pieces."""
    found: dict[int, Any] = {}
    for event in events:
        for choice in event.get("choices", ()):
            into = found.setdefault(choice["index"], {"text": "", "finish_reason": None})
            into["text"] += choice["text"]
            into["finish_reason"] = choice["finish_reason"]
            for name, entries in (choice["logprobs"] or {}).items():
                into.setdefault(name, []).extend(entries)
        if "meta_info" in event:
            found[event.get("index", 0)] = said(event)
    return found


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_pair_says_what_a_plain_server_says(two_pairs: Cluster, plain: EmulatedServer, name: str) -> None:
    path, body = REQUESTS[name]
    (status, through), (_, direct) = await asyncio.gather(
        post(two_pairs, two_pairs.url, path, body), post(two_pairs, plain.url, path, body)
    )
    assert status == 200
    assert said(through) == said(direct)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_of_a_pair_says_what_a_plain_servers_does(
    two_pairs: Cluster, plain: EmulatedServer, name: str
) -> None:
    path, body = REQUESTS[name]
    body = {**body, "stream": True}
    (status, through), (_, direct) = await asyncio.gather(
        post(two_pairs, two_pairs.url, path, body), post(two_pairs, plain.url, path, body)
    )
    assert status == 200
    assert folded(through) == folded(direct)
    assert len(through) == len(direct), "no event is lost"
    for event in through if path == GENERATE else ():
        prompt = event["meta_info"]["input_token_logprobs"]
        assert said(prompt) == folded(direct)[event.get("index", 0)]["meta_info"]["input_token_logprobs"]


async def test_identity_and_usage_of_a_stream_are_the_gateways(two_pairs: Cluster) -> None:
    body = completion("how many", 5, echo=True, logprobs=1, stream=True)
    _, events = await post(two_pairs, two_pairs.url, COMPLETIONS, body)
    assert {event["id"] for event in events} == {(await two_pairs.explain())["request_id"]}
    assert not any(event["usage"] for event in events)
    _, events = await post(two_pairs, two_pairs.url, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"]["completion_tokens"] == 5
    _, events = await post(two_pairs, two_pairs.url, GENERATE, generate(input_ids=ids(), stream=True))
    assert {event["meta_info"]["id"] for event in events} == {(await two_pairs.explain())["request_id"]}


# ---- a prefill that goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_killed_before_it_has_answered_is_tried_again(two_pairs: Cluster, stream: bool) -> None:
    body = generate(input_ids=ids(), stream=stream)
    holds = await two_pairs.hold_any(Role.PREFILL, TRANSFER.stage, TRANSFER.k)
    asked = spawn(post(two_pairs, two_pairs.url, GENERATE, body), "prompt logprobs")
    (caught,) = await two_pairs.held_once(holds)
    await two_pairs.kill(caught.server)
    for hold in holds:
        if hold.server is not caught.server:
            await two_pairs.release(hold)
    async with time_limit(10.0):
        status, answer = await asked
    assert status == 200
    last = answer[-1] if stream else answer
    assert [entry[1] for entry in last["meta_info"]["input_token_logprobs"]] == body["input_ids"]
    assert len(last["output_ids"]) == 6
    assert len((await two_pairs.explain())["attempts"]) == 2
    await two_pairs.settled(10.0, [server for server in two_pairs.servers if server is not caught.server])


async def test_a_prefill_that_cannot_answer_is_an_error_with_a_status(one_pair: Cluster) -> None:
    holds = await one_pair.hold_any(Role.PREFILL, TRANSFER.stage, TRANSFER.k)
    body = generate(input_ids=ids(), stream=True)
    asked = spawn(post(one_pair, one_pair.url, GENERATE, body), "prompt logprobs")
    await one_pair.held(holds)
    await one_pair.kill(one_pair.of(Role.PREFILL)[0])
    async with time_limit(20.0):
        status, answer = await asked
    assert status >= 500
    check_error(answer["error"])


async def test_a_client_that_leaves_frees_both_sides(two_pairs: Cluster) -> None:
    holds = await two_pairs.hold_any(Role.DECODE, "token", 3)
    asked = spawn(post(two_pairs, two_pairs.url, GENERATE, generate(input_ids=ids(), stream=True)), "prompt logprobs")
    await two_pairs.held_once(holds)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await two_pairs.settled()


@pytest.mark.parametrize("start", [-2, [0]])
async def test_a_start_that_ends_servers_reaches_none(two_pairs: Cluster, start: Any) -> None:
    body = generate(input_ids=ids(), logprob_start_len=start)
    status, answer = await post(two_pairs, two_pairs.url, GENERATE, body)
    assert (status, answer["error"]["param"]) == (400, "logprob_start_len")


async def test_a_start_behind_the_prompt_is_the_clients_fault(two_pairs: Cluster) -> None:
    for stream in (False, True):
        body = generate(input_ids=ids(), logprob_start_len=99, stream=stream)
        status, answer = await post(two_pairs, two_pairs.url, GENERATE, body)
        assert status == 400
        assert "Please use a smaller logprob_start_len" in answer["error"]["message"]
        assert len((await two_pairs.explain())["attempts"]) == 1


# ---- best_of --------------------------------------------------------------------------------------------------------


def mean(choice: dict[str, Any], tokens: int) -> float:
    return float(sum(choice["logprobs"]["token_logprobs"][-tokens:]) / tokens)


async def test_the_best_of_several_come_first(two_pairs: Cluster) -> None:
    sampled = completion(new_prompt(50), 5, best_of=6, n=3, logprobs=1, temperature=1.0)
    _, answer = await post(two_pairs, two_pairs.url, COMPLETIONS, sampled)
    means = [mean(choice, 5) for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert means == sorted(means, reverse=True)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 6 * 5
    record = await two_pairs.explain()
    assert len(record["attempts"]) == 6
    assert len({attempt[Leg.PREFILL.value] for attempt in record["attempts"]}) == 1, "all samples find one prefix"
    await two_pairs.settled()


async def test_logprobs_that_only_the_choice_needed_are_not_shown(two_pairs: Cluster) -> None:
    for asked, shown in (({"best_of": 2}, False), ({"best_of": 2, "logprobs": 0}, True), ({"best_of": 1}, False)):
        body = completion([new_prompt(20), new_prompt(20)], 4, **asked)
        _, answer = await post(two_pairs, two_pairs.url, COMPLETIONS, body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [choice["logprobs"] is not None for choice in answer["choices"]] == [shown, shown]


async def test_an_echo_of_the_best(two_pairs: Cluster, plain: EmulatedServer) -> None:
    """Greedy candidates are all the same: any of them is what a plain server says."""
    body = completion("best of an echo", 4, echo=True, logprobs=1)
    _, through = await post(two_pairs, two_pairs.url, COMPLETIONS, {**body, "best_of": 3})
    _, direct = await post(two_pairs, plain.url, COMPLETIONS, body)
    assert said(through["choices"]) == said(direct["choices"])


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 129}])
async def test_a_best_of_that_cannot_be_is_refused_by_name(two_pairs: Cluster, fields: dict[str, Any]) -> None:
    status, answer = await post(two_pairs, two_pairs.url, COMPLETIONS, completion("hi", 3, **fields))
    assert (status, answer["error"]["param"]) == (400, "best_of")
    check_error(answer["error"])
