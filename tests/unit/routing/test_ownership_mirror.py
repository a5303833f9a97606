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
    assert not mirror.apply(P0, [log.promote(Tier.DEVICE, A, 1, 1000)], 0.0, own=False)
    assert mirror.apply(P0, [log.touch(Tier.DEVICE, [A], 1000), log.drop(A)], 0.0, own=False)


SHORT, LONG = Run(B, (C, D)), Run(ROOT, (A, B, C, D))


def promote(run: Run) -> log.Op:
    return log.promote(Tier.DEVICE, run.tail, len(run.blocks), 1000)


def held(mirror: OwnershipMirror) -> list[Run]:
    return [each.run for each in mirror.snapshot(0.5) if each.state == "held"]


def test_a_promotion_is_of_the_run_that_was_meant() -> None:
    """Two pending runs have one tail, of which the longer is known."""
    for run, followed, rows in ((LONG, True, [LONG]), (SHORT, False, [])):
        mirror = OwnershipMirror()
        assert mirror.apply(P0, [log.claim(SHORT, 1000), log.claim(LONG, 1000)], 0.0, own=False)
        assert mirror.apply(P0, [promote(run)], 0.0, own=False) is followed
        assert [each.run for each in mirror.snapshot(0.0)] == rows


def test_of_what_is_promoted_and_what_is_held_the_longer_stays() -> None:
    for before, run in ((SHORT, LONG), (LONG, SHORT), (LONG, LONG)):
        mirror = OwnershipMirror()
        assert mirror.apply(P0, [log.hold(Tier.DEVICE, before, 600), log.claim(run, 1000)], 0.0, own=False)
        assert mirror.apply(P0, [promote(run)], 0.0, own=False)
        [row] = mirror.snapshot(0.5)
        assert (row.run, row.expires_s) == (LONG, 1.0)


def test_a_promotion_of_a_longer_run_than_is_known_cannot_be_followed() -> None:
    mirror = OwnershipMirror()
    mirror.apply(P0, [log.hold(Tier.DEVICE, SHORT, 1000)], 0.0, own=False)
    assert not mirror.apply(P0, [promote(LONG)], 0.0, own=False)
    assert held(mirror) == [SHORT]


def test_anothers_longer_run_takes_the_place_of_ours() -> None:
    """Ours was promoted here already, and the other's is what Redis has."""
    mirror = OwnershipMirror()
    mirror.hold(P0, 1, [A, B], 0.0)
    mirror.confirm(mirror.claim_pending(P0, 1, [A, B, C, D], 0.0), 0.0)
    assert mirror.apply(P0, [log.claim(LONG, 1000), promote(LONG)], 0.0, own=False)
    assert mirror.apply(P0, [promote(SHORT)], 0.0, own=True)
    assert held(mirror) == [Run(ROOT, (A, B)), LONG]


def test_claims_that_were_never_told_are_not_written_anew() -> None:
    """Nobody would be told of their end."""
    mirror = OwnershipMirror()
    mirror.claim_pending(P0, 1, [A], 0.0)
    assert list(mirror.beyond(P0, frozenset(), 0.0)) == []
    mirror.say_claims(0.1)
    assert [op.kind for op in mirror.beyond(P0, frozenset(), 0.1)] == [log.CLAIM]


def test_rows_on_places_that_do_not_exist_are_left_out() -> None:
    mirror = OwnershipMirror()
    strange = (SharedRow(b"z", log.pack_run(LONG), 1000, 1000), SharedRow(b"d", A, 1000, 1000))
    mirror.merge(P0, strange, 0.0)
    assert list(mirror.snapshot(0.0)) == []


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


def test_what_was_taken_with_our_own_write_may_come_again_in_the_log() -> None:
    position = Position(5, b"x", b"90-11", current=True)
    assert position.has_passed(b"90-11", entry(5, b"90-2"))
    assert position.has_passed(b"90-2", entry(4, b"80-0"))
    assert not position.has_passed(b"90-12", entry(6, b"90-11"))
    for strange in ((b"90-12", entry(5, b"90-2")), (b"90-2", entry(1, b"", b"y")), (b"90-2", entry(6, b"90-11"))):
        assert not position.has_passed(*strange), "another past"


def test_our_own_write_is_next_only_where_nothing_came_between() -> None:
    assert Position().continues(entry(1, b""))
    position = Position(2, b"x", b"2-0")
    assert position.continues(entry(3, b"2-0"))
    for strange in (entry(4, b"3-0"), entry(3, b"1-0"), entry(2, b"2-0"), entry(3, b"2-0", b"y")):
        assert not position.continues(strange)


def test_the_head_of_a_silent_log_is_believed_the_second_time() -> None:
    position = Position(2, b"x", b"2-0", current=True)
    assert not position.compare(2, b"x", position.known)
    assert position.compare(3, b"x", position.known)
    assert position.current
    assert not position.compare(4, b"x", position.known)
    assert (position.current, position.lost) == (False, False)
    for seq, db_epoch, wrote_seq in ((1, b"x", 0), (2, b"y", 0), (2, b"x", 3), (0, b"", 0)):
        position = Position(2, b"x", b"2-0", current=True, wrote_seq=wrote_seq)
        position.compare(seq, db_epoch, position.known)
        assert position.lost


def test_what_is_written_while_the_head_is_asked_for_proves_nothing() -> None:
    for position in (Position(2, b"x", b"2-0", current=True), Position(current=True)):
        asked, head = position.known, (position.seq, position.db_epoch)
        assert position.advance(b"3-0", entry(position.seq + 1, position.last))
        assert not position.compare(*head, asked)
        assert (position.current, position.lost) == (True, False)
