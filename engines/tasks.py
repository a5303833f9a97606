"""Named tasks with kept references: the only place that starts an asyncio task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger("pdgate.tasks")
_running: set[asyncio.Task[Any]] = set()
T = TypeVar("T")


def spawn(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start `work` as a task called `name`; a crash nobody awaits is logged when it happens."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_ended)
    return task


def running() -> tuple[str, ...]:
    """The names of the tasks that have not ended, for leak checks."""
    return tuple(sorted(task.get_name() for task in _running))


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s crashed", task.get_name(), exc_info=error)


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancel `task` and wait for its end, whatever it ends with."""
    if task is None or task.done():
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
