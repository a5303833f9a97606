"""One fault in its own task: it is lifted in the end, however far it has come and whoever cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest

from failover.chaos import fault_play
from failover.chaos.fault_play import FaultPlay
from failover.chaos.faults import FAULTS
from failover.chaos.record import Planned
from failover.chaos.runner import plays
from failover.chaos.world import NotAnyMore, RunWorld, Unable
from tests.fakes import timeless


class Clock:
    """All that a fault's play asks of a world."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


class Stubborn:
    """A fault that cannot be lifted `times` times."""

    targets: ClassVar[frozenset[str]] = frozenset({"prefill"})
    params: ClassVar[Mapping[str, Any]] = {}
    real: ClassVar[bool] = False
    times: ClassVar[int] = 0
    why: ClassVar[Unable] = Unable("prefill0 does not answer")

    def __init__(self, world: object, target: str, params: Mapping[str, Any]) -> None:
        self.lifts = 0

    async def apply(self) -> str:
        return "it is on"

    async def lift(self) -> None:
        self.lifts += 1
        if self.lifts <= self.times:
            raise self.why


@pytest.fixture(autouse=True)
def stubborn(monkeypatch: pytest.MonkeyPatch) -> type[Stubborn]:
    monkeypatch.setitem(cast("dict[str, Any]", FAULTS), "kill", Stubborn)
    monkeypatch.setattr(fault_play, "_AGAIN_S", 0.02)
    monkeypatch.setattr(Stubborn, "why", Unable("prefill0 does not answer"))
    return Stubborn


def play(for_s: float | None) -> FaultPlay:
    return FaultPlay(cast("RunWorld", Clock()), Planned(0, "kill", "prefill0", 0.0, for_s))


@timeless
async def test_who_cannot_be_reached_is_asked_again_while_the_load_goes_on(
    stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubborn, "times", 3)
    one = play(for_s=0.01)
    one.begin()
    for _ in range(200):
        await asyncio.sleep(0.01 if one.became.lifted_s is None else 0.0)
    assert one.became.lifted_s is not None
    assert (one.became.note, one.became.problem) == ("it is on", "")
    assert one.became.applied_s is not None
    assert one.became.lifted_s >= one.became.applied_s + 3 * 0.02
    await one.end()


@pytest.mark.parametrize(("times", "problem"), [(1, ""), (9, "it could not be lifted: prefill0 does not answer")])
@timeless
async def test_when_the_load_is_over_it_is_tried_once_more(
    stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch, times: int, problem: str
) -> None:
    monkeypatch.setattr(stubborn, "times", times)
    monkeypatch.setattr(fault_play, "_AGAIN_S", 60.0)
    one = play(for_s=0.0)
    one.begin()
    await asyncio.sleep(0.05)
    await asyncio.wait_for(one.end(), 2.0)
    assert one.became.problem == problem
    assert (one.became.lifted_s is None) is bool(problem)


@timeless
async def test_what_is_not_lifted_as_the_run_is_stopped_is_no_problem(
    stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubborn, "times", 99)
    monkeypatch.setattr(stubborn, "why", NotAnyMore("prefill0 is not started any more"))
    one = play(for_s=None)
    one.begin()
    await asyncio.sleep(0.02)
    await asyncio.wait_for(one.end(), 2.0)
    assert (one.became.lifted_s, one.became.problem) == (None, "")


@timeless
async def test_one_that_comes_again_waits_until_it_is_lifted(
    stubborn: type[Stubborn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same kind and on the same target: two at once would undo each other."""
    monkeypatch.setattr(stubborn, "times", 3)
    planned = [
        Planned(0, "kill", "prefill0", 0.0, 0.01),
        Planned(1, "kill", "prefill0", 0.0, None),
        Planned(2, "kill", "prefill1", 0.0, None),
    ]
    first, again, other = plays(cast("RunWorld", Clock()), planned)
    for each in (first, again, other):
        each.begin()
    await first.over()
    assert again.became.applied_s is None
    assert other.became.applied_s is not None
    await asyncio.sleep(0.01)
    lifted_s, applied_s = first.became.lifted_s, again.became.applied_s
    assert lifted_s is not None
    assert applied_s is not None
    assert applied_s >= lifted_s
    for each in (first, again, other):
        await each.end()


@timeless
async def test_one_that_waited_in_vain_has_not_befallen() -> None:
    planned = [Planned(0, "kill", "prefill0", 0.0, 60.0), Planned(1, "kill", "prefill0", 0.0, 60.0)]
    first, again = plays(cast("RunWorld", Clock()), planned)
    first.begin()
    again.begin()
    await asyncio.sleep(0.02)
    await asyncio.gather(first.end(), again.end())
    assert (again.became.applied_s, again.became.lifted_s) == (None, None)
    assert again.became.problem == "the one before it on this target was not lifted in time"


@timeless
async def test_what_is_never_lifted_may_befall_again() -> None:
    """Such as a reset of all connections."""
    planned = [Planned(0, "kill", "prefill0", 0.0, None), Planned(1, "kill", "prefill0", 0.0, None)]
    made = plays(cast("RunWorld", Clock()), planned)
    for each in made:
        each.begin()
    await asyncio.sleep(0.02)
    assert all(each.became.applied_s is not None for each in made)
    await asyncio.gather(*(each.end() for each in made))
