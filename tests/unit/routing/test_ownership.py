from __future__ import annotations

from routing.ownership import ROOT, Run, accepts, needs_refresh, truncated

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")
CHAIN = (A, B, C, D, E)


def test_a_run_is_named_by_its_tail() -> None:
    assert Run(ROOT, CHAIN).tail == E


def test_a_run_ends_before_its_first_lost_block() -> None:
    run = Run(A, (B, C, D))
    assert truncated(run, {C, D}) == Run(A, (B,))
    assert truncated(run, {B}) is None
    assert truncated(run, {A, E}) == run


def test_older_epochs_are_refused() -> None:
    assert accepts(3, 3)
    assert accepts(3, 4)
    assert not accepts(3, 2)


def test_a_hit_is_written_when_under_half_of_the_time_is_left() -> None:
    assert not needs_refresh(expires_s=100.0, now_s=50.0, held_s=100.0)
    assert needs_refresh(expires_s=100.0, now_s=50.1, held_s=100.0)
