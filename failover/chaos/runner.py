"""One run of a scenario: its processes, its load, its faults, and the record of what happened. A shell.

When the load ends, or the run is stopped, every fault is lifted and every process runs again, so that the fleet can
give back what it holds; then that is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random

import aiohttp

from engines import tasks
from failover.chaos import load, schedule
from failover.chaos.driver import PLAIN, Driver, Manners
from failover.chaos.eyes import EmulatedEyes, Eyes
from failover.chaos.fault_play import FaultPlay
from failover.chaos.history import History
from failover.chaos.load import Asked
from failover.chaos.processes import Processes
from failover.chaos.record import Planned, Record
from failover.chaos.scenario import Scenario, ScenarioError
from failover.chaos.world import RunWorld

_TELL_S = 1.0


async def run(scenario: Scenario, seed: int, *, long: bool, tell: Callable[[str], None], stop: asyncio.Event) -> Record:
    """Carry it out. Unable when its processes cannot be started; `tell` is given a line about once a second."""
    planned = schedule.planned(scenario, seed, long=long)
    asked = load.requests(scenario.load, seed, long=long, trace=trace_text(scenario))
    with tempfile.TemporaryDirectory(prefix="pdgate-chaos-") as folder:
        links = schedule.proxied(scenario, planned)
        world = Processes(scenario.fleet, links, Random(f"links {seed}"), Path(folder))
        roles = schedule.names(scenario.fleet)
        eyes = EmulatedEyes(world, early="gateway" in {roles.get(fault.target) for fault in planned})
        async with world:
            return await Run(world, eyes, scenario, planned, asked, tell, stop).carry_out(seed, long)


def trace_text(scenario: Scenario) -> str:
    """What is in the scenario's trace, if it names one; ScenarioError where it cannot be read."""
    if not scenario.load.trace:
        return ""
    try:
        return Path(scenario.load.trace).read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError("load.trace", f"{scenario.load.trace}: {error.strerror or error}") from error


class Run:
    """One run in a world that is ready. `manners`: how its clients ask."""

    def __init__(
        self,
        world: RunWorld,
        eyes: Eyes,
        scenario: Scenario,
        planned: Sequence[Planned],
        asked: Sequence[Asked],
        tell: Callable[[str], None],
        stop: asyncio.Event,
        manners: Manners = PLAIN,
    ) -> None:
        self._world, self._eyes, self._manners = world, eyes, manners
        self._scenario, self._planned, self._asked = scenario, planned, asked
        self._tell, self._stop = tell, stop
        self._faults = plays(world, planned)

    async def carry_out(self, seed: int, long: bool) -> Record:
        """Everything from the start of the load to the record."""
        world, eyes, load_s = self._world, self._eyes, self._scenario.load.duration_s[long]
        await eyes.before()
        world.begin()
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(clients())
            gateways = [(name, world.links.client_url(name)) for name in world.names("gateway")]
            driver = Driver(http, gateways, world.now_s, eyes.ended, eyes.began, world.links.broke, self._manners)
            stack.push_async_callback(eyes.close)
            stack.push_async_callback(driver.stop)
            watching = tasks.spawn(eyes.watch(), "chaos-watch")
            stack.push_async_callback(tasks.stop, watching)
            telling = tasks.spawn(self._progress(driver, load_s), "chaos-progress")
            stack.push_async_callback(tasks.stop, telling)
            for play in self._faults:
                play.begin()
                stack.push_async_callback(play.stop)
            await self._play(driver, load_s)
            await self._settle(driver)
            load_s = world.now_s()
            self._say("waits until all is given back")
            settled_s = await eyes.settle(0.0 if self._stop.is_set() else self._scenario.expect.settle_s)
            return eyes.told(self._record(seed, long, load_s, settled_s))

    async def _play(self, driver: Driver, load_s: float) -> None:
        """The load with its faults, until both are over."""
        playing = tasks.spawn(driver.play(self._asked), "chaos-load")
        stopping = tasks.spawn(self._stop.wait(), "chaos-stop")
        try:
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                playing.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), load_s - self._world.now_s())
        finally:
            await tasks.stop(playing)
            await tasks.stop(stopping)

    async def _settle(self, driver: Driver) -> None:
        """Lift every fault, have every process run, and see every client to its end."""
        self._say("lifts what is left of the faults")
        if self._stop.is_set():
            self._world.hurry()
        await asyncio.gather(*(play.end() for play in self._faults))
        problems = await self._world.heal()
        if problems:
            self._say("; ".join(problems))
        if self._stop.is_set():
            await driver.stop()
        else:
            self._say(f"waits for the end of {driver.live} answers")
            await driver.finish(self._scenario.expect.settle_s)

    def _record(self, seed: int, long: bool, load_s: float, settled_s: float | None) -> Record:
        return Record(
            scenario=self._scenario,
            seed=seed,
            long=long,
            version=version("pdgate"),
            planned=tuple(self._planned),
            faults=tuple(play.became for play in self._faults),
            instances=self._world.instances,
            marks=tuple(self._world.marks),
            samples=(),
            history=History(()),
            load_s=load_s,
            settled_s=settled_s,
            stopped=self._stop.is_set(),
        )

    async def _progress(self, driver: Driver, load_s: float) -> None:
        while True:
            on = ", ".join(f"{play.planned.fault} {play.planned.target}" for play in self._faults if play.is_on)
            words = f"{self._world.now_s():.0f} of {load_s:g} s, {driver.asked} asked, {driver.live} under way"
            self._tell(words + (f", {on}" if on else ""))
            await asyncio.sleep(_TELL_S)

    def _say(self, words: str) -> None:
        self._tell(f"{self._world.now_s():.0f} s: {words}")


def plays(world: RunWorld, planned: Sequence[Planned]) -> list[FaultPlay]:
    """What plays each fault, in the order of `planned`.

    One that lasts for a while knows the one of its kind before it on its target; others are not lifted before the end.
    """
    made: list[FaultPlay] = []
    last: dict[tuple[str, str], FaultPlay] = {}
    for each in planned:
        made.append(FaultPlay(world, each, last.get((each.fault, each.target))))
        if each.for_s is not None:
            last[each.fault, each.target] = made[-1]
    return made


def clients() -> aiohttp.ClientSession:
    """Connections that are not used again: one that a gateway has closed meanwhile would lose a request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
