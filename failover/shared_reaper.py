"""One gateway among its replicas: says that it is there, watches the others, reaps who is dead, and fences itself.

A shell around `failover/reaper.py`, where the rule is. One call a second renews the lease, tells whom this gateway
takes for dead, and shows everything else at one moment. A gateway that finds itself declared dead (it was frozen, say)
takes another name: what it had under the old one is being released by another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from random import Random
from typing import Any

from failover.journal import FailoverKeys
from failover.monitor import Spawn
from failover.reaper import GAP_S, LEASE_S, Look, ReplicaName, Verdict, Watch
from failover.reaping import Abort, Reaped, Reaping
from failover.shared import RETRY_S, Link, LinkTrouble
from failover.shared_attempts import SharedAttempts

LOOK_S = 1.0
LOOK_CLOSER_S = 0.5
"""While somebody is gone."""
KNOWN_S = 86_400.0
"""How long one that is gone stays known if nobody reaps it."""
_KNOWN_NAMELESS_S = 60.0
"""The same without an address: nobody can ever say that it is dead."""
_MAX_PROBES = 64

Probe = Callable[[str], Awaitable[str | None]]
"""Asks an address who is there: the replica's name, None where nobody says. Bounded in time, raises nothing."""

_log = logging.getLogger("pdgate.replicas")
_LEVELS = {Verdict.PRESENT: logging.INFO, Verdict.ABSENT: logging.INFO}
_WORDS = {
    Verdict.PRESENT: "is there again",
    Verdict.ABSENT: "has lost its lease",
    Verdict.CUT_OFF: "has had no lease for long, but answers or cannot be asked: what it runs is left alone",
    Verdict.SUSPECTED: "is taken for dead here: it has no lease and does not answer",
    Verdict.DEAD: "is dead by the word of most replicas",
}


class SharedReaper:
    """`start` and `stop` once each. `probe` and `abort` reach other gateways and servers.

    `fenced` is called when this replica was declared dead: it must end what it serves. From then until the new name is
    in Redis `is_fenced` is true, and nothing new may begin: `sure` waits for that.
    """

    def __init__(
        self,
        link: Link,
        keys: FailoverKeys,
        name: ReplicaName,
        spawn: Spawn,
        rng: Random,
        attempts: SharedAttempts,
        *,
        probe: Probe,
        abort: Abort,
        fenced: Callable[[], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._name = name
        self._spawn = spawn
        self._rng = rng
        self._attempts = attempts
        self._probe = probe
        self._abort = abort
        self._fenced = fenced
        self._address = ""
        self._watch = Watch()
        self._verdicts: dict[str, Verdict] = {}
        self._said: list[str] = []
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._reaping: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        """Set when the next look has ended, well or not; then another takes its place."""
        self._looked_s = -inf
        """When the last look that has ended had begun."""
        self._task: asyncio.Task[None] | None = None
        self.is_fenced = False
        self.live = 1
        """Replicas that are there, this one included, as far as was seen last."""
        self.reaped = self.fencings = self.released = 0
        """Dead replicas that were reaped here; how often this one was declared dead; attempts released for the dead."""

    def advertise(self, address: str) -> None:
        """Where others may ask whether this replica is there; empty: it can never be taken for dead."""
        self._address = address
        self._wake.set()

    def look(self) -> None:
        """Look now."""
        self._wake.set()

    @property
    def absent(self) -> dict[str, Verdict]:
        """What is thought of those who are gone."""
        return dict(self._verdicts)

    @property
    def is_sure(self) -> bool:
        """Whether this replica may begin something: it is not fenced, nor was it away for longer than its lease.

        Where it has looked and Redis was not there, it is sure: others see that it answers.
        """
        away_s = asyncio.get_running_loop().time() - self._looked_s
        return not self.is_fenced and not LEASE_S < away_s < inf

    async def sure(self, within_s: float) -> None:
        """Wait, where it is not sure, for a look that begins from now on, and for the new name; at most so long."""
        if self.is_sure:
            return
        asked_s = asyncio.get_running_loop().time()
        self.look()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.is_fenced or self._looked_s < asked_s:
                    await self._looked.wait()

    async def start(self) -> None:
        self._attempts.marked = self.look
        self._task = self._spawn(self._keep_looking(), "replicas")

    async def stop(self) -> None:
        """Say that this replica is not there any more, and that it has no attempts."""
        tasks = [*self._probing.values(), *self._reaping.values()]
        tasks += [self._task] if self._task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        name = self._name.now
        names = [self._keys.lives(), self._keys.addresses(), self._keys.attempts(name)]
        with suppress(LinkTrouble):  # others will see that it is gone
            await self._link.run("leave_replicas", names, [name])

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            began_s = loop.time()
            try:
                await self._look()
                pause_s = LOOK_CLOSER_S if self._verdicts else LOOK_S
            except LinkTrouble:
                self._watch = Watch()
                pause_s = RETRY_S
            self._looked_s = began_s
            self._looked.set()
            self._looked = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began_s + pause_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        keys, me = self._keys, self._name.now
        names = [keys.lives(), keys.addresses(), keys.verdicts(), keys.data_set(), keys.reaped(me)]
        times = [int(seconds * 1000) for seconds in (LEASE_S, KNOWN_S, _KNOWN_NAMELESS_S)]
        drawn = f"{self._rng.getrandbits(64):016x}"
        sent_s = loop.time()
        reply = await self._link.run(
            "look_replicas", names, [me, times[0], self._address, drawn, *times[1:], *self._said]
        )
        if int(reply[0]):
            self._fence()
            return
        look = _look_of(reply, sent_s, loop.time())
        if look.data_set != self._watch.data_set or look.answered_s - self._watch.looked_s > GAP_S:
            self._attempts.rewrite()  # it may have lost what it was told
        self.is_fenced = False
        self.live = len(look.live)
        self._watch = self._watch.looked(look)
        self._judge(look)
        self._ask(look)

    def _fence(self) -> None:
        """Others have declared this replica dead: what it has under its name is over."""
        old = self._name.now
        self._name.renew()
        self.is_fenced = True
        self.fencings += 1
        _log.warning(
            "this gateway, %s, was declared dead by others while it could not be reached: it ends what it serves, and "
            "goes on as %s",
            old,
            self._name.now,
        )
        self._watch, self._verdicts, self._said = Watch(), {}, []
        self._fenced()
        self._attempts.rewrite()
        self._wake.set()

    def _judge(self, look: Look) -> None:
        before, self._verdicts = self._verdicts, dict(self._watch.verdicts(look))
        for replica in sorted({*before, *self._verdicts}):
            verdict = self._verdicts.get(replica, Verdict.PRESENT)
            if verdict is not before.get(replica, Verdict.PRESENT) and replica in look.addresses:
                where = look.addresses[replica] or "no address"
                _log.log(_LEVELS.get(verdict, logging.WARNING), "gateway %s (%s) %s", replica, where, _WORDS[verdict])
        said = sorted(name for name, verdict in self._verdicts.items() if verdict in (Verdict.SUSPECTED, Verdict.DEAD))
        if said != self._said:
            self._said = said
            self._wake.set()
        for replica, verdict in self._verdicts.items():
            if verdict is Verdict.DEAD and replica not in self._reaping:
                self._reaping[replica] = self._spawn(self._reap(replica, look), f"reap {replica}")

    async def _reap(self, dead: str, look: Look) -> None:
        try:
            reaping = Reaping(self._link, self._keys, self._spawn, self._abort, dead)
            me, data_set = self._name.now, look.data_set.partition(" ")[0]
            done: Reaped | None = await reaping.run(me, data_set, sorted(look.live))
        finally:
            del self._reaping[dead]
        if done is not None:
            self.reaped += 1
            self.released += done.attempts - done.kept - done.left
            _log.warning(
                "gateway %s was reaped in %.2f s: of %d attempts %d are others', %d were answered by no server",
                dead,
                done.seconds,
                done.attempts,
                done.kept,
                done.left,
            )

    # ---- direct probes ---------------------------------------------------------------------------------------------

    def _ask(self, look: Look) -> None:
        """Ask everybody who is gone and has an address, one probe at a time."""
        for replica, absence in self._watch.absences.items():
            address = look.addresses[replica]
            if address and replica not in self._probing and len(self._probing) < _MAX_PROBES:
                asking = self._ask_one(replica, address, absence.since_s)
                self._probing[replica] = self._spawn(asking, f"probe {replica}")

    async def _ask_one(self, replica: str, address: str, since_s: float) -> None:
        try:
            answered = await self._probe(address)
        finally:
            del self._probing[replica]
        self._watch = self._watch.probed(replica, since_s, answered)


def _look_of(reply: Any, sent_s: float, answered_s: float) -> Look:
    _, data_set, rows, said = reply
    addresses: dict[str, str] = {}
    live = set()
    for name, there, address in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        replica = bytes(name).decode(errors="replace")
        addresses[replica] = bytes(address).decode(errors="replace")
        if int(there):
            live.add(replica)
    verdicts: dict[str, set[str]] = {}
    for each in said:
        observer, _, suspect = bytes(each).decode(errors="replace").partition(" ")
        verdicts.setdefault(suspect, set()).add(observer)
    frozen = {suspect: frozenset(observers) for suspect, observers in verdicts.items()}
    return Look(sent_s, answered_s, bytes(data_set).decode(), frozenset(live), addresses, frozen)
