"""What clients ask: at Poisson times, of every kind, valid for an engine, no two prompts alike, the same for a seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

import pytest

from engines.emulator import parse
from engines.emulator.draw import MODEL_DEFAULTS
from engines.emulator.tokens import decode
from engines.timing import PROFILES
from engines.token_rule import TOKEN_BYTES, unpack
from failover.chaos.load import KINDS, LONG_PROMPT_TOKENS, POISON, TRACE_BLOCK_TOKENS, Asked, requests
from failover.chaos.scenario import LoadPlan, ScenarioError

PROFILE = PROFILES["tiny"]
SERVER = parse.Limits(PROFILE.context_tokens, PROFILE.max_total_tokens, MODEL_DEFAULTS)
BLOCK_TOKENS = 64
MIXED = LoadPlan(mix=dict.fromkeys(KINDS, 1.0), duration_s=(20, 60))


def understood(asked: Asked) -> parse.Request:
    return parse.parse_request(parse.Api(asked.path), asked.body, SERVER)


def of(kind: str, **fields: Any) -> tuple[Asked, ...]:
    return requests(LoadPlan(mix={kind: 1.0}, **fields), 1, long=False)


def test_the_same_seed_asks_the_same() -> None:
    assert requests(MIXED, 1, long=False) == requests(MIXED, 1, long=False)
    assert requests(MIXED, 1, long=False) != requests(MIXED, 2, long=False)


def test_requests_come_by_chance_at_the_planned_rate() -> None:
    for long, load_s in ((False, 50.0), (True, 200.0)):
        times = [each.at_s for each in requests(LoadPlan((50, 200), rate_per_s=20), 3, long=long)]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] < load_s
        assert len(times) == pytest.approx(20 * load_s, rel=0.1)
        gaps = [second - first for first, second in pairwise(times)]
        assert pstdev(gaps) == pytest.approx(mean(gaps), rel=0.1), "of an exponential distribution both are alike"


def test_kinds_come_by_their_weights() -> None:
    counts = Counter(each.kind for each in requests(LoadPlan((100, 100), mix={"stream": 3, "whole": 1}), 1, long=False))
    assert counts["stream"] / counts["whole"] == pytest.approx(3, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_takes_every_kind(kind: str) -> None:
    asked = of(kind)
    assert len(asked) > 100
    for each in asked:
        request = understood(each)
        rule = request.items[0].sampling.rule
        assert each.kind == kind
        assert 5 <= rule.max_new_tokens <= 120
        assert rule.ignore_eos is (kind != "stops")
        assert request.items[0].sampling.draw.greedy is (kind not in ("sampled", "seeded"))
        assert request.model == "emulated" or kind == "generate"


@pytest.mark.parametrize(
    ("kind", "true"),
    [
        ("stream", lambda all_: all(each.stream for each in all_)),
        ("stream", lambda all_: {each.include_usage for each in all_} == {True, False}),
        ("whole", lambda all_: not any(each.stream for each in all_)),
        ("completion", lambda all_: {each.api for each in all_} == {parse.Api.COMPLETIONS}),
        ("completion", lambda all_: {each.stream for each in all_} == {True, False}),
        ("generate", lambda all_: {each.api for each in all_} == {parse.Api.GENERATE}),
        ("generate", lambda all_: {each.stream for each in all_} == {True, False}),
        ("several", lambda all_: {len(each.items) for each in all_} == {2, 3}),
        ("several", lambda all_: {each.stream for each in all_} == {True, False}),
        ("sampled", lambda all_: len({each.items[0].sampling.draw.parameters["temperature"] for each in all_}) > 10),
        ("seeded", lambda all_: len({each.items[0].sampling.draw.seed for each in all_}) == len(all_)),
        ("stops", lambda all_: all(len(each.items[0].sampling.rule.stop) == 3 for each in all_)),
        ("tools", lambda all_: all("weather" in each.items[0].text for each in all_)),
        ("long", lambda all_: min(each.items[0].prompt_tokens for each in all_) > PROFILE.prefill.chunk_tokens),
    ],
)
def test_a_kind_is_what_its_name_says(kind: str, true: Callable[[Sequence[parse.Request]], bool]) -> None:
    assert true([understood(each) for each in of(kind)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("long", "shared", "poison")])
def test_prompts_are_as_long_as_planned(kind: str) -> None:
    lengths = [_user_tokens(each) for each in of(kind, prompt_tokens=(50, 60), duration_s=(30, 30))]
    assert set(lengths) == set(range(50, 61))


def _user_tokens(asked: Asked) -> int:
    body = asked.body
    text = body["messages"][0]["content"] if "messages" in body else body.get("prompt") or body["text"]
    return len(text.encode())


def test_long_prompts_are_long() -> None:
    lengths = [_user_tokens(each) for each in of("long")]
    assert LONG_PROMPT_TOKENS[0] <= min(lengths) < max(lengths) <= LONG_PROMPT_TOKENS[1]


def test_no_prompt_begins_as_another_unless_it_is_shared() -> None:
    asked = [each for each in requests(MIXED, 1, long=True) if each.kind != "poison"]
    begins = Counter(_beginning(each) for each in asked if each.kind != "shared")
    assert max(begins.values()) == 1
    shared = Counter(_beginning(each) for each in asked if each.kind == "shared")
    assert len(shared) == 4
    assert min(shared.values()) > 1
    assert len({understood(each).items[0].prompt for each in asked}) == len(asked)


def _beginning(asked: Asked) -> bytes:
    return understood(asked).items[0].prompt[: BLOCK_TOKENS * TOKEN_BYTES]


def test_poison_is_always_the_same_prompt() -> None:
    asked = of("poison")
    prompts = {understood(each).items[0].text for each in asked}
    assert len(prompts) == 1
    assert POISON in prompts.pop()


def test_clients_leave_streams_as_often_as_planned() -> None:
    asked = requests(LoadPlan((100, 100), leave_ratio=0.3), 1, long=False)
    streams = [each for each in asked if each.body["stream"]]
    left = [each for each in streams if each.leaves_after is not None]
    assert len(left) / len(streams) == pytest.approx(0.3, abs=0.05)
    assert all(each.leaves_after is None for each in asked if not each.body["stream"])
    assert {each.leaves_after for each in left} >= {0, 1, 2, 3}
    assert all(0 <= (each.leaves_after or 0) <= each.body["max_tokens"] // 2 + 1 for each in left)


def test_who_is_asked_to_leave_does() -> None:
    asked = of("leaves")
    assert all(each.leaves_after is not None for each in asked)
    assert {each.leaves_after for each in asked if not each.body["stream"]} == {0}
    assert all(each.leaves_after is None for each in of("stream"))


def test_another_model_may_be_asked_for() -> None:
    asked = requests(LoadPlan(), 1, long=False, model="real")
    assert {each.body["model"] for each in asked} == {"real"}


# -- traces ---------------------------------------------------------------------------------------------------------

TRACED = LoadPlan((4, 40), prompt_tokens=(20, 1100), output_tokens=(2, 9), trace="some", trace_speed=2.0)


def row(timestamp: int, length: int, output: int, *ids: int) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids})


TRACE = "\n".join([row(11000, 1100, 30, 7, 8, 9), "", row(10000, 700, 1, 7, 8), row(19000, 5, 5), row(90000, 30, 3, 4)])


def test_a_trace_gives_times_lengths_and_what_is_shared() -> None:
    asked = requests(TRACED, 1, long=True, trace=TRACE)
    assert [each.at_s for each in asked] == [0.0, 0.5, 4.5]
    assert [_user_tokens(each) for each in asked] == [700, 1100, 20]
    assert [each.body["max_tokens"] for each in asked] == [2, 9, 5]
    first, second = (each.body["messages"][0]["content"] for each in asked[:2])
    assert first == second[:700]
    assert second[:TRACE_BLOCK_TOKENS] != second[TRACE_BLOCK_TOKENS : 2 * TRACE_BLOCK_TOKENS]
    for each in asked:
        assert decode(unpack(understood(each).items[0].prompt))
    assert len(requests(TRACED, 1, long=False, trace=TRACE)) == 2, "only what comes within the load"


@pytest.mark.parametrize("line", ["x", "[]", "{}", row(1, 2, 3).replace("1", '"a"'), row(1, 2, 3).replace("[]", "7")])
def test_a_trace_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ScenarioError, match=r"load.trace: line 2 is not a JSON object with timestamp"):
        requests(TRACED, 1, long=True, trace=f"{row(1, 2, 3)}\n{line}")
