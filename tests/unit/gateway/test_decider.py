"""The decider: choose and book in one step, first come first served, bookings released, prefixes owned and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engines.fleet import Fleet
from engines.types import CacheFormat, EngineId, EngineLoad, Health
from gateway.candidates import hit_tokens
from gateway.decider import Decider, Decision, _Waiter
from gateway.errors import GatewayError
from routing.queueing import HeldBack, QueueLimits
from routing.types import RequestView
from tests.fakes import FACTS, decider, now_s, request, timeless, up

P0, P1, D0, D1 = (EngineId(f"http://{name}") for name in ("p0", "p1", "d0", "d1"))
PAIRS = ("p0", "p1", "d0", "d1")
BLOCKS = tuple(bytes([number]) * 16 for number in range(10))
FITS = 8
"""So many requests of 1,100 KV tokens fit into one decode of 10,000."""


async def submitted(at: Decider, *requests: RequestView) -> list[asyncio.Task[Decision]]:
    """Tasks that wait for a decision, in this order; those that can have one are done."""
    tasks = []
    for each in requests:
        tasks.append(asyncio.ensure_future(at.submit(each)))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def done(tasks: list[asyncio.Task[Decision]]) -> list[Decision]:
    return [task.result() for task in tasks if task.done() and not task.cancelled()]


async def refusal(work: object) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def give_up(tasks: list[asyncio.Task[Decision]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def nothing_left(at: Decider) -> bool:
    clean = not at.bookings.live() and not len(at.queue) and not at.queue.body_bytes and not at._waiters
    return clean and not at.owners.index.pending_blocks()


# ---- choose and book -------------------------------------------------------------------------------------------------


@timeless
async def test_many_at_once_are_booked_as_promised() -> None:
    at = decider(up(*PAIRS))
    tasks = await submitted(at, *[request() for _ in range(40)])
    decisions = done(tasks)
    assert len(decisions) == 2 * FITS
    assert len({decision.rid for decision in decisions}) == 2 * FITS
    for engine in (P0, P1):
        promised = sum(each.booking.work.new_tokens for each in decisions if each.prefill.engine_id == engine)
        assert at.bookings.uncached_tokens(engine) == promised > 0
    for engine in (D0, D1):
        assert at.bookings.decode_kv_tokens(engine) == FITS * 1100
    await give_up(tasks)
    for decision in decisions:
        at.finished(decision)
    assert nothing_left(at)


@timeless
async def test_each_decision_sees_the_booking_before_it() -> None:
    at = decider(up(*PAIRS))
    first, second = done(await submitted(at, request(), request()))
    assert first.prefill.engine_id != second.prefill.engine_id
    assert first.decode.engine_id != second.decode.engine_id
    assert second.versions["bookings"] > first.versions["bookings"]


@timeless
async def test_a_decision_says_what_it_was_made_of() -> None:
    at = decider(up("p0", "d0", "d1"))
    asked = request()
    decision = await at.submit(asked)
    assert decision.pair == (P0, decision.decode.engine_id)
    assert decision.request is asked
    assert decision.waited_s == 0.0
    assert {candidate.decode for candidate in decision.choice.considered} == {D0, D1}
    assert set(decision.versions) == {"fleet", "index", "bookings", "estimates"}


@timeless
async def test_a_pinned_prefill_is_taken_while_it_can_serve() -> None:
    fleet = up(*PAIRS)
    at = decider(fleet)
    for _ in range(4):
        assert (await at.submit(request(), P1)).prefill.engine_id == P1
    fleet.set_health(P1, Health.SUSPECTED, "gone")
    assert (await at.submit(request(), P1)).prefill.engine_id == P0


@timeless
async def test_excluded_engines_and_pairs_are_avoided() -> None:
    at = decider(up(*PAIRS))
    without = request().avoiding(P0, (P1, D0))
    assert (await at.submit(without)).pair == (P1, D1)


# ---- waiting ---------------------------------------------------------------------------------------------------------


@timeless
async def test_full_decodes_are_waited_for_in_order_of_arrival() -> None:
    at = decider(up("p0", "d0"))
    tasks = await submitted(at, *[request() for _ in range(FITS + 3)])
    running = done(tasks)
    assert [task.done() for task in tasks] == [True] * FITS + [False] * 3
    assert len(at.queue) == 3
    for left in range(3):
        at.finished(running[left])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in tasks[FITS:]] == [True] * (left + 1) + [False] * (2 - left)
    await give_up(tasks)


@timeless
async def test_a_small_request_does_not_overtake_the_one_before_it() -> None:
    at = decider(up("p0", "d0"))
    first = await at.submit(request(prompt_tokens=7000, expected_output_tokens=1))
    big, small = await submitted(at, request(prompt_tokens=7000), request(prompt_tokens=10, expected_output_tokens=1))
    assert not big.done()
    assert not small.done()
    at.finished(first)
    assert (await big).decided_s <= (await small).decided_s


@timeless
async def test_hand_over_alone_frees_no_decode() -> None:
    at = decider(up("p0", "d0"))
    tasks = await submitted(at, *[request() for _ in range(FITS + 1)])
    running = done(tasks)
    for decision in running:
        at.handed_over(decision)
    await asyncio.sleep(0)
    assert not tasks[-1].done()
    assert at.bookings.uncached_tokens(P0) == 0
    await give_up(tasks)


@timeless
async def test_time_in_the_queue_is_told() -> None:
    at = decider(up("p0", "d0"))
    tasks = await submitted(at, *[request() for _ in range(FITS + 1)])
    await asyncio.sleep(2.5)
    at.finished(tasks[0].result())
    assert (await tasks[-1]).waited_s == pytest.approx(2.5)


@timeless
async def test_a_server_that_comes_up_lets_the_queue_move() -> None:
    fleet = up("p0", "d0", "d1")
    fleet.set_health(D1, Health.NOT_READY, "starting")
    at = decider(fleet)
    tasks = await submitted(at, *[request() for _ in range(FITS + 2)])
    assert not tasks[-1].done()
    fleet.set_health(D1, Health.READY)
    at.fleet_changed(D1)
    assert (await tasks[-1]).decode.engine_id == D1


@timeless
async def test_what_others_brought_to_a_decode_counts_too() -> None:
    fleet = up("p0", "d0")
    fleet.set_load(D0, EngineLoad(1.0, 5, 0, 0, 9000, 9000, 10_000))
    at = decider(fleet)
    (first,) = await submitted(at, request(prompt_tokens=1500))
    assert not first.done()
    fleet.set_load(D0, EngineLoad(2.0, 0, 0, 0, 0, 0, 10_000))
    at.fleet_changed(D0)
    assert (await first).decode.engine_id == D0


@pytest.mark.parametrize("health", [Health.SLOW, Health.UNKNOWN])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_server_that_is_late_or_not_looked_at_yet_is_waited_for(name: str, health: Health) -> None:
    @timeless
    async def waits() -> None:
        fleet = up("p0", "d0")
        engine = EngineId(f"http://{name}")
        fleet.set_health(engine, health, "late")
        at = decider(fleet)
        (task,) = await submitted(at, request())
        assert not task.done()
        fleet.set_health(engine, Health.READY)
        at.fleet_changed(engine)
        assert (await task).pair == (P0, D0)

    waits()


# ---- who waits for whom ----------------------------------------------------------------------------------------------


def retried(**changes: object) -> RequestView:
    """One that has failed on d0."""
    return request(excluded_engines=frozenset({D0}), **changes)


@timeless
async def test_a_retry_that_waits_for_its_only_decode_holds_nobody_back_from_another() -> None:
    at = decider(up("p0", "d0", "d1"))
    await submitted(at, *[retried() for _ in range(FITS)])
    (retry,) = await submitted(at, retried())
    others = await submitted(at, *[request() for _ in range(5)])
    assert not retry.done()
    assert [decision.decode.engine_id for decision in done(others)] == [D0] * 5
    await give_up([retry])


@timeless
async def test_nobody_takes_the_room_that_a_retry_waits_for() -> None:
    at = decider(up("p0", "d0", "d1"))
    running = done(await submitted(at, *[retried() for _ in range(FITS)]))
    (retry,) = await submitted(at, retried(prompt_tokens=3400))
    others = await submitted(at, *[request() for _ in range(FITS + 4)])
    assert len(done(others)) == FITS
    for decision in running[:2]:
        at.finished(decision)
        await asyncio.sleep(0)
    assert not retry.done(), "two ended, and it needs the room of three"
    assert len(done(others)) == FITS
    at.finished(running[2])
    assert (await retry).decode.engine_id == D1
    await give_up(others)


@timeless
async def test_an_equal_request_does_not_overtake_even_when_it_fits() -> None:
    at = decider(up("p0", "d0", "d1"))
    await at.submit(retried(prompt_tokens=7000, expected_output_tokens=1))
    big, small = await submitted(at, retried(prompt_tokens=7000), retried(prompt_tokens=10, expected_output_tokens=1))
    (other,) = await submitted(at, request())
    assert (big.done(), small.done(), other.done()) == (False, False, True)
    await give_up([big, small])


@timeless
async def test_a_full_model_holds_back_no_other() -> None:
    fleet = up(*PAIRS)
    for engine in (P1, D1):
        fleet.set_facts(engine, replace(FACTS, model="other", boot_fingerprint="other"))
        fleet.set_health(engine, Health.READY)
    at = decider(fleet)
    tasks = await submitted(at, *[request() for _ in range(FITS + 3)])
    (other,) = await submitted(at, request(model="other"))
    assert (await other).pair == (P1, D1)
    assert len(done(tasks)) == FITS
    await give_up(tasks)


@timeless
async def test_a_look_at_the_queue_decides_once_for_equals_and_not_at_all_when_all_is_full() -> None:
    at = decider(up("p0", "d0", "d1"))
    first = [request(prompt_tokens=7000) for _ in range(2)]
    await submitted(at, *first)
    tired = [retried(prompt_tokens=7000) for _ in range(30)]
    tasks = await submitted(at, *tired, *[request(prompt_tokens=7000) for _ in range(30)])
    asked: list[RequestView] = []
    decide = at._decide

    def counted(waiter: _Waiter, held: HeldBack) -> Decision | None:
        asked.append(waiter.request)
        return decide(waiter, held)

    at._decide = counted  # type: ignore[method-assign]
    at.pump()
    assert [len(each.excluded_engines) for each in asked] == [1, 0]
    await give_up(tasks[:30])
    asked.clear()
    tasks += await submitted(at, *[retried(prompt_tokens=7000) for _ in range(3)])
    asked.clear()
    at.pump()
    assert len(asked) == 1, "the first waits for every decode there is"
    await give_up(tasks)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "said"),
    [(QueueLimits(2, 1 << 30), "requests"), (QueueLimits(100, 8000), "bytes")],
    ids=["count", "bytes"],
)
def test_a_full_queue_refuses(limits: QueueLimits, said: str) -> None:
    @timeless
    async def refuses() -> None:
        at = decider(up("p0", "d0"), limits=limits)
        running = [await at.submit(request()) for _ in range(FITS)]
        waiting = await submitted(at, request(), request())
        error = await refusal(at.submit(request()))
        assert (error.status, error.code, error.safe_to_retry) == (429, "overloaded", True)
        assert said in error.message
        assert error.retry_after_s is not None
        assert error.retry_after_s >= 1.0
        await give_up(waiting)
        for decision in running:
            at.finished(decision)
        assert nothing_left(at)

    refuses()


@timeless
async def test_a_deadline_in_the_queue_is_a_429_and_the_next_one_may_leave() -> None:
    at = decider(up("p0", "d0"))
    running = await at.submit(request(prompt_tokens=7000, expected_output_tokens=1))
    begun_s = now_s()
    big, small = await submitted(
        at,
        request(prompt_tokens=7000, deadline_s=begun_s + 3),
        request(prompt_tokens=10, expected_output_tokens=1, deadline_s=begun_s + 99),
    )
    error = await refusal(big)
    assert error.status == 429
    assert "7100 tokens" in error.message
    assert now_s() - begun_s == pytest.approx(3, abs=0.002)
    assert (await small).decided_s == pytest.approx(begun_s + 3, abs=0.002)
    at.finished(running)
    at.finished(small.result())
    assert nothing_left(at)


@timeless
async def test_a_deadline_that_has_passed_is_still_served_when_there_is_room() -> None:
    at = decider(up("p0", "d0"))
    assert (await at.submit(request(deadline_s=now_s() - 1))).pair == (P0, D0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fleet: fleet.set_health(P0, Health.SUSPECTED, "reset"), "no prefill.*suspected: reset"),
        (lambda fleet: fleet.set_health(D0, Health.NOT_READY, "starting"), "no decode.*starting"),
        (lambda fleet: fleet.set_health(D0, Health.LEAKING, "x"), "leaking"),
        (lambda fleet: fleet.set_facts(D0, replace(FACTS, model="other")), "serves model other"),
        (
            lambda fleet: fleet.set_facts(
                D0, replace(FACTS, cache_format=CacheFormat(64, "auto", "early", "mooncake"))
            ),
            "may be paired",
        ),
    ],
)
def test_no_pair_is_a_503_that_says_why(change: Callable[[Fleet], object], said: str) -> None:
    @timeless
    async def refuses() -> None:
        fleet = up("p0", "d0")
        change(fleet)
        at = decider(fleet)
        with pytest.raises(GatewayError, match=said) as caught:
            await at.submit(request())
        assert (caught.value.status, caught.value.code) == (503, "no_pair_available")
        assert nothing_left(at)

    refuses()


@timeless
async def test_a_waiting_request_is_told_when_its_last_prefill_is_gone() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    tasks = await submitted(at, *[request() for _ in range(FITS + 1)])
    fleet.set_health(P0, Health.SUSPECTED, "gone")
    at.fleet_changed(P0)
    assert (await refusal(tasks[-1])).status == 503


@timeless
async def test_what_fits_nowhere_is_the_callers_fault() -> None:
    at = decider(up(*PAIRS))
    error = await refusal(at.submit(request(prompt_tokens=8000)))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert error.safe_to_retry is False


@timeless
async def test_a_stale_prefill_gets_nothing_until_it_answers() -> None:
    stale = {P0}
    at = decider(up("p0", "d0"), is_stale=lambda engine_id: engine_id in stale)
    (task,) = await submitted(at, request())
    assert not task.done()
    stale.clear()
    at.fleet_changed(P0)
    assert (await task).pair == (P0, D0)


# ---- cancellation ----------------------------------------------------------------------------------------------------


@timeless
async def test_cancelling_while_waiting_books_nothing_and_lets_the_next_one_leave() -> None:
    at = decider(up("p0", "d0"))
    running = await at.submit(request(prompt_tokens=7000, expected_output_tokens=1))
    big, small = await submitted(at, request(prompt_tokens=7000), request(prompt_tokens=10, expected_output_tokens=1))
    await give_up([big])
    at.pump()
    at.finished(await small)
    at.finished(running)
    assert nothing_left(at)


@timeless
async def test_cancelling_the_head_lets_the_next_one_leave_at_once() -> None:
    """Nothing else may happen for a long time."""
    at = decider(up("p0", "d0"))
    await at.submit(request(prompt_tokens=7000, expected_output_tokens=1))
    big, small = await submitted(at, request(prompt_tokens=7000), request(prompt_tokens=10, expected_output_tokens=1))
    await give_up([big])
    await asyncio.sleep(0)
    assert small.done()
    assert not small.cancelled()


@timeless
async def test_cancelling_in_the_step_of_the_decision_releases_it() -> None:
    at = decider(up("p0", "d0"))
    running = [await at.submit(request()) for _ in range(FITS)]
    (task,) = await submitted(at, request())
    at.finished(running.pop())
    assert at.bookings.decode_requests(D0) == FITS, "decided, and not yet told"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for decision in running:
        at.finished(decision)
    assert nothing_left(at)


# ---- what became of it -----------------------------------------------------------------------------------------------


@timeless
async def test_everything_is_released_once() -> None:
    at = decider(up("p0", "d0"))
    decision = await at.submit(request(blocks=BLOCKS))
    for _ in range(2):
        at.handed_over(decision)
    assert at.bookings.uncached_tokens(P0) == 0
    assert at.bookings.decode_kv_tokens(D0) == 1100
    for _ in range(2):
        at.finished(decision)
    at.handed_over(decision)
    assert at.bookings.decode_kv_tokens(D0) == 0
    assert nothing_left(at)


def hits(decision: Decision) -> dict[EngineId, int]:
    return {candidate.prefill: candidate.hit_tokens for candidate in decision.choice.considered}


@timeless
async def test_a_prefix_is_owned_after_hand_over() -> None:
    at = decider(up(*PAIRS))
    first = await at.submit(request(blocks=BLOCKS))
    assert set(hits(first).values()) == {0}
    at.handed_over(first)
    at.finished(first)
    again = await at.submit(request(blocks=BLOCKS))
    assert hits(again)[first.prefill.engine_id] == 640
    assert again.prefill.engine_id == first.prefill.engine_id
    assert again.booking.work.cached_tokens == 640
    assert at.owners.store.owners(BLOCKS, now_s()) == {first.prefill.engine_id: len(BLOCKS)}


@timeless
async def test_only_the_unbroken_run_from_the_start_counts() -> None:
    at = decider(up("p0", "d0"))
    first = await at.submit(request(blocks=BLOCKS))
    at.handed_over(first)
    other = (*BLOCKS[:3], b"x" * 16, *BLOCKS[4:])
    assert hits(await at.submit(request(blocks=other)))[P0] == 3 * 64


@timeless
async def test_a_failed_prefill_owns_nothing() -> None:
    at = decider(up("p0", "d0"))
    first = await at.submit(request(blocks=BLOCKS))
    at.finished(first)
    assert hits(await at.submit(request(blocks=BLOCKS)))[P0] == 0
    assert at.owners.index.held_blocks(P0) == 0
    assert not at.owners.store.owners(BLOCKS, now_s())


@timeless
async def test_a_restart_ends_ownership_and_what_was_under_way() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    held = await at.submit(request(blocks=BLOCKS[:5]))
    at.handed_over(held)
    under_way = await at.submit(request(blocks=BLOCKS))
    fleet.set_facts(P0, replace(FACTS, boot_fingerprint="other"))
    at.restarted(P0)
    assert at.owners.index.held_blocks(P0) == 0
    at.handed_over(under_way)
    assert at.owners.index.held_blocks(P0) == 0, "that was the process before"
    assert not at.owners.store.owners(BLOCKS, now_s())
    for decision in (held, under_way):
        at.finished(decision)
    assert nothing_left(at)


@timeless
async def test_an_old_attempts_end_takes_nothing_from_the_new_process() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    old = await at.submit(request(blocks=BLOCKS))
    fleet.set_facts(P0, replace(FACTS, boot_fingerprint="other"))
    at.restarted(P0)
    at.pairs.health.canary_passed((P0, D0), now_s(), now_s())
    new = await at.submit(request(blocks=BLOCKS))
    at.finished(old)
    assert at.owners.index.match(BLOCKS)[P0].pending_blocks == len(BLOCKS)
    at.handed_over(new)
    assert at.owners.index.held_blocks(P0) == len(BLOCKS)


@timeless
async def test_a_clear_miss_makes_the_index_forget_what_is_older() -> None:
    at = decider(up("p0", "d0"))
    old = tuple(b"o%02d" % number + b"." * 13 for number in range(4))
    for blocks in (old, BLOCKS):
        decision = await at.submit(request(blocks=blocks))
        at.handed_over(decision)
        at.finished(decision)
    assert at.owners.index.held_blocks(P0) == 14
    again = await at.submit(request(blocks=BLOCKS))
    at.handed_over(again, cached_tokens=0)
    assert at.owners.index.held_blocks(P0) == len(BLOCKS), "what is older than a lost block is lost, this chain is new"
    assert at.owners.index.match(old) == {}


@timeless
async def test_a_prefill_that_found_what_was_predicted_changes_nothing() -> None:
    at = decider(up("p0", "d0"))
    for cached in (None, 640):
        decision = await at.submit(request(blocks=BLOCKS))
        at.handed_over(decision, cached_tokens=cached)
        assert at.owners.index.held_blocks(P0) == len(BLOCKS)


@timeless
async def test_the_time_of_a_prefill_is_learned() -> None:
    at = decider(up("p0", "d0"))
    before = at.learned.version
    decision = await at.submit(request())
    await asyncio.sleep(0.5)
    at.handed_over(decision)
    assert at.learned.version == before + 1
    failed = await at.submit(request())
    at.finished(failed)
    assert at.learned.version == before + 1, "a failed one teaches nothing"


@timeless
async def test_unaccounted_tokens_are_what_no_live_attempt_explains() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    assert at.unaccounted_tokens(fleet.view(P0)) is None
    for engine in (P0, D0):
        fleet.set_load(engine, EngineLoad(1.0, 1, 0, 0, 1500, 1500, 10_000))
    decision = await at.submit(request())
    assert at.unaccounted_tokens(fleet.view(P0)) == 1500 - 1000
    assert at.unaccounted_tokens(fleet.view(D0)) == 1500 - 1100
    at.handed_over(decision)
    assert at.unaccounted_tokens(fleet.view(P0)) == 1500
    fleet.set_load(D0, EngineLoad(2.0, 1, 0, 0, 7, 7, 10_000))
    assert at.unaccounted_tokens(fleet.view(D0)) == 0


@timeless
async def test_a_prefills_capacity_bounds_what_it_is_thought_to_hold() -> None:
    fleet = up("p0", "d0", max_total_tokens=2000)
    at = decider(fleet)
    at.fleet_changed(P0)
    many = tuple(b"%016d" % number for number in range(100))
    decision = await at.submit(request(blocks=many, expected_output_tokens=10))
    at.handed_over(decision)
    assert at.owners.index.held_blocks(P0) == 2000 * 4 // 256


@pytest.mark.parametrize(
    ("blocks", "block_tokens", "prompt_tokens", "page_tokens", "expected"),
    [
        (0, 64.0, 1000, 1, 0),
        (3, 64.0, 1000, 1, 192),
        (3, 63.7, 1000, 1, 191),
        (3, 64.0, 1000, 64, 192),
        (3, 63.9, 1000, 64, 128),
        (3, 64.0, 192, 1, 191),
        (3, 64.0, 192, 64, 128),
        (3, 64.0, 100, 16, 96),
        (1, 64.0, 1, 1, 0),
        (1, 64.0, 0, 1, 0),
        (2, 64.0, 1000, 0, 128),
    ],
)
def test_hits_are_whole_pages_short_of_the_last_token(
    blocks: int, block_tokens: float, prompt_tokens: int, page_tokens: int, expected: int
) -> None:
    @timeless
    async def counts() -> None:
        asked = request(block_tokens=block_tokens, prompt_tokens=prompt_tokens)
        assert hit_tokens(blocks, asked, page_tokens) == expected

    counts()


@timeless
async def test_retry_after_follows_the_rate_at_which_requests_leave() -> None:
    at = decider(up("p0", "d0"))
    assert at.retry_after_s() == 60.0
    for _ in range(5):
        at.finished(await at.submit(request()))
        await asyncio.sleep(2.0)
    running = await at.submit(request(prompt_tokens=7900, expected_output_tokens=1))
    waiting = await submitted(at, *[request(prompt_tokens=7900) for _ in range(6)])
    assert at.retry_after_s() == pytest.approx(6 / (6 / 10))
    await give_up(waiting)
    at.finished(running)


@timeless
async def test_owners_live_on_while_they_are_hit_and_end_when_they_are_not() -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    blocks = tuple(bytes([number]) * 16 for number in range(4))

    async def ask() -> None:
        decision = await at.submit(request(blocks=blocks))
        at.handed_over(decision)
        at.finished(decision)

    await ask()
    await asyncio.sleep(400.0)
    await ask()
    await asyncio.sleep(300.0)
    at.fleet_changed(P0)
    assert list(at.owners.store.snapshot(now_s())), "the hit renewed it, or it would have ended at 600 s"
    await asyncio.sleep(700.0)
    at.fleet_changed(P0)
    assert not list(at.owners.store.snapshot(0.0)), "gone, and not only expired"


@timeless
async def test_a_prefill_without_a_cache_is_never_expected_to_hit() -> None:
    fleet = up("p0", "d0")
    fleet.set_facts(P0, replace(FACTS, radix_cache=False))
    at = decider(fleet)
    for _ in range(2):
        decision = await at.submit(request(prompt_tokens=1000, blocks=BLOCKS))
        assert decision.choice.best.hit_tokens == 0
        at.handed_over(decision)
        at.finished(decision)


@timeless
async def test_a_fault_in_a_decision_is_borne_by_its_own_request() -> None:
    class Faulty:
        def choose(self, view: Any, snapshot: Any, rng: Any) -> Any:
            if view.prompt_tokens == 666:
                raise ZeroDivisionError("a bug")
            return real.choose(view, snapshot, rng)

    fleet = up("p0", "d0")
    fleet.set_facts(D0, replace(FACTS, max_running_requests=1))
    at = decider(fleet)
    real, at._policy = at._policy, Faulty()
    first = await at.submit(request(prompt_tokens=100))
    bad = asyncio.ensure_future(at.submit(request(prompt_tokens=666)))
    good = asyncio.ensure_future(at.submit(request(prompt_tokens=100)))
    await asyncio.sleep(0)
    assert len(at.queue) == 2
    at.finished(first)  # lets the next two leave, and must not hear of what is wrong with them
    with pytest.raises(ZeroDivisionError):
        await bad
    at.finished(await good)
    assert (at.bookings.live(), len(at.queue)) == (0, 0)


@timeless
async def test_a_promise_that_goes_wrong_books_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    at = decider(up("p0", "d0"))

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(at.owners, "promise", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await at.submit(request(blocks=BLOCKS))
    assert at.bookings.live() == 0


@timeless
async def test_what_cannot_be_paired_is_said_before_anybody_asks(caplog: pytest.LogCaptureFixture) -> None:
    fleet = up("p0", "d0")
    at = decider(fleet)
    fleet.set_facts(D0, replace(FACTS, cache_format=replace(FACTS.cache_format, page_size_tokens=16)))
    at.fleet_changed(D0)
    assert "page_size_tokens differs" in caplog.text
