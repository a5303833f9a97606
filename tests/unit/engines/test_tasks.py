"""Tasks: named, kept, their crashes logged, their end waited for."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from engines import tasks


async def test_a_task_is_named_and_listed_while_it_runs() -> None:
    task = tasks.spawn(asyncio.Event().wait(), "waits")
    assert task.get_name() == "waits"
    assert "waits" in tasks.running()
    await tasks.stop(task)
    assert task.cancelled()
    await asyncio.sleep(0)
    assert "waits" not in tasks.running()


async def test_a_task_nobody_holds_is_not_collected() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    task = weakref.ref(tasks.spawn(work(), "unheld"))
    await asyncio.sleep(0)
    gc.collect(1)
    assert task() is not None
    await tasks.stop(task())


async def test_a_crash_is_logged_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    async def crash() -> None:
        raise RuntimeError("boom")

    tasks.spawn(crash(), "crashes")
    with caplog.at_level(logging.ERROR, "pdgate.tasks"):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "task crashes crashed" in caplog.text
    assert "boom" in caplog.text


async def test_a_result_comes_back() -> None:
    async def work() -> int:
        return 7

    assert await tasks.spawn(work(), "seven") == 7


async def test_stop_takes_any_end() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    await tasks.stop(None)
    task = tasks.spawn(stubborn(), "stubborn")
    await asyncio.sleep(0)
    await tasks.stop(task)
    assert task.done()
    assert not task.cancelled()
    await tasks.stop(task)
