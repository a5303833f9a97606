"""What the emulator refuses of a `/generate` body, in SGLang's words; its time limits; the forms of its load page."""

from __future__ import annotations

from typing import Any

import pytest

from engines.emulator.contract import SAMPLING, out_of_range, violation
from engines.emulator.core import Timeouts
from engines.emulator.load_format import as_prometheus, included

EITHER = "a value or an array of values for"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": 5}, f"invalid type: integer `5`, expected {EITHER} StringOrList"),
        ({"stream": "x"}, 'invalid type: string "x", expected a boolean'),
        ({"priority": 1.5}, "invalid type: floating point `1.5`, expected i64"),
        ({"bootstrap_room": True}, f"invalid type: boolean `true`, expected {EITHER} OptionalInt64OrList"),
        ({"bootstrap_room": [1, "2"]}, 'invalid type: string "2", expected i64'),
        ({"sampling_params": {"temperature": "hot"}}, 'invalid type: string "hot", expected f64'),
        ({"sampling_params": {"stop_token_ids": [None]}}, "invalid type: null, expected i64"),
        ({"sampling_params": {"stop_token_ids": {}}}, "invalid type: map, expected a sequence"),
        ({"sampling_params": [{}, {"n": []}]}, "invalid type: sequence, expected i64"),
        ({"sampling_params": 1}, f"invalid type: integer `1`, expected {EITHER} SamplingParamsOrList"),
    ],
)
def test_what_the_contract_refuses(body: dict[str, Any], words: str) -> None:
    assert violation(body) == words


def test_an_unknown_sampling_key_is_refused_with_all_that_exist() -> None:
    refused = violation({"sampling_params": {"nonsense": 1}})
    assert refused is not None
    assert refused.startswith("unknown field `nonsense`, expected one of `max_new_tokens`, `stop`, ")
    assert refused.endswith("`choice`")
    assert refused.count("`") == 2 * (len(SAMPLING) + 1)


def test_what_the_contract_lets_pass() -> None:
    params = {"temperature": 1, "stop": ["a"], "max_new_tokens": None, "logit_bias": {"1": 2}}
    rooms = {"bootstrap_room": [1, None], "bootstrap_host": [None, "h"], "nonsense": {}}
    assert violation({"text": ["a"], "sampling_params": params, **rooms}) is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_new_tokens": 7, "max_new_tokens": 6}, "min_new_tokens must be in [0, max_new_tokens(6)], got 7."),
        ({"repetition_penalty": 2.5}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 2.5."),
        ({"top_k": -1, "temperature": 0, "max_new_tokens": 0}, None),
    ],
)
def test_numbers_out_of_range(params: dict[str, Any], words: str | None) -> None:
    assert out_of_range(params) == words


def test_time_limits_come_from_sglangs_own_variables() -> None:
    limits = Timeouts().set_by(
        {
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "0.5",
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "3",
        }
    )
    assert (limits.waiting_s, limits.heartbeat_s, limits.heartbeat_failures) == (30.0, 2.0, 3)
    assert limits.bootstrap_s == 300.0
    assert Timeouts().set_by({}) == Timeouts()


LOAD = {"dp_rank": 1, "timestamp": 2.5, "decode_moments": None, "memory": {"weight_gb": 0.1}, "queues": {"waiting": 3}}


@pytest.mark.parametrize(
    ("include", "sections"),
    [(None, {"memory", "queues"}), ("all,core", {"memory", "queues"}), ("core", set()), ("queues, core", {"queues"})],
)
def test_sections_of_the_load_page(include: str | None, sections: set[str]) -> None:
    assert set(included(LOAD, include)) - {"dp_rank", "timestamp", "decode_moments"} == sections


def test_a_section_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        included(LOAD, "core,nonsense")


def test_the_load_page_as_prometheus() -> None:
    assert as_prometheus([LOAD, {**LOAD, "dp_rank": 2}]).splitlines() == [
        "# TYPE sglang_timestamp gauge",
        'sglang_timestamp{dp_rank="1"} 2.5',
        'sglang_timestamp{dp_rank="2"} 2.5',
        "# TYPE sglang_memory_weight_gb gauge",
        'sglang_memory_weight_gb{dp_rank="1"} 0.1',
        'sglang_memory_weight_gb{dp_rank="2"} 0.1',
        "# TYPE sglang_queues_waiting gauge",
        'sglang_queues_waiting{dp_rank="1"} 3',
        'sglang_queues_waiting{dp_rank="2"} 3',
    ]
