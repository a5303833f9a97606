"""What a whole answer teaches, and what it does not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engines.sglang_wire import Usage
from gateway.context import Gateway
from gateway.explain import AttemptRecord
from gateway.openai_api import Api, expand, parse
from gateway.prompt import identify, request_view
from gateway.reply import Reply, SingleSink
from gateway.settle import learn
from tests.fakes import FakeClient, FakeUpstream, gateway, now_s, probed, timeless


async def learned_from(usage: Usage | None, *, took_s: float = 1.0, **body: Any) -> tuple[Gateway, AttemptRecord]:
    """A gateway after one answer with this usage, `took_s` after hand-over."""
    gw = await probed(gateway(FakeUpstream(), "p0", "d0"))
    request = parse(Api.GENERATE, orjson.dumps({"model": "tiny", **(body or {"text": "x" * 400})}))
    (unit,) = expand(request)
    prompt = await identify(gw, request.api, unit, "tiny")
    decision = await gw.decider.submit(request_view(gw, request, unit, "tiny", prompt, now_s(), now_s() + 9))
    note = AttemptRecord(decision, 1, 0, 0.0, handed_over_s=0.5)
    gw.decider.handed_over(decision)
    sink = SingleSink(Reply(FakeClient(), request, "0" * 32, 1))
    sink.usage = usage
    learn(gw, request, unit, decision, note, sink, 0.5 + took_s)
    return gw, note


def metric(gw: Gateway, name: str) -> float:
    lines = gw.metrics.text().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@timeless
async def test_token_counts_are_learned() -> None:
    gw, note = await learned_from(Usage(200, 50, 30))
    assert gw.decider.learned.bytes_per_token("tiny") == pytest.approx(2.0, rel=0.2)
    assert note.cached_tokens == 30
    assert metric(gw, "pdgate_prompt_tokens_total") == 200
    assert metric(gw, "pdgate_completion_tokens_total") == 50
    assert metric(gw, "pdgate_cached_tokens_total") == 30
    assert metric(gw, "pdgate_prefix_hit_error_tokens") == -30


@timeless
async def test_the_time_of_a_decode_step_is_learned() -> None:
    gw, _ = await learned_from(Usage(200, 101, None), took_s=2.0)
    assert ("decode", "http://d0") in gw.decider.learned.errors()


@timeless
async def test_few_steps_say_nothing_of_a_decode() -> None:
    gw, _ = await learned_from(Usage(200, 5, None))
    assert ("decode", "http://d0") not in gw.decider.learned.errors()


@timeless
async def test_ids_say_nothing_of_bytes_per_token() -> None:
    gw, _ = await learned_from(Usage(100, 5, None), input_ids=[1] * 200)
    assert gw.decider.learned.bytes_per_token("tiny") == 4.0


@timeless
async def test_an_answer_without_usage_teaches_nothing() -> None:
    gw, note = await learned_from(None)
    assert gw.decider.learned.version == 1, "the prefill alone"
    assert note.cached_tokens is None
    assert metric(gw, "pdgate_prompt_tokens_total") == 0
