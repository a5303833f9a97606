"""Key names in one Cluster slot; signals that come back as they were, and strangers' that are nothing."""

from __future__ import annotations

import pytest

from engines.types import EngineId
from failover.journal import FailoverKeys, Signal, SignalKind, pack, unpack
from routing.ownership import Keys

P = EngineId("http://p0")
SUSPICION = Signal("me", SignalKind.SUSPICION, P, "connection lost", "boot")


def test_all_keys_of_a_fleet_lie_in_one_slot_and_none_is_another() -> None:
    keys = FailoverKeys("pdgate", "f")
    names = [keys.process(7), keys.process(8), keys.leases(), keys.members()]
    names += [keys.asked(), keys.signals(), keys.poison()]
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
