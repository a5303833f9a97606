"""DP ranks on SGLang's wire: what each leg's body names, and what the load report says of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from engines.sglang import SglangStrategy
from engines.sglang_facts import facts_of, load_of
from engines.types import RankLoad
from tests.fakes import attempt, server_info

NAMES = ("routed_dp_rank", "disagg_prefill_dp_rank")


@pytest.mark.parametrize(
    ("prefill_rank", "decode_rank", "to_prefill", "to_decode"),
    [
        (None, None, {}, {}),
        (3, 1, {"routed_dp_rank": 3, "disagg_prefill_dp_rank": 3}, {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}),
        (0, 0, {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}, {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}),
        (2, None, {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}, {"disagg_prefill_dp_rank": 2}),
        (None, 1, {}, {"routed_dp_rank": 1}),
    ],
)
def test_a_leg_names_ranks_only_where_a_server_has_several(
    prefill_rank: int | None, decode_rank: int | None, to_prefill: dict[str, int], to_decode: dict[str, int]
) -> None:
    one, strategy = replace(attempt(), prefill_rank=prefill_rank, decode_rank=decode_rank), SglangStrategy()
    for call, expected in (
        (strategy.prefill_call(one), to_prefill),
        (strategy.decode_call(one, None), to_decode),
    ):
        body = orjson.loads(call.body)
        assert {name: body[name] for name in NAMES if name in body} == expected
        rest = {name: value for name, value in body.items() if name not in NAMES}
        assert rest == orjson.loads(strategy.prefill_call(attempt()).body)


def rank(number: int | None, **numbers: int) -> dict[str, Any]:
    return {"dp_rank": number, "timestamp": 5.0, **numbers}


def test_a_load_report_is_summed_and_kept_by_rank() -> None:
    second = rank(1, num_used_tokens=7, num_total_tokens=8, num_waiting_uncached_tokens=9)
    first = rank(0, num_used_tokens=1, num_total_tokens=2, num_waiting_uncached_tokens=3)
    load = load_of({"loads": [second, first]})
    assert load is not None
    assert (load.used_tokens, load.total_tokens, load.waiting_uncached_tokens) == (8, 10, 12)
    assert load.ranks == (RankLoad(3, 1, 2), RankLoad(9, 7, 8))
    assert load.of_rank(1) == RankLoad(9, 7, 8)
    assert load.of_rank(None) is load.of_rank(2) is load


def test_a_report_of_one_rank_is_the_whole() -> None:
    load = load_of({"loads": [rank(0, num_used_tokens=1)]})
    assert load is not None
    assert load.ranks == ()
    assert load.of_rank(0) is load


@pytest.mark.parametrize(
    ("states", "limit"),
    [
        ([{"effective_max_running_requests_per_dp": 8}, {"effective_max_running_requests_per_dp": 8}], 8),
        ([{"effective_max_running_requests_per_dp": 0}], 16),
        ([{}], 16),
        ([], 16),
        ({"no": "list"}, 16),
    ],
)
def test_the_running_limit_is_that_of_one_rank(states: Any, limit: int) -> None:
    said = {**server_info(), "max_running_requests": 16, "dp_size": 2, "internal_states": states}
    facts = facts_of(said, {"served_model_name": "tiny"})
    assert (facts.max_running_requests, facts.dp_size) == (limit, 2)
