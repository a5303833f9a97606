"""A scenario on a real fleet: what is refused, what is mapped and bounded, and what its clients ask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from failover.chaos import real_plan, scenario_file
from failover.chaos.faults import FAULTS
from failover.chaos.fleet_file import of_urls, parse
from failover.chaos.load import Asked
from failover.chaos.real_fleet import RealFleet
from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario, ScenarioError

FLEET = RealFleet(
    "lab",
    ("http://10.0.0.1:1", "http://10.0.0.1:2"),
    decodes=("http://10.0.0.2:1", "http://10.0.0.2:2", "http://10.0.0.2:3"),
    proxies={"gateway0>decode0": "127.0.0.1:9100", "gateway0>decode2": "127.0.0.1:9102"},
)
KINDS = (
    "stream",
    "whole",
    "completion",
    "generate",
    "several",
    "sampled",
    "seeded",
    "stops",
    "tools",
    "long",
    "shared",
)
LOAD = LoadPlan((10, 60), 50.0, dict.fromkeys((*KINDS, "leaves"), 1.0), (20, 4_000), (5, 4_000))


EXAMPLES = Path(__file__).parents[4] / "examples"
SHIPPED = sorted((EXAMPLES / "chaos-real").glob("*.toml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_scenario_can_be_done_on_the_shipped_fleet(file: Path) -> None:
    fleet = parse((EXAMPLES / "fleets" / "staging.toml").read_text(), "staging")
    for long in (False, True):
        fitted = real_plan.fitted(scenario_file.parse(file.read_text(), file.stem, FAULTS), fleet)
        assert real_plan.planned(fitted, fleet, 1, long=long)
        every = real_plan.asked(fitted, fleet, 1, long=long, trace="", model="m")
        assert {each.kind for each in every} == set(fitted.load.mix)
    assert len(SHIPPED) == 2


def scenario(*faults: FaultPlan, load: LoadPlan = LOAD) -> Scenario:
    return Scenario("s", "a", "p", FleetPlan(2, 4, 2), load, faults)


def asked(some: Scenario, fleet: RealFleet = FLEET, trace: str = "") -> tuple[Asked, ...]:
    return real_plan.asked(real_plan.fitted(some, fleet), fleet, 1, long=False, trace=trace, model="m")


def test_everything_that_cannot_be_done_is_told_at_once() -> None:
    faults = (
        FaultPlan("kill", "decode0"),
        FaultPlan("silent", "gateway0>decode0"),
        FaultPlan("silent", "gateway0>decode1"),
        FaultPlan("reset", "gateway0>decode0", phase="token:5"),
        FaultPlan("flush", "redis"),
        FaultPlan("cut", "prefill0>decode0"),
    )
    with pytest.raises(ScenarioError) as refused:
        real_plan.fitted(scenario(*faults, load=replace(LOAD, mix={"stream": 1, "poison": 1})), FLEET)
    assert refused.value.field == "on the real fleet lab"
    told = str(refused.value).split("; ")
    assert "faults[0]: kill needs processes that are ours" in told[0]
    assert "faults[2].target: there is no proxy in gateway0>decode1" in str(refused.value)
    assert "faults[3].phase: only emulated engines can be held at token:5" in str(refused.value)
    assert "faults[4]: flush needs" in str(refused.value)
    assert "faults[5].target: there is no proxy in prefill0>decode0; it has client>gateway0" in str(refused.value)
    assert "load.mix.poison: " in str(refused.value)
    assert "faults[1]" not in str(refused.value)


def test_the_fleet_is_the_real_one_and_its_bounds_hold() -> None:
    fitted = real_plan.fitted(scenario(), FLEET)
    assert fitted.fleet == FleetPlan(0, 3, 2)
    assert (fitted.load.rate_per_s, fitted.load.prompt_tokens, fitted.load.output_tokens) == (
        5.0,
        (20, 2_000),
        (5, 256),
    )
    assert "generate" not in fitted.load.mix
    assert fitted.load.mix["completion"] == 2.0
    assert real_plan.fitted(fitted, FLEET) == fitted, "a record's scenario is replayed as it is"
    slow = replace(LOAD, rate_per_s=0.5, prompt_tokens=(20, 30), output_tokens=(5, 6))
    same = real_plan.fitted(scenario(load=slow), FLEET).load
    assert (same.rate_per_s, same.prompt_tokens, same.output_tokens) == (0.5, (20, 30), (5, 6))


def test_wildcards_mean_links_with_a_proxy_only() -> None:
    faults = (
        FaultPlan("reset", "all gateway0>*", at_s=1),
        FaultPlan("silent", "gateway*>decode*", at_s=2, every_s=0.1),
        FaultPlan("cut", "all client>*", at_s=0.5),
    )
    planned = real_plan.planned(real_plan.fitted(scenario(*faults), FLEET), FLEET, 1, long=False)
    assert [each.target for each in planned[:4]] == [
        "client>gateway0",
        "client>gateway1",
        "gateway0>decode0",
        "gateway0>decode2",
    ]
    assert {each.target for each in planned[4:]} == {"gateway0>decode0", "gateway0>decode2"}


def test_clients_ask_in_words_and_only_what_any_gateway_has() -> None:
    every = asked(scenario())
    assert {each.path for each in every} == {"/v1/chat/completions", "/v1/completions"}
    assert {each.kind for each in every} == {*KINDS, "leaves"} - {"generate"}
    for each in every:
        assert each.body["model"] == "m"
        prompt = each.body["messages"][0]["content"] if "messages" in each.body else each.body["prompt"]
        assert 20 <= len(prompt.split()) <= 2_000 + (512 if each.kind == "shared" else 0)
        assert each.body["max_tokens"] <= 256
    starts = {str(each.body)[:120] for each in every if each.kind == "stream"}
    assert len(starts) == sum(each.kind == "stream" for each in every), "each prompt differs at its beginning"
    assert asked(scenario()) == every
    assert 20 < len(every) < 90, "5 per second"


def test_a_trace_that_is_too_much_is_refused() -> None:
    row = {"input_length": 30, "output_length": 9, "hash_ids": [1]}
    many = "\n".join(json.dumps({**row, "timestamp": ms}) for ms in range(0, 9_000, 100))
    load = replace(LOAD, trace="t")
    with pytest.raises(ScenarioError, match=r"load.trace_speed: 90 requests in 10 s; the fleet's max_rate_per_s is 5"):
        asked(scenario(load=load), trace=many)
    few = "\n".join(json.dumps({**row, "timestamp": ms}) for ms in range(0, 9_000, 300))
    assert len(asked(scenario(load=load), trace=few)) == 30


def test_what_pdgate_is_asked_has_a_name_of_its_run_and_shows_ids_where_it_can() -> None:
    every = [real_plan.for_pdgate(each, "1a2b") for each in asked(scenario())]
    assert len({each.body["rid"] for each in every}) == len(every)
    assert all(each.body["rid"].startswith("chaos-1a2b-") for each in every)
    shown = [each for each in every if each.body.get("return_token_ids")]
    assert {each.path for each in shown} == {"/v1/chat/completions", "/v1/completions"}
    assert not any(each.body["stream"] for each in shown if each.path == "/v1/chat/completions"), "SGLang refuses that"
    assert any(each.body["stream"] for each in shown)
    assert len(shown) < len(every) / 2


def test_references_are_whole_answers_of_greedy_prompts() -> None:
    every = asked(scenario())
    before = real_plan.references(every, "1a2b", with_rid=True)
    assert {each.kind for each in before} == {
        *("stream", "whole", "completion", "several", "stops", "long", "shared", "leaves"),
    }
    by_number = {each.number: each for each in every}
    for each in before:
        body: dict[str, Any] = dict(each.body)
        assert body.pop("rid") == f"chaos-1a2b-before-{each.number:06d}"
        assert body.pop("stream") is False
        assert each.leaves_after is None
        like = {k: v for k, v in by_number[each.number].body.items() if k not in ("n", "stream", "stream_options")}
        assert body == like
    assert all("rid" not in each.body for each in real_plan.references(every, "1a2b", with_rid=False))


def test_by_urls_alone_only_clients_can_be_disturbed() -> None:
    fleet = of_urls(["http://127.0.0.1:1"], [])
    some = scenario(FaultPlan("reset", "client>gateway*"))
    assert [each.target for each in real_plan.planned(real_plan.fitted(some, fleet), fleet, 1, long=False)] == [
        "client>gateway0"
    ]
    with pytest.raises(ScenarioError, match="there is no proxy"):
        real_plan.fitted(scenario(FaultPlan("reset", "gateway0>decode0")), fleet)
