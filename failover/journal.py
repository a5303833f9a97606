"""What gateways of one fleet write down for each other besides ownership: key names, and signals. Pure.

All keys of a fleet lie in one Cluster slot. They are small: an entry for each engine, gateway and refused request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engines.types import EngineId

MAX_SIGNALS = 1000
"""Signals kept in the stream, about: who was away for longer looks for himself."""
_MAX_REASON_CHARS = 200
_MAX_NAME_CHARS = 2000
_NONE = EngineId("")


@dataclass(frozen=True, slots=True)
class FailoverKeys:
    """Every key of process ids, leases, suspicion and poison. `prefix` tells pdgate's keys from others'."""

    prefix: str
    fleet: str

    def _key(self, *names: object) -> bytes:
        return ":".join((self.prefix, f"{{{self.fleet}:f}}", *map(str, names))).encode()

    def process(self, process_id: int) -> bytes:
        """STRING: whose rooms begin with this id; it outlives its owner for as long as a room may not come again."""
        return self._key("process", process_id)

    def leases(self) -> bytes:
        """HASH: lease → `token since holder`; times are Unix milliseconds of Redis's own clock."""
        return self._key("leases")

    def members(self) -> bytes:
        """ZSET: gateways that want leases → until when they, and hence their leases, count; as above."""
        return self._key("members")

    def asked(self) -> bytes:
        """HASH: lease → the gateway that asks its holder for it; gone a moment after the last was asked for."""
        return self._key("asked")

    def signals(self) -> bytes:
        """STREAM: what all gateways should hear at once."""
        return self._key("signals")

    def poison(self) -> bytes:
        """ZSET: fingerprint of a refused request → until when it is refused, as above."""
        return self._key("poison")


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
