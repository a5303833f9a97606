"""Key names in one Cluster slot; signals that come back as they were, and strangers' that are nothing."""

from __future__ import annotations

import pytest

from engines.types import EngineId
from failover.journal import FailoverKeys, Server, Signal, SignalKind, pack, pack_attempt, unpack, unpack_attempt
from routing.ownership import Keys

P = EngineId("http://p0")
SUSPICION = Signal("me", SignalKind.SUSPICION, P, "connection lost", "boot")


def test_all_keys_of_a_fleet_lie_in_one_slot_and_none_is_another() -> None:
    keys = FailoverKeys("pdgate", "f")
    names = [keys.process(7), keys.process(8), keys.leases(), keys.members()]
    names += [keys.asked(), keys.signals(), keys.poison()]
    names += [keys.data_set(), keys.lives(), keys.addresses(), keys.verdicts()]
    names += [key(name) for key in (keys.attempts, keys.reaped, keys.claim) for name in ("a", "a-2")]
    assert len(set(names)) == len(names)
    assert all(name.startswith(b"pdgate:{f:f}:") for name in names)
    assert not {*names} & {Keys("pdgate", "f").bookings(), Keys("pdgate", "f").replicas()}
    assert not {*names} & {FailoverKeys("pdgate", "g").leases(), FailoverKeys("other", "f").leases()}


@pytest.mark.parametrize("signal", [SUSPICION, Signal("me", SignalKind.LEASES), Signal("me", SignalKind.POISON)])
def test_a_signal_comes_back_as_it_was(signal: Signal) -> None:
    assert unpack(pack(signal)) == signal


def test_what_lua_writes_is_a_signal() -> None:
    assert unpack({b"replica": b"me", b"kind": b"leases"}) == Signal("me", SignalKind.LEASES)
    assert unpack({b"replica": b"me", b"kind": b"poison"}) == Signal("me", SignalKind.POISON)


@pytest.mark.parametrize(
    "change",
    [
        {b"kind": b"gossip"},
        {b"kind": b"leases"},
        {b"replica": b""},
        {b"engine": b""},
        {b"engine": b"\xff"},
        {b"engine": b"x" * 3000},
        {b"kind": b"\xff"},
    ],
)
def test_what_is_no_signal_is_nothing(change: dict[bytes, bytes]) -> None:
    assert unpack(pack(SUSPICION) | change) is None
    assert unpack({}) is None


def test_a_reason_has_its_length() -> None:
    fields = pack(Signal("me", SignalKind.SUSPICION, P, "x" * 100_000, "boot"))
    assert len(fields[b"reason"]) == 200
    found = unpack(fields | {b"reason": b"x" * 100_000})
    assert found is not None
    assert len(found.reason) == 200
    assert unpack(pack(Signal("me", SignalKind.SUSPICION, P, "\udcff", "boot"))) is not None


def test_an_attempt_comes_back_as_it_was() -> None:
    prefill, decode = Server(P, "boot"), Server(EngineId("http://d0"))
    assert unpack_attempt(pack_attempt(prefill, decode)) == (prefill, decode)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"?",
        b"\xff",
        b"{}",
        b"7",
        b"null",
        b'["a","b"]',
        b'[["a","b"]]',
        b'[["a",1],["b","c"]]',
        b'[["a","b","c"],["d","e"]]',
    ],
)
def test_what_is_no_attempt_has_no_servers(value: bytes) -> None:
    assert unpack_attempt(value) == ()
