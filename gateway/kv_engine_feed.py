"""Follows the KV events of one prefill: applies what its subscriber hands on, a slice at a time, and tells a sink.

A prefill whose events have a hole is in approximate mode: what comes is still told, and the sink is told not to rely on
it alone, until the prefill clears its cache or starts anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from engines.kv_events import KvBatch
from engines.kv_subscriber import ConditionKind, KvCondition, KvSubscriber
from engines.kv_types import KvEvent, PagesCleared
from engines.types import EngineId, EngineView, KvEventSource
from routing.kv_bridge import Change, Held, KvBridge, Lost
from routing.kv_joining import joined
from routing.kv_ranks import RankUnion
from routing.ownership import Tier

_log = logging.getLogger("pdgate.kv_events")

SLICE_PAGES, SLICE_TOKENS, STEP_S = 512, 2048, 0.002
"""A step of the event loop ends after so many pages (or so many tokens where pages are large), or after so long."""


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

    def events_elsewhere(self, engine_id: EngineId, elsewhere: bool) -> None:
        """Whether it is for another gateway to follow the engine's events."""


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


class EngineFeed:
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
