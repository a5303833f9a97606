"""What gateways and engines tell of a run, turned into the checker's history; a fake world stands for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from engines import tasks
from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.tokens import decode, encode, render_chat
from engines.sglang_wire import RoomMaker
from engines.token_rule import ContextHash, pack, sampling_key, unpack
from failover.chaos import leftovers, observe
from failover.chaos.answer import DONE, Answer
from failover.chaos.checker import Outcome, check, outcome
from failover.chaos.history import Death, Ending, History, Request
from failover.chaos.load import CHAT, COMPLETIONS, GENERATE, Asked
from failover.chaos.observe import Observer, limits_of
from failover.chaos.processes import Processes
from failover.chaos.reading import Secret, Truth, is_sampled, request
from failover.chaos.scenario import FleetPlan
from failover.chaos.world import Unable

LIMITS = limits_of(FleetPlan())
PROMPT = "tell me more of the sea"
TOKENS = 12
SECRET, OTHER = b"its secret", b"another's"
URLS = {"http://p": "prefill0", "http://d": "decode0"}


def ids_of(prompt: str, tokens: int, prefill_key: bytes = b"", decode_key: bytes = b"") -> list[int]:
    """The true answer to a prompt by the token rule."""
    packed = encode(prompt)
    found = [ContextHash(packed, prefill_key).next_token(False)]
    while len(found) < tokens:
        found.append(ContextHash(packed + pack(found), decode_key).next_token(False))
    return found


def truth() -> Truth:
    return Truth(LIMITS, URLS, {name: Secret(SECRET, False) for name in URLS.values()})


def told(rid: str = "rid0", decided_s: float = 0.1, ended_s: float | None = 0.5, index: int = 0) -> dict[str, Any]:
    attempt = {"rid": rid, "room": "77", "choice_index": index, "prefill": "http://p", "decode": "http://d"}
    times = {"decided_s": decided_s, "first_output_s": None, "ended_s": ended_s}
    return {**attempt, **times, "outcomes": [], "considered": "much more"}


def failure(leg: str, kind: str, message: str = "", status: int | None = None) -> dict[str, Any]:
    engine = {"prefill": "http://p", "decode": "http://d"}[leg]
    return {"engine": engine, "leg": leg, "kind": kind, "stage": "dispatched", "status": status, "message": message}


def chat_answer(ids: list[int], *, temperature: float = 0.0, sent_s: float = 1.0, number: int = 7) -> Answer:
    """A whole stream of a chat that answers with these ids, two to an event."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "ignore_eos": True}
    asked = Asked(number, 0.9, "stream", CHAT, {**body, "stream": True, "temperature": temperature})
    answer = Answer(asked, "gateway0", sent_s, 2.0, 200, {"content-type": "text/event-stream"})
    for at in range(0, len(ids), 2):
        delta = {"content": decode(ids[: at + 2]).removeprefix(decode(ids[:at]))}
        finish = "length" if at + 2 >= TOKENS else None
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "matched_stop": None}
        answer.read.append((1.5 + at / 100, {"choices": [choice]}))
    answer.read.append((1.9, DONE))
    answer.ended = True
    return answer


def violations(read: Request | None) -> list[str]:
    assert read is not None
    return [str(each) for each in check(History((read,)), decode)]


CHATTED = render_chat([{"role": "user", "content": PROMPT}])


def test_a_true_answer_is_read_as_such() -> None:
    answer = chat_answer(ids_of(CHATTED, TOKENS))
    read = request(answer, [told()], truth())
    assert violations(read) == []
    assert read is not None
    assert (read.name, read.kind, read.gateway) == ("request 7 (stream)", "stream", "gateway0")
    assert read.ending is Ending.WHOLE
    [choice] = read.choices
    [attempt] = choice.attempts
    assert (attempt.prefill, attempt.decode, attempt.room) == ("prefill0", "decode0", 77)
    assert (attempt.began_s, attempt.ended_s) == (1.1, 1.5)
    assert choice.prompt_ids == tuple(unpack(encode(CHATTED)))
    assert outcome(read) is Outcome.WHOLE


@pytest.mark.parametrize(
    ("leg", "kind", "message", "aborted"),
    [
        ("decode", "aborted", "Aborted", True),
        ("prefill", "aborted", "Aborted", False),
        ("decode", "reset", "Aborted", False),
        ("decode", "status", "Decode transfer failed for request\n...: Aborted by AbortReq.", True),
        ("decode", "status", "Decode handshake failed for request ...: Aborted by AbortReq.", False),
        ("decode", "aborted", "Decode handshake failed for request ...: Aborted by AbortReq.", False),
        ("decode", "aborted", "Decode transfer failed for request\n...: Aborted by AbortReq.", True),
        ("decode", "aborted", "Decode transfer failed for request ...: Lost connection", False),
    ],
)
def test_who_was_aborted_by_others_is_known_by_its_decodes_words(
    leg: str, kind: str, message: str, aborted: bool
) -> None:
    failed = {**told(), "outcomes": [failure(leg, kind, message)]}
    read = request(chat_answer(ids_of(CHATTED, TOKENS)), [failed, told("rid1", 0.6, 0.9)], truth())
    assert read is not None
    assert [attempt.aborted for attempt in read.choices[0].attempts] == [aborted, False]


BROKE = failure("decode", "reset", "Connection reset by peer")
ANSWERED_500 = failure("prefill", "status", "Injected by /emulator/fault", 500)


@pytest.mark.parametrize(
    ("outcomes", "engine"),
    [
        ([], ""),
        ([BROKE], "decode0"),
        ([ANSWERED_500], "prefill0"),
        ([failure("decode", "connect", "refused")], "decode0"),
        ([failure("decode", "truncated")], "decode0"),
        ([failure("prefill", "timeout", "no output for 5 s")], "prefill0"),
        ([BROKE, ANSWERED_500], ""),
        ([BROKE, failure("decode", "status", "gone", 503)], "decode0"),
        ([failure("decode", "status", "max_tokens must be positive", 400)], ""),
        ([failure("decode", "status", "Lost connection with prefill instance", 500)], ""),
        ([failure("decode", "status", "KVTransferError(bootstrap_room=7)", 500)], ""),
        ([failure("prefill", "status", "Prefill transfer failed for request rank=0", 500)], ""),
        ([failure("decode", "reset", "in KVPoll.Bootstrapping")], ""),
        ([ANSWERED_500, failure("decode", "status", "Decode handshake failed", 500)], ""),
        ([failure("decode", "aborted", "Aborted")], ""),
        ([failure("decode", "stream_error", "something", 500)], ""),
    ],
)
def test_who_failed_an_attempt_is_known_where_its_outcomes_leave_no_doubt(
    outcomes: list[dict[str, Any]], engine: str
) -> None:
    first, second = {**told(), "outcomes": outcomes}, {**told("rid1", 0.6, 0.9), "first_output_s": 0.7}
    read = request(chat_answer(ids_of(CHATTED, TOKENS)), [first, second], truth())
    assert read is not None
    assert [each.failed_on for each in read.choices[0].attempts] == [engine, ""]
    assert [each.had_output for each in read.choices[0].attempts] == [False, True]


@pytest.mark.parametrize(
    ("headers", "again_s"),
    [
        ({}, None),
        ({"Retry-After": "2", "x-should-retry": "true"}, 2.0),
        ({"retry-after": "2", "x-should-retry": "false"}, None),
        ({"retry-after": "2"}, None),
        ({"x-should-retry": "true"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "x-should-retry": "true"}, None),
    ],
)
def test_when_to_ask_again_is_what_client_libraries_read(headers: dict[str, str], again_s: float | None) -> None:
    answer = Answer(Asked(7, 0.9, "whole", CHAT, {"messages": []}), "gateway0", 1.0, 2.0, 503, headers)
    read = request(answer, [], truth())
    assert read is not None
    assert read.again_s == again_s


def test_one_wrong_event_is_seen() -> None:
    ids = ids_of(CHATTED, TOKENS)
    answer = chat_answer(ids)
    del answer.read[2]
    assert violations(request(answer, [told()], truth()))


def test_a_sampled_answer_is_keyed_by_its_engine_and_its_attempt() -> None:
    key, other = sampling_key(SECRET, "rid0"), sampling_key(OTHER, "rid0")
    answer = chat_answer(ids_of(CHATTED, TOKENS, key, key), temperature=1.0)
    assert violations(request(answer, [told()], truth())) == []
    assert violations(request(answer, [told(rid="rid1")], truth()))
    elsewhere = chat_answer(ids_of(CHATTED, TOKENS, key, other), temperature=1.0)
    assert violations(request(elsewhere, [told()], truth()))


def test_what_nobody_tells_of_is_judged_only_where_it_is_greedy() -> None:
    greedy = chat_answer(ids_of(CHATTED, TOKENS))
    assert violations(request(greedy, None, truth())) == []
    sampled = chat_answer(ids_of(CHATTED, TOKENS), temperature=1.0)
    assert request(sampled, None, truth()) is None
    assert request(sampled, [told()], Truth(LIMITS, URLS)) is None, "a secret that is not known"
    sampled.read.clear()
    sampled.ended, sampled.status = False, None
    read = request(sampled, None, truth())
    assert read is not None
    assert outcome(read) is Outcome.LOST
    assert is_sampled(sampled, LIMITS)
    assert not is_sampled(greedy, LIMITS)


def test_objects_of_generate_repeat_what_came() -> None:
    ids = ids_of(PROMPT, 3)
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    asked = Asked(1, 0.0, "generate", GENERATE, {"text": PROMPT, "sampling_params": params, "stream": True})
    answer = Answer(asked, "gateway0", 0.0, 1.0, 200, {"content-type": "text/event-stream"}, ended=True)
    prompt_tokens = len(unpack(encode(PROMPT)))
    for count in (1, 2, 3):
        finish = {"type": "length"} if count == 3 else None
        meta = {"finish_reason": finish, "prompt_tokens": prompt_tokens, "completion_tokens": count, "cached_tokens": 0}
        text = decode(ids[:count])
        answer.read.append((count / 10, {"text": text, "output_ids": ids[:count], "meta_info": meta}))
    answer.read.append((0.4, DONE))
    assert violations(request(answer, [told()], truth())) == []
    answer.read[1][1]["text"] = "other"
    assert any("form" in each for each in violations(request(answer, [told()], truth())))


def test_an_error_and_what_is_no_event() -> None:
    answer = chat_answer(ids_of(CHATTED, TOKENS)[:4])
    answer.read[-1] = (1.9, {"error": {"message": "the server failed", "type": "server_error", "code": "reset"}})
    read = request(answer, [told()], truth())
    assert violations(read) == []
    assert read is not None
    assert outcome(read) is Outcome.BROKEN
    answer.read.insert(1, (1.6, b"{half"))
    assert any("{half" in each for each in violations(request(answer, [told()], truth())))


def test_a_body_that_an_engine_refuses_has_no_choices() -> None:
    asked = Asked(1, 0.0, "whole", COMPLETIONS, {"max_tokens": 3})
    answer = Answer(asked, "gateway0", 0.0, 1.0, 400, {"content-type": "application/json"}, ended=True)
    answer.read.append((0.5, {"error": {"message": "no prompt", "type": "invalid_request_error"}}))
    read = request(answer, None, truth())
    assert violations(read) == []
    assert read is not None
    assert (read.choices, outcome(read)) == ((), Outcome.REFUSED)


def test_limits_follow_the_flags_of_decodes() -> None:
    assert LIMITS.context_tokens == 32_768
    assert LIMITS.chat_defaults == MODEL_DEFAULTS
    plan = FleetPlan(engine_flags=("--context-length", "100"), decode_flags=("--sampling-defaults", "openai"))
    limits = limits_of(plan)
    assert (limits.context_tokens, limits.chat_defaults) == (100, {})


# -- a whole run ------------------------------------------------------------------------------------------------------


@dataclass
class Gateway:
    name: str
    role: str = "gateway"
    deaths_s: list[float] = field(default_factory=list)
    running: bool = True
    frozen: bool = False
    launched_s: float = 90.0


class FakeWorld:
    """What an observer asks of `Processes`; `told` answers by what a test put into `explains`."""

    def __init__(self) -> None:
        self.plan = FleetPlan()
        self.links = self
        self.names = URLS
        self.zero_s = 100.0
        self.gateway = Gateway("gateway0")
        self.children = {"gateway0": self.gateway}
        self.explains: dict[str, Any] = {}
        self.asked: list[str] = []
        self.on_start: Any = None

    def of(self, *roles: str) -> list[Any]:
        return [self.gateway] if "gateway" in roles else []

    async def admin(self, name: str, method: str, path: str) -> Mapping[str, Any]:
        return {"secret": SECRET.hex(), "deterministic": False}

    async def told_of(self, path: str) -> Mapping[str, Any]:
        rid = path.rpartition("/")[2]
        self.asked.append(rid)
        if not self.gateway.running:
            raise Unable("it does not answer")
        known = self.explains.get(rid)
        return {"error": "not found"} if known is None else {"attempts": known}

    async def told(self, name: str, path: str) -> Mapping[str, Any]:
        return await self.told_of(path)


def observer(world: FakeWorld, *, early: bool = False) -> Observer:
    return Observer(cast("Processes", world), early=early)


async def test_attempts_are_asked_for_when_an_answer_is_over_and_again_where_one_had_not_ended() -> None:
    world = FakeWorld()
    seen, answer = observer(world), chat_answer(ids_of(CHATTED, TOKENS))
    world.explains[answer.rid] = [told(ended_s=None)]
    seen.ended(answer)
    await _rest()
    [read] = seen.requests
    assert read.choices[0].attempts[0].ended_s is None
    world.explains[answer.rid] = [told(), told("rid1", 0.6, 0.9)]
    await seen.finish()
    [read] = seen.requests
    assert [attempt.ended_s for attempt in read.choices[0].attempts] == [1.5, 1.9]
    assert world.asked == [answer.rid] * 2
    assert (seen.untold, seen.unexplained) == (0, 0)


def left_early() -> Answer:
    """Of a client that has read nothing."""
    answer = chat_answer([])
    answer.read.clear()
    answer.ended, answer.left = False, True
    return answer


async def test_who_is_closed_asks_nothing_any_more() -> None:
    world = FakeWorld()
    seen, answer = observer(world), left_early()
    seen.ended(answer)
    await _rest()
    closing = asyncio.ensure_future(seen.close())
    await asyncio.sleep(0)
    closing.cancel()
    seen.ended(chat_answer(ids_of(CHATTED, TOKENS)))
    await _rest()
    assert (world.asked, tasks.running()) == ([], ())


async def test_one_that_leaves_is_asked_about_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_LEFT_S", 0.1)
    world = FakeWorld()
    seen, answer = observer(world), left_early()
    seen.ended(answer)
    await _rest()
    assert world.asked == []
    world.explains[answer.rid] = [told()]
    await seen.finish()
    assert [read.ending for read in seen.requests] == [Ending.LEFT]


async def test_a_gateway_that_knows_nothing_is_at_fault_only_while_it_lives() -> None:
    world = FakeWorld()
    seen = observer(world)
    seen.ended(chat_answer(ids_of(CHATTED, TOKENS)))
    await seen.finish()
    assert (seen.unexplained, len(seen.requests)) == (1, 1)
    world.gateway.deaths_s = [101.5]
    assert seen.unexplained == 0
    assert seen.deaths() == (Death("gateway0", 1.5),)
    world.gateway.deaths_s = [100.5]
    assert seen.unexplained == 1, "it was asked after that death"
    world.gateway.launched_s = 102.0
    assert seen.unexplained == 0, "it ended in order since, and began anew"


async def test_a_gateway_may_tell_at_the_end_what_it_could_not_tell_before() -> None:
    world = FakeWorld()
    key = sampling_key(SECRET, "rid0")
    seen, answer = observer(world), chat_answer(ids_of(CHATTED, TOKENS, key, key), temperature=1.0)
    seen._truth = truth()
    seen.ended(answer)
    await _rest()
    assert (seen.untold, seen.unexplained) == (1, 1)
    world.explains[answer.rid] = [told()]
    await seen.finish()
    assert (seen.untold, seen.unexplained) == (0, 0)
    assert violations(seen.requests[0]) == []


@pytest.mark.parametrize("early", [True, False])
async def test_streams_of_gateways_that_may_die_are_asked_about_early(early: bool) -> None:
    world = FakeWorld()
    key = sampling_key(SECRET, "rid0")
    seen, answer = observer(world, early=early), chat_answer(ids_of(CHATTED, TOKENS, key, key), temperature=1.0)
    seen._truth = truth()
    world.explains[answer.rid] = [told()]
    seen.began(answer)
    await _rest()
    world.gateway.running, world.gateway.deaths_s = False, [101.8]
    seen.ended(answer)
    await seen.finish()
    assert (seen.untold, seen.unexplained) == (0 if early else 1, 0)
    assert [violations(read) for read in seen.requests] == ([[]] if early else [])


async def test_a_started_engine_is_asked_for_its_secret() -> None:
    world = FakeWorld()
    seen = observer(world)

    @dataclass
    class Engine:
        name: str = "decode0"
        role: str = "decode"
        launched_s: float = 99.0

    await world.on_start(Engine())
    await world.on_start(Gateway("gateway0"))
    assert seen._truth.secrets == {"decode0": Secret(SECRET, False)}


async def _rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# -- what is left -----------------------------------------------------------------------------------------------------


def test_gauges_are_summed_and_the_unknown_is_none() -> None:
    text = (
        "# HELP pdgate_live_bookings x\n"
        "pdgate_live_bookings 2.0\n"
        'pdgate_kv_unaccounted_tokens{engine="a",role="decode"} NaN\n'
        'pdgate_kv_unaccounted_tokens{engine="b",role="decode"} -3.0\n'
        'pdgate_kv_unaccounted_tokens{engine="c",role="decode"} 0.5\n'
        "pdgate_live_bookings_total 9.0\n"
    )
    found = leftovers.gauges(text)
    assert (found["pdgate_live_bookings"], found["pdgate_kv_unaccounted_tokens"]) == (2, 4)
    assert set(found) == set(leftovers.GAUGES)
    assert sum(found.values()) == 6


# -- gateways that die ------------------------------------------------------------------------------------------------


class LedgerWorld(FakeWorld):
    """One engine holds KV for a room of the gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = RoomMaker(Random(1), 4711)
        self.room = str(self.rooms.next_room())
        self.readyz: dict[str, Any] = {"engines": [], "replicas": {"process_id": 4711}}

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.zero_s

    async def admin(self, name: str, method: str, path: str) -> Mapping[str, Any]:
        return {"by_room": {self.room: 7, "99": 1}, "cache_tokens": 3, "total_tokens": 50}

    async def told(self, name: str, path: str) -> Mapping[str, Any]:
        return self.readyz


@pytest.mark.parametrize("replicas", [{"process_id": 4711}, {"process_id": None}, None])
async def test_what_a_dead_gateway_left_is_seen_where_it_had_told_what_its_rooms_begin_with(replicas: Any) -> None:
    world = LedgerWorld()
    world.readyz["replicas"] = replicas
    now_s = asyncio.get_running_loop().time()
    world.zero_s, world.gateway.launched_s = now_s, now_s - 5.0
    seen, engine = observer(world), Gateway("decode0", "decode")
    await seen._look(world.gateway)  # type: ignore[arg-type]
    await seen._sample(engine)  # type: ignore[arg-type]
    assert (seen.orphans, seen.roomless) == ((), 0)
    world.gateway.deaths_s = [now_s + 1.0]
    await seen._sample(engine)  # type: ignore[arg-type]
    assert [sample.used_tokens for sample in seen.samples] == [8, 8]
    if replicas is None or replicas["process_id"] is None:
        assert (seen.orphans, seen.roomless) == ((), 1)
        return
    [orphan] = seen.orphans
    assert (orphan.gateway, orphan.engine, orphan.room) == ("gateway0", "decode0", world.room)
    assert (orphan.died_s, orphan.seen_s) == (pytest.approx(1.0), pytest.approx(0.0, abs=0.5))
    assert seen.roomless == 0


async def test_what_engines_hold_of_attempts_that_are_over_is_seen() -> None:
    world = LedgerWorld()
    world.zero_s = asyncio.get_running_loop().time() - 20.0
    seen, answer = observer(world), chat_answer(ids_of(CHATTED, TOKENS))
    world.room = "77"  # that of the attempt, which was over at 1.5 s
    await seen._sample(Gateway("decode0", "decode"))  # type: ignore[arg-type]
    assert seen.held == ()
    seen._note(answer, [told()])
    [held] = seen.held
    assert (held.engine, held.room, held.seen_s) == ("decode0", "77", held.since_s)
    seen._note(answer, [told(ended_s=None)])
    assert seen.held == ()


async def test_what_a_new_process_says_is_not_taken_for_the_old_ones() -> None:
    world = LedgerWorld()
    seen = observer(world)

    async def told(name: str, path: str) -> Mapping[str, Any]:
        world.gateway.launched_s += 1.0
        return world.readyz

    world.told = told  # type: ignore[method-assign]
    await seen._look(world.gateway)  # type: ignore[arg-type]
    world.gateway.deaths_s = [world.gateway.launched_s + 9.0]
    assert seen.roomless == 1
