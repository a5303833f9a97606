from __future__ import annotations

import pytest

from engines.types import EngineId, Role
from routing.queueing import HeldBack, Offer, QueueLimits, WaitingQueue, has_room, retry_after_s
from tests.unit.routing.fleets import decode, load, request, view


def queue_of(*names: str, limits: QueueLimits | None = None) -> WaitingQueue:
    queue = WaitingQueue(limits)
    for name in names:
        assert queue.offer(request(request_id=name)) is Offer.ACCEPTED
    return queue


def test_requests_leave_in_the_order_they_came() -> None:
    queue = queue_of("a", "b", "c")
    assert [waiting.request_id for waiting in queue.ready(2)] == ["a", "b"]
    assert len(queue) == 3, "ready takes nothing away"
    assert queue.take("a") is not None
    assert [waiting.request_id for waiting in queue.ready()] == ["b", "c"]
    assert "a" not in queue


def test_it_is_bounded_in_requests() -> None:
    queue = queue_of("a", "b", limits=QueueLimits(max_requests=2))
    assert queue.offer(request(request_id="c")) is Offer.FULL_REQUESTS
    assert queue.offer(request(request_id="broken stream", goes_on=True)) is Offer.ACCEPTED
    queue.take("broken stream")
    queue.take("a")
    assert queue.offer(request(request_id="c")) is Offer.ACCEPTED


def test_it_is_bounded_in_bytes() -> None:
    queue = queue_of("a", limits=QueueLimits(max_bytes=1500))
    assert queue.offer(request(request_id="b")) is Offer.FULL_BYTES
    assert queue.offer(request(request_id="b", body_bytes=500)) is Offer.ACCEPTED
    assert queue.body_bytes == 1500


def test_a_request_waits_once() -> None:
    with pytest.raises(ValueError, match="waits already"):
        queue_of("a").offer(request(request_id="a"))


def test_taking_twice_takes_once() -> None:
    queue = queue_of("a")
    assert queue.take("a") is not None
    assert queue.take("a") is None
    assert queue.body_bytes == 0


def test_the_expired_leave() -> None:
    queue = WaitingQueue()
    for name, deadline_s in (("a", 5.0), ("b", 1.0), ("c", 9.0)):
        queue.offer(request(request_id=name, deadline_s=deadline_s))
    assert queue.expired(0.5) == ()
    assert [late.request_id for late in queue.expired(5.0)] == ["a", "b"]
    assert [waiting.request_id for waiting in queue.ready()] == ["c"]
    assert queue.body_bytes == 1000


def test_room_is_by_what_is_booked() -> None:
    need = request().kv_tokens
    edge = round(0.95 * 600_000) - need
    assert has_room(request(), decode(booked_tokens=edge, booked_requests=9))
    assert not has_room(request(), decode(booked_tokens=edge + 1, booked_requests=9))


def test_room_is_by_what_is_reported_too() -> None:
    full = decode(view=view("d0", Role.DECODE, load=load(580_000)), booked_tokens=100, booked_requests=1)
    assert not has_room(request(), full)
    assert has_room(request(), decode(view=view("d0", Role.DECODE, load=load(5000)), booked_requests=1))


def test_an_empty_decode_may_be_filled_to_the_brim() -> None:
    assert has_room(request(), decode(capacity_tokens=12_350))
    assert not has_room(request(), decode(capacity_tokens=12_350, booked_requests=1))
    assert not has_room(request(), decode(capacity_tokens=12_349))


def test_slots_are_room_and_reuse_needs_none() -> None:
    assert not has_room(request(), decode(booked_requests=256))
    assert has_room(request(), decode(capacity_tokens=350, reuse_tokens=12_000))


def test_who_waits_holds_back_its_equals_and_the_decodes_it_waits_for() -> None:
    d0, d1 = EngineId("d0"), EngineId("d1")
    held = HeldBack()
    assert held.has_turn(request())
    held.waits(request().avoiding(d0, None), [d1])
    assert not held.has_turn(request(prompt_tokens=1).avoiding(d0, None))
    assert held.has_turn(request())
    assert held.has_turn(request(model="other").avoiding(d0, None))
    assert held.has_turn(request().avoiding(d0, (d0, d1)))
    assert (held.lets_use(d0), held.lets_use(d1)) == (True, False)


@pytest.mark.parametrize(
    ("waiting", "rate", "expected_s"), [(0, 1.0, 1.0), (3, 0.5, 6.0), (3, 0.0, 60.0), (3, 0.01, 60.0)]
)
def test_retry_after_follows_the_drain_rate(waiting: int, rate: float, expected_s: float) -> None:
    assert retry_after_s(queue_of(*map(str, range(waiting))), rate) == expected_s
