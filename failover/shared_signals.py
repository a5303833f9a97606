"""Signals between gateways: suspicion of an engine, and that leases or the poison list have changed.

One gateway may fail to reach an engine that all others reach. Its suspicions must not keep them from using it: of one
engine each gateway sends at most one suspicion per `APART_S` and acts on at most one, whoever sent it. Acting keeps new
rooms away until an own probe succeeds, which begins within `JITTER_S`. What comes in between is dropped: who uses the
engine finds out for himself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from random import Random
from typing import Protocol

from engines.types import EngineId
from failover.journal import MAX_SIGNALS, FailoverKeys, Signal, SignalKind, pack, unpack
from failover.monitor import Spawn
from failover.shared import RETRY_S, Link, LinkTrouble

APART_S = 2.0
JITTER_S = 0.05
"""Gateways that hear of one suspicion do not all probe in the same moment."""
_BLOCK_S = 1.0
_START = b"0-0"
_MAX_ENGINES = 10_000


class Suspects(Protocol):
    """Who acts on a suspicion (`failover.monitor.Monitor.suspect_elsewhere`)."""

    def __call__(self, engine_id: EngineId, reason: str, fingerprint: str, look_in_s: float) -> None: ...


class _Rarely:
    """Lets each engine pass once per `APART_S`; of too many engines it forgets the first."""

    def __init__(self) -> None:
        self._passed_s: dict[EngineId, float] = {}
        """In the order of time."""

    def may_pass(self, engine_id: EngineId, now_s: float) -> bool:
        for name, passed_s in tuple(islice(self._passed_s.items(), 2)):
            if now_s >= passed_s + APART_S or len(self._passed_s) > _MAX_ENGINES:
                del self._passed_s[name]
        if now_s < self._passed_s.get(engine_id, float("-inf")) + APART_S:
            return False
        self._passed_s.pop(engine_id, None)
        self._passed_s[engine_id] = now_s
        return True


class Signals:
    """The signals of one gateway. `start` and `stop` once each.

    While Redis is in trouble suspicions are dropped: they are of use at once or not at all.
    """

    def __init__(
        self,
        link: Link,
        keys: FailoverKeys,
        replica: str,
        spawn: Spawn,
        rng: Random,
        *,
        on_suspicion: Suspects,
        on_leases: Callable[[], None],
        on_poison: Callable[[], None],
    ) -> None:
        self._link = link
        self._stream = keys.signals()
        self._replica = replica
        self._spawn = spawn
        self._rng = rng
        self._on_suspicion = on_suspicion
        self._on_leases = on_leases
        self._on_poison = on_poison
        self._unsent: dict[EngineId, Signal] = {}
        self._wake = asyncio.Event()
        self._sent, self._acted = _Rarely(), _Rarely()
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = self.heard = self.acted = self.dropped = 0
        """Suspicions sent and heard; of those heard, how many were acted on; of our own, how many never left."""

    def suspect(self, engine_id: EngineId, reason: str, fingerprint: str) -> None:
        """This gateway suspects an engine: let all others know. Quick, and never fails."""
        if self._sent.may_pass(engine_id, asyncio.get_running_loop().time()):
            signal = Signal(self._replica, SignalKind.SUSPICION, engine_id, reason, fingerprint)
            self._unsent[engine_id] = signal
            self._wake.set()

    async def start(self) -> None:
        self._tasks = [
            self._spawn(self._keep_telling(), "tell suspicions"),
            self._spawn(self._keep_hearing(), "hear signals"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _keep_telling(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            unsent, self._unsent = self._unsent, {}
            for signal in unsent.values():
                words = [word for field in pack(signal).items() for word in field]
                try:
                    await self._link.command("XADD", self._stream, "MAXLEN", "~", MAX_SIGNALS, "*", *words)
                    self.sent += 1
                except LinkTrouble:
                    self.dropped += 1

    async def _keep_hearing(self) -> None:
        after: bytes | None = None
        while True:
            try:
                if after is None:
                    after = await self._end()
                found = (await self._link.read({self._stream: after}, _BLOCK_S)).get(self._stream, [])
                if found:
                    after = found[-1][0]
                    self._hear([fields for _, fields in found])
                else:
                    after = min(after, await self._end(), key=_order)  # it was flushed, or its server's clock went back
            except LinkTrouble:
                await asyncio.sleep(RETRY_S)

    async def _end(self) -> bytes:
        """The id of the last entry: who starts looks at every engine and reads leases and poison anyway."""
        last = await self._link.command("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        return bytes(last[0][0]) if last else _START

    def _hear(self, found: list[dict[bytes, bytes]]) -> None:
        signals = [signal for signal in map(unpack, found) if signal is not None and signal.replica != self._replica]
        kinds = {signal.kind for signal in signals}
        if SignalKind.LEASES in kinds:
            self._on_leases()
        if SignalKind.POISON in kinds:
            self._on_poison()
        now_s = asyncio.get_running_loop().time()
        for signal in signals:
            if signal.kind is SignalKind.SUSPICION:
                self.heard += 1
                if self._acted.may_pass(signal.engine_id, now_s):
                    self.acted += 1
                    look_in_s = self._rng.uniform(0.0, JITTER_S)
                    self._on_suspicion(signal.engine_id, signal.reason, signal.fingerprint, look_in_s)


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))
