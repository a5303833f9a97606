"""Every shipped scenario can be run, says what it proves, and is short enough; together they use every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.timing import PROFILES
from failover.chaos.faults import FAULTS
from failover.chaos.faults.poison_prompt import PoisonPrompt
from failover.chaos.load import POISON, requests
from failover.chaos.scenario import Scenario
from failover.chaos.scenario_file import parse
from failover.chaos.schedule import planned

FOLDER = Path(__file__).parents[4] / "examples" / "chaos"
FILES = sorted(FOLDER.glob("*.toml"))
SHORT_S, QUICK_S = 20.0, 7.0
"""Of load: a run also starts, settles and is judged, within 30 s, and 12 s if it is quick."""


def scenario(file: Path) -> Scenario:
    return parse(file.read_text(encoding="utf-8"), file.stem, FAULTS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_a_shipped_scenario_can_be_run(file: Path, long: bool) -> None:
    some = scenario(file)
    for words in (some.about, some.proves):
        assert words[0].isupper()
        assert words.endswith(".")
        assert words.count(". ") == 0, "one sentence"
    assert some.load.duration_s[0] <= (QUICK_S if some.quick else SHORT_S)
    asked = requests(some.load, 1, long=long)
    assert {each.kind for each in asked} == {kind for kind, weight in some.load.mix.items() if weight}
    faults = planned(some, 1, long=long)
    assert {each.fault for each in faults} == {fault.fault for fault in some.faults}, "each befalls in this form"


def test_eight_are_quick() -> None:
    assert sum(scenario(file).quick for file in FILES) == 8


def test_every_fault_is_shown_by_a_scenario() -> None:
    shown = {fault.fault for file in FILES for fault in scenario(file).faults}
    assert shown == FAULTS.keys()


def test_a_dead_gateway_can_be_seen_to_be_reaped() -> None:
    """Its links stay silent for as long as that may take, and what it had on engines lives for longer."""
    some = scenario(FOLDER / "gateway-dies-silently.toml")
    died_s = max(fault.at_s for fault in some.faults)
    assert all(fault.at_s == died_s and fault.for_s is None for fault in some.faults)
    assert some.load.duration_s[0] > died_s + some.expect.reaped_s
    timing = PROFILES[some.fleet.profile].decode
    shortest_s = some.load.output_tokens[0] * timing.base_s / some.fleet.speed
    assert shortest_s > died_s / 2 + some.expect.reaped_s, "also of most that were begun before"


def test_the_word_that_kills_is_the_one_that_clients_ask_with() -> None:
    assert PoisonPrompt.params["word"] == POISON
