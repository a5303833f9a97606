"""The fleets that tests of a module share, healed after each, and the gateway's log in the report of what fails."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Generator
from typing import Any

import pytest
import pytest_asyncio

from tests.redis_servers import RedisServer
from tests.scenarios import cluster
from tests.scenarios.cluster import Cluster
from tests.scenarios.two_gateways import Replicated


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        for each in cluster.running():
            report.sections.append((f"gateway {each.url}", each.gateway.log_tail()))
    return report


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_two_pairs() -> AsyncIterator[Cluster]:
    async with Cluster(2, 2) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_one_pair() -> AsyncIterator[Cluster]:
    async with Cluster(1, 1) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def two_pairs(shared_two_pairs: Cluster) -> AsyncIterator[Cluster]:
    """Two prefills and two decodes, as new."""
    yield shared_two_pairs
    await shared_two_pairs.heal()


@pytest_asyncio.fixture(loop_scope="session")
async def one_pair(shared_one_pair: Cluster) -> AsyncIterator[Cluster]:
    """One prefill and one decode, as new: what fails has nowhere to go."""
    yield shared_one_pair
    await shared_one_pair.heal()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_watched() -> AsyncIterator[Cluster]:
    async with Cluster(1, 1, recorded=True) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def watched(shared_watched: Cluster) -> AsyncIterator[Cluster]:
    """One pair with a recorder before each server."""
    yield shared_watched
    await shared_watched.heal()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_two_gateways() -> AsyncIterator[Replicated]:
    with RedisServer() as redis:
        async with Replicated(redis) as started:
            yield started


@pytest_asyncio.fixture(loop_scope="session")
async def replicated(shared_two_gateways: Replicated) -> AsyncIterator[Replicated]:
    """Two gateways that know each other, as new."""
    await shared_two_gateways.all_live()
    yield shared_two_gateways
    shared_two_gateways.lift()
    shared_two_gateways.a.send_signal(signal.SIGCONT)
    await shared_two_gateways.heal()
