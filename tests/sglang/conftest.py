"""One fleet of real SGLang servers for all tests here; without an environment they are skipped, and say so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

import openai
import pytest
import pytest_asyncio

from engines.sglang_process import NoEnvironment, load
from tests.sglang.fleet import RealFleet

_fleets: list[RealFleet] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        for fleet in _fleets:
            report.sections += [(f"gateway {each.url}", each.log_tail()) for each in fleet.gateways]
            report.sections += [(f"{each.role} server", f"its output: {each.log}") for each in fleet.servers]
    return report


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_fleet() -> AsyncIterator[RealFleet]:
    try:
        launch = load()
    except NoEnvironment as error:
        pytest.skip(str(error))
    async with RealFleet(launch) as fleet:
        _fleets.append(fleet)
        yield fleet
        _fleets.remove(fleet)


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(shared_fleet: RealFleet) -> AsyncIterator[RealFleet]:
    """The fleet, with nothing running on it; what ended in the test before runs again."""
    yield shared_fleet
    await shared_fleet.heal()


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: RealFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, of the gateway."""
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def plain(fleet: RealFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, of a server that needs neither gateway nor pair."""
    async with openai.AsyncOpenAI(base_url=f"{fleet.plain.url}/v1", api_key="none", max_retries=0) as made:
        yield made
