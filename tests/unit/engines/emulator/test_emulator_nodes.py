"""The scheduler core by itself: forwards cut by chunk, shared forwards, steps, admission, holds, speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.emulator.core import Ended, Job, JobStage, PushAddresses, SendKv, Stepped, Timeouts, faster_profile
from engines.emulator.decode_node import DecodeNode
from engines.emulator.faults import Fault, Faults, Holds, HoldState
from engines.emulator.kv_pool import KvPool
from engines.emulator.plain_node import PlainNode
from engines.emulator.prefill_node import PrefillNode
from engines.emulator.radix import RadixCache
from engines.timing import TINY, PrefillWork, decode_step_s, prefill_forward_s, transfer_s
from engines.token_rule import pack

PROFILE = replace(TINY, prefill=replace(TINY.prefill, chunk_tokens=100))


class Endless:
    def step(self) -> bool:
        return False


def job(rid: str, room: int, tokens: int, max_new: int = 10) -> Job:
    return Job(rid, room, pack([room] * tokens), tokens, max_new, Endless(), "peer")


def prefill_node(total: int = 10_000) -> PrefillNode:
    return PrefillNode(PROFILE, KvPool(total, 1, RadixCache(1)), Timeouts())


def test_chunks_of_several_requests_share_a_forward() -> None:
    node = prefill_node()
    for room, tokens in ((1, 150), (2, 30), (3, 90)):
        node.submit(job(f"r{room}", room, tokens), 0.0)
        node.addresses(room, "d", 0.0)
    sends: list[tuple[int | None, int, int, bool]] = []
    now_s = 0.0
    forwards = []
    node.advance(now_s)
    while (due_s := node.next_s()) is not None and due_s < 100:
        now_s = due_s
        node.advance(now_s)
        for event in node.take_events():
            if isinstance(event, SendKv):
                sends.append((event.job.room, event.start, event.stop, event.last))
            elif isinstance(event, Stepped):
                forwards.append(now_s)
    by_room = sorted(sends, key=lambda send: send[0] or 0)  # stable: the order within a room is kept
    assert by_room == [(1, 0, 100, False), (1, 100, 150, True), (2, 0, 30, True), (3, 0, 20, False), (3, 20, 90, True)]
    first = prefill_forward_s(PROFILE.prefill, [PrefillWork(100)])
    second = prefill_forward_s(PROFILE.prefill, [PrefillWork(150, 100), PrefillWork(30), PrefillWork(20)])
    third = prefill_forward_s(PROFILE.prefill, [PrefillWork(90, 20)])
    assert forwards == pytest.approx([first + second, first + second, first + second + third])


def test_the_link_takes_the_time_of_the_bytes() -> None:
    node = prefill_node()
    node.submit(job("r", 1, 50), 0.0)
    node.addresses(1, "d", 0.0)
    node.advance(0.0)
    computed_s = node.next_s() or 0.0
    node.advance(computed_s)
    assert (node.next_s() or 0.0) - computed_s == pytest.approx(
        transfer_s(PROFILE.link, 50 * PROFILE.kv_bytes_per_token), rel=1e-6
    )


def test_a_cached_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    node = prefill_node()
    for rid in ("a", "b"):
        each = job(rid, 1, 60)
        node.submit(each, 0.0)
        node.addresses(1, "d", 0.0)
        while each.stage is not JobStage.DONE:
            node.advance(node.next_s() or 0.0)
            for event in node.take_events():
                if isinstance(event, SendKv) and event.last:
                    assert (event.start, event.stop) == (0, 60)
                    node.transfer_acked(event.job, 0.0)
    assert each.cached_tokens == 59
    assert node.counters.prefill_uncached_tokens == 61
    assert node.pool.used_tokens == 0


def test_a_prefill_that_has_no_pages_waits_for_them() -> None:
    node = prefill_node(total=100)
    first, second = job("a", 1, 80), job("b", 2, 80)
    for each in (first, second):
        node.submit(each, 0.0)
        node.addresses(each.room or 0, "d", 0.0)
    node.advance(0.0)
    node.advance(node.next_s() or 0.0)
    assert (first.stage, second.stage) == (JobStage.INFLIGHT, JobStage.WAITING)
    node.transfer_acked(first, 1.0)
    node.advance(1.0)
    assert second.stage is JobStage.RUNNING


def decode_node(total: int = 10_000) -> DecodeNode:
    node = DecodeNode(PROFILE, KvPool(total, 1), Timeouts())
    node.peer_known("peer")
    return node


def test_all_running_requests_get_one_token_a_step() -> None:
    node = decode_node()
    jobs = [job(f"r{room}", room, 40) for room in (1, 2)]
    for each in jobs:
        node.submit(each, 0.0)
    node.advance(0.0)
    for each in jobs:
        node.kv_arrived(each.room or 0, 7, 0.0)
    node.advance(0.0)
    assert [each.output_tokens for each in jobs] == [1, 1]
    assert node.next_s() == pytest.approx(decode_step_s(PROFILE.decode, 2, 82))
    node.advance(node.next_s() or 0.0)
    assert [each.output_tokens for each in jobs] == [2, 2]
    assert [each.cached_tokens for each in jobs] == [7, 7]


def test_a_decode_reserves_in_order_and_keeps_room_for_answers() -> None:
    node = decode_node(total=1000)
    first, big, small = job("a", 1, 300, 500), job("b", 2, 300, 500), job("c", 3, 10, 5)
    for each in (first, big, small):
        node.submit(each, 0.0)
    node.advance(0.0)
    pushed = [event.job.rid for event in node.take_events() if isinstance(event, PushAddresses)]
    assert pushed == ["a"]
    assert node.load().prealloc == 2
    assert node.load().queued_tokens == 310
    node.abort("b", 0.0)
    node.advance(0.0)
    assert small.stage is JobStage.TRANSFER


def test_pages_of_an_aborted_transfer_come_back_with_the_ack_or_after_the_deferred_release() -> None:
    node = decode_node()
    for room in (1, 2):
        node.submit(job(f"r{room}", room, 40), 0.0)
    node.advance(0.0)
    node.abort("r", 1.0)
    assert node.pool.ledger().by_room == {"1": 40, "2": 40}
    node.abort_acked(1)
    assert node.pool.ledger().by_room == {"2": 40}
    node.advance(30.9)
    assert node.pool.ledger().by_room == {"2": 40}
    node.advance(31.0)
    assert node.pool.ledger().by_room == {}


def test_a_full_pool_retracts_and_resumes() -> None:
    node = PlainNode(PROFILE, KvPool(120, 1), Timeouts())
    jobs = [replace_source(job(f"r{room}", room, 50, 20), 20) for room in (1, 2)]
    for each in jobs:
        node.submit(each, 0.0)
    ended: list[str] = []
    node.advance(0.0)
    while (due_s := node.next_s()) is not None:
        node.advance(due_s)
        ended += [event.job.rid for event in node.take_events() if isinstance(event, Ended)]
    assert sorted(ended) == ["r1", "r2"]
    assert sum(each.retractions for each in jobs) >= 1
    assert node.pool.ledger().by_room == {}


def replace_source(each: Job, tokens: int) -> Job:
    class Count:
        left = tokens

        def step(self) -> bool:
            self.left -= 1
            return self.left == 0

    each.source = Count()
    return each


def test_speed_divides_every_time() -> None:
    fast = faster_profile(PROFILE, 10.0)
    works = [PrefillWork(90, 10)]
    assert prefill_forward_s(fast.prefill, works) == pytest.approx(prefill_forward_s(PROFILE.prefill, works) / 10)
    assert decode_step_s(fast.decode, 5, 1000) == pytest.approx(decode_step_s(PROFILE.decode, 5, 1000) / 10)
    assert transfer_s(fast.link, 1e6) == pytest.approx(transfer_s(PROFILE.link, 1e6) / 10)
    timeouts = Timeouts().faster(10.0)
    assert (timeouts.bootstrap_s, timeouts.heartbeat_s, timeouts.deferred_release_s) == (30.0, 0.5, 3.0)
    assert (timeouts.heartbeat_failures, timeouts.lookup_attempts) == (2, 15)


def test_a_hold_takes_the_next_matching_request_once() -> None:
    holds = Holds()
    hold = holds.arm("token", 2)
    one, two = job("a", 1, 5), job("b", 2, 5)
    assert not holds.check(one, "token", 1)
    assert not holds.check(one, "transfer", 2)
    assert holds.check(one, "token", 2)
    assert not holds.check(two, "token", 2)
    assert hold.state is HoldState.HELD
    assert holds.release(hold) is one
    assert holds.release(hold) is None
    with pytest.raises(ValueError, match="unknown stage"):
        holds.arm("nowhere")


def test_faults_are_used_up() -> None:
    faults = Faults()
    faults.set(Fault("status", count=2))
    assert faults.take("stall") is None
    assert [faults.take("status") is not None for _ in range(3)] == [True, True, False]
    with pytest.raises(ValueError, match="unknown fault"):
        faults.set(Fault("nonsense"))
