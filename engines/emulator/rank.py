"""The scheduler of one DP rank of a server: its node, its KV events, and the clock that drives them. A shell.

It owns the loop timer: inputs poke it, it lets the node advance, and hands the node's events to replies and peers.
What only a prefill or a decode does lies in `pd_prefill` and `pd_decode`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from engines.emulator.config import Options
from engines.emulator.core import ABORTED, End, Ended, EndKind, Event, Job, Stepped, Timeouts, faster_profile
from engines.emulator.decode_node import DecodeNode
from engines.emulator.faults import Faults, Holds
from engines.emulator.kv_event_log import KvEventLog
from engines.emulator.kv_pool import KvPool
from engines.emulator.kv_publisher import KvPublisher, config_of_rank, parse_config
from engines.emulator.live import Live
from engines.emulator.plain_node import PlainNode
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.radix import RadixCache
from engines.timing import EngineProfile
from engines.types import Role

_log = logging.getLogger("pdgate.emulator")
CRASH_STATUS = 131
"""Exit status of a server that a request killed; SGLang's children die by SIGQUIT."""
_RATE_WINDOW_S = 1.0
_TICK_S = 0.001
"""The loop's timers are no finer; shorter waits would spin."""


@dataclass(slots=True)
class Shared:
    """What the ranks of one server have in common. `secret` keys its sampled answers."""

    options: Options
    timeouts: Timeouts
    secret: bytes
    holds: Holds
    faults: Faults
    on_ended: Callable[[Live], None]
    """Told of every request that has ended, before its answer is."""


class Rank:
    """Runs requests on one node; everything happens in one event loop."""

    def __init__(self, number: int, shared: Shared) -> None:
        self.number = number
        self.options = shared.options
        self.timeouts = shared.timeouts
        self.faults = shared.faults
        self.loop = asyncio.get_running_loop()
        self.on_event: Callable[[Event], None] | None = None
        self.require: Callable[[str], None] = lambda peer: None
        """Sees that the prefill at a bootstrap address is known; a decode's links set it."""
        self.kv_publisher: KvPublisher | None = None
        """Set while KV events are published; batches go out after each step of the scheduler."""
        self._shared = shared
        self._kv_log: KvEventLog | None = None
        self.node = self._build_node(shared.holds)
        self._by_job: dict[int, Live] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False
        self._stalls = 0
        self.stuck = False
        """The scheduler stands still, by a fault."""
        self.pause_s = 0.0
        """How long it pauses after each round, by a fault."""
        self._free_s = 0.0
        self._rate = (self.loop.time(), 0, 0.0)

    def _build_node(self, holds: Holds) -> PrefillNode | DecodeNode | PlainNode:
        options = self.options
        profile = _resized(faster_profile(options.profile, options.speed), options)
        config = parse_config(options.kv_events_config)
        if config.on and not options.disable_radix_cache:
            self._kv_log = KvEventLog(options.page_size, self.number)
            self.kv_publisher = KvPublisher(config_of_rank(config, self.number))
        cache = None if options.disable_radix_cache else RadixCache(options.page_size, self._kv_log)
        pool = KvPool(options.max_total_tokens, options.page_size, cache)
        if options.role is Role.PREFILL:
            return PrefillNode(profile, pool, self.timeouts, holds.check)
        if options.role is Role.DECODE:
            return DecodeNode(profile, pool, self.timeouts, holds.check)
        return PlainNode(profile, pool, self.timeouts, holds.check)

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def sampling_of(self, live: Live) -> bytes:
        """The extra hash key of a sampled request; empty for a greedy one."""
        deterministic = self.options.enable_deterministic_inference
        return live.item.sampling.draw.key(self._shared.secret, live.rid, deterministic)

    def submit(self, live: Live) -> None:
        """Give `live` to the scheduler."""
        live.dispatched_s = self.now_s
        if self.options.role is Role.DECODE:
            self.require(live.job.peer)
        else:
            live.output.start(live.item.prompt, self.sampling_of(live))
        self.node.submit(live.job, self.now_s)
        self._by_job[live.job.serial] = live
        self.poke()

    def abort(self, rid_prefix: str) -> None:
        """Abort every request here whose rid starts with `rid_prefix`."""
        self.node.abort(rid_prefix, self.now_s)
        self.poke()

    def live_of(self, job: Job) -> Live | None:
        return self._by_job.get(job.serial)

    def release_hold(self, job: Job) -> None:
        """Let a held job of this rank go on."""
        self.node.release_hold(job, self.now_s)
        self.poke()

    def stall(self, stalled: bool) -> None:
        """Stop the scheduler while a decode's synchronous bootstrap look-up runs, as SGLang's does."""
        self._stalls += 1 if stalled else -1
        self.poke()

    def poke(self) -> None:
        """Something changed: let the node advance in this turn of the loop."""
        if not self._poked:
            self._poked = True
            self.loop.call_soon(self._pump)

    def tokens_per_s(self) -> float:
        """Generated tokens a second over the last window."""
        start_s, tokens, rate = self._rate
        elapsed_s = self.now_s - start_s
        if elapsed_s >= _RATE_WINDOW_S:
            generated = self.node.counters.generated_tokens
            rate = (generated - tokens) / elapsed_s
            self._rate = (self.now_s, generated, rate)
        return rate

    def _pump(self) -> None:
        self._poked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stalls or self.stuck:
            return
        if self.pause_s and self.now_s < self._free_s:
            self._timer = self.loop.call_at(self._free_s, self._pump)
            return
        self._free_s = self.now_s + self.pause_s
        self.node.advance(self.now_s)
        for event in self.node.take_events():
            self._dispatch(event)
        self._publish_kv_events()
        due_s = self.node.next_s()
        if due_s is not None and not self._poked:
            now_s = self.now_s
            self._timer = self.loop.call_at(due_s if due_s <= now_s else max(due_s, now_s + _TICK_S), self._pump)

    def _publish_kv_events(self) -> None:
        if self._kv_log is not None and self.kv_publisher is not None:
            payload = self._kv_log.take(datetime.now(UTC).timestamp())
            if payload is not None:
                self.kv_publisher.publish(payload)

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, Stepped):
            by_job = self._by_job
            for job in event.jobs:
                live = by_job[job.serial]
                if live.first_token_s == 0.0:
                    live.first_token_s = self.now_s
                if live.sink.streaming:
                    live.sink.stepped(live)
        elif isinstance(event, Ended):
            self._ended(event)
        elif self.on_event is not None:
            self.on_event(event)

    def _ended(self, event: Ended) -> None:
        live = self._by_job.pop(event.job.serial, None)
        if live is None:
            return
        end = End(EndKind.ABORTED, ABORTED) if live.fault == "abort_in_200" else event.end
        live.finished_s, live.end = self.now_s, end
        self._shared.on_ended(live)
        if self.on_event is not None:
            self.on_event(event)
        live.sink.ended(live, end)


def _resized(profile: EngineProfile, options: Options) -> EngineProfile:
    return replace(
        profile,
        prefill=replace(profile.prefill, chunk_tokens=options.chunked_prefill_size),
        max_total_tokens=options.max_total_tokens,
        context_tokens=options.context_length,
        page_size_tokens=options.page_size,
        max_running_requests=options.max_running_requests,
    )


def crash(reason: str) -> None:
    """End this process at once, as an exception in one of SGLang's schedulers does."""
    _log.critical("scheduler died: %s", reason)
    os._exit(CRASH_STATUS)
