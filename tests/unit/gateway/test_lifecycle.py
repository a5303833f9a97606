"""The story of one request over a fleet without sockets: every ending, and that nothing is left after it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from engines.errors import UpstreamError
from engines.types import EngineId, FailureKind, Health
from gateway import lifecycle, relay
from gateway.config import DeadlineConfig, RetryConfig
from gateway.errors import GatewayError
from gateway.lifecycle import Arrival
from gateway.openai_api import Api
from tests.fakes import (
    DONE,
    Answer,
    FakeExchange,
    chat_event,
    event,
    now_s,
)
from tests.gateway_world import (
    CHAT,
    REFUSED,
    World,
    dying,
    failed,
    first_calls,
    only_host,
    story,
)

# ---- whole answers ---------------------------------------------------------------------------------------------------


@story
async def test_a_stream_is_answered(world: World) -> None:
    await world.ask()
    assert world.text == "hello"
    assert world.events[-1] == b"[DONE]"
    assert world.client.calls[0] == "begin"
    assert world.client.calls[-1] == "end"
    (shown,) = world.record["attempts"]
    headers = world.client.headers
    assert headers["x-pdgate-request-id"] == world.record["request_id"] == world.events[0]["id"]
    assert (headers["x-pdgate-prefill"], headers["x-pdgate-decode"]) == (shown["prefill"], shown["decode"])
    assert headers["x-pdgate-attempts"] == "1"
    assert world.record["status"] == 200
    assert shown["handed_over_s"] is not None
    assert len(world.servers.calls) == 2


@story
async def test_a_whole_answer_is_answered(world: World) -> None:
    await world.ask(stream=False)
    assert world.client.calls == ["whole"]
    answer = orjson.loads(world.client.body)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["id"] == world.record["request_id"]


@story
async def test_both_legs_get_one_rid_and_one_room(world: World) -> None:
    await world.ask(rid="mine", bootstrap_room=1)
    (_, one), (_, other) = world.servers.calls
    assert one == other
    assert one["rid"] not in ("mine", world.record["request_id"])
    assert one["bootstrap_room"] > 1
    assert world.gw.explain.find("mine") is world.gw.explain.newest()


@story
async def test_a_request_that_is_over_leaves_nothing_of_its_prompt_in_its_record(world: World) -> None:
    world.servers.behave = first_calls("d", REFUSED)
    await world.ask()
    record = world.gw.explain.newest()
    assert record is not None
    assert len(record.attempts) == 2
    assert not any(attempt.decision.request.blocks for attempt in record.attempts)
    held = world.gw.decider.owners.index
    assert sum(held.held_blocks(attempt.decision.prefill.engine_id) for attempt in record.attempts) > 0


@story
async def test_a_second_turn_goes_where_its_prefix_is(world: World) -> None:
    await world.ask()
    first = world.record["attempts"][0]
    await world.ask(messages=[*CHAT["messages"], {"role": "assistant", "content": "x"}])
    again = world.record["attempts"][0]
    assert again["prefill"] == first["prefill"]
    assert again["hit_tokens"] > 0


@story
async def test_samples_share_one_prefill_and_one_answer(world: World) -> None:
    await world.ask(n=3)
    assert len(set(world.servers.hosts("p"))) == 1
    assert len({body["rid"] for _, body in world.servers.calls}) == 3
    texts = dict.fromkeys(range(3), "")
    for each in world.events[:-1]:
        texts[each["choices"][0]["index"]] += each["choices"][0]["delta"]["content"]
    assert texts == {0: "hello", 1: "hello", 2: "hello"}
    assert world.client.body.count(DONE) == 1


# ---- refusals at the door --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"top_logprobs": 200}, 400, "unsupported_field", "top_logprobs"),
        ({"model": "nope"}, 404, "model_not_found", "model"),
        ({"metadata": orjson.loads(b"[" * 300 + b"]" * 300)}, 400, "invalid_json", None),
        ({"tools": orjson.loads(b"[" * 900 + b"]" * 900)}, 400, "invalid_json", None),
    ],
    ids=["messages", "poison", "model", "nested", "nested tools"],
)
def test_what_cannot_be_served_is_refused_by_name(
    body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    async def refused(world: World) -> None:
        raw = (
            b"{"
            + b",".join(orjson.dumps(name) + b":" + dumped(value) for name, value in {**CHAT, **body}.items())
            + b"}"
        )
        with pytest.raises(GatewayError) as caught:
            await lifecycle.handle(world.gw, Arrival(Api.CHAT, raw, {}, now_s()), world.client)
        error = caught.value
        assert (error.status, error.code, error.param) == (status, code, param)
        assert error.headers["x-pdgate-attempts"] == "0"
        assert world.servers.calls == []

    story(refused)()


def dumped(value: Any) -> bytes:
    """JSON of any depth."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        depth, inner = 0, value
        while inner:
            depth, inner = depth + 1, inner[0]
        return b"[" * (depth + 1) + b"]" * (depth + 1)
    return orjson.dumps(value)


@story
async def test_without_a_pair_it_is_a_503(world: World) -> None:
    for name in ("d0", "d1"):
        world.gw.fleet.set_health(EngineId(f"http://{name}"), Health.SUSPECTED, "gone")
    error = await world.error()
    assert (error.status, error.code) == (503, "no_pair_available")
    assert world.record["status"] == 503


# ---- another attempt -------------------------------------------------------------------------------------------------


@story
async def test_servers_that_were_all_lost_at_once_may_come_back(world: World) -> None:
    lost: list[float] = []

    def all_lost(host: str, body: dict[str, Any]) -> Answer | None:
        if not host.startswith("d") or lost:
            return None
        lost.append(now_s())
        for name in ("d0", "d1"):
            world.gw.fleet.set_health(EngineId(f"http://{name}"), Health.SUSPECTED, "reset")
        return REFUSED

    world.servers.behave = all_lost
    await world.ask()  # they are looked at, and found well
    assert world.text == "hello"
    assert len(world.record["attempts"]) == 2


@pytest.mark.parametrize("role", ["p", "d"])
@pytest.mark.parametrize("how", ["status", "refused", "dies", "error event"])
def test_a_leg_that_fails_before_the_commit_is_tried_elsewhere(role: str, how: str) -> None:
    async def retried(world: World) -> None:
        bad: dict[str, Answer] = {
            "status": failed(),
            "refused": REFUSED,
            "dies": dying(),
            "error event": FakeExchange(200, event({"error": {"message": "m", "code": 500}}), DONE, whole=True),
        }
        answer = bad[how]

        def behave(host: str, body: dict[str, Any]) -> Answer | None:
            if len(world.servers.calls) > 2:
                return None
            # The sibling of a leg that fails waits until it is aborted.
            return answer if host.startswith(role) else FakeExchange(200)

        world.servers.behave = behave
        await world.ask()
        assert world.text == "hello"
        first, second = world.record["attempts"]
        assert first["verdict"] == "retry"
        failing = "prefill" if role == "p" else "decode"
        assert first["outcomes"][0]["leg"] == failing
        assert first[failing] != second[failing]
        assert first["rid"] != second["rid"]
        assert first["room"] != second["room"]
        assert world.client.headers["x-pdgate-attempts"] == "2"
        assert {each["id"] for each in world.events[:-1]} == {world.record["request_id"]}

    story(retried)()


@story
async def test_role_only_output_of_a_failed_attempt_is_not_seen(world: World) -> None:
    decode = FakeExchange(200, chat_event(None))
    world.servers.behave = first_calls("d", decode)
    asyncio.get_running_loop().call_later(0.5, decode.break_off)
    await world.ask()
    assert len(world.record["attempts"]) == 2
    roles = [each for each in world.events[:-1] if each["choices"] and "role" in each["choices"][0]["delta"]]
    assert len(roles) == 1


@story
async def test_attempts_are_bounded(world: World) -> None:
    world.servers.behave = only_host("d0", lambda body: failed())
    await world.ask()
    world.servers.behave = lambda host, body: failed(message="secret path") if host.startswith("d") else None
    error = await world.error()
    assert (error.status, error.code, error.safe_to_retry) == (502, "engine_failed", True)


def test_the_number_of_attempts_is_the_configured_one() -> None:
    async def tried(world: World) -> None:
        world.servers.behave = lambda host, body: failed() if host.startswith("d") else None
        await world.error()
        assert len(world.record["attempts"]) == 2

    story(tried, "p0", "p1", "p2", "d0", "d1", "d2", retry=RetryConfig(2))()


@story
async def test_a_callers_fault_goes_to_the_client_in_the_engines_words(world: World) -> None:
    world.servers.behave = lambda host, body: failed(400, "The input is longer than the model's context length")
    error = await world.error()
    assert (error.status, error.code, error.safe_to_retry) == (400, "context_length_exceeded", False)
    assert "longer than" in error.message
    assert len(world.record["attempts"]) == 1


@story
async def test_an_operators_fault_keeps_the_engines_words_inside(world: World) -> None:
    world.servers.behave = lambda host, body: failed(401, "key abc") if host.startswith("d") else None
    error = await world.error()
    assert (error.status, error.code) == (502, "engine_misconfigured")
    assert "abc" not in error.message


@story
async def test_each_verdict_is_noted_on_its_own_attempt(world: World) -> None:
    """The attempts of several samples run at the same time."""

    def behave(host: str, body: dict[str, Any]) -> Answer | None:
        decodes = len(world.servers.hosts("d"))
        if host.startswith("d") and decodes == 1:
            exchange = FakeExchange(200)
            asyncio.get_running_loop().call_later(0.5, exchange.break_off)
            return exchange
        if host.startswith("d") and decodes == 2:
            exchange = FakeExchange(200, *[chat_event(letter, body["rid"]) for letter in "slow"])
            asyncio.get_running_loop().call_later(
                5.0, lambda: (exchange.send(chat_event("", finish="stop"), DONE), exchange.end())
            )
            return exchange
        return None

    world.servers.behave = behave
    await world.ask(n=2)
    verdicts = {(each["choice_index"], bool(each["outcomes"])): each["verdict"] for each in world.record["attempts"]}
    assert verdicts == {(0, True): "retry", (0, False): "", (1, False): ""}


# ---- after the commit ------------------------------------------------------------------------------------------------


@story
async def test_a_stream_that_breaks_off_ends_with_one_error(world: World) -> None:
    decode = FakeExchange(200, chat_event(None), chat_event("a"))
    world.servers.behave = first_calls("d", decode)
    asyncio.get_running_loop().call_later(0.5, decode.break_off)
    await world.ask()
    assert world.text == "a"
    assert [each for each in world.events if "error" in each] == [world.events[-1]]
    assert world.client.calls[-1] == "end"
    assert len(world.record["attempts"]) == 1
    assert world.record["error"]


@story
async def test_a_prefill_that_dies_after_hand_over_changes_nothing(world: World) -> None:
    decode = FakeExchange()
    world.servers.behave = lambda host, body: decode if host.startswith("d") else dying()
    asyncio.get_running_loop().call_later(0.1, decode.send, chat_event("a", finish="stop"), DONE)
    asyncio.get_running_loop().call_later(0.2, decode.end)
    await world.ask()
    assert world.text == "a"
    assert world.events[-1] == b"[DONE]"


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_request_out_of_time_is_a_504() -> None:
    async def late(world: World) -> None:
        world.servers.behave = lambda host, body: FakeExchange()
        begun_s = now_s()
        error = await world.error()
        assert (error.status, error.code) == (504, "deadline_exceeded")
        assert now_s() - begun_s == pytest.approx(3.0, abs=0.1)

    story(late, deadlines=DeadlineConfig(request_s=3.0, first_output_s=100.0))()


def test_a_silent_server_is_suspected_like_a_broken_one() -> None:
    async def silent(world: World) -> None:
        world.servers.behave = lambda host, body: None if len(world.servers.calls) > 2 else FakeExchange()
        suspected: list[str] = []
        world.gw.monitor._listener.fleet_changed = suspected.append  # type: ignore[method-assign]
        await world.ask()
        first = world.record["attempts"][0]
        assert [each["kind"] for each in first["outcomes"]] == ["timeout"]
        assert first["prefill"] in suspected
        assert world.text == "hello"

    story(silent, deadlines=DeadlineConfig(first_output_s=2.0))()


# ---- servers that die under a request --------------------------------------------------------------------------------


@story
async def test_a_request_that_ends_two_servers_is_refused_for_a_while(world: World) -> None:
    def kill(host: str, body: dict[str, Any]) -> Answer | None:
        if not host.startswith("d"):
            return None
        world.servers.down.add(f"http://{host}")
        return dying()

    world.servers.behave = kill
    error = await world.error()
    assert (error.status, error.code, error.safe_to_retry) == (502, "poison_suspected", False)
    assert len(world.record["attempts"]) == 2
    world.servers.down.clear()
    world.servers.behave = lambda host, body: None
    await asyncio.sleep(1.0)
    assert (await world.error()).code == "poison_suspected"
    await world.ask(messages=[{"role": "user", "content": "something else"}])
    assert world.text == "hello"


# ---- clients that go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.5])
def test_a_client_that_goes_frees_both_servers(stream: bool, after_s: float) -> None:
    async def goes(world: World) -> None:
        world.servers.behave = lambda host, body: FakeExchange()
        task = asyncio.ensure_future(world.ask(stream=stream))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.gw.decider.bookings.live() == 0
        await asyncio.sleep(0.05)
        aborts = [call for call in world.servers.fetched if call[1].endswith("/abort_request")]
        assert len(aborts) == len(world.servers.calls)
        if world.servers.calls:
            assert world.record["status"] == 499

    story(goes)()


@story
async def test_a_client_that_goes_in_the_middle_of_a_write_is_a_499(world: World) -> None:
    async def gone(data: bytes) -> None:
        raise ConnectionResetError

    decode = FakeExchange(200, chat_event("a"))
    world.servers.behave = lambda host, body: decode if host.startswith("d") else None
    world.client.write = gone  # type: ignore[method-assign]
    raw = orjson.dumps({**CHAT, "stream": True})
    asyncio.get_running_loop().call_later(0.5, decode.send, chat_event("b"))
    with pytest.raises(ConnectionError):
        await lifecycle.handle(world.gw, Arrival(Api.CHAT, raw, {}, now_s()), world.client)
    assert world.record["status"] == 499


@story
async def test_one_failed_sample_ends_the_others(world: World) -> None:
    def behave(host: str, body: dict[str, Any]) -> Answer | None:
        if not host.startswith("d"):
            return None
        return failed(400, "no") if len(world.servers.hosts("d")) == 2 else FakeExchange()

    world.servers.behave = behave
    error = await world.error(n=3)
    assert error.status == 400


# ---- calls for any one server ----------------------------------------------------------------------------------------


@story
async def test_a_relayed_call_goes_to_the_first_server_that_is_up(world: World) -> None:
    world.servers.down.add("http://p0")
    assert (await relay.relay(world.gw, "/tokenize", b"{}"))[0] == 200
    assert world.servers.fetched[-1][1] == "http://p1/tokenize"


@story
async def test_a_relayed_call_that_may_have_been_done_is_not_repeated(world: World) -> None:
    async def lost(method: str, url: str, **_: Any) -> Any:
        raise UpstreamError(FailureKind.RESET, "lost")

    world.servers.fetch = lost  # type: ignore[method-assign]
    with pytest.raises(GatewayError) as caught:
        await relay.relay(world.gw, "/tokenize", b"{}")
    assert (caught.value.status, caught.value.definite) == (502, False)


@story
async def test_a_relayed_call_without_servers_is_a_503(world: World) -> None:
    world.servers.down.update(f"http://{name}" for name in ("p0", "p1", "d0", "d1"))
    with pytest.raises(GatewayError) as caught:
        await relay.relay(world.gw, "/tokenize", b"{}")
    assert caught.value.status == 503
