from __future__ import annotations

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import ROOT, OwnershipConfig, Run, Tier
from routing.ownership_entries import Position
from routing.ownership_mirror import OwnershipMirror, SharedRow, oldest_first

P0 = EngineId("p0")
A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def row(run: Run, expires_ms: int) -> SharedRow:
    return SharedRow(b"d", log.pack_run(run), expires_ms, expires_ms)


def test_the_oldest_rows_come_first_and_of_equal_age_parents() -> None:
    parent, child, grandchild = Run(ROOT, (A,)), Run(A, (B,)), Run(B, (C,))
    old = Run(ROOT, (D,))
    given = [row(grandchild, 500), row(child, 500), row(parent, 500), row(old, 100)]
    assert [log.unpack_run(each.packed) for each in oldest_first(given)] == [old, parent, child, grandchild]
    younger_parent = [row(child, 300), row(parent, 500)]
    assert oldest_first(younger_parent) == younger_parent
    strange = [row(Run(A, (A,)), 5)]
    assert oldest_first(strange) == strange


def test_rows_of_others_are_adopted_by_the_first_epoch_that_is_seen_here() -> None:
    mirror = OwnershipMirror(OwnershipConfig())
    mirror.merge(P0, [row(Run(ROOT, (A, B)), 1000)], 0.0)
    assert [each.epoch for each in mirror.snapshot(0.0)] == [-1]
    mirror.begin(P0, 3, "boot")
    assert [each.epoch for each in mirror.snapshot(0.0)] == [3]
    mirror.outdate(P0)
    mirror.hold(P0, 3, [C], 0.0)
    assert mirror.refused == 1
    mirror.merge(P0, [row(Run(ROOT, (D,)), 1000)], 0.0)
    mirror.begin(P0, 4, "newer")
    assert mirror.owners([D], 0.0) == {P0: 1}


def test_an_operation_on_an_unknown_row_cannot_be_followed() -> None:
    mirror = OwnershipMirror()
    assert not mirror.apply(P0, [log.cut(Tier.DEVICE, A, A)], 0.0, own=False)
    assert not mirror.apply(P0, [log.promote(Tier.DEVICE, A, 1000)], 0.0, own=False)
    assert mirror.apply(P0, [log.touch(Tier.DEVICE, [A], 1000), log.drop(A)], 0.0, own=False)


def entry(seq: int, before: bytes, db_epoch: bytes = b"x") -> log.LogEntry:
    return log.LogEntry(seq, db_epoch, before, b"r", 1, 1, P0, frozenset(), b"")


def test_a_log_is_followed_entry_by_entry() -> None:
    position = Position(current=True)
    assert position.advance(b"1-0", entry(1, b""))
    assert position.advance(b"2-0", entry(2, b"1-0"))
    assert not position.advance(b"4-0", entry(4, b"3-0"))
    assert (position.current, position.lost, position.seq) == (False, False, 2)


def test_another_past_is_a_loss() -> None:
    for strange in (entry(3, b"9-9"), entry(2, b"1-0"), entry(3, b"2-0", b"y")):
        position = Position(2, b"x", b"2-0", current=True)
        assert not position.advance(b"3-0", strange)
        assert position.lost


def test_the_head_of_a_silent_log_is_believed_the_second_time() -> None:
    position = Position(2, b"x", b"2-0", current=True)
    assert not position.compare(2, b"x", 2)
    assert position.compare(3, b"x", 2)
    assert position.current
    assert not position.compare(4, b"x", 2)
    assert (position.current, position.lost) == (False, False)
    for seq, db_epoch, wrote_seq in ((1, b"x", 0), (2, b"y", 0), (2, b"x", 3), (0, b"", 0)):
        position = Position(2, b"x", b"2-0", current=True)
        position.compare(seq, db_epoch, wrote_seq)
        assert position.lost
