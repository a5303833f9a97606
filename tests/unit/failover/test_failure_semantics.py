"""The page on broken requests holds the table as the code decides.

`python tests/unit/failover/test_failure_semantics.py` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import orjson
import pytest

from engines import exact_chat_rules, seam
from engines.types import CacheFormat, ChatFacts, EngineFacts
from failover.features import CHAT, COMPLETIONS, GENERATE, PATHS, Feature, Sampling, features, sampling
from failover.recovery import (
    DEFAULT_MODES,
    REPLAY_WHY_NOT,
    RESUME_TEXT_WHY_NOT,
    RESUME_WHY_NOT,
    WANTED_HEADER,
    Determinism,
    Mode,
    Traits,
    choose,
)
from gateway.openai_api import Api, Unit, expand, parse

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "failure-semantics.md"
BEGIN = "<!-- written by `python tests/unit/failover/test_failure_semantics.py` -->\n"
END = "<!-- end of what is written -->\n"

Body = dict[str, Any]
PROMPT: dict[str, Body] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
    GENERATE: {"text": "hello"},
}
TOOL = {"type": "function", "function": {"name": "f"}}
ASKED: dict[str, dict[str, Body]] = {
    "plain": {path: {} for path in PATHS},
    "stop strings": {path: {"stop": ["X"]} for path in PATHS},
    "n > 1": {path: {"n": 2} for path in PATHS},
    "logprobs": {CHAT: {"logprobs": True}, COMPLETIONS: {"logprobs": 1}, GENERATE: {"return_logprob": True}},
    "tools": {CHAT: {"tools": [TOOL]}},
    "reasoning": {CHAT: {"reasoning_effort": "high"}, GENERATE: {"require_reasoning": True}},
    "grammar": {
        CHAT: {"response_format": {"type": "json_object"}},
        COMPLETIONS: {"json_schema": "{}"},
        GENERATE: {"json_schema": "{}"},
    },
    "penalties": {path: {"frequency_penalty": 0.5} for path in PATHS},
}
"""What a row asks for, by route; a route that has no such field is left out."""
ON_TOP = ("return_logprob", "require_reasoning")
"""Fields of `/generate` that stand outside its sampling_params."""
COLUMNS: dict[str, tuple[Body, Determinism]] = {
    "greedy": ({"temperature": 0}, Determinism.NONE),
    "sampled": ({"temperature": 1}, Determinism.NONE),
    "seeded, deterministic inference": ({"temperature": 1, "seed": 7}, Determinism.ENGINE),
}
FACTS = EngineFacts(
    model="m",
    weight_version="default",
    cache_format=CacheFormat(1, "auto", "early", "mooncake"),
    max_total_tokens=10_000,
    context_tokens=4096,
    chunk_tokens=2048,
    dp_size=1,
    boot_fingerprint="b",
    sampling_defaults="openai",
)

_KILLS = "tests/scenarios/test_stream_kills.py::"
_RESUMED = (
    _KILLS + "test_a_stream_goes_on_on_another_decode",
    _KILLS + "test_a_stream_is_whole_wherever_its_decode_died",
    _KILLS + "test_a_character_that_was_half_sent_is_whole",
    _KILLS + "test_a_stop_string_over_the_seam_is_found",
    _KILLS + "test_streams_survive_kills",
)
_ENDED = (
    _KILLS + "test_what_cannot_go_on_ends_with_one_error_at_once",
    "tests/property/test_replay_properties.py::test_the_same_answer_goes_on_exactly",
)
_RETRIED = (
    "tests/scenarios/test_kills.py::test_a_killed_server_costs_no_answer",
    "tests/scenarios/test_mixed_load.py::test_mixed_load_survives_kills",
)
SHOWN_BY: dict[tuple[str, bool, Mode], tuple[str, ...]] = {
    (CHAT, True, Mode.RESUME): (*_RESUMED, _KILLS + "test_choices_go_on_each_by_itself"),
    (CHAT, True, Mode.ERROR): _ENDED,
    (COMPLETIONS, True, Mode.RESUME): (*_RESUMED, _KILLS + "test_logprobs_and_ids_go_on"),
    (COMPLETIONS, True, Mode.ERROR): _ENDED,
    (GENERATE, True, Mode.RESUME): _RESUMED,
    (GENERATE, True, Mode.ERROR): _ENDED,
    (CHAT, False, Mode.RETRY): (
        *_RETRIED,
        "tests/scenarios/test_kills.py::test_one_of_several_choices_is_retried_alone",
    ),
    (COMPLETIONS, False, Mode.RETRY): _RETRIED,
    (GENERATE, False, Mode.RETRY): ("tests/unit/failover/test_recovery.py::test_what_is_no_stream_is_tried_again",),
}
"""The tests that show a row, by route, stream and what its greedy request gets."""


@dataclass(frozen=True)
class Row:
    path: str
    stream: bool
    asked: str
    modes: tuple[Mode, ...]
    why: str

    @property
    def like(self) -> tuple[Any, ...]:
        return self.path, self.stream, self.modes, self.why


def unit_of(path: str, stream: bool, asked: Body, chosen: Body) -> tuple[Body, Unit]:
    """A client's body, and the engine request that it becomes."""
    if path == GENERATE:
        inner = {"sampling_seed" if name == "seed" else name: value for name, value in {**asked, **chosen}.items()}
        top = {name: inner.pop(name) for name in ON_TOP if name in inner}
        body = {**PROMPT[path], "stream": stream, "sampling_params": inner, **top}
    else:
        body = {**PROMPT[path], "stream": stream, **asked, **chosen}
    return body, expand(parse(Api(path), orjson.dumps(body)))[0]


def traits_of(path: str, stream: bool, label: str, column: str) -> Traits:
    """As the gateway sees the request: a chat's output ids are known where it can be asked for as a completion."""
    chosen, determinism = COLUMNS[column]
    body, unit = unit_of(path, stream, ASKED[label][path], chosen)
    facts = replace(FACTS, chat=ChatFacts(reasoning_parser="qwen3")) if label == "reasoning" else FACTS
    inexact = exact_chat_rules.why_not(unit.body, facts, None, token_texts=True) if path == CHAT else ""
    return Traits(path, stream, sampling(path, body), determinism, features(path, body), inexact)


def rows() -> Iterator[Row]:
    for path in PATHS:
        for stream in (True, False):
            for label in (label for label in ASKED if path in ASKED[label]):
                every = [traits_of(path, stream, label, column) for column in COLUMNS]
                modes = tuple(choose(traits, DEFAULT_MODES).mode for traits in every)
                why = choose(every[0], [Mode.RESUME]).reason.removeprefix("no resume: ")
                yield Row(path, stream, label, modes, why)


def table() -> str:
    """Neighbours that differ only in what they ask for share a line; tests are named below, by number."""
    lines = ["| route | | asks for | " + " | ".join(COLUMNS) + " | why | shown by |", "|---" * 8 + "|"]
    numbers = {test: number for number, test in enumerate(dict.fromkeys(chain(*SHOWN_BY.values())), 1)}
    for _, group in groupby(rows(), key=lambda row: row.like):
        alike = list(group)
        row = alike[0]
        asks = ", ".join(each.asked for each in alike)
        tests = ", ".join(str(numbers[test]) for test in SHOWN_BY[row.path, row.stream, row.modes[0]])
        cells = (f"`{row.path}`", "stream" if row.stream else "whole", asks, *row.modes, row.why, tests)
        lines.append("| " + " | ".join(cells) + " |")
    names = [f"{number}. `{test}`" for test, number in numbers.items()]
    return "\n".join([*lines, "", *names]) + "\n"


def why_not_table() -> str:
    """What each feature forbids, and why; a dot where it does not. Those that forbid nothing are named below."""
    tables = (RESUME_WHY_NOT, REPLAY_WHY_NOT, RESUME_TEXT_WHY_NOT)
    lines = ["| a request with | resume | replay | resume_text |", "|---|---|---|---|"]
    for feature in (feature for feature in Feature if any(feature in table for table in tables)):
        lines.append(f"| {feature} | " + " | ".join(table.get(feature, "·") for table in tables) + " |")
    harmless = ", ".join(feature for feature in Feature if not any(feature in table for table in tables))
    return "\n".join([*lines, "", f"Carried over by all three: {harmless}."]) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = page.partition(BEGIN)
    return (
        f"{head}{BEGIN}\n{table()}\n### What each feature forbids\n\n{why_not_table()}\n{END}{rest.partition(END)[2]}"
    )


def test_the_page_holds_the_table_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `python tests/unit/failover/test_failure_semantics.py`"


def test_every_request_of_the_table_is_in_it() -> None:
    asked = {(path, stream, label) for label in ASKED for path in ASKED[label] for stream in (True, False)}
    assert {(row.path, row.stream, row.asked) for row in rows()} == asked
    assert all(len(row.modes) == len(COLUMNS) for row in rows())


def test_the_columns_are_what_they_say() -> None:
    for path in PATHS:
        ways = [traits_of(path, True, "plain", column).sampling for column in COLUMNS]
        assert ways == [Sampling.GREEDY, Sampling.SAMPLED, Sampling.SEEDED]


def test_plain_streams_are_always_resumed_and_nothing_breaks_with_deterministic_inference() -> None:
    for row in rows():
        if row.asked in ("plain", "stop strings", "n > 1") and row.stream:
            assert set(row.modes) == {Mode.RESUME}
        for column in COLUMNS:
            traits = traits_of(row.path, row.stream, row.asked, column)
            assert choose(replace(traits, determinism=Determinism.ENGINE), DEFAULT_MODES).mode is not Mode.ERROR


def test_what_is_resumed_is_what_the_engine_side_can_continue() -> None:
    """The wire forms refuse some parameters by themselves: never one that the table promises."""
    for row in rows():
        if row.stream and Mode.RESUME in row.modes:
            _, unit = unit_of(row.path, True, ASKED[row.asked][row.path], {})
            assert seam.why_not(unit.body.get("sampling_params", unit.body)) == ""


@pytest.mark.parametrize("test", sorted({test for tests in SHOWN_BY.values() for test in tests}))
def test_the_tests_that_are_named_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^ *(async )?def {name.rpartition('::')[2]}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_the_page_names_every_mode_and_the_header() -> None:
    page = PAGE.read_text()
    assert WANTED_HEADER in page
    assert all(f"`{mode}`" in page for mode in Mode)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
