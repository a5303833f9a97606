"""What engines were seen to hold is told of attempts that were over, with the last time, and of nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from failover.chaos import holdings
from failover.chaos.history import Request
from failover.chaos.holdings import Holdings
from failover.chaos.record import Held
from tests.unit.failover.chaos.records import RESUMED

FIRST, SECOND = (str(each.room) for each in RESUMED.choices[0].attempts)
"""Over at 1 s and at 2 s."""


def open_(request: Request) -> Request:
    [choice] = request.choices
    made = tuple(replace(each, ended_s=None) for each in choice.attempts)
    return replace(request, choices=(replace(choice, attempts=made),))


def test_each_engine_is_told_with_the_last_time_after_the_end() -> None:
    seen = Holdings()
    for at_s in (0.5, 1.5, 2.5):
        seen.look(at_s, "decode0", [FIRST, SECOND, "77"])
    seen.look(2.0, "prefill0", [FIRST, SECOND])
    seen.look(3.0, "prefill0", [])
    assert seen.after_their_end([RESUMED]) == (
        Held("decode0", FIRST, 0.5, 2.5),
        Held("decode0", SECOND, 0.5, 2.5),
        Held("prefill0", FIRST, 2.0, 2.0),
    )
    assert seen.after_their_end([open_(RESUMED)]) == ()
    assert Holdings().after_their_end([RESUMED]) == ()


def test_so_many_rooms_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "MAX_ROOMS", 1)
    seen = Holdings()
    seen.look(1.5, "decode0", [FIRST, SECOND])
    seen.look(2.5, "decode0", [FIRST, SECOND])
    assert seen.after_their_end([RESUMED]) == (Held("decode0", FIRST, 1.5, 2.5),)
