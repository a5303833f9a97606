"""A history goes to plain JSON and comes back the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from failover.chaos.history import Death, History, Ledger, from_json, to_json
from tests.unit.failover.chaos.histories import PATIENT, Plan, plans


@PATIENT
@given(plans())
def test_a_history_comes_back(plan: Plan) -> None:
    base = plan.history()
    history = replace(base, ledgers=(Ledger("d", {"5": 3}),), deaths=(Death("g", 1.5),), left_over={"tasks": 2})
    assert from_json(json.loads(json.dumps(to_json(history)))) == history


@pytest.mark.parametrize(
    "value", [{}, {"version": 2, "requests": []}, {"version": 1}, {"version": 1, "requests": [{"nam": 1}]}]
)
def test_another_form_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="history"):
        from_json(value)


def test_the_form_is_pinned() -> None:
    assert to_json(History(())) == {"version": 1, "requests": [], "ledgers": [], "deaths": [], "left_over": {}}
