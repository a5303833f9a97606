"""Reaching a phase by holds of engines, on a world whose engines have the emulator's own registry of holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from engines.emulator.core import Job, TokenSource
from engines.emulator.faults import Holds
from failover.chaos import phases
from failover.chaos.phases import Held, reach
from failover.chaos.world import Unable
from tests.fakes import timeless


class FakeEngine:
    def __init__(self, name: str, pid: int) -> None:
        self.name, self.role, self.url = name, name.rstrip("0123456789"), "http://fake"
        self.pid, self.running, self.frozen = pid, True, False
        self.holds = Holds()
        self.armed: dict[int, str] = {}
        """What was armed and not ended, by number."""
        self.asked: list[Mapping[str, Any]] = []
        self.rids: set[str] = set()

    def comes(self, rid: str, stage: str, count: int = 1) -> bool:
        """Whether a request that comes to a stage is stopped there."""
        self.rids.add(rid)
        source: TokenSource = None  # type: ignore[assignment]
        return self.holds.check(Job(rid, 7, b"", 0, 1, source), stage, count)


class FakeWorld:
    def __init__(self, *names: str) -> None:
        self.engines = {name: FakeEngine(name, 100 + number) for number, name in enumerate(names)}

    def names(self, role: str) -> Sequence[str]:
        return [name for name, engine in self.engines.items() if engine.role == role]

    def process(self, name: str) -> FakeEngine:
        return self.engines[name]

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        engine = self.engines[name]
        await asyncio.sleep(0)
        if engine.frozen:
            await asyncio.sleep(60.0)
        if not engine.running:
            raise Unable(f"{name} does not answer")
        if path == "/emulator/requests":
            return {"live": [{"rid": rid} for rid in engine.rids], "recent": []}
        if body is not None:
            engine.asked.append(body)
            hold = engine.holds.arm(body["stage"], body["k"])
            engine.armed[hold.hold_id] = body["stage"]
            return {"hold_id": hold.hold_id}
        found = engine.holds.get(int(path.rpartition("/")[2]))
        if found is None:
            raise Unable("no such hold")
        if method == "DELETE":
            engine.holds.release(found)
            engine.armed.pop(found.hold_id, None)
        return {"state": found.state.value, "rid": found.job.rid if found.job else None}

    def armed(self) -> dict[str, list[str]]:
        return {name: list(engine.armed.values()) for name, engine in self.engines.items() if engine.armed}


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld("prefill0", "prefill1", "decode0", "decode1", "gateway0")


def reaching(world: FakeWorld, target: str, phase: str) -> asyncio.Task[Held]:
    return asyncio.ensure_future(reach(world, target, phase))  # type: ignore[arg-type]


async def rounds() -> None:
    await asyncio.sleep(0.08)


async def cancelled(task: asyncio.Task[Held]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@timeless
async def test_a_request_is_held_and_the_other_engines_are_let_go(world: FakeWorld) -> None:
    task = reaching(world, "decode1", "token:5")
    await rounds()
    assert world.armed() == {"decode0": ["token"], "decode1": ["token"]}
    asked = [body for engine in world.engines.values() for body in engine.asked]
    assert asked == [{"stage": "token", "k": 5, "for_s": phases._HOLD_S}] * 2
    assert not world.engines["decode1"].comes("a", "token", 4)
    assert world.engines["decode1"].comes("a", "token", 5)
    held = await task
    assert (held.engine, held.rid) == ("decode1", "a")
    assert world.armed() == {"decode1": ["token"]}
    await held.release()
    await held.release()
    assert world.armed() == {}


@timeless
async def test_a_request_that_the_target_has_no_part_in_goes_on(world: FakeWorld) -> None:
    task = reaching(world, "prefill1", "token:1")
    await rounds()
    world.engines["prefill0"].rids.add("other")
    world.engines["prefill1"].rids.add("its")
    assert world.engines["decode0"].comes("other", "token")
    await rounds()
    assert not task.done()
    assert world.armed() == {"decode0": ["token"], "decode1": ["token"]}
    assert world.engines["decode0"].comes("its", "token")
    held = await task
    assert (held.engine, held.rid) == ("decode0", "its")


@pytest.mark.parametrize(("target", "reached"), [("gateway0>decode0", False), ("prefill0>decode1", True)])
@timeless
async def test_a_link_has_a_part_in_what_both_its_ends_know(world: FakeWorld, target: str, reached: bool) -> None:
    task = reaching(world, target, "transfer")
    await rounds()
    world.engines["decode1"].rids.add("a")
    assert world.engines["prefill0"].comes("a", "transfer")
    await rounds()
    assert task.done() is reached
    await cancelled(task)


@pytest.mark.parametrize("target", ["gateway0", "redis", "client>gateway0", "gateway0>redis"])
@timeless
async def test_a_gateway_or_redis_has_a_part_in_every_request(world: FakeWorld, target: str) -> None:
    task = reaching(world, target, "bootstrap")
    await rounds()
    assert world.engines["prefill1"].comes("a", "bootstrap")
    assert (await task).engine == "prefill1"


@timeless
async def test_nothing_is_left_armed_when_it_is_cancelled(world: FakeWorld) -> None:
    task = reaching(world, "decode0", "reserved")
    await rounds()
    await cancelled(task)
    assert world.armed() == {}


@timeless
async def test_an_engine_that_comes_again_or_ended_its_hold_is_armed_again(world: FakeWorld) -> None:
    task = reaching(world, "decode0", "handed_over")
    await rounds()
    first, second = world.engines["decode0"], world.engines["decode1"]
    second.running = False
    first.holds.release(first.holds._armed[0])  # its time is over
    await rounds()
    assert first.comes("a", "handed_over")
    assert (await task).hold_id == 2
    second.running, second.pid, second.holds, second.armed = True, 200, Holds(), {}
    again = reaching(world, "decode1", "handed_over")
    await rounds()
    second.pid, second.holds = 201, Holds()
    await rounds()
    assert second.comes("b", "handed_over")
    assert (await again).pid == 201


@timeless
async def test_a_frozen_engine_does_not_keep_the_others(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_ANSWER_S", 0.05)
    world.engines["decode0"].frozen = True
    task = reaching(world, "decode1", "reserved")
    await asyncio.sleep(0.2)
    assert world.engines["decode1"].comes("a", "reserved")
    assert (await asyncio.wait_for(task, 1.0)).engine == "decode1"


@timeless
async def test_what_a_dead_engine_held_needs_no_release(world: FakeWorld) -> None:
    held = Held(world, "decode0", 1, 1)  # type: ignore[arg-type]
    await held.release()
    assert not held.exists


@pytest.mark.parametrize("phase", ["", "decode_step:3", "tokens"])
@timeless
async def test_a_phase_that_there_is_not(world: FakeWorld, phase: str) -> None:
    with pytest.raises(Unable, match="bootstrap"):
        await reach(world, "decode0", phase)  # type: ignore[arg-type]
