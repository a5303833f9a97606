from __future__ import annotations

from hashlib import blake2b

import pytest

from routing.ownership import ROOT, Run
from routing.ownership_rows import Span, TierRows, missing_runs, reach


def block(name: str) -> bytes:
    """A block whose identity is its whole prefix, as with real hashes."""
    return blake2b(name.encode(), digest_size=16).digest()


def chain(name: str) -> tuple[bytes, ...]:
    return tuple(block(name[: end + 1]) for end in range(len(name)))


def run(name: str, start: int = 0) -> Run:
    return Run(block(name[:start]) if start else ROOT, chain(name)[start:])


CHAIN = chain("abcde")
A, B, C, D, E = CHAIN


def rows_of(*runs: Run) -> TierRows:
    rows = TierRows()
    for each in runs:
        rows.put(each, 10.0)
    return rows


def held(rows: TierRows) -> set[tuple[bytes, ...]]:
    return {row.run.blocks for row in rows.rows.values()}


def test_a_run_is_what_is_new() -> None:
    assert missing_runs(CHAIN, [Span(0, 2, B)]) == (Run(B, (C, D, E)),)
    assert missing_runs(CHAIN, []) == (Run(ROOT, CHAIN),)
    assert missing_runs(CHAIN, [Span(0, 3, C), Span(1, 5, E)]) == ()
    assert missing_runs((), []) == ()


def test_blocks_lost_in_the_middle_make_runs_of_their_own() -> None:
    assert missing_runs(CHAIN, [Span(0, 1, A), Span(3, 4, D)]) == (Run(A, (B, C)), Run(D, (E,)))


def test_a_chain_is_held_up_to_its_first_gap() -> None:
    assert reach([]) == reach([Span(1, 5, E)]) == 0
    assert reach([Span(0, 3, C), Span(1, 2, B), Span(3, 4, D)]) == 4
    assert reach([Span(0, 1, A), Span(2, 5, E)]) == 1


def test_a_chain_finds_the_rows_that_begin_in_it() -> None:
    rows = rows_of(run("abc"), run("abcxy", 3), run("abcdefg", 3), run("zz"))
    assert rows.spans(CHAIN) == [Span(0, 3, C), Span(3, 5, block("abcdefg"))]
    assert rows.joined(CHAIN) == 5
    assert rows.spans(chain("abxxx")) == [Span(0, 2, C)]
    assert rows.joined(chain("abxxx")) == 2
    assert rows.spans(chain("q")) == []
    assert rows.joined(chain("q")) == 0


def test_a_row_whose_ancestors_are_gone_is_found() -> None:
    rows = rows_of(run("abcd", 2))
    assert rows.spans(CHAIN) == [Span(2, 4, D)]
    assert rows.put_missing(CHAIN, rows.spans(CHAIN), 20.0) == (Run(ROOT, (A, B)), Run(D, (E,)))
    assert rows.joined(CHAIN) == rows.blocks == 5


def test_a_block_counts_as_long_as_any_row_has_it() -> None:
    rows = rows_of(run("ab"), run("abc"))
    assert set(rows.with_any([A])) == {B, C}
    assert rows.blocks == 5
    assert rows.remove(C) == [C]
    assert rows.spans(CHAIN) == [Span(0, 2, B)]
    assert rows.remove(B) == [A, B]
    assert not rows.spans(CHAIN)
    assert rows.blocks == 0


def test_three_rows_may_share_a_block() -> None:
    rows = rows_of(run("a"), run("ab"), run("ac"))
    assert rows.remove(B) == [B]
    assert rows.remove(A) == []
    assert rows.remove(block("ac")) == [A, block("ac")]


def test_a_row_that_begins_inside_another_shares_its_blocks() -> None:
    """Neither begins in the other one's first block, nor is the parent any row's end."""
    rows = rows_of(run("abcd"), run("abce", 2))
    assert rows.remove(D) == [A, B, D]
    rows = rows_of(run("abcd"), run("abce", 2))
    assert rows.remove(block("abce")) == [block("abce")]
    rows = rows_of(run("abce", 2), run("abcd"))
    assert rows.remove(D) == [A, B, D]


def test_a_row_shares_its_blocks_with_one_that_was_put_later_and_begins_before_it() -> None:
    rows = rows_of(run("ab"), run("abce", 2), run("abcd", 1))
    assert rows.remove(block("abce")) == [block("abce")]
    rows = rows_of(run("ab"), run("abce", 2), run("abcd", 1))
    assert set(rows.with_any(frozenset([block("abce"), C]))) == {block("abce"), D}


def test_of_two_rows_with_one_tail_the_longer_stays() -> None:
    rows = TierRows()
    assert rows.put(Run(A, (B, C)), 10.0)
    assert not rows.put(Run(B, (C,)), 5.0)
    assert (rows.rows[C].run, rows.rows[C].expires_s) == (Run(A, (B, C)), 10.0)
    assert rows.put(Run(ROOT, (A, B, C)), 7.0)
    assert (rows.rows[C].run, rows.rows[C].expires_s) == (Run(ROOT, (A, B, C)), 10.0)
    assert rows.blocks == 3
    assert rows.remove(C) == [A, B, C]


def test_a_row_ends_before_what_is_lost() -> None:
    rows = rows_of(run("abc"))
    assert rows.cut(C, {B}) == [B, C]
    assert (rows.rows[A].run, rows.rows[A].expires_s) == (Run(ROOT, (A,)), 10.0)
    assert rows.cut(A, {A}) == [A]
    rows.put(run("ab"), 10.0)
    assert rows.cut(B, {D}) == [A, B]  # whoever cut it knows that its end is gone
    assert not rows.rows


def test_what_another_row_still_has_is_not_lost_by_a_cut() -> None:
    rows = rows_of(run("ab"), run("abc"))
    assert rows.cut(C, {B}) == [C]
    assert held(rows) == {(A, B), (A,)}


@pytest.mark.parametrize("lost", [(C, B), (B,), (A, C), (C, block("unknown"))], ids=["end", "middle", "both", "more"])
def test_rows_with_lost_blocks_are_found_wherever_these_lie(lost: tuple[bytes, ...]) -> None:
    rows = rows_of(run("abc"), run("xyz"))
    assert rows.with_any(frozenset(lost)) == [C]
    assert rows.with_any(frozenset(lost[1:2])) == ([C] if lost[1:2] not in ((), (block("unknown"),)) else [])


def test_both_rows_with_a_lost_block_are_found_though_it_ends_one() -> None:
    for runs in ((run("abc"), run("abcde", 1)), (run("abcde", 1), run("abc"))):
        assert set(rows_of(*runs).with_any(frozenset([C]))) == {C, E}


def test_what_was_used_is_the_most_recent() -> None:
    rows = rows_of(run("a"), run("b"))
    rows.touch(A, 30.0)
    assert list(rows.rows) == [block("b"), A]
    assert rows.rows[A].expires_s == 30.0
