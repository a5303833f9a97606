from __future__ import annotations

from engines.types import EngineId
from routing import ownership_log as log
from routing.ownership import ROOT, Run, Tier
from routing.ownership_outbox import Lane, Outbox, fingerprint_name

P0, P1 = EngineId("p0"), EngineId("p1")


def block(number: int) -> bytes:
    return b"%016d" % number


def hold(number: int, blocks: int = 1) -> log.Op:
    return log.hold(Tier.DEVICE, Run(ROOT, tuple(block(number * 1000 + at) for at in range(blocks))), 1000)


def settled(outbox: Outbox, engine_id: EngineId = P0, epoch: int = 1) -> Lane:
    lane = outbox.lane(engine_id)
    lane.begin(epoch, "boot")
    lane.settled, lane.number = True, 10
    return lane


def test_nothing_is_written_before_the_boot_is_settled() -> None:
    outbox = Outbox(10_000, 10_000)
    outbox.add(P0, 1, hold(1))
    assert outbox.next_batches(10_000) == []
    outbox.lane(P0).begin(1, "boot")
    assert outbox.lane(P0).unsettled
    assert outbox.has_work()
    assert outbox.next_batches(10_000) == []
    settled(outbox)
    [(_, batch)] = outbox.next_batches(10_000)
    assert batch.ops == (hold(1),)
    assert outbox.queued_bytes == 0


def test_operations_of_an_older_epoch_are_left_out_and_those_of_a_newer_one_wait() -> None:
    outbox = Outbox(10_000, 10_000)
    lane = settled(outbox, epoch=2)
    for epoch in (1, 2, 3):
        outbox.add(P0, epoch, hold(epoch))
    [(_, batch)] = outbox.next_batches(10_000)
    assert batch.ops == (hold(2),)
    assert outbox.refused == 1
    assert [epoch for epoch, _ in lane.queue] == [3]


def test_a_batch_that_may_not_have_arrived_comes_again_unchanged() -> None:
    outbox = Outbox(10_000, 10_000)
    lane = settled(outbox)
    outbox.add(P0, 1, hold(1))
    [(_, first)] = outbox.next_batches(10_000)
    outbox.add(P0, 1, hold(2))
    assert outbox.next_batches(10_000) == [(lane, first)]
    outbox.written(lane, first, 5)
    [(_, second)] = outbox.next_batches(10_000)
    assert second.ops == (hold(2),)
    assert lane.read_back(first.number) is first
    assert list(lane.outstanding()) == [hold(2)]


def test_what_is_read_back_passes_what_came_before() -> None:
    outbox = Outbox(10_000, 10_000)
    lane = settled(outbox)
    batches = []
    for number in range(3):
        outbox.add(P0, 1, hold(number))
        [(_, batch)] = outbox.next_batches(10_000)
        outbox.written(lane, batch, number + 1)
        batches.append(batch)
    assert lane.read_back(batches[1].number) is batches[1]
    assert list(lane.unread) == [batches[2]]
    assert lane.read_back(batches[0].number) is None
    lane.forget_passed(3)
    assert not lane.unread


def test_batches_are_bounded() -> None:
    outbox = Outbox(1 << 20, 1000)
    settled(outbox)
    settled(outbox, P1)
    for number in range(20):
        outbox.add(P0, 1, hold(number))
        outbox.add(P1, 1, hold(number))
    [(_, batch), _] = outbox.next_batches(1 << 20)
    assert 1 <= len(batch.ops) < 20
    assert len(outbox.next_batches(1)) == 1


def test_beyond_the_bound_hints_go_first_then_rows_and_evictions_last() -> None:
    outbox = Outbox(20_000, 10_000)
    lane = settled(outbox)
    cut = log.cut(Tier.DEVICE, block(1), block(0))
    outbox.add(P0, 1, cut)
    for number in range(60):
        outbox.add(P0, 1, log.touch(Tier.DEVICE, [block(number)], 1))
    assert outbox.dropped == 0
    for number in range(60):
        outbox.add(P0, 1, hold(number))
    kinds = [op.kind for _, op in lane.queue]
    assert outbox.dropped > 0
    assert not lane.again
    assert kinds.count(log.HOLD) == 60
    for number in range(200):
        outbox.add(P0, 1, hold(number))
        assert outbox.queued_bytes <= 20_000
    assert lane.again
    assert (1, cut) in lane.queue
    assert (1, hold(199)) in lane.queue
    assert outbox.queued_bytes == lane.queued_bytes


def test_a_boot_that_is_over_gives_up_all() -> None:
    outbox = Outbox(10_000, 10_000)
    lane = settled(outbox)
    outbox.add(P0, 1, hold(1))
    outbox.next_batches(10_000)
    outbox.add(P0, 1, hold(2))
    assert outbox.discard(lane) == 2
    assert (outbox.queued_bytes, list(lane.outstanding())) == (0, [])


def test_fingerprints_are_short_and_have_no_white_space() -> None:
    assert fingerprint_name("a b") != fingerprint_name("a c")
    assert len(fingerprint_name("x" * 5000)) == 24
    assert " " not in fingerprint_name("a b")
