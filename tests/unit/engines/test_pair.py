"""Both legs of one attempt: what is sent, in which order things are told, and that each leg ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from engines import pair
from engines.base import Attempt, Call, Order
from engines.errors import UpstreamError
from engines.pair import LegAnswer, LegEvent, LegFailed, LegOutput, PairRun
from engines.sglang import SglangStrategy
from engines.sse_frames import EventKind, data_of
from engines.types import EngineView, FailureKind, Leg, Outcome
from tests.fakes import DONE, RID, Answer, FakeExchange, FakeUpstream, attempt, chat_answer, chat_event, event

SMALL = chat_event("", finish="length") + DONE
"""What a prefill answers in a stream."""


class Two:
    """A run over two scripted answers."""

    def __init__(
        self,
        *,
        stream: bool = True,
        prefill: Answer | None = None,
        decode: Answer | None = None,
        logprobs: bool = False,
    ) -> None:
        asked = {"path": "/generate", "return_logprob": True, "logprob_start_len": 0} if logprobs else {}
        self.answers = {Leg.PREFILL: prefill or FakeExchange(), Leg.DECODE: decode or FakeExchange()}
        self.upstream = FakeUpstream(self._answer)
        self.failures: list[Outcome] = []
        self.run = PairRun(attempt(stream=stream, **asked), SglangStrategy(), self.upstream, self.failures.append)  # type: ignore[arg-type]
        self.run.start()

    def _answer(self, url: str, body: bytes) -> Answer:
        return self.answers[Leg.PREFILL if url.startswith("http://p") else Leg.DECODE]

    @property
    def prefill(self) -> FakeExchange:
        return exchange(self.answers[Leg.PREFILL])

    @property
    def decode(self) -> FakeExchange:
        return exchange(self.answers[Leg.DECODE])


def exchange(answer: Answer) -> FakeExchange:
    assert isinstance(answer, FakeExchange)
    return answer


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Two]]:
    made: list[Two] = []

    def build(**options: object) -> Two:
        made.append(Two(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for two in made:
        for leg in two.run.open_legs:
            two.run.close(leg)
        await two.run.wait_ended(1.0)


async def soon(run: PairRun) -> LegEvent:
    async with asyncio.timeout(1.0):
        return await run.next_event()


async def events(run: PairRun, count: int) -> list[LegEvent]:
    return [await soon(run) for _ in range(count)]


async def settle() -> None:
    """Let everything that can happen without us happen."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(run: PairRun) -> bool:
    async with asyncio.timeout(1.0):
        return await run.wait_ended(1.0)


def no_more(run: PairRun) -> bool:
    return run._events.empty()


# ---- the good way ----------------------------------------------------------------------------------------------------


async def test_both_legs_are_sent_at_once_with_identical_bodies(make: Callable[..., Two]) -> None:
    two = make()
    await settle()
    (_, decode_url, decode_body, _), (_, prefill_url, prefill_body, _) = two.upstream.opened
    assert (decode_url, prefill_url) == ("http://d0/v1/chat/completions", "http://p0/v1/chat/completions")
    assert decode_body == prefill_body
    assert orjson.loads(prefill_body or b"")["rid"] == RID


async def test_events_come_in_order_of_arrival(make: Callable[..., Two]) -> None:
    two = make()
    two.decode.send(chat_event(None))
    first = await soon(two.run)
    two.prefill.send(SMALL)
    two.prefill.end()
    second = await soon(two.run)
    two.decode.send(chat_event("a") + chat_event("b"))
    third = await soon(two.run)
    two.decode.send(SMALL)
    two.decode.end()
    last = await events(two.run, 2)
    assert first == LegOutput([(EventKind.ROLE_ONLY, chat_event(None))])
    assert second == LegAnswer(Leg.PREFILL, SMALL)
    assert third == LegOutput([(EventKind.CONTENT, chat_event("a")), (EventKind.CONTENT, chat_event("b"))])
    finish = chat_event("", finish="length")
    assert last == [LegOutput([(EventKind.FINISH, finish), (EventKind.DONE, DONE)]), LegAnswer(Leg.DECODE, b"")]
    assert await ended(two.run)
    assert two.prefill.closed
    assert two.decode.closed
    assert two.failures == []


async def test_a_frame_that_comes_in_pieces_is_passed_on_whole(make: Callable[..., Two]) -> None:
    two = make()
    frame = chat_event("abc")
    two.decode.send(frame[:7], frame[7:30], frame[30:])
    assert await soon(two.run) == LegOutput([(EventKind.CONTENT, frame)])


async def test_a_whole_answer_is_one_event(make: Callable[..., Two]) -> None:
    body = chat_answer()
    two = make(stream=False, decode=FakeExchange(200, body[:9], body[9:], whole=True))
    assert await soon(two.run) == LegAnswer(Leg.DECODE, body)
    assert two.run.open_legs == (Leg.PREFILL,)


# ---- failures --------------------------------------------------------------------------------------------------------


def failure(found: LegEvent) -> Outcome:
    assert isinstance(found, LegFailed)
    return found.outcome


@pytest.mark.parametrize("leg", list(Leg))
async def test_a_refused_connection_is_definite(make: Callable[..., Two], leg: Leg) -> None:
    refused = UpstreamError(FailureKind.CONNECT, "refused", definite=True)
    two = make(**{leg.value: refused})
    outcome = failure(await soon(two.run))
    assert (outcome.leg, outcome.kind, outcome.definite) == (leg, FailureKind.CONNECT, True)
    assert outcome.engine_id == ("http://p0" if leg is Leg.PREFILL else "http://d0")
    assert two.failures == [outcome]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_status_is_judged_by_its_body(make: Callable[..., Two], stream: bool) -> None:
    two = make(stream=stream, decode=FakeExchange(400, b'{"error": {"message": "too long"}}', whole=True))
    outcome = failure(await soon(two.run))
    assert (outcome.kind, outcome.status, outcome.message) == (FailureKind.STATUS, 400, "too long")


async def test_a_200_that_ended_in_abort_is_a_failure(make: Callable[..., Two]) -> None:
    two = make(stream=False, prefill=FakeExchange(200, chat_answer(finish="abort"), whole=True))
    outcome = failure(await soon(two.run))
    assert (outcome.leg, outcome.kind) == (Leg.PREFILL, FailureKind.ABORTED)


async def test_a_stream_without_its_end_is_truncated(make: Callable[..., Two]) -> None:
    two = make(decode=FakeExchange(200, chat_event("a"), whole=True))
    assert isinstance(await soon(two.run), LegOutput)
    assert failure(await soon(two.run)).kind is FailureKind.TRUNCATED


async def test_a_stream_that_breaks_off_is_reset(make: Callable[..., Two]) -> None:
    two = make()
    two.decode.send(chat_event("a"))
    two.decode.break_off()
    assert isinstance(await soon(two.run), LegOutput)
    outcome = failure(await soon(two.run))
    assert (outcome.kind, outcome.definite) == (FailureKind.RESET, False)
    await settle()
    assert two.run.open_legs == (Leg.PREFILL,)


BAD = [
    pytest.param(event({"error": {"message": "boom", "code": 500}}), FailureKind.STREAM_ERROR, id="error"),
    pytest.param(chat_event("", finish="abort"), FailureKind.ABORTED, id="abort"),
]


@pytest.mark.parametrize(("bad", "kind"), BAD)
async def test_an_error_event_fails_its_leg_at_once_and_what_came_before_is_kept(
    make: Callable[..., Two], bad: bytes, kind: FailureKind
) -> None:
    two = make()
    two.decode.send(chat_event("a") + bad + chat_event("never"))
    assert await soon(two.run) == LegOutput([(EventKind.CONTENT, chat_event("a"))])
    assert failure(await soon(two.run)).kind is kind
    assert Leg.DECODE in two.run.open_legs, "its exchange has not ended"
    two.decode.send(DONE)
    two.decode.end()
    await settle()
    assert two.run.open_legs == (Leg.PREFILL,)
    assert no_more(two.run)


@pytest.mark.parametrize("leg", list(Leg))
@pytest.mark.parametrize(("bad", "kind"), BAD)
@pytest.mark.parametrize("again", ["bad", "reset", "truncated"])
async def test_a_leg_fails_once(make: Callable[..., Two], leg: Leg, bad: bytes, kind: FailureKind, again: str) -> None:
    two = make()
    failing = two.decode if leg is Leg.DECODE else two.prefill
    failing.send(bad)
    if again == "bad":
        failing.send(bad)
    if again == "reset":
        failing.break_off()
    failing.end()
    assert failure(await soon(two.run)).kind is kind
    await settle()
    assert no_more(two.run)
    assert len(two.failures) == 1
    assert leg not in two.run.open_legs


async def test_a_connection_lost_after_the_terminator_takes_nothing_away(make: Callable[..., Two]) -> None:
    two = make()
    two.decode.send(chat_event("a") + SMALL)
    two.decode.break_off()
    assert isinstance(await soon(two.run), LegOutput)
    assert await soon(two.run) == LegAnswer(Leg.DECODE, b"")
    assert two.failures == []


@pytest.mark.parametrize(
    "stream",
    [
        DONE,
        chat_event(None) + DONE,
        chat_event("a") + DONE,
        event({"choices": [], "usage": {"prompt_tokens": 1}}) + DONE,
    ],
    ids=["nothing", "role only", "cut short", "usage only"],
)
async def test_a_terminator_without_a_finish_is_no_whole_answer(make: Callable[..., Two], stream: bytes) -> None:
    two = make()
    two.decode.send(stream)
    two.decode.end()
    found = await soon(two.run)
    assert isinstance(found, LegFailed), found
    assert found.outcome.kind is FailureKind.GARBLED
    await settle()
    assert no_more(two.run)


@pytest.mark.parametrize("after", [chat_event("GHOST"), b'data: {"error": {"message": "late"}}\n\n', DONE])
@pytest.mark.parametrize("together", [True, False])
async def test_what_comes_after_the_terminator_does_not_exist(
    make: Callable[..., Two], after: bytes, together: bool
) -> None:
    two = make()
    two.decode.send(*([SMALL + after] if together else [SMALL, after]))
    two.decode.end()
    output, answer = await events(two.run, 2)
    assert output == LegOutput([(EventKind.FINISH, chat_event("", finish="length")), (EventKind.DONE, DONE)])
    assert answer == LegAnswer(Leg.DECODE, b"")
    await settle()
    assert no_more(two.run)


async def test_comments_of_an_engine_are_no_output(make: Callable[..., Two]) -> None:
    two = make()
    two.decode.send(b": ping\n\n", b": ping\n\n" + chat_event("a"))
    assert await soon(two.run) == LegOutput([(EventKind.CONTENT, chat_event("a"))])


async def test_a_stream_answered_with_something_else_is_garbled(make: Callable[..., Two]) -> None:
    two = make(decode=FakeExchange(200, chat_answer(), whole=True))
    two.decode.headers = {"content-type": "application/json"}
    found = await soon(two.run)
    assert isinstance(found, LegFailed)
    assert found.outcome.kind is FailureKind.GARBLED


@pytest.mark.parametrize("stream", [True, False])
async def test_only_200_is_an_answer(make: Callable[..., Two], stream: bool) -> None:
    two = make(stream=stream, decode=FakeExchange(302, chat_answer(), whole=True))
    found = await soon(two.run)
    assert isinstance(found, LegFailed)
    assert (found.outcome.kind, found.outcome.status) == (FailureKind.STATUS, 302)


async def test_a_prefills_stream_without_end_is_bounded(
    make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "FRAME_LIMIT_BYTES", 1000)
    two = make()
    two.prefill.send(*[chat_event("x" * 100)] * 20)
    found = await soon(two.run)
    assert isinstance(found, LegFailed)
    assert (found.outcome.leg, found.outcome.kind) == (Leg.PREFILL, FailureKind.GARBLED)


async def test_a_bug_in_a_strategy_is_a_failure_and_no_silence(
    make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SglangStrategy, attempt: Attempt) -> Call:
        raise TypeError("Recursion limit reached")

    monkeypatch.setattr(SglangStrategy, "prefill_call", broken)
    two = make()
    outcome = failure(await soon(two.run))
    assert (outcome.leg, outcome.kind) == (Leg.PREFILL, FailureKind.GARBLED)
    assert outcome.message == "TypeError: Recursion limit reached"


async def test_failures_are_told_when_nobody_asks_for_events(make: Callable[..., Two]) -> None:
    two = make()
    two.decode.break_off()
    two.prefill.break_off()
    assert await ended(two.run)
    assert {outcome.leg for outcome in two.failures} == set(Leg)


# ---- letting go ------------------------------------------------------------------------------------------------------


async def test_unread_output_is_bounded(make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_UNREAD_OUTPUTS", 3)
    two = make()
    two.decode.send(*[chat_event(str(number)) for number in range(20)])
    await settle()
    assert two.decode.taken == 4, "three wait for the client, one in hand"
    await soon(two.run)
    await settle()
    assert two.decode.taken == 5


async def test_a_slow_reader_gets_everything_in_order(
    make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_UNREAD_OUTPUTS", 2)
    frames = [chat_event(str(number)) for number in range(9)]
    frames.append(chat_event("", finish="length"))
    two = make(decode=FakeExchange(200, *frames, DONE, whole=True))
    got = [found for found in await events(two.run, 12) if isinstance(found, LegOutput)]
    assert [frame for output in got for _, frame in output.frames] == [*frames, DONE]


async def test_dropped_output_is_read_to_its_end_and_thrown_away(
    make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_UNREAD_OUTPUTS", 2)
    two = make()
    two.decode.send(*[chat_event(str(number)) for number in range(50)])
    await settle()
    two.run.drop_output()
    two.decode.send(*[chat_event("late")] * 50, DONE)
    two.decode.end()
    two.prefill.send(SMALL)
    two.prefill.end()
    assert await ended(two.run)
    assert two.decode.taken == 101
    assert two.run._events.qsize() <= 2 + 1 + 2, "what was unread, one in hand, two answers"


async def test_closing_drops_the_connection(make: Callable[..., Two]) -> None:
    two = make()
    await settle()
    two.run.close(Leg.DECODE)
    two.run.close(Leg.DECODE)
    await settle()
    assert two.decode.closed
    assert two.run.open_legs == (Leg.PREFILL,)
    assert two.failures == [], "our own doing is no failure of the engine"


async def test_waiting_for_the_end_is_bounded(make: Callable[..., Two]) -> None:
    two = make()
    assert not await two.run.wait_ended(0.001)
    assert two.run.open_legs == (Leg.DECODE, Leg.PREFILL), "the decode first"
    for leg in Leg:
        two.run.close(leg)
    assert await ended(two.run)


async def test_a_cancelled_wait_for_events_loses_none(make: Callable[..., Two]) -> None:
    two = make()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await two.run.next_event()
    two.decode.send(chat_event("a"))
    assert isinstance(await soon(two.run), LegOutput)


async def test_an_abort_names_the_rid_and_its_answer_means_nothing(make: Callable[..., Two]) -> None:
    two = make()
    await two.run.post_abort(Leg.PREFILL)
    two.upstream.down.add("http://d0")
    await two.run.post_abort(Leg.DECODE)
    assert [(call[1], orjson.loads(call[2] or b"")) for call in two.upstream.fetched] == [
        ("http://p0/abort_request", {"rid": RID}),
        ("http://d0/abort_request", {"rid": RID}),
    ]
    assert two.run.open_legs == (Leg.DECODE, Leg.PREFILL)


# ---- output that needs the prefill's answer --------------------------------------------------------------------------


def generated(*prompt: int, finish: object = None, text: str = "a") -> dict[str, Any]:
    known = [[-1.0, token, None] for token in prompt]
    return {"text": text, "meta_info": {"id": RID, "finish_reason": finish, "input_token_logprobs": known}}


LENGTH = {"type": "length", "length": 1}


async def test_output_is_as_it_came_where_nothing_is_needed_of_the_prefill(make: Callable[..., Two]) -> None:
    two = make(prefill=FakeExchange(200, SMALL, whole=True))
    assert not two.run.needs_prefill_answer
    assert isinstance(await soon(two.run), LegAnswer)
    frames = [(EventKind.CONTENT, event(generated(5)))]
    assert two.run.merged_frames(frames) is frames
    assert two.run.merged_answer(b"body") == b"body"


async def test_a_stream_is_completed_from_the_prefills_answer(make: Callable[..., Two]) -> None:
    two = make(logprobs=True, prefill=FakeExchange(200, event(generated(5, 6, finish=LENGTH)) + DONE, whole=True))
    assert two.run.needs_prefill_answer
    assert isinstance(await soon(two.run), LegAnswer)
    (_, merged), done = two.run.merged_frames([(EventKind.CONTENT, event(generated())), (EventKind.DONE, DONE)])
    assert orjson.loads(data_of(merged))["meta_info"]["input_token_logprobs"] == [[-1.0, 5, None], [-1.0, 6, None]]
    assert done == (EventKind.DONE, DONE)


async def test_a_whole_answer_is_completed_from_the_prefills(make: Callable[..., Two]) -> None:
    two = make(
        stream=False, logprobs=True, prefill=FakeExchange(200, orjson.dumps(generated(5, finish=LENGTH)), whole=True)
    )
    assert isinstance(await soon(two.run), LegAnswer)
    merged = orjson.loads(two.run.merged_answer(orjson.dumps(generated(finish=LENGTH))))
    assert merged["meta_info"]["input_token_logprobs"] == [[-1.0, 5, None]]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_that_does_not_say_what_is_needed_has_failed(make: Callable[..., Two], stream: bool) -> None:
    answer = {"text": "a", "meta_info": {"finish_reason": LENGTH}}
    said = event(answer) + DONE if stream else orjson.dumps(answer)
    two = make(stream=stream, logprobs=True, prefill=FakeExchange(200, said, whole=True))
    outcome = failure(await soon(two.run))
    assert (outcome.leg, outcome.kind) == (Leg.PREFILL, FailureKind.GARBLED)
    await settle()
    assert no_more(two.run), "and has not answered"


async def test_what_is_needed_may_be_longer_than_an_event_of_a_decode(
    make: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "FRAME_LIMIT_BYTES", 1000)
    long = event(generated(*range(300), finish=LENGTH)) + DONE
    two = make(logprobs=True, prefill=FakeExchange(200, long, whole=True))
    assert isinstance(await soon(two.run), LegAnswer)
    two = make(prefill=FakeExchange(200, long, whole=True))
    assert failure(await soon(two.run)).kind is FailureKind.GARBLED


# ---- one after the other ---------------------------------------------------------------------------------------------


class InTurn(SglangStrategy):
    """A kind of server whose decode is told what its prefill answered."""

    order = Order.SEQUENTIAL

    def decode_call(self, attempt: Attempt, prefill_answer: bytes | None) -> Call:
        assert prefill_answer is not None
        return Call("http://d0/x", b"after " + prefill_answer, {})

    def abort_call(self, view: EngineView, rid: str) -> Call:
        raise AssertionError("not asked for")


async def in_turn(prefill: Answer) -> tuple[PairRun, FakeUpstream]:
    decode = FakeExchange(200, chat_answer("decoded"), whole=True)
    upstream = FakeUpstream(lambda url, body: prefill if url.startswith("http://p") else decode)
    run = PairRun(attempt(stream=False), InTurn(), upstream)  # type: ignore[arg-type]
    run.start()
    await settle()
    return run, upstream


async def test_a_decode_is_built_from_its_prefills_answer() -> None:
    answer = chat_answer("kv is here")
    prefill = FakeExchange()
    run, upstream = await in_turn(prefill)
    assert [call[1] for call in upstream.opened] == ["http://p0/v1/chat/completions"]
    prefill.send(answer)
    prefill.end()
    assert await events(run, 2) == [LegAnswer(Leg.PREFILL, answer), LegAnswer(Leg.DECODE, chat_answer("decoded"))]
    assert upstream.opened[1][2] == b"after " + answer


@pytest.mark.parametrize(
    "prefill",
    [FakeExchange(500, b"boom", whole=True), UpstreamError(FailureKind.CONNECT, "refused", definite=True)],
    ids=["status", "refused"],
)
async def test_a_failed_prefill_ends_the_decode_that_waits_for_it(prefill: Answer) -> None:
    run, upstream = await in_turn(prefill)
    assert failure(await soon(run)).leg is Leg.PREFILL
    assert await ended(run)
    assert len(upstream.opened) == 1
    assert no_more(run)


async def test_closing_a_prefill_ends_the_decode_that_waits_for_it() -> None:
    run, _ = await in_turn(FakeExchange())
    run.close(Leg.PREFILL)
    assert await ended(run)
