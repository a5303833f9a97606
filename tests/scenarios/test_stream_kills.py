"""Decodes are killed under running streams, at any moment of them: every stream that can go on does, whole and true.

Each answer is judged by the token rule, attempt by attempt, when the cluster heals (`tests/scenarios/history.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.emulator.tokenizer_files import FOLDER
from engines.emulator.tokens import decode, encode, render_chat
from engines.tasks import spawn
from engines.token_rule import FIRST_WORD_TOKEN, continue_greedily, unpack
from tests.machine import Stopwatch, time_limit
from tests.scenarios.client import CHAT, COMPLETIONS, GENERATE, Answer, ask, chat, completion, new_prompt
from tests.scenarios.cluster import Cluster, eventually
from tests.scenarios.test_exact_ids import joined

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.first]

ROUTES = (CHAT, COMPLETIONS, GENERATE)
TOKENS = 120
STREAM_S = 20.0
PLACES = ("role_chunk", "finish_chunk")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def exact() -> AsyncIterator[Cluster]:
    async with Cluster(2, 2, gateway=("--tokenizer-path", str(FOLDER))) as started:
        await joined(started)
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def resuming(exact: Cluster) -> AsyncIterator[Cluster]:
    """Two pairs behind a gateway that has the model's tokenizer, as new."""
    yield exact
    await exact.heal()


def body_of(path: str, prompt: str, tokens: int = TOKENS, **sampling: Any) -> dict[str, Any]:
    """A streamed request of any of the three routes; greedy, unless `sampling` says otherwise."""
    usage = {"stream_options": {"include_usage": True}}
    if path == CHAT:
        return {**chat(prompt, tokens, stream=True), **usage, **sampling}
    if path == COMPLETIONS:
        return {**completion(prompt, tokens, stream=True), **usage, **sampling}
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    return {"text": prompt, "sampling_params": params, "stream": True}


def true_ids(path: str, prompt: str, tokens: int = TOKENS) -> list[int]:
    text = render_chat([{"role": "user", "content": prompt}]) if path == CHAT else prompt
    return continue_greedily(unpack(encode(text)), tokens, ignore_eos=True)


async def kill_at(cluster: Cluster, path: str, body: dict[str, Any], stage: str, k: int = 1) -> Answer:
    """A stream whose decode is killed when it has come to `stage`."""
    holds = [await cluster.hold(server, stage, k) for server in cluster.decodes]
    answer = Answer()
    asked = spawn(ask(cluster.http, cluster.url, body, path, answer), "a stream")
    held, *others = await cluster.held(holds)
    await _read_all(answer, k if stage == "token" else 0)
    await cluster.kill(held.server)
    for other in others:  # of several choices one may be there
        await cluster.release(other)
    async with time_limit(STREAM_S):
        await asked
    return answer


async def _read_all(answer: Answer, tokens: int) -> None:
    """Wait until a client has what was written before its stream was held: most of it is there, and no more comes."""

    async def missing() -> str:
        return "" if len(answer.events) >= tokens // 2 else f"{len(answer.events)} events have come"

    await eventually(missing, STREAM_S)
    before_bytes = -1
    while before_bytes < len(answer.raw):
        before_bytes = len(answer.raw)
        await asyncio.sleep(0.1)


def check_whole(answer: Answer) -> None:
    """It says of itself that it is whole; that it is the true one is judged by the checker."""
    assert (answer.status, answer.errors, answer.done, answer.ended) == (200, [], 1, True), bytes(answer.raw[-500:])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}], ids=("greedy", "sampled"))
async def test_a_stream_goes_on_on_another_decode(resuming: Cluster, path: str, sampling: dict[str, Any]) -> None:
    answer = await kill_at(resuming, path, body_of(path, new_prompt(), **sampling), "token", 40)
    check_whole(answer)
    assert answer.comments == ["pdgate resumes: the decode server failed (reset)"]
    first, second = (await resuming.explain(answer.request_id))["attempts"]
    assert (first["verdict"], first["on_failure"]) == ("continue", "resume")
    assert second["emitted_tokens"] >= 38
    assert first["decode"] != second["decode"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_is_whole_wherever_its_decode_died(resuming: Cluster, path: str, place: str) -> None:
    """Between role chunk and first token, and after the finish chunk, before the terminator."""
    if place == "role_chunk" and path != CHAT:
        pytest.skip("only a chat has a role chunk")
    plain = {} if place == "finish_chunk" else {"logprobs": True}  # as the engine's own chat: it writes the role chunk
    check_whole(await kill_at(resuming, path, body_of(path, new_prompt(), **plain), place))


@pytest.mark.parametrize("path", ROUTES)
async def test_a_character_that_was_half_sent_is_whole(resuming: Cluster, path: str) -> None:
    prompt, at = next(found for found in map(_with_character, [path] * 200) if found is not None)
    answer = await kill_at(resuming, path, body_of(path, prompt), "token", at)
    check_whole(answer)
    assert answer.comments, "it went on"


def _with_character(path: str) -> tuple[str, int] | None:
    """A prompt whose answer has a character of several tokens, and how many tokens there are inside of it."""
    prompt = new_prompt(60)
    ids = true_ids(path, prompt)
    inside = [at for at in range(10, 80) if decode(ids[:at]).endswith("\ufffd")]
    return (prompt, inside[0]) if inside else None


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stop_string_over_the_seam_is_found(resuming: Cluster, path: str) -> None:
    prompt = new_prompt(60)
    ids = true_ids(path, prompt)
    at = next(at for at in range(20, 60) if min(ids[at - 3 : at + 3]) >= FIRST_WORD_TOKEN)
    stop = decode(ids[at - 2 : at + 1])
    truth = decode(ids)
    body = body_of(path, prompt, stop=[stop])
    answer = await kill_at(resuming, path, body, "token", at)
    check_whole(answer)
    text = answer.events[-1]["text"] if path == GENERATE else answer.text()
    assert text == truth[: truth.index(stop)]


async def test_choices_go_on_each_by_itself(resuming: Cluster) -> None:
    body = {**body_of(CHAT, new_prompt(), temperature=1.0), "n": 3}
    check_whole(await kill_at(resuming, CHAT, body, "token", 30))


async def test_logprobs_and_ids_go_on(resuming: Cluster) -> None:
    shown = {"logprobs": 2, "return_token_ids": True}
    answer = await kill_at(resuming, COMPLETIONS, body_of(COMPLETIONS, new_prompt(), **shown), "token", 30)
    check_whole(answer)
    choices = [choice for event in answer.events for choice in event["choices"]]
    tokens = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
    ids = [token for choice in choices for token in choice["token_ids"] or ()]
    assert len(tokens) == len(ids) == TOKENS


UNRESUMABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "penalties": (COMPLETIONS, {"frequency_penalty": 0.5}),
    "chat with tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    "grammar": (COMPLETIONS, {"regex": "[a-z ]+"}),
}


@pytest.mark.parametrize("name", UNRESUMABLE)
async def test_what_cannot_go_on_ends_with_one_error_at_once(resuming: Cluster, name: str) -> None:
    path, fields = UNRESUMABLE[name]
    body = body_of(path, new_prompt(), **fields)
    holds = [await resuming.hold(server, "token", 20) for server in resuming.decodes]
    answer = Answer()
    asked = spawn(ask(resuming.http, resuming.url, body, path, answer), "a stream")
    (held,) = await resuming.held(holds)
    await asyncio.sleep(0.1)
    killed = Stopwatch()
    await resuming.kill(held.server)
    async with time_limit(STREAM_S):
        await asked
    assert killed.took_s() < 2.0
    assert (answer.status, len(answer.errors), answer.done, answer.ended) == (200, 1, 0, True)
    assert "asking again is safe" in answer.errors[0]["message"]


# ---- many ------------------------------------------------------------------------------------------------------------


async def proved(cluster: Cluster) -> None:
    """Requests have succeeded on every decode, so that none of them is half open."""

    async def missing() -> str:
        prompts = [new_prompt() for _ in range(4)]
        await asyncio.gather(*(ask(cluster.http, cluster.url, chat(prompt, 3), CHAT) for prompt in prompts))
        found = [
            value for sample, value in await cluster.metrics(names=("pdgate_engine_health",)) if _is_half_open(sample)
        ]
        return "a server is half open" if any(found) else ""

    await eventually(missing, STREAM_S)


def _is_half_open(sample: Any) -> bool:
    return sample.name == "pdgate_engine_health" and sample.labels["health"] != "ready"


async def kill_under_load(
    cluster: Cluster, rng: Random, streams: int, at_ratio: float, report: list[str], tokens: int
) -> int:
    """Kill a decode when so much of `streams` streams has come; how many ran on it then."""
    await proved(cluster)
    answers = [Answer() for _ in range(streams)]
    plans = [(rng.choice(ROUTES), {"temperature": rng.choice((0, 1.0))}) for _ in answers]
    victim: EmulatedServer = rng.choice(cluster.decodes)
    other = next(server for server in cluster.decodes if server is not victim)
    work = [
        spawn(ask(cluster.http, cluster.url, body_of(path, new_prompt(), tokens, **sampling), path, answer), "a stream")
        for (path, sampling), answer in zip(plans, answers, strict=True)
    ]
    at_tokens = at_ratio * tokens

    async def missing() -> str:
        came = sum(len(answer.events) for answer in answers) / streams
        return "" if came >= at_tokens or all(each.done() for each in work) else f"{came:g} events"

    await eventually(missing, STREAM_S)
    ran = [
        answer
        for answer, each in zip(answers, work, strict=True)
        if not each.done() and answer.headers.get("x-pdgate-decode") == victim.url
    ]
    await cluster.kill(victim)
    async with time_limit(STREAM_S):
        await asyncio.gather(*work)
    for answer, (path, sampling) in zip(answers, plans, strict=True):
        if (answer.status, answer.errors, answer.done) != (200, [], 1):
            report.append(f"{path} {sampling} {answer.request_id}: {answer.status} {answer.errors} {answer.done}")
    assert other.returncode is None
    await cluster.heal()
    return len(ran)


async def test_streams_survive_kills(exact: Cluster) -> None:
    """Longer ones, so that even a client that reads late kills in the middle of most."""
    await _kills(exact, 24, (0.3, 0.7), seed=1, tokens=3 * TOKENS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
async def test_two_thousand_streams_survive_their_decodes(exact: Cluster, seed: int) -> None:
    """Fifty kills a seed, each under 44 streams: half are on the decode that dies, unless they are over by then."""
    rng = Random(seed)
    await _kills(exact, 44, [rng.uniform(0.0, 0.95) for _ in range(50)], seed)


async def _kills(cluster: Cluster, streams: int, at_ratios: Sequence[float], seed: int, tokens: int = TOKENS) -> None:
    rng, report, broken = Random(seed), list[str](), 0
    for at_ratio in at_ratios:
        broken += await kill_under_load(cluster, rng, streams, at_ratio, report, tokens)
    print(f"{len(at_ratios)} kills, {broken} streams broken, {len(report)} not whole")
    assert not report, "\n".join(report)
    assert broken > 4 * len(at_ratios), "the kills were hardly felt"
