"""The parts of a gateway start and end together, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio

import pytest

from engines.tasks import running
from gateway.app import started
from gateway.context import Gateway
from tests.fakes import FakeUpstream, gateway


async def begun() -> Gateway:
    return gateway(FakeUpstream())


@pytest.mark.parametrize("part", ["monitor", "joins", "feed"])
async def test_a_part_that_does_not_start_ends_those_before_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gw = await begun()
    closed: list[str] = []

    def fail() -> None:
        raise RuntimeError(part)

    async def close() -> None:
        closed.append("upstream")

    monkeypatch.setattr(getattr(gw, part), "start", fail)
    monkeypatch.setattr(gw.upstream, "close", close, raising=False)
    with pytest.raises(RuntimeError, match=part):
        async with started(gw):
            raise AssertionError("it has not started")
    await asyncio.sleep(0)
    assert closed == ["upstream"]
    assert running() == ()


async def test_an_end_that_fails_skips_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gw = await begun()
    stop = gw.feed.stop

    async def fail() -> None:
        await stop()
        raise RuntimeError("feed")

    monkeypatch.setattr(gw.feed, "stop", fail)
    with pytest.raises(RuntimeError, match="feed"):
        async with started(gw):
            pass
    await asyncio.sleep(0)
    assert running() == ()
