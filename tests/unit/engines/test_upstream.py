"""The connections to the servers, without any; with servers in tests/contract/test_upstream.py."""

from __future__ import annotations

import aiohttp

from engines.emulator.app import KEEP_ALIVE_S
from engines.upstream import Upstream


async def test_idle_connections_are_closed_before_a_server_closes_them() -> None:
    """A request on a connection that its server closes at that moment is lost."""
    upstream = Upstream()
    await upstream.start()
    assert upstream._session is not None
    connector = upstream._session.connector
    assert isinstance(connector, aiohttp.TCPConnector)
    assert 0.5 < connector._keepalive_timeout <= KEEP_ALIVE_S - 0.5
    await upstream.close()
