"""What is done to all processes of a run when its load is over, and when it is stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from failover.chaos.children import Child, ChildPlan
from failover.chaos.processes import Processes
from failover.chaos.scenario import FleetPlan
from failover.chaos.world import NotAnyMore, Unable

SLEEPER = (sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")


async def _yes() -> bool:
    return True


@pytest.fixture
def world(tmp_path: Path) -> Processes:
    """An engine of each kind and a gateway, none of which has begun."""
    processes = Processes(FleetPlan(1, 1), (), Random(1), tmp_path)
    for name in ("prefill0", "decode0", "gateway0"):
        plan = ChildPlan(name, name[:-1], "http://nowhere", lambda: SLEEPER, _yes)
        processes.children[name] = Child(plan, tmp_path / name, processes.mark)
    return processes


def whats(world: Processes, name: str) -> list[str]:
    return [mark.what for mark in world.marks if mark.instance == name]


async def test_all_go_on_and_engines_have_no_faults_when_the_load_is_over(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def admin(name: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        assert not world.process(name).frozen, "it could not answer"
        calls.append((name, method, path))
        if name == "decode0":
            raise Unable("it is busy")
        return {}

    monkeypatch.setattr(world, "admin", admin)
    for name in ("prefill0", "decode0"):
        await world.process(name).start()
    world.process("prefill0").send_signal(signal.SIGSTOP)
    try:
        assert await world.heal() == []
        assert sorted(calls) == [(name, "DELETE", "/emulator/fault") for name in ("decode0", "prefill0")]
        assert whats(world, "prefill0") == ["started", "frozen", "thawed"]
        assert world.process("gateway0").running
    finally:
        for child in world.children.values():
            child.end()
            await child.wait()


async def test_in_a_hurry_nothing_is_started_and_who_was_told_to_end_is_killed(
    world: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def admin(name: str, method: str, path: str) -> Mapping[str, Any]:
        return {}

    monkeypatch.setattr(world, "admin", admin)
    prefill, decode, gateway = (world.process(name) for name in ("prefill0", "decode0", "gateway0"))
    await prefill.start()
    await gateway.start()
    try:
        gateway.send_signal(signal.SIGTERM)
        prefill.send_signal(signal.SIGSTOP)
        world.hurry()
        world.hurry()
        await gateway.wait()
        assert await world.heal() == []
        assert whats(world, "gateway0") == ["started", "told to end", "killed"]
        assert whats(world, "prefill0") == ["started", "frozen", "thawed"]
        prefill.send_signal(signal.SIGTERM)
        await prefill.wait()
        assert whats(world, "prefill0")[3:] == ["killed"], "nor does anybody get time to end from now on"
        assert not decode.begun
        with pytest.raises(NotAnyMore):
            await decode.start()
        with pytest.raises(NotAnyMore):
            await gateway.start()
    finally:
        prefill.end()
        await prefill.wait()


async def test_who_is_just_being_started_is_not_waited_for(world: Processes, tmp_path: Path) -> None:
    async def never() -> bool:
        world.hurry()
        return False

    child = Child(ChildPlan("decode0", "decode", "", lambda: SLEEPER, never), tmp_path / "log", world.mark)
    world.children["decode0"] = child
    with pytest.raises(NotAnyMore):
        await child.start()
    child.end()
    await child.wait()
