"""A decode whose pages have another size would be killed by its first request: it never gets one."""

from __future__ import annotations

import asyncio

import pytest

from engines.sglang_process import SglangServer
from engines.types import Role
from tests.sglang.fleet import MODEL, PAGE_TOKENS, SEED, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_another_page_size_is_refused_before_it_kills(fleet: RealFleet) -> None:
    pages = ("--page-size", str(2 * PAGE_TOKENS), *SEED)
    async with SglangServer(Role.DECODE, fleet.launch, arguments=pages) as misfit:
        gateway = await fleet.add_gateway(decodes=[misfit.url])
        body = {"model": MODEL, "prompt": "which of the two", "max_tokens": 4}
        for _ in range(8):
            async with fleet.http.post(gateway.url + "/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                assert reply.headers["x-pdgate-decode"] == fleet.decode.url
        shown = str(await fleet.get(gateway.url + "/readyz")) + str(
            await fleet.get(f"{gateway.url}/pdgate/explain/newest")
        )
        assert "page" in shown, "it is said why"
        await asyncio.sleep(1.0)
        assert misfit.returncode is None
        await gateway.stop()
        fleet.gateways.remove(gateway)
