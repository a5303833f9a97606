"""Servers that broke under requests come back by requests: few first, then all, also where a whole role broke."""

from __future__ import annotations

import asyncio

import pytest

from engines.types import Role
from tests.machine import time_limit
from tests.scenarios.cluster import HEARTBEATS_S, Cluster
from tests.scenarios.phases import RESERVED, TOKEN, Asked, hold_at

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVED_S = 10.0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=str)
async def test_a_whole_role_that_restarts_is_in_full_use_again_at_once(two_pairs: Cluster, role: Role) -> None:
    held = await hold_at(two_pairs, TOKEN if role is Role.DECODE else RESERVED, True, True, True, True)
    servers = two_pairs.of(role)
    await asyncio.gather(*(two_pairs.kill(server) for server in servers))
    for asked in held.asked:
        await asked.finish()
    await asyncio.sleep(HEARTBEATS_S)  # the downtime: decodes have noticed
    await asyncio.gather(*(server.start() for server in servers))
    await two_pairs.ready()
    engines = (await two_pairs.get("/readyz"))["engines"]
    mine = [each["health"] for each in engines if each["role"] == role]
    assert "broken" not in mine
    async with time_limit(SERVED_S):
        many = [Asked(two_pairs, stream=True) for _ in range(40)]
        for asked in many:
            (await asked.finish()).check_whole(asked.truth, attempts=1)
    assert [each["health"] for each in (await two_pairs.get("/readyz"))["engines"] if each["role"] == role] == [
        "ready"
    ] * 2
