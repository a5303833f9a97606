"""Sends canaries: tiny real requests that move KV from one prefill to one decode, where nothing else proves it can.

A shell: `failover/canary.py` says where, `failover/pair_health.py` what follows. Pairs in trouble are tried as soon as
they are due, idle ones in turn; no server has two canaries at a time. One is booked, and let go of, like any attempt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import orjson

from engines.base import Attempt, PairStrategy
from engines.errors import UpstreamError
from engines.fleet import Fleet
from engines.pair import LegAnswer, LegFailed, PairRun
from engines.sglang_wire import RoomMaker, new_rid
from engines.tasks import spawn
from engines.timing import PrefillWork, prefill_s
from engines.types import EngineSpec, EngineView, Leg, Outcome, Role
from engines.upstream import Upstream
from failover import canary
from failover.canary import Answer, Rounds, Texts
from failover.monitor import Monitor
from failover.pair_health import CANARY, HEARTBEAT_S, Against, Pair, against_the_pair
from gateway.bookings import Booking
from gateway.decider import Decider
from gateway.releaser import Releaser

LOOK_EVERY_S = 0.25
CANARY_S = 3.0
"""How long a canary may take, beside what its prefill has to do before it."""
PATIENCE_S = 330.0
"""A decode that has a prefill's old address drops it only when a request has waited for it in vain: 300 s
(`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`). One canary of such a pair is left to wait that long, and a little more."""
_GAVE_UP = "in KVPoll.WaitingForInput"
"""What a decode says when it has waited in vain, and dropped the address."""
_HEARTBEAT_TIMEOUT_S = 3.0
_FULLEST_RATIO = 0.9
"""A decode as full as this may not reserve pages in time: what a canary found there would say nothing of its pair."""
_SPARE_TOKENS = 16
"""What chat frames and special tokens may add to a prompt whose tokens we do not count."""


@dataclass(frozen=True, slots=True)
class Way:
    """How an attempt gets to its servers, and how they are let go of."""

    fleet: Fleet
    strategy: PairStrategy
    upstream: Upstream
    monitor: Monitor
    releaser: Releaser
    rooms: RoomMaker


class Canaries:
    """One gateway's canaries. `start()` and `stop()` once each.

    `counts`: how they ended, since the start; those that "differed" have also "passed", as KV arrived.
    """

    def __init__(self, decider: Decider, way: Way, rng: Random, interval_s: float) -> None:
        self._fleet, self._monitor, self._way = way.fleet, way.monitor, way
        self._decider = decider
        self._pairs = decider.pairs
        self._rng = rng
        self._interval_s = interval_s
        self._rounds = Rounds(0.0, 0.0)
        self._texts: Texts | None = None
        self._flying: dict[Pair, asyncio.Task[None]] = {}
        self._waiting: dict[Pair, asyncio.Task[None]] = {}
        """Runs whose decode is left to give its prefill up."""
        self._sent: dict[str, tuple[Attempt, Booking]] = {}
        """Those that may hold KV yet, by rid; looked through whenever one is added."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """Bootstrap servers of prefills that take no rooms, asked as decodes ask them."""
        self._asked_s: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter(dict.fromkeys(("passed", "failed", "differed", "void"), 0))

    def start(self) -> None:
        first_s = self._now_s() + self._rng.uniform(0.5, 1.0) * self._interval_s
        self._rounds = Rounds(self._interval_s, first_s)
        self._task = spawn(self._keep_looking(), "canaries")

    async def stop(self) -> None:
        tasks = [*self._flying.values(), *self._waiting.values(), *self._asking.values()]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def under_way(self) -> list[dict[str, str | int]]:
        """Every canary that may hold KV, and what is promised for it: nobody asked for these but the gateway itself."""
        return [
            {
                "rid": attempt.rid,
                "room": str(attempt.room),
                "prefill": attempt.prefill.engine_id,
                "decode": attempt.decode.engine_id,
                "uncached_tokens": booking.work.new_tokens,
                "kv_tokens": booking.kv_tokens,
            }
            for attempt, booking in self._still_there()
        ]

    def _still_there(self) -> Iterator[tuple[Attempt, Booking]]:
        """Booked, or being let go of."""
        for attempt, booking in self._sent.values():
            if self._decider.bookings.has(booking) or self._way.releaser.has(attempt.rid):
                yield attempt, booking

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- when and where --------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            self._wake.clear()
            self._look()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _look(self) -> None:
        """Let time pass for the matrix, and send what canaries are due."""
        version = self._pairs.health.version
        self._pairs.apart(self._fleet.snapshot())  # notes restarts
        self._pairs.tick()
        self._ask_silent()
        for pair, left in self._waiting.items():
            if pair not in self._pairs.health.records:
                left.cancel()  # another has passed meanwhile
        if chosen := self._choose():
            if self._texts is None or not self._texts.disputed or self._texts.rounds > 2:
                self._texts = Texts(f"{self._rng.getrandbits(40):010x}")
            else:
                self._texts.rounds += 1
            for pair in chosen:
                self._flying[pair] = spawn(self._fly(pair, self._texts), f"canary {pair[0]} {pair[1]}")
        if version != self._pairs.health.version:
            self._decider.pump()

    def _choose(self) -> list[Pair]:
        """The pairs that get a canary now, none of which share a server."""
        records, now_s = self._pairs.health.records, self._now_s()
        if not records and not self._rounds.is_due(now_s):
            return []
        prefills = [view.engine_id for view in self._fleet.views() if self._can_fly(view, Role.PREFILL)]
        decodes = [view.engine_id for view in self._fleet.views() if self._can_fly(view, Role.DECODE)]
        if not prefills or not decodes:
            return []
        there = {*prefills, *decodes}

        def usable(pair: Pair) -> bool:
            return there.issuperset(pair) and not self._pairs.incompatible(pair)

        def idle(pair: Pair) -> bool:
            return usable(pair) and pair not in records

        suspects = [pair for pair in canary.due(records, now_s) if usable(pair)]
        turns = self._rounds.pairs(sorted(prefills), sorted(decodes), self._pairs.proved_s, now_s)
        wanted = [*suspects, *filter(idle, turns)]
        garbled = [pair for pair in suspects if records[pair].garbles]
        disputed = self._texts is not None and self._texts.disputed and self._texts.rounds <= 2
        if garbled or disputed:
            asked = () if self._texts is None or not disputed else tuple(self._texts.answers)
            wanted += canary.witnesses(garbled, prefills, decodes, idle, asked)
        return canary.disjoint(wanted, busy={engine_id for pair in self._flying for engine_id in pair})

    def _can_fly(self, view: EngineView, role: Role) -> bool:
        if view.spec.role is not role or not view.takes_rooms or view.facts is None:
            return False
        if role is Role.PREFILL:
            return not self._monitor.is_stale(view.engine_id)
        booked_tokens = self._decider.bookings.decode_kv_tokens(view.engine_id)
        held_tokens = max(booked_tokens, view.load.total_tokens if view.load is not None else 0)
        return held_tokens < _FULLEST_RATIO * view.facts.max_total_tokens * max(1, view.facts.dp_size)

    # ---- one canary ------------------------------------------------------------------------------------------------

    async def _fly(self, pair: Pair, texts: Texts) -> None:
        began_s, ended = self._now_s(), "void"
        self._pairs.health.trial_began(pair, CANARY, began_s)
        try:
            ended = await self._ask(pair, texts, began_s)
        finally:
            self._pairs.health.trial_void(pair, CANARY, self._now_s())  # unless something was said of it
            self.counts[ended] += 1
            del self._flying[pair]
            self._pairs.tick()
            self._decider.pump()
            self._wake.set()

    async def _ask(self, pair: Pair, texts: Texts, began_s: float) -> str:
        """Send it and judge what comes; how it ended."""
        attempt = self._attempt(pair, texts.word)
        booking = self._booking(attempt, texts.word, began_s)
        deadline_s = began_s + CANARY_S + self._queue_s(attempt.prefill, began_s)
        self._decider.bookings.book(booking)
        self._sent = {each.rid: (each, of) for each, of in self._still_there()} | {attempt.rid: (attempt, booking)}
        run = PairRun(attempt, self._way.strategy, self._way.upstream, partial(self._leg_failed, pair))
        whole = kept = False
        try:
            run.start()
            got = await _answer(run, deadline_s)
            whole = isinstance(got, bytes)
            if isinstance(got, bytes):
                return self._answered(pair, texts, _read(got), began_s)
            if got is None:
                against: Against | None = Against(
                    f"no canary was answered in {deadline_s - began_s:.1f} s", silence=True
                )
            else:
                against = against_the_pair([got])
            if against is None:
                return "void"
            kept = got is None and Leg.DECODE in run.open_legs and pair not in self._waiting
            if kept:
                left = self._waiting[pair] = spawn(self._wait(run), f"canary left {attempt.rid}")
                left.add_done_callback(lambda _: self._let_go_of_left(pair, run, booking))
            self._pairs.health.canary_failed(pair, against, began_s, self._now_s())
            if _GAVE_UP in against.words:
                self._pairs.health.try_now(pair, self._now_s())
            return "failed"
        finally:
            if not kept:
                self._way.releaser.let_go(run, whole=whole)
                self._decider.bookings.release(booking, self._now_s())

    def _answered(self, pair: Pair, texts: Texts, answer: Answer, began_s: float) -> str:
        """Compare what was answered with what the other pairs of its round were."""
        health, now_s = self._pairs.health, self._now_s()
        texts.add(pair, answer, trusted=not canary.is_garbled(health.records, pair))
        for each in texts.newly_wrong():
            reason = "KV arrives wrong: a canary was answered with other text than on other pairs"
            health.canary_differed(each, reason, now_s)
            self.counts["differed"] += 1
        if pair in texts.wrong():
            return "passed"
        health.canary_passed(pair, began_s, now_s, text_agrees=texts.confirmed(pair))
        for engine_id in pair:
            self._monitor.proved(engine_id)
        return "passed"

    async def _wait(self, run: PairRun) -> None:
        """Free the prefill, and leave the decode to find out by itself that its prefill's address is an old one."""
        await run.post_abort(Leg.PREFILL)
        await run.wait_ended(PATIENCE_S)

    def _let_go_of_left(self, pair: Pair, run: PairRun, booking: Booking) -> None:
        """Called when `_wait` is over, also where it was cancelled before it began."""
        self._pairs.health.try_now(pair, self._now_s())
        self._way.releaser.let_go(run, whole=False)
        self._decider.bookings.release(booking, self._now_s())
        del self._waiting[pair]
        self._wake.set()

    def _leg_failed(self, pair: Pair, outcome: Outcome) -> None:
        """What speaks against a server is the monitor's to know; what speaks against the pair is not."""
        if against_the_pair([outcome]) is None:
            self._monitor.leg_failed(outcome, pair)

    def _attempt(self, pair: Pair, word: str) -> Attempt:
        prefill, decode = (self._fleet.view(engine_id) for engine_id in pair)
        room = self._way.rooms.next_room(prefill.facts.dp_size if prefill.facts is not None else 1)
        sampling = {"max_new_tokens": canary.OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"text": canary.prompt(word), "sampling_params": sampling, "stream": False}
        return Attempt(new_rid(self._rng), room, prefill, decode, "/generate", False, body)

    def _booking(self, attempt: Attempt, word: str, now_s: float) -> Booking:
        tokens = len(canary.prompt(word)) + _SPARE_TOKENS
        kv_tokens, prefill = tokens + canary.OUTPUT_TOKENS, attempt.prefill
        chunk_tokens = prefill.facts.chunk_tokens if prefill.facts is not None else tokens
        timing = self._decider.learned.prefill_timing(prefill.engine_id, chunk_tokens)
        predicted_s = prefill_s(timing, tokens)
        engines = prefill.engine_id, attempt.decode.engine_id
        return Booking(attempt.rid, *engines, PrefillWork(tokens), kv_tokens, predicted_s, now_s)

    def _queue_s(self, prefill: EngineView, now_s: float) -> float:
        chunk_tokens = prefill.facts.chunk_tokens if prefill.facts is not None else 1
        timing = self._decider.learned.prefill_timing(prefill.engine_id, chunk_tokens)
        return self._decider.bookings.queue_s(prefill.engine_id, timing, now_s)

    # ---- how long a prefill is away --------------------------------------------------------------------------------

    def _ask_silent(self) -> None:
        """Ask the bootstrap server of every prefill that takes no rooms what decodes ask it: they forget it by that."""
        now_s = self._now_s()
        for view in self._fleet.views():
            spec = view.spec
            due = now_s - self._asked_s.get(spec.engine_id, 0.0) >= HEARTBEAT_S / 5
            if view.takes_rooms or spec.bootstrap_host is None or not due or spec.engine_id in self._asking:
                continue
            self._asked_s[spec.engine_id] = now_s
            self._asking[spec.engine_id] = spawn(self._heartbeat(spec), f"heartbeat {spec.engine_id}")

    async def _heartbeat(self, spec: EngineSpec) -> None:
        url = f"http://{spec.bootstrap_host}:{spec.bootstrap_port}/health"
        try:
            reply = await self._way.upstream.fetch("GET", url, timeout_s=_HEARTBEAT_TIMEOUT_S)
            answered = reply.status == 200
        except UpstreamError:
            answered = False
        finally:
            del self._asking[spec.engine_id]
        self._pairs.heartbeat(spec.engine_id, answered=answered)


async def _answer(run: PairRun, deadline_s: float) -> bytes | Outcome | None:
    """The decode's whole answer, or the first failure of a leg, or None when the deadline passes first."""
    try:
        async with asyncio.timeout_at(deadline_s):
            while True:
                match await run.next_event():
                    case LegAnswer(leg=Leg.DECODE, body=body):
                        return body
                    case LegFailed(outcome=outcome):
                        return outcome
                    case _:
                        continue
    except TimeoutError:
        return None


def _read(body: bytes) -> Answer:
    """What the decode answered: its ids, or its text where it tells none."""
    try:
        told: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    ids = told.get("output_ids") if isinstance(told, dict) else None
    if isinstance(ids, list) and ids:
        return tuple(ids)
    return str(told.get("text") or "") if isinstance(told, dict) else ""
