"""A stream that breaks under its client's eyes: how it goes on, over a fleet without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from failover.recovery import Mode
from gateway.errors import GatewayError
from gateway.failover_flags import FailoverConfig
from gateway.lifecycle import Arrival, handle
from gateway.openai_api import Api
from tests.fakes import DONE, FakeClient, FakeExchange, chat_event, event, now_s, usage_event
from tests.gateway_world import World, story

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
WHOLE = "abcdefgh"
FIRST_ID = 97


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": len(WHOLE), "temperature": 0, "stream": True, **fields}


def piece(rid: str, at: int, *, finish: str | None = None) -> bytes:
    """One token of the true answer, as `/v1/completions` sends it with ids."""
    choice = {"index": 0, "text": WHOLE[at], "logprobs": None, "finish_reason": finish, "matched_stop": None}
    choices = [{**choice, "token_ids": [FIRST_ID + at]}]
    head = {"id": rid, "object": "text_completion", "created": 1700000000, "model": "tiny"}
    return event({**head, "choices": choices, "usage": None})


def pieces(body: dict[str, Any], end: int | None = None) -> list[bytes]:
    """What a decode sends for a body, which may continue: up to a token, or to the end."""
    begin = len(body["prompt"]) - len(PROMPT)
    assert body["prompt"][len(PROMPT) :] == [FIRST_ID + at for at in range(begin)], "another context"
    whole = end is None
    last = begin + body["max_tokens"] if end is None else end
    sent = [piece(body["rid"], at, finish="length" if whole and at == last - 1 else None) for at in range(begin, last)]
    ending = [usage_event(len(body["prompt"]), body["max_tokens"], body["rid"]), DONE]
    return [*sent, *(ending if whole else ())]


def true(host: str, body: dict[str, Any]) -> FakeExchange | None:
    if "prompt" not in body:
        return None
    if host.startswith("p"):
        return FakeExchange(200, piece(body["rid"], 0, finish="length") + DONE, whole=True)
    return FakeExchange(200, *pieces(body), whole=True)


def breaking(*sent: bytes) -> FakeExchange:
    """An answer whose connection breaks when its client has what was sent."""
    exchange = FakeExchange(200, *sent)
    asyncio.get_running_loop().call_later(0.5, exchange.break_off)
    return exchange


class Breaks:
    """Decodes that send some tokens of the first answers, and die then."""

    def __init__(self, *after: int, ending: tuple[bytes, ...] = ()) -> None:
        self.left = list(after)
        self.ending = ending

    def __call__(self, host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("d") and "prompt" in body and self.left:
            return breaking(*pieces(body, self.left.pop(0)), *self.ending)
        return true(host, body)


async def ask(world: World, body: dict[str, Any], api: Api = Api.COMPLETIONS, **headers: str) -> None:
    world.client = FakeClient()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    await handle(world.gw, Arrival(api, orjson.dumps(body), sent, now_s()), world.client)


def events(world: World) -> list[Any]:
    frames = [frame for frame in world.client.body.split(b"\n\n") if frame.startswith(b"data: ")]
    return [frame if frame.endswith(b"[DONE]") else orjson.loads(frame[6:]) for frame in frames]


def text(world: World) -> str:
    choices = [each["choices"] for each in events(world) if isinstance(each, dict) and each.get("choices")]
    return "".join(each[0]["text"] for each in choices)


@story
async def test_a_broken_completion_goes_on_after_its_last_token(world: World) -> None:
    world.servers.behave = Breaks(3)
    await ask(world, completion(stream_options={"include_usage": True}))
    assert text(world) == WHOLE
    shown = events(world)
    assert shown[-1] == b"data: [DONE]"
    assert shown[-2]["usage"]["prompt_tokens"] == len(PROMPT)
    assert shown[-2]["usage"]["completion_tokens"] == len(WHOLE)
    assert {each["id"] for each in shown[:-1]} == {world.record["request_id"]}
    assert len({each["created"] for each in shown[:-1]}) == 1
    assert not any("token_ids" in each["choices"][0] for each in shown[:-2])
    assert world.client.body.count(b": pdgate resumes") == 1
    decodes = [body for host, body in world.servers.calls if host.startswith("d")]
    assert [len(body["prompt"]) for body in decodes] == [len(PROMPT), len(PROMPT) + 3]
    assert [body["max_tokens"] for body in decodes] == [8, 5]
    assert len({body["rid"] for body in decodes}) == len({body["bootstrap_room"] for body in decodes}) == 2
    first, second = world.record["attempts"]
    assert (first["on_failure"], first["verdict"], first["emitted_tokens"]) == ("resume", "continue", 0)
    assert second["emitted_tokens"] == 3
    assert first["decode"] != second["decode"]


@story
async def test_each_break_goes_on_from_where_the_last_one_came_to(world: World) -> None:
    world.servers.behave = Breaks(2, 5)
    world.gw.monitor.probe_now = alive  # type: ignore[method-assign]
    await ask(world, completion())
    assert text(world) == WHOLE
    assert [each["emitted_tokens"] for each in world.record["attempts"]] == [0, 2, 5]
    assert world.client.body.count(b": pdgate resumes") == 2


async def alive(engine_id: Any) -> bool:
    """Connections break, and servers live."""
    return True


@story
async def test_a_stream_whose_end_is_missing_gets_it_without_another_attempt(world: World) -> None:
    finish = [piece("x" * 32, 7, finish="length")]

    def dies_at_the_end(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("d"):
            return breaking(*pieces(body, 7), *(each.replace(b"x" * 32, body["rid"].encode()) for each in finish))
        return true(host, body)

    world.servers.behave = dies_at_the_end
    await ask(world, completion(stream_options={"include_usage": True}))
    assert text(world) == WHOLE
    assert events(world)[-1] == b"data: [DONE]"
    assert events(world)[-2]["usage"]["completion_tokens"] == len(WHOLE)
    assert len(world.record["attempts"]) == 1


async def dead(engine_id: Any) -> bool:
    """What broke is gone."""
    return False


@story
async def test_an_answer_that_was_given_is_not_taken_back_for_its_servers_deaths(world: World) -> None:
    """Two servers ended while they worked on it: such a request is not tried again, but this one need not be."""
    world.gw.monitor.probe_now = dead  # type: ignore[method-assign]
    breaks = Breaks(3)

    def dies_twice(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("d") and not breaks.left:
            return breaking(*pieces(body)[:-2])
        return breaks(host, body)

    world.servers.behave = dies_twice
    await ask(world, completion())
    assert text(world) == WHOLE
    assert events(world)[-1] == b"data: [DONE]"
    assert [each["verdict"] for each in world.record["attempts"]] == ["continue", "closed"]


@story
async def test_what_cannot_go_on_ends_with_one_error_that_says_why(world: World) -> None:
    world.servers.behave = Breaks(3)
    await ask(world, completion(frequency_penalty=0.5))
    *_, last = events(world)
    assert "penalties count output tokens only" in last["error"]["message"]
    assert last["error"]["message"].count("asking again is safe") == 1
    assert sum("error" in each for each in events(world)) == 1
    assert b"[DONE]" not in world.client.body
    assert world.client.calls[-1] == "end"


@story
async def test_a_client_may_want_an_error_instead(world: World) -> None:
    world.servers.behave = Breaks(3)
    await ask(world, completion(), x_pdgate_on_failure="error")
    assert events(world)[-1]["error"]["code"] == "engine_failed"
    assert len(world.record["attempts"]) == 1


@story
async def test_a_client_may_want_only_what_its_operator_allows(world: World) -> None:
    with pytest.raises(GatewayError) as caught:
        await ask(world, completion(), x_pdgate_on_failure="resume_text")
    assert caught.value.status == 400
    assert caught.value.param == "x-pdgate-on-failure"
    assert "send one or more of resume, replay, error" in caught.value.message
    assert not world.servers.calls


async def no_pair_is_left(world: World) -> None:
    world.servers.behave = Breaks(3)
    await ask(world, completion())
    *before, last = events(world)
    assert [each["choices"][0]["text"] for each in before] == list("abc")
    assert last["error"]["code"] == "engine_failed"


test_no_pair_is_left_to_go_on = story(no_pair_is_left, "p0", "d0")


# ---- replay ----------------------------------------------------------------------------------------------------------

DETERMINISTIC = {"failover": FailoverConfig(deterministic=True)}


def chat_pieces(rid: str, words: str, *, whole: bool) -> list[bytes]:
    sent = [chat_event(None, rid), *(chat_event(letter, rid) for letter in words)]
    return [*sent, chat_event("", rid, finish="stop"), usage_event(400, 20, rid), DONE] if whole else sent


async def replays(world: World) -> None:
    answers = iter([("hel", False), ("hello", True)])

    def behave(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("p"):
            return None
        words, whole = next(answers)
        sent = chat_pieces(body["rid"], words, whole=whole)
        return FakeExchange(200, *sent, whole=True) if whole else breaking(*sent)

    world.servers.behave = behave
    await world.ask(temperature=0)
    assert world.text == "hello"
    roles = [each["choices"][0]["delta"].get("role") for each in events(world)[:-1] if each["choices"]]
    assert [role for role in roles if role] == ["assistant"]
    assert events(world)[-1] == b"data: [DONE]"
    assert world.client.body.count(b": pdgate replays") == 1
    assert {each["id"] for each in events(world)[:-1]} == {world.record["request_id"]}


test_a_declared_run_is_replayed = story(replays, **DETERMINISTIC)


async def diverges(world: World) -> None:
    answers = iter([("hel", False), ("help!", True)])

    def behave(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("p"):
            return None
        words, whole = next(answers)
        sent = chat_pieces(body["rid"], words if whole else "hex", whole=whole)
        return FakeExchange(200, *sent, whole=True) if whole else breaking(*sent)

    world.servers.behave = behave
    await world.ask(temperature=0)
    assert events(world)[-1]["error"]["code"] == "replay_diverged"
    assert world.client.body.count(b"error") == 2  # the field and its type: one event


test_another_answer_is_never_spliced_on = story(diverges, **DETERMINISTIC)


# ---- by text ---------------------------------------------------------------------------------------------------------


async def by_text(world: World) -> None:
    bodies = []

    def behave(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("p"):
            return None
        bodies.append(body)
        words, whole = ("hel", False) if len(bodies) == 1 else ("lo", True)
        sent = chat_pieces(body["rid"], words, whole=whole)
        return FakeExchange(200, *sent, whole=True) if whole else breaking(*sent)

    world.servers.behave = behave
    await world.ask(max_tokens=9)
    assert world.text == "hello"
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "hel"}
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["max_tokens"] == 6
    assert world.client.body.count(b'"role":"assistant"') == 1


test_text_goes_on_where_it_is_allowed = story(by_text, failover=FailoverConfig((Mode.RESUME, Mode.RESUME_TEXT)))


async def replays_slowly(world: World) -> None:
    decodes = []

    def behave(host: str, body: dict[str, Any]) -> FakeExchange | None:
        if host.startswith("p"):
            return None
        decodes.append(body["rid"])
        if len(decodes) == 1:
            return breaking(*chat_pieces(body["rid"], "hel", whole=False))
        slow, loop = FakeExchange(200), asyncio.get_running_loop()
        for number, piece in enumerate(chat_pieces(body["rid"], "hello", whole=True)):
            loop.call_later(4.0 * number, slow.send, piece)
        loop.call_later(40.0, slow.end)
        return slow

    world.servers.behave = behave
    await world.ask(temperature=0)
    assert world.text == "hello"
    assert world.client.body.count(b": pdgate replays\n\n") == 1, "it came again for twelve seconds"


test_a_slow_replay_keeps_its_client = story(replays_slowly, **DETERMINISTIC)
