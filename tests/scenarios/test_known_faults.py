"""Faults that users met in other gateways, on real processes, where no other scenario would find them.

`tests/unit/test_known_faults.py` lists all of them with their tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest

from engines.tasks import spawn
from engines.types import Role
from gateway.http_server import _NOT_ON_PAIRS
from gateway.openai_api import Api
from tests.machine import Stopwatch
from tests.scenarios.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Answer,
    ask,
    chat,
    completion,
    continued,
    expected_text,
    new_prompt,
)
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.phases import PHASES, RESERVED, TOKEN, Asked, hold_at
from tests.scenarios.recorder import Call

pytestmark = pytest.mark.asyncio(loop_scope="session")

FREED_S = 4.0
"""Only aborts free a server so soon: connections are closed after 5 s, and servers give up after 15 (300 in life)."""
BURST = 24


def generate(text: Any, tokens: int = 5, **fields: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"text": text, "sampling_params": greedy, **fields}


async def test_a_burst_of_failing_prefills_pins_no_decode_and_is_told_at_once(one_pair: Cluster) -> None:
    await one_pair.fault(one_pair.prefills[0], "status", status=500, count=BURST)
    begun = Stopwatch()
    asked = [Asked(one_pair, stream=number % 2 == 0) for number in range(BURST)]
    for each in asked:
        (await each.finish()).check_refused(502, 503)
    assert begun.took_s() < FREED_S
    await one_pair.settled(FREED_S)
    for server in one_pair.servers:
        assert await one_pair.metric("pdgate_pinned_requests", engine=server.url) == 0
    await one_pair.clear_faults()  # who came when the prefill was known to be broken has used none
    await one_pair.ready()
    await served(one_pair)


async def served(cluster: Cluster) -> None:
    """One chat comes through: no server is on trial, with few requests at a time, after it."""
    asked = Asked(cluster, stream=False)
    (await asked.finish()).check_whole(asked.truth, attempts=1)


async def test_storms_of_clients_that_hang_up_leave_nothing_in_any_queue(one_pair: Cluster) -> None:
    """At every phase of a request at once, again and again: the decode's pool comes back to where it was."""
    await served(one_pair)
    (decode,) = one_pair.decodes
    before = await used_tokens(one_pair, decode.url)
    for _ in range(2):
        holds = [
            await one_pair.hold(one_pair.of(phase.holder)[0], phase.stage, phase.k) for phase in PHASES for _ in (1, 2)
        ]
        asked = [Asked(one_pair, stream=number % 2 == 0, tokens=2_000) for number in range(BURST)]
        await one_pair.held(holds, len(holds))
        await asyncio.gather(*(each.leave() for each in asked))
        await one_pair.settled(FREED_S)
    assert await used_tokens(one_pair, decode.url) == before


async def used_tokens(cluster: Cluster, url: str) -> int:
    """What a server says that it holds."""
    async with cluster.http.get(url + "/v1/loads?include=core") as reply:
        return sum(load["num_used_tokens"] for load in (await reply.json())["loads"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_hangs_up_ends_every_sample_on_both_sides(watched: Cluster, stream: bool) -> None:
    held = await hold_at(watched, RESERVED, stream, samples=3)
    rids = {attempt["rid"] for attempt in (await watched.explain())["attempts"]}
    assert len(rids) == 3
    await held.asked[0].leave()
    await watched.settled(FREED_S)
    for server in watched.servers:
        aborts = [orjson.loads(call.body)["rid"] for call in watched.recorder(server).of("/abort_request")]
        assert rids <= set(aborts), f"{server.role} was not told of all samples"


BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "a chat": (CHAT, chat(new_prompt(), 5), 1),
    "a streamed chat": (CHAT, chat(new_prompt(), 5, stream=True), 1),
    "two samples": (CHAT, chat(new_prompt(), 5, n=2), 2),
    "a completion": (COMPLETIONS, completion(new_prompt(), 5), 1),
    "a list of prompts": (COMPLETIONS, completion([new_prompt(), new_prompt()], 5, n=2, stream=True), 4),
    "generate": (GENERATE, generate(new_prompt()), 1),
    "a streamed generate": (GENERATE, generate(new_prompt(), stream=True), 1),
    "a batch of generate": (GENERATE, generate([new_prompt(), new_prompt()]), 2),
}


async def test_every_route_that_generates_brings_a_room_of_its_own_for_each_sample(watched: Cluster) -> None:
    assert {path for path, _, _ in BODIES.values()} == {api.value for api in Api}
    rooms: set[int] = set()
    for name, (path, body, samples) in BODIES.items():
        answer = await ask(watched.http, watched.url, {**body, "bootstrap_room": 7, "rid": ""}, path)
        assert (answer.status, answer.errors) == (200, []), name
        attempts = (await watched.explain(answer.request_id))["attempts"]
        wanted = {(each["rid"], int(each["room"])) for each in attempts}
        assert len(wanted) == samples, name
        for server in watched.servers:
            bodies = [orjson.loads(call.body) for call in generating(watched.recorder(server).calls)]
            mine = [sent for sent in bodies if sent["rid"] in {rid for rid, _ in wanted}]
            assert {(sent["rid"], sent["bootstrap_room"]) for sent in mine} == wanted, name
            assert len(mine) == samples, name
            assert {sent["bootstrap_port"] for sent in mine} == {watched.prefills[0].bootstrap_port}, name
            assert all(sent["bootstrap_host"] for sent in mine), name
        assert not rooms & {room for _, room in wanted}, name
        rooms |= {room for _, room in wanted}


async def test_a_route_that_no_pair_can_serve_reaches_no_server(watched: Cluster) -> None:
    """There it would be answered with words about a room that the client has never heard of."""
    before = [len(told(watched.recorder(server).calls)) for server in watched.servers]
    for path in {"/v1/responses", "/v1/messages", *_NOT_ON_PAIRS, "/v1/of/tomorrow"}:
        refused = await ask(watched.http, watched.url, chat(new_prompt()), path)
        refused.check_refused(404, 501)
        assert path in refused.body["error"]["message"]
    assert [len(told(watched.recorder(server).calls)) for server in watched.servers] == before


def generating(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.path in list(Api)]


def told(calls: list[Call]) -> list[Call]:
    """Calls with a body: probes have none."""
    return [call for call in calls if call.body]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_a_token_is_with_its_client_before_the_next_is_made(one_pair: Cluster, path: str) -> None:
    (decode,) = one_pair.decodes
    shown_at = (1, 4, 9)
    holds = [await one_pair.hold(decode, TOKEN.stage, k) for k in shown_at]
    prompt = next(prompt for prompt in iter(new_prompt, "") if all_show(path, prompt, shown_at))
    bodies = {
        CHAT: chat(prompt, 20, stream=True),
        COMPLETIONS: completion(prompt, 20, stream=True),
        GENERATE: generate(prompt, 20, stream=True),
    }
    answer = Answer()
    asking = spawn(ask(one_pair.http, one_pair.url, bodies[path], path, answer), "a stream")
    seen = []
    for hold in holds:
        await one_pair.held_once([hold])
        await eventually(lambda: _more(answer, seen), 2.0)
        seen.append(len(answer.events))
        await one_pair.release(hold)
    await asking
    assert answer.done == 1


def all_show(path: str, prompt: str, counts: Sequence[int]) -> bool:
    """Whether so many tokens of its answer are each more text than the last: not the first half of a character."""
    texts = [(expected_text if path == CHAT else continued)(prompt, count).rstrip("\ufffd") for count in (0, *counts)]
    return all(len(more) > len(text) for text, more in pairwise(texts))


async def _more(answer: Answer, seen: list[int]) -> str:
    return "" if len(answer.events) > (seen[-1] if seen else 0) else f"{len(answer.events)} events have come"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cached_tokens_are_those_that_the_prefill_had(one_pair: Cluster, stream: bool) -> None:
    """For the decode the whole prompt comes from elsewhere; that is no cache hit."""
    text = new_prompt(400)
    told = [await told_cached(one_pair, text + more, stream=stream) for more in ("", "", " and now something else")]
    prompt_tokens = told[0][1]
    assert told[0][0] < 20, "but for the beginning that all prompts share"
    assert told[1] == (prompt_tokens - 1, prompt_tokens)
    assert prompt_tokens - 5 <= told[2][0] < told[2][1] - 5


async def told_cached(cluster: Cluster, text: str, *, stream: bool) -> tuple[int, int]:
    answer = await ask(cluster.http, cluster.url, generate(text, stream=stream), GENERATE)
    meta = (answer.events[-1] if stream else answer.body)["meta_info"]
    return meta["cached_tokens"], meta["prompt_tokens"]


async def test_a_large_body_arrives_whole_on_both_sides(watched: Cluster) -> None:
    prompt, image = new_prompt(), "data:image/png;base64," + "iVBORw0KGgo" * 90_000
    body = chat(prompt, 5, some_picture=image)
    answer = await ask(watched.http, watched.url, body)
    answer.check_whole(expected_text(prompt, 5), attempts=1)
    for server in watched.servers:
        sent = orjson.loads(watched.recorder(server).of(CHAT)[-1].body)
        assert sent["some_picture"] == image
        watched.recorder(server).calls.clear()


async def test_no_abort_of_an_empty_or_a_shorter_name_ends_a_request(one_pair: Cluster) -> None:
    """SGLang aborts all that begins with what it is told, and once took an empty name for everybody's."""
    asked = Asked(one_pair, stream=True, rid="mine", tokens=60)
    hold = await one_pair.hold(one_pair.of(Role.DECODE)[0], TOKEN.stage, 9)
    await one_pair.held([hold])
    rid = (await one_pair.last_attempt())["rid"]
    for wrong in ("", "m", rid[:8]):
        async with one_pair.http.post(one_pair.url + "/abort_request", json={"rid": wrong}) as reply:
            assert reply.status in (200, 400), await reply.text()
    await asyncio.sleep(0.1)
    await one_pair.release(hold)
    (await asked.finish()).check_whole(asked.truth, attempts=1)
