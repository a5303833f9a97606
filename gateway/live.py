"""The requests under way, by the id their client was given and the rid it had asked for, so that they can be aborted.

An abort ends the request as its client's disconnect would, only that the client hears of it. Once the last bytes of
its answer are on their way it is too late for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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


def _aborted() -> GatewayError:
    return GatewayError(499, "the request was aborted", code="aborted", stage=Stage.STREAMING, definite=False)


def _shutting_down() -> GatewayError:
    return GatewayError(
        503,
        "the gateway is shutting down and could not wait for this answer any longer",
        code="shutting_down",
        kind="service_unavailable",
        stage=Stage.STREAMING,
        definite=False,
        retry_after_s=1.0,
        safe_to_retry=True,
    )


def fenced(stage: Stage) -> GatewayError:
    """503: other gateways have declared this one dead, and are releasing what it had."""
    return GatewayError(
        503,
        "this gateway was cut off for so long that others took over what it ran",
        code="gateway_fenced",
        kind="service_unavailable",
        stage=stage,
        definite=stage is Stage.ADMISSION,
        retry_after_s=1.0,
        safe_to_retry=True,
    )


class _Live:
    """One request; `error` is why it was ended from outside, `ending` that its answer is over anyway."""

    __slots__ = ("ending", "error", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.error: GatewayError | None = None
        self.ending = False

    def end(self, error: GatewayError) -> bool:
        """End it with this error, once; whether it was to be ended."""
        if self.ending or self.error is not None:
            return False
        self.error = error
        self.task.cancel()
        return True


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
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until nobody is being served."""
        await self._idle.wait()

    async def run(self, names: tuple[str, ...], work: Coroutine[Any, Any, None]) -> None:
        """Await `work` in this task, abortable under each of `names`. Raises GatewayError when it was aborted."""
        task = asyncio.current_task()
        assert task is not None
        live = _Live(task)
        _current.set(live)
        self._idle.clear()
        for name in names:
            self._by_name.setdefault(name, []).append(live)
        try:
            await work
        except asyncio.CancelledError:
            if live.error is None or task.uncancel() > 0:
                raise
            raise live.error from None
        finally:
            for name in names:
                self._forget(name, live)
            if not self._by_name:
                self._idle.set()

    def abort(self, name: str) -> int:
        """End every request known by `name`, but for those that are ending; how many that were."""
        return sum(live.end(_aborted()) for live in self._by_name.get(name, ()))

    def shut_down(self) -> int:
        """End every request that has not ended, as the gateway stops; how many that were."""
        return self._end_all(_shutting_down)

    def fence(self) -> None:
        """End every request that has not ended, as others release what it has on servers."""
        self._end_all(lambda: fenced(Stage.STREAMING))

    def _end_all(self, why: Callable[[], GatewayError]) -> int:
        everyone = {id(live): live for lives in self._by_name.values() for live in lives}
        return sum(live.end(why()) for live in everyone.values())

    def __len__(self) -> int:
        return len({id(live) for lives in self._by_name.values() for live in lives})

    def _forget(self, name: str, live: _Live) -> None:
        lives = self._by_name[name]
        lives.remove(live)
        if not lives:
            del self._by_name[name]
