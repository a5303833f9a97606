"""What the gateways of one fleet share through Redis besides ownership, put together for one of them.

Bookings, process ids of rooms, leases, suspicion, refused requests; and who is there, with a journal of live attempts
for when one dies. Each part works as if this gateway were alone while Redis is in trouble; nothing here is ever waited
for by a request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import orjson

from engines.base import PairStrategy
from engines.errors import UpstreamError
from engines.fleet import Fleet
from engines.sglang_wire import RoomMaker
from engines.types import EngineId, EngineView
from engines.upstream import Upstream
from failover.journal import FailoverKeys, Server
from failover.monitor import Monitor
from failover.poison import PoisonGuard
from failover.reaper import ReplicaName, Verdict
from failover.shared import LinkTrouble
from failover.shared_attempts import SharedAttempts
from failover.shared_leases import Leases
from failover.shared_poison import SharedPoison
from failover.shared_process import ProcessId
from failover.shared_reaper import SharedReaper
from failover.shared_signals import Signals
from gateway.bookings import Booking
from gateway.decider import Decider
from gateway.releaser import Releaser
from routing.bookings_log import Totals
from routing.ownership import Keys
from routing.redis_link import Entry, RedisLink, RedisTrouble, Script, ScriptCall, Spawn, load_script
from routing.shared_bookings import SharedBookings

_log = logging.getLogger("pdgate.replicas")
REPLICA_PATH = "/pdgate/replica"
"""Where a gateway says which replica it is."""
_PROBE_S = 1.0
_PROBE_LIMIT_BYTES = 10_000
_ABORT_S = 2.0
_SURE_S = 2.0
"""So long a request waits for this gateway to know whether it was declared dead: it takes milliseconds."""


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
    name: str
    live: int
    """Replicas that are there, this one included."""
    absent: Mapping[str, Verdict]
    """What is thought of those who are gone."""
    journaled: int
    """Attempts in the journal, or on their way there."""
    reaped: int
    """Dead replicas whose attempts were released here; how many those were."""
    released: int
    fencings: int
    """How often this one was declared dead."""
    fenced: bool


class _Outside:
    """How the reaper reaches other gateways, and servers."""

    def __init__(self, fleet: Fleet, strategy: PairStrategy, upstream: Upstream) -> None:
        self._fleet = fleet
        self._strategy = strategy
        self._upstream = upstream

    async def who_answers(self, address: str) -> str | None:
        """The replica that answers there; None where nobody says that he is one."""
        try:
            reply = await self._upstream.fetch(
                "GET", address + REPLICA_PATH, timeout_s=_PROBE_S, limit_bytes=_PROBE_LIMIT_BYTES
            )
            name = orjson.loads(reply.body)["replica"] if reply.status == 200 else None
        except (UpstreamError, orjson.JSONDecodeError, TypeError, KeyError):
            return None
        return name if isinstance(name, str) else None

    async def abort(self, server: Server, rid: str) -> bool:
        """Whether this server has answered, or has ended; one that this gateway does not know cannot be asked."""
        if (view := self._view(server)) is None:
            _log.warning("request %s of a dead gateway is on %s, which is not known here", rid, server.engine_id)
            return True
        try:
            call = self._strategy.abort_call(view, rid)
        except ValueError:  # a stranger's entry: no attempt has such a rid
            return True
        try:
            await self._upstream.fetch("POST", call.url, body=call.body, headers=call.headers, timeout_s=_ABORT_S)
        except UpstreamError as error:
            return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ECONNREFUSED
        return True

    def _view(self, server: Server) -> EngineView | None:
        if self._fleet.has(server.engine_id):
            return self._fleet.view(server.engine_id)
        boots = ((view, view.facts.boot_fingerprint) for view in self._fleet.views() if view.facts is not None)
        return next((view for view, boot in boots if boot == server.fingerprint), None)


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
        strategy: PairStrategy,
        upstream: Upstream,
        releaser: Releaser,
        fence: Callable[[], None],
        several: bool = True,
    ) -> None:
        """`replica` must be new at every start; `prefix` and `fleet_name` those of the keys in Redis.

        `rng` must differ between gateways. `fence` ends all that is served. `several`: whether there may be others;
        without it nothing is journaled.

        `replica` names the process, for good: totals, leases and rooms are fenced by their own numbers. Only what is
        reaped by name, the lease of life and the journal, goes on under another once this one was declared dead.
        """
        self._decider = decider
        self._fleet = fleet
        self._monitor = monitor
        self._releaser = releaser
        self._several = several
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
        self._name = ReplicaName(replica)
        self._attempts = SharedAttempts(way, keys, self._name, spawn)
        outside = _Outside(fleet, strategy, upstream)
        self._reaper = SharedReaper(
            way,
            keys,
            self._name,
            spawn,
            rng,
            self._attempts,
            probe=outside.who_answers,
            abort=outside.abort,
            fenced=fence,
        )

    async def start(self) -> None:
        """Begin; waits for nothing."""
        self._decider.bookings.own_changed = self._bookings.changed
        self._monitor.on_suspected = self._signals.suspect
        for part in (self._process, self._signals, self._poison, self._bookings, self.leases):
            await part.start()
        if self._several:
            self._decider.bookings.on_booked = self._began
            self._decider.bookings.on_released = self._ended
            self._releaser.on_released = self._attempts.end
            await self._attempts.start()
            await self._reaper.start()

    async def stop(self) -> None:
        """Give everything back that others may have now; within the link's time limit."""
        if self._several:
            await self._attempts.stop()
            await self._reaper.stop()
        for part in (self.leases, self._bookings, self._poison, self._signals, self._process):
            await part.stop()

    @property
    def name(self) -> str:
        """Which replica this is now."""
        return self._name.now

    @property
    def is_fenced(self) -> bool:
        """Whether this replica was declared dead and is not another one yet: nothing new may begin."""
        return self._reaper.is_fenced

    async def sure(self) -> None:
        """Wait, after a standstill of its own or when fenced, until this replica may begin something; not for long."""
        await self._reaper.sure(_SURE_S)

    def advertise(self, address: str) -> None:
        """Where others may ask whether this replica is there; empty: nobody can take it for dead from now on."""
        self._reaper.advertise(address)

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
            self._name.now,
            self._reaper.live,
            self._reaper.absent,
            len(self._attempts),
            self._reaper.reaped,
            self._reaper.released,
            self._reaper.fencings,
            self._reaper.is_fenced,
        )

    # ---- live attempts ---------------------------------------------------------------------------------------------

    def _began(self, booking: Booking) -> None:
        self._attempts.begin(booking.rid, self._server(booking.prefill), self._server(booking.decode))

    def _server(self, engine_id: EngineId) -> Server:
        facts = self._fleet.view(engine_id).facts
        return Server(engine_id, facts.boot_fingerprint if facts is not None else "")

    def _ended(self, booking: Booking) -> None:
        """Its booking is released; what may still hold something on a server is with the releaser by now."""
        if not self._releaser.has(booking.rid):
            self._attempts.end(booking.rid)

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
