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
from failover.chaos.driver import Driver
from failover.chaos.fault_play import FaultPlay
from failover.chaos.history import History
from failover.chaos.leftovers import Leftovers
from failover.chaos.load import Asked
from failover.chaos.observe import Observer
from failover.chaos.processes import Processes
from failover.chaos.record import Planned, Record
from failover.chaos.scenario import Scenario, ScenarioError

UNTOLD = "answers of gateways that died"
"""What a record says of answers that nobody can judge."""
_TELL_S = 1.0
_LAST_LOOK_S = 2.0
"""How long the last connections of our own may take to be gone."""


async def run(scenario: Scenario, seed: int, *, long: bool, tell: Callable[[str], None], stop: asyncio.Event) -> Record:
    """Carry it out. Unable when its processes cannot be started; `tell` is given a line about once a second."""
    planned = schedule.planned(scenario, seed, long=long)
    asked = load.requests(scenario.load, seed, long=long, trace=_trace(scenario))
    with tempfile.TemporaryDirectory(prefix="pdgate-chaos-") as folder:
        links = schedule.proxied(scenario, planned)
        world = Processes(scenario.fleet, links, Random(f"links {seed}"), Path(folder))
        one = _Run(world, scenario, planned, asked, tell, stop)
        async with world:
            return await one.carry_out(seed, long)


def _trace(scenario: Scenario) -> str:
    if not scenario.load.trace:
        return ""
    try:
        return Path(scenario.load.trace).read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError("load.trace", f"{scenario.load.trace}: {error.strerror or error}") from error


class _Run:
    def __init__(
        self,
        world: Processes,
        scenario: Scenario,
        planned: Sequence[Planned],
        asked: Sequence[Asked],
        tell: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        self._world, self._scenario, self._planned, self._asked = world, scenario, planned, asked
        self._tell, self._stop = tell, stop
        roles = schedule.names(scenario.fleet)
        befallen = {roles.get(fault.target) for fault in planned}
        self._observer = Observer(world, early="gateway" in befallen)
        self._faults = [FaultPlay(world, fault) for fault in planned]

    async def carry_out(self, seed: int, long: bool) -> Record:
        """Everything from the start of the load to the record."""
        world, observer = self._world, self._observer
        leftovers = Leftovers(world)
        await leftovers.before()
        world.begin()
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(_clients())
            gateways = [(name, world.links.client_url(name)) for name in world.names("gateway")]
            driver = Driver(http, gateways, world.now_s, observer.ended, observer.began, world.links.broke)
            stack.push_async_callback(observer.close)
            stack.push_async_callback(driver.stop)
            watching = tasks.spawn(observer.watch(), "chaos-watch")
            stack.push_async_callback(tasks.stop, watching)
            telling = tasks.spawn(self._progress(driver, self._scenario.load.duration_s[long]), "chaos-progress")
            stack.push_async_callback(tasks.stop, telling)
            for play in self._faults:
                play.begin()
                stack.push_async_callback(play.stop)
            await self._play(driver, self._scenario.load.duration_s[long])
            await self._settle(driver)
            load_s = world.now_s()
            self._say("waits until all is given back")
            within_s = 0.0 if self._stop.is_set() else self._scenario.expect.settle_s
            settled = await leftovers.wait(within_s, with_clients=False)
            settled_s = world.now_s() - load_s
            await observer.finish()
            settled = await leftovers.wait(min(within_s, _LAST_LOOK_S)) and settled
            return self._record(seed, long, load_s, settled_s if settled else None, leftovers)

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
        await asyncio.gather(*(play.end() for play in self._faults))
        problems = await self._world.heal()
        if problems:
            self._say("; ".join(problems))
        if self._stop.is_set():
            await driver.stop()
        else:
            self._say(f"waits for the end of {driver.live} answers")
            await driver.finish(self._scenario.expect.settle_s)

    def _record(self, seed: int, long: bool, load_s: float, settled_s: float | None, left: Leftovers) -> Record:
        world, observer = self._world, self._observer
        counts = {**left.counts, **left.log_errors(), "requests that a gateway does not know": observer.unexplained}
        history = History(observer.requests, left.ledgers, observer.deaths(), counts)
        untold = f"{observer.untold} sampled answers: their gateway died before it told how they were drawn"
        return Record(
            scenario=self._scenario,
            seed=seed,
            long=long,
            version=version("pdgate"),
            planned=tuple(self._planned),
            faults=tuple(play.became for play in self._faults),
            instances=world.instances,
            marks=tuple(world.marks),
            samples=tuple(observer.samples),
            history=history,
            load_s=load_s,
            settled_s=settled_s,
            unseen={UNTOLD: untold} if observer.untold else {},
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


def _clients() -> aiohttp.ClientSession:
    """Connections that are not used again: one that a gateway has closed meanwhile would lose a request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
