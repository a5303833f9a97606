"""Feeds the decider with what prefills hold, from their KV events: one subscriber and one bridge a rank for each.

Only where the prompts of the prefill's model are hashed as ids, and where this gateway has the lease of its events; one
that it cannot use goes to another gateway. A prefill whose events have a hole is in approximate mode: what comes is
still told, and the decider is told not to rely on it alone, until the prefill clears its cache or starts anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import zmq.asyncio

from engines.kv_events import KvBatch
from engines.kv_subscriber import ConditionKind, KvCondition, KvSubscriber
from engines.kv_types import KvEvent, PagesCleared
from engines.tasks import spawn, stop
from engines.types import EngineId, EngineView, FleetSnapshot, KvEventSource, Role
from failover.shared_leases import Alone, Holder
from routing.kv_bridge import Change, Held, KvBridge, Lost
from routing.kv_joining import joined
from routing.kv_ranks import RankUnion
from routing.ownership import Tier

_log = logging.getLogger("pdgate.kv_events")

LOOK_EVERY_S = 0.25
MAX_SOCKETS = 65_535
"""Of all engines' ranks together; ZMQ's own default is 1023."""
MAX_PAGES = 2_000_000
"""Pages that are remembered of one rank: 230 MB where a page is one token."""
SLICE_PAGES, SLICE_TOKENS, STEP_S = 512, 2048, 0.002
"""A step of the event loop ends after so many pages (or so many tokens where pages are large), or after so long."""
LEASE = "kv-events:"
UNABLE_S, LEFT_TO_OTHERS_S = 10.0, 30.0
"""Who cannot follow an engine for so long leaves it to other gateways, and asks for it again after so long."""


class Fleet(Protocol):
    """What is asked of the fleet (`engines.fleet.Fleet`)."""

    def snapshot(self) -> FleetSnapshot: ...


class Sink(Protocol):
    """Who is told (`gateway.decider.Decider`). Synchronous; a call of an epoch that has passed does nothing."""

    def engine_held(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        """The engine has this whole chain on `tier`."""

    def engine_lost(self, engine_id: EngineId, epoch: int, blocks: tuple[bytes, ...], tier: Tier) -> None:
        """The engine does not have these blocks on `tier`."""

    def engine_cleared(self, engine_id: EngineId, epoch: int) -> None:
        """The engine has nothing."""

    def events_live(self, engine_id: EngineId, live: bool) -> None:
        """Whether what is told of the engine is all there is to know."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How prompts of a model are hashed: asked anew at each look."""

    is_ids: Callable[[str], bool]
    chain_root: Callable[[str, str | None, str | None], bytes]
    """By model, cache salt and LoRA name."""
    block_tokens: Callable[[str], int]


class FeedMode(StrEnum):
    """How well an engine's cache is known."""

    EVENTS = "events"
    APPROXIMATE = "approximate"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class FeedStats:
    """One engine's feed. `lost` counts batches; `last_event_age_s` is None until a batch has come."""

    mode: FeedMode
    trouble: str = ""
    batches: int = 0
    gaps: int = 0
    lost: int = 0
    malformed: int = 0
    pages: int = 0
    pages_bytes: int = 0
    last_event_age_s: float | None = None


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
        self._feeds: dict[EngineId, _Feed] = {}
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
        self._asked = set(able)
        return {engine_id: view for engine_id, view in able.items() if self._leases.hold(LEASE + engine_id)}

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
        feed = _Feed(view, self._sink, self._hashing, self._max_pages, self._restart_seen)
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


class _Feed:
    """One engine's feed: applies what its subscriber hands on, a slice at a time."""

    def __init__(
        self,
        view: EngineView,
        sink: Sink,
        hashing: Hashing,
        max_pages: int,
        restart_seen: Callable[[EngineId], None],
    ) -> None:
        assert view.facts is not None
        assert view.facts.kv_events is not None
        self._source: KvEventSource = view.facts.kv_events
        self._engine_id, self._url, self._epoch = view.engine_id, view.spec.url, view.epoch
        self._sink = sink
        self._restart_seen = restart_seen
        self._model, ranks = view.facts.model, range(self._source.dp_size)
        self._block_tokens = hashing.block_tokens(self._model)
        self._loop = asyncio.get_running_loop()

        def root_of(salt: str | None, lora: str | None) -> bytes:
            return hashing.chain_root(self._model, salt, lora)

        page_tokens = self._source.block_tokens
        self._slice_pages = max(1, min(SLICE_PAGES, SLICE_TOKENS // page_tokens))
        self._bridges = [KvBridge(root_of, self._block_tokens, page_tokens, max_pages) for _ in ranks]
        self._exact = [False for _ in ranks]
        self._union = RankUnion(len(self._bridges))
        self._live: bool | None = None
        self._last_event_s: float | None = None
        self._counts = FeedStats(FeedMode.APPROXIMATE)
        self._deaf: set[int] = set()
        """Ranks that are not listened to."""
        self.trouble = ""
        self.unable_since_s: float | None = None
        """Since when something of the engine cannot be listened to."""
        self.subscriber: KvSubscriber | None = None

    def goes_on_for(self, view: EngineView, block_tokens: int) -> bool:
        """Whether this feed is the right one for the engine as it is now; a new epoch may be taken over.

        With a replay, the events of a new process are best read from their start. Without one, the subscription must
        not be cut: it may be about to see that start.
        """
        facts = view.facts
        assert facts is not None
        same = (facts.kv_events, view.spec.url, facts.model, block_tokens)
        if same != (self._source, self._url, self._model, self._block_tokens):
            return False
        if view.epoch != self._epoch:
            if self._source.replay_endpoint:
                return False
            self._epoch = view.epoch
            for rank, bridge in enumerate(self._bridges):
                bridge.reset()
                self._exact[rank] = False
            self._union.clear()
            self._tell_live()
        return True

    def stats(self) -> FeedStats:
        pages = sum(bridge.pages for bridge in self._bridges)
        age_s = None if self._last_event_s is None else self._loop.time() - self._last_event_s
        mode = FeedMode.EVENTS if self._live else FeedMode.APPROXIMATE
        return replace(
            self._counts,
            mode=mode,
            trouble=self.trouble,
            pages=pages,
            pages_bytes=sum(bridge.memory_bytes for bridge in self._bridges),
            last_event_age_s=age_s,
        )

    async def handle(self, rank: int, what: KvBatch | KvCondition) -> None:
        """Take a batch, or a condition, of one rank."""
        if isinstance(what, KvCondition):
            self._take_condition(rank, what)
            return
        self._last_event_s = self._loop.time()
        self._counts = replace(self._counts, batches=self._counts.batches + 1)
        pages, end_s = 0, self._loop.time() + STEP_S
        for event in joined(what.events, self._slice_pages):
            self._apply(rank, event)
            pages += 0 if isinstance(event, PagesCleared) else len(event.hashes)
            if pages >= self._slice_pages or self._loop.time() >= end_s:
                await asyncio.sleep(0)
                pages, end_s = 0, self._loop.time() + STEP_S
        await asyncio.sleep(0)  # the next batch may be there already

    def _apply(self, rank: int, event: KvEvent) -> None:
        bridge = self._bridges[rank]
        try:
            changes = bridge.apply(event)
        except ValueError as error:
            self._not_exact(rank, str(error))
            return
        if bridge.overflowed and self._exact[rank]:
            self._not_exact(rank, "more pages than are remembered")
        if isinstance(event, PagesCleared):
            self._cleared(rank)
            self._exact[rank] = True  # nothing is what it has, whatever was missed before
            self._tell_live()
        else:
            self._tell(self._union.apply(rank, changes))

    def _take_condition(self, rank: int, condition: KvCondition) -> None:
        counts, kind = self._counts, condition.kind
        missed = condition.last - condition.first + 1
        if kind is ConditionKind.WHOLE:
            self._exact[rank], self.trouble = not self._bridges[rank].overflowed, ""
            self._tell_live()
        elif kind is ConditionKind.FILLED:
            self._counts = replace(counts, gaps=counts.gaps + 1)
        elif kind is ConditionKind.LOST:
            self._counts = replace(counts, gaps=counts.gaps + 1, lost=counts.lost + missed)
            self._not_exact(rank, f"batches {condition.first} to {condition.last} are lost")
        elif kind is ConditionKind.MALFORMED:
            self._counts = replace(counts, malformed=counts.malformed + 1)
            self._not_exact(rank, condition.detail)
        elif kind is ConditionKind.NOT_LISTENING:
            self._deaf.add(rank)
            if self.unable_since_s is None:
                self.unable_since_s = self._loop.time()
            self._not_exact(rank, condition.detail)
        elif kind is ConditionKind.LISTENING:
            self._deaf.discard(rank)
            if not self._deaf:
                self.unable_since_s = None
        elif kind is ConditionKind.RESTARTED:
            self._bridges[rank].reset()
            self._cleared(rank)
            self._exact[rank] = False
            self._tell_live()
            self._restart_seen(self._engine_id)

    def _cleared(self, rank: int) -> None:
        """The rank has nothing; what other ranks have stays."""
        lost = self._union.cleared(rank)
        if lost is None:
            self._sink.engine_cleared(self._engine_id, self._epoch)
        else:
            self._tell(lost)

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Held):
                self._sink.engine_held(self._engine_id, self._epoch, change.blocks, change.tier)
            elif isinstance(change, Lost):
                self._sink.engine_lost(self._engine_id, self._epoch, change.blocks, change.tier)

    def _not_exact(self, rank: int, trouble: str) -> None:
        if trouble != self.trouble:
            _log.warning("%s: its cache is known approximately: rank %d: %s", self._engine_id, rank, trouble)
        self.trouble = trouble
        self._exact[rank] = False
        self._tell_live()

    def _tell_live(self) -> None:
        live = all(self._exact)
        if live:
            self.trouble = ""
        if live is not self._live:
            self._live = live
            if live:
                _log.info("%s: its cache is known exactly, by its KV events", self._engine_id)
            self._sink.events_live(self._engine_id, live)
