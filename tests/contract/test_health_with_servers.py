"""The monitor against emulated servers: stopped, stuck, draining, dead, and without a bootstrap server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer, free_ports
from engines.fleet import Fleet
from engines.sglang import SglangEngine
from engines.tasks import spawn
from engines.types import EngineId, EngineSpec, Health, Role
from engines.upstream import Upstream
from failover.monitor import Monitor
from failover.wedge import Owed
from tests.contract.emu_fleet import EmuFleet, emu_fleet, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

STUCK_S, LATE_S = 1.0, 0.8
_serial = count()


def new_prompt() -> dict[str, Any]:
    """A request of several chunks, of which no server has anything cached."""
    number = next(_serial)
    return {"prompt": " ".join(f"{number} {word}" for word in range(80)), "max_tokens": 64, "stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(speed=10.0, arguments=("--model", "tiny", "--chunked-prefill-size", "64")) as running:
        yield running


class Nobody:
    def fleet_changed(self, engine_id: EngineId) -> None: ...

    def restarted(self, engine_id: EngineId) -> None: ...


class Watched:
    """A monitor over a prefill and a decode; `owed` is what it is told that they owe."""

    def __init__(self, upstream: Upstream, servers: EmuFleet, bootstrap_port: int | None = None) -> None:
        port = bootstrap_port or servers.prefill.bootstrap_port
        self.prefill = self._spec(servers.prefill, Role.PREFILL, port)
        self.decode = self._spec(servers.decode, Role.DECODE, None)
        self.fleet = Fleet([self.prefill, self.decode])
        self.owed = 0
        self.monitor = Monitor(
            self.fleet,
            SglangEngine(upstream, None),
            Nobody(),
            spawn,
            probe_interval_s=0.1,
            load_interval_s=0.05,
            timeout_s=LATE_S,
            wedged_after_s=STUCK_S,
        )
        self.monitor.owed = lambda engine_id: Owed(self.owed)
        self.seen: dict[EngineId, list[Health]] = {self.prefill.engine_id: [], self.decode.engine_id: []}

    @staticmethod
    def _spec(server: EmulatedServer, role: Role, port: int | None) -> EngineSpec:
        return EngineSpec(EngineId(server.url), server.url, role, server.host if port else None, port)

    def health(self, spec: EngineSpec) -> Health:
        return self.fleet.view(spec.engine_id).health

    async def becomes(self, spec: EngineSpec, health: Health, within_s: float = 5.0) -> None:
        async def has() -> bool:
            return self.health(spec) is health

        try:
            await until(has, within_s)
        except AssertionError as error:
            view = self.fleet.view(spec.engine_id)
            raise AssertionError(f"{spec.role} is {view.health} ({view.reason}), not {health}") from error

    def steps(self, spec: EngineSpec) -> set[Health]:
        """The states it has been in since the start."""
        return {after for engine_id, _, after, _ in self.monitor.transitions if engine_id == spec.engine_id}


@asynccontextmanager
async def watched(servers: EmuFleet, bootstrap_port: int | None = None) -> AsyncIterator[Watched]:
    upstream = Upstream()
    await upstream.start()
    world = Watched(upstream, servers, bootstrap_port)
    world.monitor.start()
    try:
        await world.becomes(world.decode, Health.READY)
        yield world
    finally:
        await world.monitor.stop()
        await upstream.close()


async def while_held(servers: EmuFleet, role: Role, stage: str, look: Callable[[], Awaitable[None]]) -> None:
    """Run `look` while a request is held at a stage on one server; then it is let go, and ends."""
    server = servers.prefill if role is Role.PREFILL else servers.decode
    hold = await servers.hold(server, stage, 2)
    asking = asyncio.ensure_future(servers.pair("/v1/completions", new_prompt()))
    try:
        await servers.held(server, hold)
        await look()
    finally:
        await servers.release(server, hold)
        await asking


async def test_a_server_that_pauses_is_slow_at_most(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        servers.decode.send_signal(signal.SIGSTOP)
        await world.becomes(world.decode, Health.SLOW)
        await asyncio.sleep(2 * LATE_S)
        servers.decode.send_signal(signal.SIGCONT)
        await world.becomes(world.decode, Health.READY)
        assert world.steps(world.decode) == {Health.READY, Health.SLOW}


async def test_a_server_whose_streams_go_on_is_not_even_slow(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        servers.decode.send_signal(signal.SIGSTOP)
        for _ in range(20):
            world.monitor.progress(world.decode.engine_id, asyncio.get_running_loop().time())
            await asyncio.sleep(0.1)
        servers.decode.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.2)
        assert world.steps(world.decode) == {Health.READY}


async def test_a_decode_that_stands_still_under_work_is_wedged_until_it_goes_on(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        world.owed = 1

        async def look() -> None:
            await world.becomes(world.decode, Health.WEDGED)
            reply = await servers.call(servers.decode, "GET", "/ready")
            assert reply.status == 200
            assert world.health(world.prefill) is Health.READY

        await while_held(servers, Role.DECODE, "token", look)
        await world.becomes(world.decode, Health.PROBATION)


async def test_a_prefill_whose_forwards_stand_still_is_wedged_and_the_decode_that_waits_for_it_is_not(
    servers: EmuFleet,
) -> None:
    async with watched(servers) as world:
        await world.becomes(world.prefill, Health.READY)
        world.owed = 1

        async def look() -> None:
            await world.becomes(world.prefill, Health.WEDGED)
            await asyncio.sleep(STUCK_S)
            assert world.health(world.decode) is Health.READY

        await while_held(servers, Role.PREFILL, "prefill_chunk", look)
        await world.becomes(world.prefill, Health.PROBATION)


async def test_a_server_that_works_is_not_wedged(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        world.owed = 1
        until_s = asyncio.get_running_loop().time() + 2 * STUCK_S
        while asyncio.get_running_loop().time() < until_s:
            await servers.pair("/v1/completions", new_prompt())
        for spec in (world.prefill, world.decode):
            assert Health.WEDGED not in world.steps(spec)


async def test_a_prefill_whose_bootstrap_port_refuses_gets_no_rooms(servers: EmuFleet) -> None:
    async with watched(servers, bootstrap_port=free_ports(1)[0]) as world:
        await world.becomes(world.prefill, Health.SUSPECTED)
        assert "bootstrap server" in world.fleet.view(world.prefill.engine_id).reason
        assert world.monitor.is_stale(world.prefill.engine_id)


async def test_a_server_that_drains_itself_takes_no_rooms_and_comes_back_as_another(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        epoch = world.fleet.view(world.decode.engine_id).epoch

        async def look() -> None:
            servers.decode.send_signal(signal.SIGTERM)
            await world.becomes(world.decode, Health.NOT_READY)
            assert "503" in world.fleet.view(world.decode.engine_id).reason

        await while_held(servers, Role.DECODE, "token", look)  # its stream ends well meanwhile
        await world.becomes(world.decode, Health.SUSPECTED, 10.0)
        await servers.decode.start()
        await world.becomes(world.decode, Health.READY)
        assert world.fleet.view(world.decode.engine_id).epoch == epoch + 1


async def test_a_killed_server_is_noticed_and_its_next_boot_is_another_epoch(servers: EmuFleet) -> None:
    async with watched(servers) as world:
        epoch = world.fleet.view(world.decode.engine_id).epoch
        await servers.decode.kill()
        await world.becomes(world.decode, Health.SUSPECTED)
        await servers.decode.start()
        await world.becomes(world.decode, Health.READY)
        assert world.fleet.view(world.decode.engine_id).epoch == epoch + 1
