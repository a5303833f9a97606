"""What is said before a run: every target, proxy, request and fault of it, and what will not be seen."""

from __future__ import annotations

from failover.chaos import dry_run, real_plan, schedule
from failover.chaos.client_checks import BY_PDGATE, UNSEEN
from failover.chaos.invariants import INVARIANTS
from failover.chaos.load import requests
from failover.chaos.real_fleet import RealFleet
from failover.chaos.scenario import FaultPlan, FleetPlan, LoadPlan, Scenario

FLEET = RealFleet(
    "lab",
    ("http://10.0.0.1:1",),
    decodes=("http://10.0.0.2:1", "http://10.0.0.3:1"),
    proxies={"gateway0>decode0": "127.0.0.1:9100"},
    model="m",
)
LOAD = LoadPlan((10, 60), 3.0, {"stream": 2, "generate": 1, "several": 1})
SCENARIO = Scenario("s", "a", "p", FleetPlan(1, 2), LOAD, (FaultPlan("silent", "gateway0>decode*", at_s=2, every_s=3),))


def real(fleet: RealFleet = FLEET) -> str:
    return "\n".join(dry_run.on_real(SCENARIO, fleet, 7, long=False, trace=""))


def test_a_real_fleet_with_all_that_is_connected_to() -> None:
    lines = real().splitlines()
    assert lines[0] == "s, seed 7, on the fleet lab: nothing is sent"
    at = lines.index("connects to these, and to nothing else:")
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["gateway0", "decode0", "listens"]
    assert "10.0.0.3" not in real(), "what is behind no proxy is not touched"
    assert "listens on 127.0.0.1:9100 for gateway0>decode0: tell gateway0 that decode0 is there" in real()
    assert "asks the model m" in real()


def test_the_requests_are_those_of_the_run() -> None:
    fitted = real_plan.fitted(SCENARIO, FLEET)
    asked = real_plan.asked(fitted, FLEET, 7, long=False, trace="", model="m")
    assert f"sends {len(asked)} requests in 10 s:" in real()
    for kind in ("stream", "completion", "several"):
        of_kind = [each for each in asked if each.kind == kind]
        tokens = sum(each.body["max_tokens"] * each.body.get("n", 1) for each in of_kind)
        bodies = [each.body for each in of_kind]
        prompts = [body["messages"][0]["content"] if "messages" in body else body["prompt"] for body in bodies]
        words = sum(len(prompt.split()) for prompt in prompts)
        expected = f"{len(of_kind)} requests, {words:,} words of prompts, {tokens:,} tokens of answers at most"
        assert f"    {kind:<12}{expected}" in real()


def test_the_faults_are_those_of_the_run() -> None:
    planned = real_plan.planned(real_plan.fitted(SCENARIO, FLEET), FLEET, 7, long=False)
    assert len(planned) == 3
    assert f"breaks {len(planned)} times:" in real()
    for fault in planned:
        assert f"fault {fault.number}: silent on gateway0>decode0, planned at {fault.at_s:.2f} s" in real()


def test_what_will_be_seen() -> None:
    lines = real().splitlines()
    [always] = [line.removeprefix("judged: ").split(", ") for line in lines if line.startswith("judged: ")]
    [some] = [line.partition(": ")[2].split(", ") for line in lines if line.startswith("judged where")]
    never = [line.split(": ")[1] for line in lines if line.startswith("not seen: ")]
    assert {*always, *some, *never} == {*INVARIANTS, "true_answers"}
    assert len([*always, *some, *never]) == len(INVARIANTS) + 1
    assert {*some} == {*BY_PDGATE}
    assert {*never} == {*UNSEEN, "true_answers"}
    with_reference = real(RealFleet(**{**_fields(FLEET), "reference": True}))
    assert "not seen: true_answers" not in with_reference
    assert "once before the faults, to compare with" in with_reference


def _fields(fleet: RealFleet) -> dict[str, object]:
    return {name: getattr(fleet, name) for name in RealFleet.__slots__}


def test_a_fleet_that_is_started_for_it() -> None:
    told = list(dry_run.on_emulated(SCENARIO, 7, long=True, trace=""))
    assert told[:2] == [
        "s, seed 7, long: nothing is started or sent",
        "starts 1 gateway, 1 prefill, 2 decodes on this machine",
    ]
    links = schedule.proxied(SCENARIO, schedule.planned(SCENARIO, 7, long=True))
    assert f"proxies in {', '.join(links)}" in told
    asked = requests(LOAD, 7, long=True)
    assert f"sends {len(asked)} requests in 60 s:" in told
    generated = [each.body for each in asked if each.kind == "generate"]
    tokens = sum(body["sampling_params"]["max_new_tokens"] for body in generated)
    size = sum(len(body["text"]) for body in generated)
    expected = f"{len(generated)} requests, {size:,} bytes of prompts, {tokens:,} tokens of answers at most"
    assert f"    {'generate':<12}{expected}" in told
    assert told[-1] == f"judged: {', '.join(INVARIANTS)}"
