"""A client that goes away at whatever moment: its request is cancelled at every await that it ever comes to.

Each case runs a request from its start and cancels it at its n-th await, for n from 1 until it ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar
from unittest.mock import patch

import orjson
import pytest

from engines import tasks
from gateway.app import started
from gateway.lifecycle import Arrival, handle
from gateway.openai_api import Api
from tests.fakes import FakeClient, FakeExchange, gateway, now_s, timeless
from tests.gateway_world import CHAT, Behaviour, Servers, failed, first_calls
from tests.unit.gateway.test_continuation import Breaks, completion

_MOST_AWAITS = 400
T = TypeVar("T")


class Awaits:
    """Counts the awaits of a request, those of its legs and samples included, and cancels it at the n-th."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.task: asyncio.Task[None] | None = None

    def came(self) -> None:
        self.count += 1
        if self.count == self.at:
            assert self.task is not None
            asyncio.get_running_loop().call_soon(self.task.cancel)

    def counted(self, inner: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return _Counted(inner, self)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return tasks.spawn(self.counted(work), name)


class _Counted(Coroutine[Any, Any, T]):
    def __init__(self, inner: Coroutine[Any, Any, T], awaits: Awaits) -> None:
        self._inner, self._awaits = inner, awaits

    def send(self, value: Any) -> Any:
        return self._came(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._came(self._inner.throw(*error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def _came(self, awaited: Any) -> Any:
        self._awaits.came()
        return awaited


class SlowClient(FakeClient):
    """Takes a moment for everything."""

    async def begin(self, status: int, headers: Mapping[str, str], first: bytes) -> None:
        await asyncio.sleep(0.01)
        await super().begin(status, headers, first)

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0.01)
        await super().write(data)

    async def end(self) -> None:
        await asyncio.sleep(0.01)
        await super().end()

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await asyncio.sleep(0.01)
        await super().whole(status, headers, body)


class SlowServers(Servers):
    """Every connection, piece and abort takes a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[FakeExchange] = []

    async def open(self, *args: Any, **named: Any) -> FakeExchange:
        await asyncio.sleep(0.01)
        exchange = await super().open(*args, **named)
        whole = exchange.chunks

        async def one_by_one() -> AsyncIterator[bytes]:
            async for piece in whole():
                await asyncio.sleep(0.01)
                yield piece

        exchange.chunks = one_by_one  # type: ignore[method-assign]
        self.exchanges.append(exchange)
        return exchange


async def run(body: dict[str, Any], api: Api, behave: Behaviour, at: int) -> bool:
    """One request, cancelled at its `at`-th await; whether it got that far. Fails where anything is left of it."""
    servers, awaits = SlowServers(), Awaits(at)
    servers.behave = behave
    gw = gateway(servers)
    async with started(gw):
        await asyncio.sleep(0.01)
        with patch("gateway.lifecycle.spawn", awaits.spawn), patch("engines.pair.spawn", awaits.spawn):
            work = awaits.counted(handle(gw, Arrival(api, orjson.dumps(body), {}, now_s()), SlowClient()))
            awaits.task = asyncio.get_running_loop().create_task(work)
            await asyncio.gather(awaits.task, return_exceptions=True)
            reached = awaits.task.cancelled()
            await gw.releaser.drained(10.0)
        await asyncio.sleep(0)
        assert gw.decider.bookings.live() == 0, f"a booking is left after await {at}"
        assert len(gw.decider.queue) == 0, f"it still waits after await {at}"
        assert not gw.decider.owners.index.pending_blocks(), f"a promise of its prefix is left after await {at}"
        assert len(gw.live) == 0, f"it counts as running after await {at}"
        assert all(exchange.closed for exchange in servers.exchanges), f"a connection is open after await {at}"
    await asyncio.sleep(0)
    assert not tasks.running(), f"tasks are left after await {at}"
    return reached


def plain(host: str, body: dict[str, Any]) -> None:
    return None


CASES: dict[str, tuple[dict[str, Any], Api, Callable[[], Behaviour]]] = {
    "stream": ({**CHAT, "stream": True}, Api.CHAT, lambda: plain),
    "whole": ({**CHAT}, Api.CHAT, lambda: plain),
    "two samples": ({**CHAT, "stream": True, "n": 2}, Api.CHAT, lambda: plain),
    "tried again": ({**CHAT, "stream": True}, Api.CHAT, lambda: first_calls("d", failed(), failed())),
    "resumed": (completion(), Api.COMPLETIONS, lambda: Breaks(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_request_that_is_cancelled_leaves_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    body, api, behave = CASES[name]

    @timeless
    async def until_it_ends() -> None:
        for at in range(1, _MOST_AWAITS):
            if not await run(body, api, behave(), at):
                assert at > 5, "it was cancelled nowhere"
                return
        raise AssertionError(f"more than {_MOST_AWAITS} awaits")

    until_it_ends()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
