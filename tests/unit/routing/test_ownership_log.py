from __future__ import annotations

import pytest

from routing import ownership_log as log
from routing.ownership import ROOT, Run, Tier

A, B, C = (bytes([letter]) * 16 for letter in b"abc")


def test_operations_survive_packing() -> None:
    ops = [
        log.claim(Run(ROOT, (A, B)), 120_000),
        log.hold(Tier.HOST, Run(A, (B, C)), 1),
        log.promote(Tier.DEVICE, B, 2, 600_000),
        log.drop(B),
        log.touch(Tier.STORE, [A, C], 5),
        log.cut(Tier.DEVICE, C, B),
        log.clear(),
    ]
    assert list(log.unpack_ops(log.pack_ops(ops))) == ops
    assert list(log.unpack_ops(b"")) == []
    assert sum(op.size_bytes for op in ops) == len(log.pack_ops(ops))


def test_the_tail_is_the_run_an_operation_is_about() -> None:
    assert log.hold(Tier.DEVICE, Run(A, (B, C)), 1).tail == C
    assert log.cut(Tier.DEVICE, C, B).tail == C
    assert log.promote(Tier.DEVICE, B, 2, 1).tail == B
    assert log.promote(Tier.DEVICE, B, 70_000, 1).promoted_blocks == 70_000


@pytest.mark.parametrize("cut", [1, 9, 10, 20])
def test_what_ends_early_is_said(cut: int) -> None:
    with pytest.raises(log.BadOps):
        list(log.unpack_ops(log.pack_ops([log.drop(A)])[:cut]))


@pytest.mark.parametrize(
    "op",
    [
        log.Op(b"?", b"d", 0, A),
        log.Op(log.HOLD, b"?", 0, A + B),
        log.Op(log.HOLD, b"p", 0, A + B),
        log.Op(log.HOLD, b"d", 0, A),
        log.Op(log.HOLD, b"d", 0, A + B + b"short"),
        log.Op(log.CLAIM, b"d", 0, A + B),
        log.Op(log.CLAIM, b"p", 0, A),
        log.Op(log.PROMOTE, b"d", 0, A),
        log.Op(log.PROMOTE, b"p", 0, A + b"1234"),
        log.Op(log.DROP, b"d", 0, A),
        log.Op(log.DROP, b"p", 0, A + B),
        log.Op(log.TOUCH, b"p", 0, A),
        log.Op(log.TOUCH, b"d", 0, b"short"),
        log.Op(log.CUT, b"p", 0, A + B),
        log.Op(log.CUT, b"d", 0, A),
        log.Op(log.CLEAR, b"d", 0, b""),
        log.Op(log.CLEAR, b"p", 0, A),
    ],
)
def test_what_is_no_operation_is_said(op: log.Op) -> None:
    with pytest.raises(log.BadOps):
        list(log.unpack_ops(log.pack_ops([op])))


@pytest.mark.parametrize("run", [Run(ROOT, (A,)), Run(A, (B, C))])
def test_runs_survive_packing(run: Run) -> None:
    assert log.unpack_run(log.pack_run(run)) == run


@pytest.mark.parametrize("packed", [b"", A, A + b"short"])
def test_what_is_no_run_is_said(packed: bytes) -> None:
    assert not log.is_run(packed)
    with pytest.raises(log.BadOps):
        log.unpack_run(packed)


def test_durations_are_never_zero_and_fit() -> None:
    assert log.duration_ms(10.0, 9.5) == 500
    assert log.duration_ms(10.0, 11.0) == 1
    assert log.duration_ms(1e12, 0.0) == 0xFFFF_FFFF
