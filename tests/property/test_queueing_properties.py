"""The queue never breaks its bounds, keeps the order, and neither loses nor doubles a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routing.queueing import Offer, QueueLimits, WaitingQueue, has_room
from routing.types import RequestView
from tests.unit.routing.fleets import decode, request

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 400), st.floats(0, 100)),
        st.tuples(st.just("take"), st.integers(0, 30), st.just(0.0)),
        st.tuples(st.just("expire"), st.just(0), st.floats(0, 100)),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 6), st.integers(0, 1200))
def test_bounds_and_order_hold_at_every_step(
    steps: list[tuple[str, int, float]], max_requests: int, max_bytes: int
) -> None:
    queue = WaitingQueue(QueueLimits(max_requests, max_bytes))
    model: list[RequestView] = []
    for number, (step, size, time_s) in enumerate(steps):
        if step == "offer":
            wanted = request(request_id=str(number), body_bytes=size, deadline_s=time_s)
            offer = queue.offer(wanted)
            if offer is Offer.ACCEPTED:
                model.append(wanted)
            else:
                full = len(model) >= max_requests
                assert offer is (Offer.FULL_REQUESTS if full else Offer.FULL_BYTES)
                assert full or sum(r.body_bytes for r in model) + size > max_bytes
        elif step == "take":
            taken = queue.take(str(size))
            assert taken == next((r for r in model if r.request_id == str(size)), None)
            model = [r for r in model if r != taken]
        else:
            late = queue.expired(time_s)
            assert list(late) == [r for r in model if r.deadline_s <= time_s]
            model = [r for r in model if r.deadline_s > time_s]
        assert list(queue.ready(100)) == model
        assert len(queue) == len(model) <= max_requests
        assert queue.body_bytes == sum(r.body_bytes for r in model) <= max_bytes


@given(st.integers(0, 700_000), st.integers(0, 300), st.integers(1, 100_000), st.integers(1, 5000))
def test_a_dispatch_never_overbooks_a_decode(booked: int, running: int, prompt: int, output: int) -> None:
    wanted = request(prompt_tokens=prompt, expected_output_tokens=output)
    state = decode(booked_tokens=booked, booked_requests=running)
    if has_room(wanted, state):
        assert booked + prompt + output <= state.capacity_tokens
        assert running < state.max_running_requests
