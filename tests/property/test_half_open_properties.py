"""Half-open servers under any interleaving: never more than a few requests on trial, and none waits without reason."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engines.types import EngineId, Health
from gateway.decider import Decision
from gateway.errors import GatewayError
from gateway.trials import AT_ONCE
from tests.fakes import decider, request, timeless, up

ENGINES = tuple(EngineId(f"http://{name}") for name in ("p0", "p1", "d0", "d1"))
OPS = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 3 + ["succeed", "succeed", "fail", "end", "break", "half_open", "drain", "undrain"]),
        st.integers(0, 1000),
    ),
    max_size=60,
)


class World:
    """A decider whose servers break and come back half-open, as a monitor would have them."""

    def __init__(self) -> None:
        self.fleet = up("p0", "p1", "d0", "d1")
        self.at = decider(self.fleet)
        self.tasks: list[asyncio.Task[Decision]] = []

    @property
    def live(self) -> list[Decision]:
        told = [task.result() for task in self.tasks if task.done() and not task.cancelled() and not task.exception()]
        return [decision for decision in told if not decision.over]

    def set_health(self, engine_id: EngineId, health: Health) -> None:
        self.fleet.set_health(engine_id, health, "")
        self.at.fleet_changed(engine_id)

    async def do(self, op: str, number: int) -> None:
        engine, live = ENGINES[number % 4], self.live
        match op:
            case "ask":
                asked = request(prompt_tokens=10, expected_output_tokens=10, deadline_s=1e9)
                self.tasks.append(asyncio.ensure_future(self.at.submit(asked)))
            case "succeed" if live:
                decision = live[number % len(live)]
                self.at.handed_over(decision)
                for each in decision.pair:
                    if self.at.trials.passed(each, decision.rid) and self.health(each) is Health.PROBATION:
                        self.set_health(each, Health.READY)
            case "fail" if live:
                decision = live[number % len(live)]
                broken = decision.pair[number % 2]
                self.set_health(broken, Health.BROKEN)
                self.at.finished(decision)
            case "end" if live:
                self.at.finished(live[number % len(live)])
            case "break":
                self.set_health(engine, Health.BROKEN)
            case "half_open" if self.health(engine) is Health.BROKEN:
                self.set_health(engine, Health.PROBATION)
            case "drain" | "undrain":
                self.fleet.set_draining(engine, op == "drain")
                self.at.fleet_changed(engine)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def health(self, engine_id: EngineId) -> Health:
        return self.fleet.view(engine_id).health

    def check(self) -> None:
        on_trial = Counter(
            view.engine_id
            for each in self.live
            for view in (each.prefill, each.decode)
            if view.health is Health.PROBATION and each.rid in self.at.trials._rids.get(view.engine_id, ())
        )
        assert all(count <= AT_ONCE for count in on_trial.values())
        assert {engine: len(rids) for engine, rids in self.at.trials._rids.items()} == dict(on_trial)
        usable = [
            {
                view.spec.role
                for view in self.fleet.views()
                if view.takes_rooms and not (view.health is Health.PROBATION and self.at.trials.is_full(view.engine_id))
            }
        ][0]
        if len(usable) == 2:
            assert not len(self.at.queue), "a pair is free: nobody waits"


@given(OPS)
def test_few_are_on_trial_at_any_time_and_nobody_waits_for_a_free_pair(ops: list[tuple[str, int]]) -> None:
    @timeless
    async def runs() -> None:
        world = World()
        for op, number in ops:
            await world.do(op, number)
            world.check()
        for engine in ENGINES:  # all are well again: whoever still waits is served
            world.fleet.set_draining(engine, False)
            world.set_health(engine, Health.READY)
        for ended in await asyncio.gather(*world.tasks, return_exceptions=True):
            if isinstance(ended, Decision):
                world.at.finished(ended)
            else:
                assert isinstance(ended, GatewayError)
                assert ended.code == "no_pair_available"
        assert not world.at.trials._rids
        assert world.at.bookings.live() == 0

    runs()
