from __future__ import annotations

from routing.ownership import ROOT, Run
from routing.ownership_rows import TierRows

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def test_a_block_counts_as_long_as_any_row_has_it() -> None:
    rows = TierRows()
    assert rows.put(Run(ROOT, (A, B)), 10.0)
    assert rows.put(Run(ROOT, (A, B, C)), 20.0)
    assert rows.with_any([A]) == {B: None, C: None}
    assert rows.lives(A, 15.0)
    assert rows.remove(C) == [C]
    assert rows.lives(A, 5.0)
    assert not rows.lives(A, 15.0)
    assert rows.remove(B) == [A, B]
    assert not rows.tails


def test_three_rows_may_share_a_block() -> None:
    rows = TierRows()
    for run in (Run(ROOT, (A,)), Run(ROOT, (A, B)), Run(ROOT, (A, C))):
        rows.put(run, 10.0)
    assert rows.remove(B) == [B]
    assert rows.remove(A) == []
    assert rows.remove(C) == [A, C]


def test_of_two_rows_with_one_tail_the_longer_stays() -> None:
    rows = TierRows()
    assert rows.put(Run(A, (B, C)), 10.0)
    assert not rows.put(Run(B, (C,)), 5.0)
    assert (rows.rows[C].run, rows.rows[C].expires_s) == (Run(A, (B, C)), 10.0)
    assert rows.put(Run(ROOT, (A, B, C)), 7.0)
    assert (rows.rows[C].run, rows.rows[C].expires_s) == (Run(ROOT, (A, B, C)), 10.0)
    assert rows.remove(C) == [A, B, C]


def test_a_row_ends_before_what_is_lost() -> None:
    rows = TierRows()
    rows.put(Run(ROOT, (A, B, C)), 10.0)
    assert rows.cut(C, {B}) == [B, C]
    assert (rows.rows[A].run, rows.rows[A].expires_s) == (Run(ROOT, (A,)), 10.0)
    assert rows.cut(A, {A}) == [A]
    rows.put(Run(ROOT, (A, B)), 10.0)
    assert rows.cut(B, {D}) == [A, B]  # whoever cut it knows that its end is gone
    assert not rows.rows


def test_what_another_row_still_has_is_not_lost_by_a_cut() -> None:
    rows = TierRows()
    rows.put(Run(ROOT, (A, B)), 10.0)
    rows.put(Run(ROOT, (A, B, C)), 10.0)
    assert rows.cut(C, {B}) == [C]
    assert rows.lives(B, 0.0)


def test_only_a_run_that_is_all_new_is_put_in_one_walk() -> None:
    rows = TierRows()
    assert rows.put_new(Run(ROOT, (A, B)), 10.0)
    assert not rows.put_new(Run(ROOT, (A, B)), 10.0)
    assert not rows.put_new(Run(ROOT, (D, B, C)), 10.0)
    assert rows.tails == {A: B, B: B}


def test_what_was_used_is_the_most_recent() -> None:
    rows = TierRows()
    rows.put(Run(ROOT, (A,)), 10.0)
    rows.put(Run(ROOT, (B,)), 10.0)
    rows.touch(A, 30.0)
    assert list(rows.rows) == [B, A]
    assert rows.rows[A].expires_s == 30.0
