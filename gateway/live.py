"""The requests under way, by the id their client was given and the rid it had asked for, so that they can be aborted.

An abort ends the request as its client's disconnect would, only that the client hears of it. Once the last bytes of
its answer are on their way it is too late for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import orjson

from engines.types import Stage
from gateway.errors import GatewayError, bad_request


def wanted_rid(raw: bytes) -> str:
    """The rid of an `/abort_request` body; raises GatewayError 400 without one."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    rid = body.get("rid") if isinstance(body, dict) else None
    if not isinstance(rid, str) or not rid:
        raise bad_request("rid must name the request to abort; everything at once cannot be aborted", param="rid")
    return rid


class _Live:
    __slots__ = ("aborted", "ending", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.aborted = False
        self.ending = False


_current: ContextVar[_Live | None] = ContextVar("current_request", default=None)
"""The request that a task works for, its sub-tasks included."""


def ending() -> None:
    """The current request's answer ends here: an abort that comes now comes too late."""
    if (live := _current.get()) is not None:
        live.ending = True


class LiveRequests:
    """Who is being served now."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[_Live]] = {}

    async def run(self, names: tuple[str, ...], work: Coroutine[Any, Any, None]) -> None:
        """Await `work` in this task, abortable under each of `names`. Raises GatewayError when it was aborted."""
        task = asyncio.current_task()
        assert task is not None
        live = _Live(task)
        _current.set(live)
        for name in names:
            self._by_name.setdefault(name, []).append(live)
        try:
            await work
        except asyncio.CancelledError:
            if not live.aborted or task.uncancel() > 0:
                raise
            raise GatewayError(
                499, "the request was aborted", code="aborted", stage=Stage.STREAMING, definite=False
            ) from None
        finally:
            for name in names:
                self._forget(name, live)

    def abort(self, name: str) -> int:
        """End every request known by `name`, but for those that are ending; how many that were."""
        found = [live for live in self._by_name.get(name, ()) if not (live.aborted or live.ending)]
        for live in found:
            live.aborted = True
            live.task.cancel()
        return len(found)

    def __len__(self) -> int:
        return len({id(live) for lives in self._by_name.values() for live in lives})

    def _forget(self, name: str, live: _Live) -> None:
        lives = self._by_name[name]
        lives.remove(live)
        if not lives:
            del self._by_name[name]
