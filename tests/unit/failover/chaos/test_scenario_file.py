"""A scenario is read whole from TOML, and each thing that cannot be run is refused by its field, with the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from engines.emulator import faults as emulator
from failover.chaos.faults.base import Fault
from failover.chaos.scenario import (
    COUNTED_STAGES,
    STAGES,
    Expectations,
    FaultPlan,
    FleetPlan,
    LoadPlan,
    Scenario,
    ScenarioError,
    Value,
)
from failover.chaos.scenario_file import parse

HEAD = 'about = "Something happens."\nproves = "It does no harm."\n'
KILL = '[[faults]]\nfault = "kill"\ntarget = "prefill0"\n'


def kind(*targets: str, **params: Value) -> Any:
    class Some:
        pass

    Some.targets: ClassVar = frozenset(targets)  # type: ignore[attr-defined, misc]
    Some.params: ClassVar = params  # type: ignore[attr-defined, misc]
    return Some


KINDS: Mapping[str, type[Fault]] = {
    "kill": kind("prefill", "decode", "gateway", "redis"),
    "delay": kind("link", delay_s=0.1, direction="both"),
    "storm": kind("gateway", clients=100, slowly=False),
}


def parsed(text: str) -> Scenario:
    return parse(HEAD + text, "trouble", KINDS)


def test_all_that_is_not_said_is_the_default() -> None:
    assert parsed("") == Scenario("trouble", "Something happens.", "It does no harm.")


def test_everything_can_be_said() -> None:
    text = """
        quick = true
        [fleet]
        prefills = 3
        decodes = 1
        gateways = 2
        redis = true
        speed = 5
        profile = "h100-70b"
        engine_flags = ["--page-size", "16"]
        links = ["gateway*>redis"]
        [load]
        duration_s = [5, 30.5]
        rate_per_s = 7
        mix = { stream = 1, tools = 0.5 }
        prompt_tokens = [30, 60]
        output_tokens = 9
        leave_ratio = 0.25
        trace = "some.jsonl"
        trace_speed = 10
        [[faults]]
        fault = "delay"
        target = "all gateway0>*"
        at_s = 0
        jitter_s = 2
        for_s = [1, 3]
        every_s = 4
        params = { delay_s = 1, direction = "forth" }
        [[faults]]
        fault = "kill"
        target = "decode*"
        for_s = 2
        phase = "token:5"
        [expect]
        refused_ratio = 1
        deaths = 2
    """
    assert type(parsed(text).fleet.speed) is float
    slow = FaultPlan("delay", "all gateway0>*", 0.0, 2.0, (1.0, 3.0), 4.0, params={"delay_s": 1, "direction": "forth"})
    assert parsed(text) == Scenario(
        "trouble",
        "Something happens.",
        "It does no harm.",
        FleetPlan(3, 1, 2, True, 5.0, "h100-70b", ("--page-size", "16"), links=("gateway*>redis",)),
        LoadPlan((5.0, 30.5), 7.0, {"stream": 1.0, "tools": 0.5}, (30, 60), (9, 9), 0.25, "some.jsonl", 10.0),
        (slow, FaultPlan("kill", "decode*", for_s=(2.0, 2.0), phase="token:5")),
        Expectations(refused_ratio=1.0, deaths=2),
        quick=True,
    )


def fault(**fields: str) -> str:
    lines = {"fault": '"kill"', "target": '"prefill0"', **fields}
    return "[[faults]]\n" + "\n".join(f"{name} = {value}" for name, value in lines.items())


REFUSED = (
    # what is not there, or not what it must be
    ("fleat = 1", "fleat", "there is no such field; did you mean 'fleet'?"),
    ("zzz = 1", "zzz", "there is no such field; it may be about, expect, faults, fleet, load, name, proves, quick"),
    ('name = "x"', "name", "a scenario is called like its file: leave this out"),
    ("fleet = 3", "fleet", "must be a table, not 3"),
    ("quick = 1", "quick", "must be true or false, not 1"),
    ("[fleet]\nprefils = 3", "fleet.prefils", "there is no such field; did you mean 'prefills'?"),
    ('[fleet]\nprefills = "3"', "fleet.prefills", "must be a whole number, not '3'"),
    ("[fleet]\nprefills = 1.0", "fleet.prefills", "must be a whole number, not 1.0"),
    ("[fleet]\nprefills = true", "fleet.prefills", "must be a whole number, not true"),
    ("[fleet]\nprefills = 0", "fleet.prefills", "must be between 1 and 64, not 0"),
    ("[fleet]\nspeed = true", "fleet.speed", "must be a number, not true"),
    ("[fleet]\nspeed = 0", "fleet.speed", "must be between 0.01 and 1000, not 0"),
    ("[fleet]\nspeed = inf", "fleet.speed", "must be finite"),
    ("[fleet]\nspeed = nan", "fleet.speed", "must be finite"),
    ("[fleet]\nprofile = 3", "fleet.profile", "must be text, not 3"),
    ('[fleet]\nprofile = "tinny"', "fleet.profile", "there is no 'tinny'; did you mean 'tiny'?"),
    ('[fleet]\nengine_flags = "--x"', "fleet.engine_flags", "must be a list, not '--x'"),
    ("[fleet]\nengine_flags = [7]", "fleet.engine_flags[0]", "must be text, not 7"),
    ('[fleet]\nlinks = ["a>b"]', "fleet.links[0]", "this fleet has no 'a>b'; it may be client>gateway0, gateway0>dec"),
    ('[fleet]\nlinks = ["prefill0"]', "fleet.links[0]", "a proxy cannot befall prefill0; it may be a link"),
    ("[load]\nduration_s = [5]", "load.duration_s", "must be one value or 2, not [5]"),
    ("[load]\nduration_s = [5, 4]", "load.duration_s", "must not fall, as [5, 4] does"),
    ('[load]\nduration_s = ["a", 4]', "load.duration_s", "must be a number, not 'a'"),
    ("[load]\nduration_s = 0", "load.duration_s", "must be between 1 and 86400, not 0"),
    ("[load]\nmix = []", "load.mix", "must be a table, not []"),
    ("[load]\nmix = { strem = 1 }", "load.mix.strem", "there is no such kind of request; did you mean 'stream'?"),
    ("[load]\nmix = { stream = -1 }", "load.mix.stream", "must be at least 0, not -1"),
    ("[load]\nmix = { stream = 0 }", "load.mix", "some kind must have a weight above 0"),
    ("[load]\nleave_ratio = 1.5", "load.leave_ratio", "must be between 0 and 1, not 1.5"),
    ("[load]\nprompt_tokens = [5, 9]", "load.prompt_tokens", "must be between 20 and 1e+06, not 5"),
    ("[load]\noutput_tokens = 32000", "load.prompt_tokens", "prompt and output must fit in 31744 tokens together"),
    ("[expect]\nattempts_ratio = 0.5", "expect.attempts_ratio", "must be between 1 and 100, not 0.5"),
    # faults
    ("faults = 3", "faults", "must be a list, not 3"),
    ("faults = [3]", "faults[0]", "must be a table, not 3"),
    ('[[faults]]\ntarget = "redis"', "faults[0].fault", "is missing"),
    (KILL + '[[faults]]\nfault = "kill"', "faults[1].target", "is missing"),
    (KILL + fault(phas='"token"'), "faults[1].phas", "there is no such field; did you mean 'phase'?"),
    (fault(fault='"kil"'), "faults[0].fault", "there is no fault 'kil'; did you mean 'kill'?"),
    (fault(fault='"x"'), "faults[0].fault", "there is no fault 'x'; it may be delay, kill, storm"),
    (fault(target='"prefill7"'), "faults[0].target", "this fleet has no 'prefill7'; did you mean 'prefill"),
    (
        fault(target='"redis"'),
        "faults[0].target",
        "this fleet has no 'redis'; it may be decode0, decode1, gateway0, pre",
    ),
    (fault(target='"all redis"'), "faults[0].target", "this fleet has no 'all redis'; it may be decode0"),
    (fault(target='"gateway0>prefill0"'), "faults[0].target", "kill cannot befall gateway0>prefill0; it may be a deco"),
    (fault(fault='"delay"', target='"decode0"'), "faults[0].target", "delay cannot befall decode0; it may be a link"),
    (fault(at_s="-1"), "faults[0].at_s", "must be at least 0, not -1"),
    (fault(at_s="10"), "faults[0].at_s", "must be within the load, which lasts 10 s"),
    (fault(for_s="0"), "faults[0].for_s", "must be at least 0.001, not 0"),
    (fault(for_s="[1, 5]", every_s="5"), "faults[0].for_s", "must be below every_s, 5: it would befall twice at once"),
    (fault(every_s="0"), "faults[0].every_s", "must be at least 0.1, not 0"),
    (fault(for_s='"5"'), "faults[0].for_s", "must be a number, not '5'"),
    (fault(params="{ x = 1 }"), "faults[0].params.x", "kill has no such parameter"),
    (
        fault(fault='"storm"', target='"gateway0"', params="{ client = 1 }"),
        "faults[0].params.client",
        "storm has no such parameter; did you mean 'clients'?",
    ),
    (
        fault(fault='"storm"', target='"gateway0"', params='{ clients = "1" }'),
        "faults[0].params.clients",
        "must be a whole number, not '1'",
    ),
    (
        fault(fault='"storm"', target='"gateway0"', params="{ slowly = 1 }"),
        "faults[0].params.slowly",
        "must be true or false, not 1",
    ),
    (fault(params="{ x = [1] }"), "faults[0].params.x", "must be text, not [1]"),
    (fault(phase='"tokens"'), "faults[0].phase", "engines have no stage 'tokens'; did you mean 'token'?"),
    (fault(phase='"transfer:2"'), "faults[0].phase", "only prefill_chunk and token are counted"),
    (
        fault(phase='"token:0"'),
        "faults[0].phase",
        "must be a stage and a number from 1 on, as in token:5, not 'token:0'",
    ),
    (fault(phase='"token:"'), "faults[0].phase", "must be a stage and a number from 1 on, as in token:5, not 'token:'"),
    (fault(phase='"token:²"'), "faults[0].phase", "must be a stage and a number from 1 on"),
)


@pytest.mark.parametrize(
    ("text", "field", "problem"), REFUSED, ids=[f"{row[1]}-{at}" for at, row in enumerate(REFUSED)]
)
def test_what_cannot_be_run_is_refused(text: str, field: str, problem: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parsed(text)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {problem}")


def test_what_is_no_toml_is_refused_by_the_name_of_the_scenario() -> None:
    with pytest.raises(ScenarioError, match=r"trouble: this is not TOML: .* line 3"):
        parsed("= 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [('proves = "x"', "about: is missing"), ('about = " "\nproves = "x"', "about: say it in a sentence")],
)
def test_a_scenario_says_what_it_is(text: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        parse(text, "trouble", KINDS)


def test_stages_are_the_emulators_own() -> None:
    assert STAGES.keys() == emulator.HOLD_STAGES
    assert emulator._COUNTED_STAGES == COUNTED_STAGES
