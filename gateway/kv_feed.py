"""Feeds the decider with what prefills hold, from their KV events: one subscriber and one bridge a rank for each.

Only where the prompts of the prefill's model are hashed as ids, and where this gateway has the lease of its events; one
that it cannot use goes to another gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq.asyncio

from engines.kv_subscriber import KvSubscriber
from engines.tasks import spawn, stop
from engines.types import EngineId, EngineView, FleetSnapshot, Role
from failover.shared_leases import Alone, Holder
from gateway.kv_engine_feed import EngineFeed, FeedMode, FeedStats, Hashing, Sink

_log = logging.getLogger("pdgate.kv_events")

LOOK_EVERY_S = 0.25
MAX_SOCKETS = 65_535
"""Of all engines' ranks together; ZMQ's own default is 1023."""
MAX_PAGES = 2_000_000
"""Pages that are remembered of one rank: 230 MB where a page is one token."""
LEASE = "kv-events:"
UNABLE_S, LEFT_TO_OTHERS_S = 10.0, 30.0
"""Who cannot follow an engine for so long leaves it to other gateways, and asks for it again after so long."""


class Fleet(Protocol):
    """What is asked of the fleet (`engines.fleet.Fleet`)."""

    def snapshot(self) -> FleetSnapshot: ...


class KvFeed:
    """The feeds of all prefills. `start()` and `stop()` once each."""

    def __init__(
        self,
        fleet: Fleet,
        sink: Sink,
        hashing: Hashing,
        leases: Holder | None = None,
        *,
        restart_seen: Callable[[EngineId], None] = lambda engine_id: None,
        look_every_s: float = LOOK_EVERY_S,
        max_pages: int = MAX_PAGES,
    ) -> None:
        """`restart_seen` is told when the events show another process before the monitor has noticed."""
        self._fleet = fleet
        self._sink = sink
        self._hashing = hashing
        self._leases = leases or Alone()
        self._restart_seen = restart_seen
        self._look_every_s = look_every_s
        self._max_pages = max_pages
        self._feeds: dict[EngineId, EngineFeed] = {}
        self._asked: set[EngineId] = set()
        """Whose leases are wanted."""
        self._left: dict[EngineId, _Left] = {}
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for prefills that publish events."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._task = spawn(self._run(), "kv-feed")

    async def stop(self) -> None:
        """End every subscription."""
        await stop(self._task)
        for engine_id in tuple(self._feeds):
            await self._end(engine_id)
        if self._context is not None:
            self._context.term()

    def stats(self) -> dict[EngineId, FeedStats]:
        """Every prefill's feed, also of those that have none."""
        views = self._fleet.snapshot().with_role(Role.PREFILL)
        return {view.engine_id: self._stats_of(view.engine_id) for view in views}

    def _stats_of(self, engine_id: EngineId) -> FeedStats:
        if (feed := self._feeds.get(engine_id)) is not None:
            return feed.stats()
        left = self._left.get(engine_id)
        return FeedStats(FeedMode.OFF, left.trouble if left is not None else "")

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._look_every_s)

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._leave(now_s)
        wanted = self._wanted(now_s)
        for engine_id in self._feeds.keys() - wanted.keys():
            await self._end(engine_id)
        for engine_id, view in wanted.items():
            feed = self._feeds.get(engine_id)
            if feed is not None and not feed.goes_on_for(view, self._block_tokens(view)):
                await self._end(engine_id)
                feed = None
            if feed is None:
                self._begin(view)

    def _leave(self, now_s: float) -> None:
        """Leave the engines that this gateway cannot follow to the others, where there are any."""
        self._left = {engine_id: left for engine_id, left in self._left.items() if now_s < left.until_s}
        if self._leases.alone:
            return
        for engine_id, feed in self._feeds.items():
            if feed.unable_since_s is not None and now_s >= feed.unable_since_s + UNABLE_S:
                self._left[engine_id] = _Left(now_s + LEFT_TO_OTHERS_S, feed.trouble)
                _log.warning("%s: its KV events are left to other gateways: %s", engine_id, feed.trouble)

    def _wanted(self, now_s: float) -> dict[EngineId, EngineView]:
        """The prefills that this gateway follows: those that it could, and has the lease of."""
        prefills = self._fleet.snapshot().with_role(Role.PREFILL)
        able = {view.engine_id: view for view in prefills if self._publishes(view) and view.engine_id not in self._left}
        for engine_id in self._asked - able.keys():
            self._leases.let_go(LEASE + engine_id)
        wanted = {engine_id: view for engine_id, view in able.items() if self._leases.hold(LEASE + engine_id)}
        for engine_id in self._asked | able.keys():
            self._sink.events_elsewhere(engine_id, engine_id in able and engine_id not in wanted)
        self._asked = set(able)
        return wanted

    def _publishes(self, view: EngineView) -> bool:
        """Whether the prefill's events can tell what it holds of our blocks."""
        facts = view.facts
        has_events = facts is not None and facts.kv_events is not None and facts.radix_cache
        return facts is not None and has_events and self._hashing.is_ids(facts.model)

    def _block_tokens(self, view: EngineView) -> int:
        assert view.facts is not None
        return self._hashing.block_tokens(view.facts.model)

    def _begin(self, view: EngineView) -> None:
        assert self._context is not None
        assert view.facts is not None
        assert view.facts.kv_events is not None
        feed = EngineFeed(view, self._sink, self._hashing, self._max_pages, self._restart_seen)
        self._feeds[view.engine_id] = feed
        try:
            feed.subscriber = KvSubscriber(
                self._context, view.facts.kv_events, view.spec.url, feed.handle, name=view.engine_id
            )
        except ValueError as error:
            feed.trouble = str(error)
            feed.unable_since_s = asyncio.get_running_loop().time()
            _log.warning("%s: its KV events are not followed: %s", view.engine_id, error)
            return
        feed.subscriber.start()

    async def _end(self, engine_id: EngineId) -> None:
        feed = self._feeds.pop(engine_id)
        if feed.subscriber is not None:
            await feed.subscriber.stop()
        self._sink.events_live(engine_id, False)


@dataclass(frozen=True, slots=True)
class _Left:
    """An engine that is left to other gateways, and why."""

    until_s: float
    trouble: str
