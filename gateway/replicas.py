"""What the gateways of one fleet share through Redis besides ownership, put together for one of them.

Bookings, process ids of rooms, leases, suspicion, refused requests. Each part works as if this gateway were alone while
Redis is in trouble; nothing here is ever waited for by a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from engines.fleet import Fleet
from engines.sglang_wire import RoomMaker
from engines.types import EngineId
from failover.journal import FailoverKeys
from failover.monitor import Monitor
from failover.poison import PoisonGuard
from failover.shared import LinkTrouble
from failover.shared_leases import Leases
from failover.shared_poison import SharedPoison
from failover.shared_process import ProcessId
from failover.shared_signals import Signals
from gateway.decider import Decider
from routing.bookings_log import Totals
from routing.ownership import Keys
from routing.redis_link import Entry, RedisLink, RedisTrouble, Script, ScriptCall, Spawn, load_script
from routing.shared_bookings import SharedBookings


@dataclass(frozen=True, slots=True)
class ReplicasStatus:
    """What an operator is shown. `process_id` is None until one was claimed.

    `booked_elsewhere`: other gateways on which anything is booked now. `alone`: Redis could not be asked for so long
    that this gateway acts on all leases. Suspicions: `acted` of those `heard`; `dropped` are our own that never left.
    """

    process_id: int | None
    booked_elsewhere: int
    leases_held: int
    alone: bool
    suspicions_sent: int
    suspicions_heard: int
    suspicions_acted: int
    suspicions_dropped: int


class _FailoverLink:
    """`failover.shared.Link` over a link to Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[bytes | int | str]) -> Any:
        try:
            return await self._link.run(ScriptCall(_failover_script(script), keys, args))
        except RedisTrouble as error:
            raise LinkTrouble(str(error)) from error

    async def read(self, after: Mapping[bytes, bytes], block_s: float) -> Mapping[bytes, list[Entry]]:
        try:
            return await self._link.read(after, block_s)
        except RedisTrouble as error:
            raise LinkTrouble(str(error)) from error

    async def command(self, *words: bytes | str | int) -> Any:
        try:
            return await self._link.command(*words)
        except RedisTrouble as error:
            raise LinkTrouble(str(error)) from error


@cache
def _failover_script(name: str) -> Script:
    return load_script("failover", name)


class Replicas:
    """One gateway among those of its fleet. `start` after the link, `stop` before it and before the monitor's."""

    def __init__(
        self,
        link: RedisLink,
        prefix: str,
        fleet_name: str,
        replica: str,
        spawn: Spawn,
        rng: Random,
        *,
        decider: Decider,
        fleet: Fleet,
        monitor: Monitor,
        poison: PoisonGuard,
        rooms: RoomMaker,
    ) -> None:
        """`replica` must be new at every start; `prefix` and `fleet_name` those of the keys in Redis.

        `rng` must differ between gateways.
        """
        self._decider = decider
        self._fleet = fleet
        self._monitor = monitor
        way, keys = _FailoverLink(link), FailoverKeys(prefix, fleet_name)
        self.leases = Leases(way, keys, replica, spawn)
        self._poison = SharedPoison(way, keys, replica, spawn, poison)
        self._process = ProcessId(
            way,
            keys,
            replica,
            spawn,
            rng,
            taken=rooms.take_process_id,
            came_back=self._poison.publish_all,
        )
        self._signals = Signals(
            way,
            keys,
            replica,
            spawn,
            rng,
            on_suspicion=monitor.suspect_elsewhere,
            on_leases=self.leases.look,
            on_poison=self._poison.look,
        )
        self._bookings = SharedBookings(
            link, Keys(prefix, fleet_name).bookings(), replica, spawn, self._totals_now, self._booked_elsewhere
        )

    async def start(self) -> None:
        """Begin; waits for nothing."""
        self._decider.bookings.own_changed = self._bookings.changed
        self._monitor.on_suspected = self._signals.suspect
        for part in (self._process, self._signals, self._poison, self._bookings, self.leases):
            await part.start()

    async def stop(self) -> None:
        """Give everything back that others may have now; within the link's time limit."""
        for part in (self.leases, self._bookings, self._poison, self._signals, self._process):
            await part.stop()

    def status(self) -> ReplicasStatus:
        """How it is."""
        signals = self._signals
        return ReplicasStatus(
            self._process.id,
            self._bookings.others,
            len(self.leases.held()),
            self.leases.alone,
            signals.sent,
            signals.heard,
            signals.acted,
            signals.dropped,
        )

    # ---- bookings ------------------------------------------------------------------------------------------------

    def _totals_now(self) -> dict[EngineId, Totals]:
        bookings = self._decider.bookings
        totals = {engine_id: bookings.own(engine_id) for engine_id in bookings.own_engines()}
        return {
            engine_id: replace(each, queue_s=self._queue_s(engine_id)) if each.prefill_requests else each
            for engine_id, each in totals.items()
        }

    def _queue_s(self, engine_id: EngineId) -> float:
        facts = self._fleet.view(engine_id).facts
        if facts is None:
            return 0.0
        timing = self._decider.learned.prefill_timing(engine_id, facts.chunk_tokens)
        return self._decider.bookings.own_queue_s(engine_id, timing, asyncio.get_running_loop().time())

    def _booked_elsewhere(self, totals: Mapping[EngineId, Totals]) -> None:
        self._decider.bookings.set_others(totals)
        self._decider.pump()  # others may have made room for who waits here
