"""One run of a scenario on a fleet that others have started. A shell."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from failover.chaos import real_plan
from failover.chaos.answer import Answer
from failover.chaos.driver import Driver, Manners
from failover.chaos.load import Asked
from failover.chaos.real_eyes import RealEyes
from failover.chaos.real_fleet import RealFleet, address
from failover.chaos.real_reading import request
from failover.chaos.real_world import RealWorld
from failover.chaos.record import Record
from failover.chaos.runner import Run, clients, trace_text
from failover.chaos.scenario import Scenario
from failover.chaos.world import Unable

REFERENCE_S = 120.0
"""How long an answer before the faults may take."""


async def run(
    scenario: Scenario, fleet: RealFleet, seed: int, *, long: bool, tell: Callable[[str], None], stop: asyncio.Event
) -> Record:
    """Carry it out. Unable when the fleet does not answer; ScenarioError when the scenario cannot be done on it."""
    scenario = real_plan.fitted(scenario, fleet)
    planned = real_plan.planned(scenario, fleet, seed, long=long)
    trace = trace_text(scenario)
    world = RealWorld(fleet, {fault.target for fault in planned}, Random(f"links {seed}"), stop)
    tell(f"waits until {fleet.name} is ready")
    async with world:
        name = secrets.token_hex(4)
        asked = real_plan.asked(scenario, fleet, seed, long=long, trace=trace, model=world.model)
        all_pdgate = len(world.pdgates) == len(fleet.gateways)
        before = real_plan.references(asked, name, all_pdgate) if fleet.reference else ()
        if all_pdgate:
            asked = tuple(real_plan.for_pdgate(each, name) for each in asked)
        manners = _manners(world)
        references = await _answered(before, world, manners, tell, stop)
        eyes = RealEyes(world, references, len(before))
        return await Run(world, eyes, scenario, planned, asked, tell, stop, manners).carry_out(seed, long)


def _manners(world: RealWorld) -> Manners:
    """Whoever is asked by a proxy is still told its own name, as a server of several must be."""
    own = {name: {**world.headers, "host": address(world.fleet.targets[name][1])} for name in world.names("gateway")}
    return Manners(world.fleet.max_concurrent, own, names=False)


async def _answered(
    before: Sequence[Asked], world: RealWorld, manners: Manners, tell: Callable[[str], None], stop: asyncio.Event
) -> dict[str, str]:
    """The texts of what is asked before the faults, by the names of their requests; only of those that came whole."""
    found: dict[str, str] = {}

    def ended(answer: Answer) -> None:
        read = request(answer, None, world.name_of)
        whole = answer.status == 200 and answer.ended and any(event.finish for event in read.events)
        if whole:
            found[read.name] = "".join(event.text for event in read.events)

    apart_s = 1.0 / world.fleet.max_rate_per_s
    async with clients() as http:
        gateways = [(name, world.links.client_url(name)) for name in world.names("gateway")]
        driver = Driver(http, gateways, world.now_s, ended, manners=manners)
        try:
            for number, each in enumerate(before):
                if stop.is_set():
                    raise Unable("it was stopped before its load began")
                tell(f"asks {len(before)} prompts before the faults, {number} so far")
                await driver.play([replace(each, at_s=world.now_s() + apart_s)])
            await driver.finish(REFERENCE_S)
        finally:
            await driver.stop()
    return found
