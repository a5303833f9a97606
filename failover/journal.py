"""What gateways of one fleet write down for each other besides ownership: key names, signals, live attempts. Pure.

All keys of a fleet lie in one Cluster slot. They are small: an entry for each engine, gateway, refused request and live
attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import orjson

from engines.types import EngineId

MAX_SIGNALS = 1000
"""Signals kept in the stream, about: who was away for longer looks for himself."""
_MAX_REASON_CHARS = 200
_MAX_NAME_CHARS = 2000
_NONE = EngineId("")


@dataclass(frozen=True, slots=True)
class FailoverKeys:
    """Every key of process ids, leases, suspicion, poison, and of who is there and who is dead.

    `prefix` tells pdgate's keys from others'. Times are Unix milliseconds of Redis's own clock, everywhere.
    """

    prefix: str
    fleet: str

    def _key(self, *names: object) -> bytes:
        return ":".join((self.prefix, f"{{{self.fleet}:f}}", *map(str, names))).encode()

    def process(self, process_id: int) -> bytes:
        """STRING: whose rooms begin with this id; it outlives its owner for as long as a room may not come again."""
        return self._key("process", process_id)

    def leases(self) -> bytes:
        """HASH: lease → `token since holder`."""
        return self._key("leases")

    def members(self) -> bytes:
        """ZSET: gateways that want leases → until when they, and hence their leases, count."""
        return self._key("members")

    def asked(self) -> bytes:
        """HASH: lease → the gateway that asks its holder for it; gone a moment after the last was asked for."""
        return self._key("asked")

    def signals(self) -> bytes:
        """STREAM: what all gateways should hear at once."""
        return self._key("signals")

    def poison(self) -> bytes:
        """ZSET: fingerprint of a refused request → until when it is refused."""
        return self._key("poison")

    def data_set(self) -> bytes:
        """STRING: drawn by chance, once for each data set: it is another after a flush or an empty restart."""
        return self._key("data_set")

    def lives(self) -> bytes:
        """ZSET: replica → until when it counts as there; who is gone stays in it until it was reaped."""
        return self._key("lives")

    def addresses(self) -> bytes:
        """HASH: replica, of those in `lives` → the URL at which others may ask whether it is there; may be empty."""
        return self._key("addresses")

    def verdicts(self) -> bytes:
        """ZSET: `observer suspect` → until when this observer's word counts that the suspect is dead."""
        return self._key("verdicts")

    def attempts(self, replica: str) -> bytes:
        """HASH: rid → the servers of each live attempt of a replica."""
        return self._key("attempts", replica)

    def reaped(self, replica: str) -> bytes:
        """STRING: this replica was declared dead; it may not go on under this name."""
        return self._key("reaped", replica)

    def claim(self, replica: str) -> bytes:
        """STRING, expiring: who releases what a dead replica had, and since when."""
        return self._key("claim", replica)


class SignalKind(StrEnum):
    """What a signal is about."""

    SUSPICION = "suspicion"
    """A gateway suspects an engine: the signal says all of it."""
    LEASES = "leases"
    """A lease was freed, asked for or handed over: renew yours now."""
    POISON = "poison"
    """Requests were refused: read which."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One entry of the stream. The engine's fields belong to suspicions; `fingerprint` names the boot suspected."""

    replica: str
    kind: SignalKind
    engine_id: EngineId = _NONE
    reason: str = ""
    fingerprint: str = ""


def pack(signal: Signal) -> dict[bytes, bytes]:
    """The fields of a signal's entry; Lua writes `replica` and `kind` alike."""
    fields = {b"replica": signal.replica, b"kind": str(signal.kind)}
    if signal.kind is SignalKind.SUSPICION:
        fields[b"engine"] = signal.engine_id
        fields[b"reason"] = signal.reason[:_MAX_REASON_CHARS]
        fields[b"fingerprint"] = signal.fingerprint
    return {name: value.encode(errors="replace") for name, value in fields.items()}


def unpack(fields: Mapping[bytes, bytes]) -> Signal | None:
    """A signal as it was packed; None for anything else, so that a stranger's entry harms nobody."""
    try:
        kind = SignalKind(fields[b"kind"].decode())
        replica, engine_id, reason, fingerprint = (
            fields.get(name, b"").decode() for name in (b"replica", b"engine", b"reason", b"fingerprint")
        )
    except (KeyError, ValueError):
        return None
    if not replica or (kind is SignalKind.SUSPICION) != bool(engine_id) or len(engine_id) > _MAX_NAME_CHARS:
        return None
    return Signal(replica, kind, EngineId(engine_id), reason[:_MAX_REASON_CHARS], fingerprint)


@dataclass(frozen=True, slots=True)
class Server:
    """A server as the journal names it: replicas that reach it by other URLs know it by the fingerprint of its boot."""

    engine_id: EngineId
    fingerprint: str = ""


def pack_attempt(prefill: Server, decode: Server) -> bytes:
    """The value of an attempt in `FailoverKeys.attempts`."""
    return orjson.dumps([(each.engine_id, each.fingerprint) for each in (prefill, decode)])


def unpack_attempt(value: bytes) -> tuple[Server, ...]:
    """Its prefill and its decode; nothing for what is no attempt."""
    try:
        (prefill, prefill_boot), (decode, decode_boot) = orjson.loads(value)
    except (ValueError, TypeError):
        return ()
    if not all(isinstance(each, str) for each in (prefill, prefill_boot, decode, decode_boot)):
        return ()
    return Server(EngineId(prefill), prefill_boot), Server(EngineId(decode), decode_boot)
