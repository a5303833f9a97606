"""A prefill and a decode of two DP ranks each: every request is right, on the ranks that the gateway named, and none
of them keeps anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engines.tasks import spawn
from tests.scenarios.client import Answer, ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 3000
"""Bytes of a prompt of many blocks."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_ranks() -> AsyncIterator[Cluster]:
    async with Cluster(1, 1, engine=("--dp-size", "2", "--enable-cache-report")) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="session")
async def ranks(shared_ranks: Cluster) -> AsyncIterator[Cluster]:
    yield shared_ranks
    await shared_ranks.heal()


async def attempt_of(cluster: Cluster, answer: Answer) -> dict[str, Any]:
    """The one attempt of an answer; the ranks named are those that the servers say."""
    [attempt] = (await cluster.explain(answer.request_id))["attempts"]
    assert int(attempt["room"]) % 2 == attempt["prefill_rank"]
    for server, named in ((cluster.prefills[0], "prefill_rank"), (cluster.decodes[0], "decode_rank")):
        [ran] = [each for each in (await cluster.requests(server))["recent"] if each["rid"] == attempt["rid"]]
        assert ran["dp_rank"] == attempt[named]
        assert str(ran["room"]) == attempt["room"]
    return dict(attempt)


async def nothing_kept(cluster: Cluster) -> None:
    await cluster.settled()
    for server in cluster.servers:
        ledger = await cluster.ledger(server)
        assert [(rank["by_room"], rank["locked_cache_tokens"]) for rank in ledger["ranks"]] == [({}, 0)] * 2
        async with cluster.http.get(server.url + "/v1/loads") as reply:
            loads = (await reply.json())["loads"]
        assert [(load["dp_rank"], load["num_running_reqs"] + load["num_waiting_reqs"]) for load in loads] == [
            (0, 0),
            (1, 0),
        ]


async def test_a_conversation_stays_on_the_rank_that_has_it(ranks: Cluster) -> None:
    for _ in range(3):
        prompt, homes = new_prompt(LONG), set()
        for turn in range(3):
            answer = await ask(ranks.http, ranks.url, chat(prompt, 5, stream=turn == 1))
            answer.check_whole(expected_text(prompt, 5), attempts=1)
            attempt = await attempt_of(ranks, answer)
            homes.add(attempt["prefill_rank"])
            if turn:
                assert attempt["cached_tokens"] > LONG * 0.9
                assert attempt["hit_tokens"] > 0
            prompt += " and then?"
        assert len(homes) == 1
    await nothing_kept(ranks)


async def test_load_is_spread_over_all_ranks(ranks: Cluster) -> None:
    prompts = [new_prompt() for _ in range(24)]
    asked = [ask(ranks.http, ranks.url, chat(prompt, 30, stream=bool(at % 2))) for at, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*asked)
    prefills, decodes = Counter[int](), Counter[int]()
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.check_whole(expected_text(prompt, 30), attempts=1)
        attempt = await attempt_of(ranks, answer)
        prefills[attempt["prefill_rank"]] += 1
        decodes[attempt["decode_rank"]] += 1
    assert min(prefills[0], prefills[1]) >= 3, prefills
    assert min(decodes[0], decodes[1]) >= 6, decodes
    await nothing_kept(ranks)


async def test_clients_that_leave_free_their_ranks(ranks: Cluster) -> None:
    holds = [await ranks.hold(ranks.decodes[0], "token", 3) for _ in range(4)]
    prompts = [new_prompt() for _ in range(4)]
    asked = [spawn(ask(ranks.http, ranks.url, chat(prompt, 50, stream=True)), prompt) for prompt in prompts]
    await ranks.held(holds, 4)
    held = [rank["by_room"] for rank in (await ranks.ledger(ranks.decodes[0]))["ranks"]]
    assert [len(rooms) for rooms in held] == [2, 2]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await nothing_kept(ranks)


async def test_streams_on_both_ranks_outlive_their_prefill(ranks: Cluster) -> None:
    prompts = [new_prompt() for _ in range(4)]
    answers = [Answer() for _ in prompts]
    holds = [await ranks.hold(ranks.decodes[0], "token", 5) for _ in prompts]
    asked = [
        spawn(ask(ranks.http, ranks.url, chat(prompt, 40, stream=True), answer=answer), prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    await ranks.held(holds, 4)
    await ranks.kill(ranks.prefills[0])
    for hold in holds:
        await ranks.release(hold)
    await asyncio.gather(*asked)
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.check_whole(expected_text(prompt, 40), attempts=1)
    await ranks.heal()
    prompts = [new_prompt() for _ in range(4)]
    again = await asyncio.gather(*(ask(ranks.http, ranks.url, chat(prompt, 5)) for prompt in prompts))
    for prompt, answer in zip(prompts, again, strict=True):
        answer.check_whole(expected_text(prompt, 5), attempts=1)
    await nothing_kept(ranks)
