"""The Redis user that the documentation asks for is enough for everything a gateway does."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from tests.redis_servers import RedisServer
from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import ROOT, Cluster
from tests.scenarios.test_replicas import owners

pytestmark = pytest.mark.asyncio(loop_scope="session")


def documented_rules() -> str:
    """The ACL rules in docs/ownership.md."""
    found = re.search(r"`(~pdgate:\*[^`]*)`", (ROOT / "docs" / "ownership.md").read_text())
    assert found is not None
    return found[1]


async def test_the_documented_user_is_enough() -> None:
    with RedisServer(users={"pdgate": f"on >secret {documented_rules()}"}) as redis:
        url = f"redis://pdgate:secret@127.0.0.1:{redis.port}"
        async with Cluster(1, 1, gateway=("--redis-url", url)) as cluster:
            prompt = new_prompt(2000)
            (await ask(cluster.http, cluster.url, chat(prompt, 5))).check_whole(expected_text(prompt, 5))
            await asyncio.sleep(1.5)  # what is said every second was said
            assert (await cluster.get("/readyz"))["ownership"]["state"] == "shared"
            assert sum(blocks for blocks, _ in (await owners(cluster, cluster.gateway)).values()) > 0
            assert "WARNING pdgate.redis" not in cluster.gateway.log_tail()
            inspected = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "redis", "inspect", "--redis-url", url, cwd=ROOT
            )
            assert await inspected.wait() == 0
