"""The decider before servers of several DP ranks: the rank is chosen, booked and released with the pair."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engines.fleet import Fleet
from engines.types import EngineId, EngineLoad, RankLoad
from gateway.decider import Decider, Decision
from gateway.errors import GatewayError
from gateway.explain import AttemptRecord
from routing.ranks import home
from tests.fakes import FACTS, decider, request, timeless, up

P0, D0 = EngineId("http://p0"), EngineId("http://d0")
BLOCKS = tuple(bytes([number]) * 16 for number in range(1, 21))
OTHERS = tuple(bytes([number]) * 16 for number in range(101, 121))
FITS = 8
"""So many requests of 1,100 KV tokens fit into one rank of 10,000."""


def two_ranks() -> tuple[Fleet, Decider]:
    fleet = up("p0", "d0", dp_size=2)
    return fleet, decider(fleet)


async def decided(at: Decider, **changes: Any) -> Decision:
    return await at.submit(request(**changes))


def ranks(decision: Decision) -> tuple[int | None, int | None]:
    return decision.booking.prefill_rank, decision.booking.decode_rank


def load(*by_rank: RankLoad) -> EngineLoad:
    used, total = sum(each.used_tokens for each in by_rank), sum(each.total_tokens for each in by_rank)
    waiting = sum(each.waiting_uncached_tokens for each in by_rank)
    return EngineLoad(1.0, 0, 0, waiting, used, total, 20_000, ranks=by_rank)


async def refused_for_now(at: Decider, **changes: Any) -> bool:
    task = asyncio.ensure_future(at.submit(request(**changes)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waits = not task.done()
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    for each in results:
        if isinstance(each, Decision):
            at.finished(each)
    return waits


@timeless
async def test_ranks_are_named_only_where_a_server_has_several() -> None:
    at = decider(up("p0", "d0"))
    assert ranks(await decided(at)) == (None, None)
    fleet = up("p0", "d0")
    fleet.set_facts(D0, replace(FACTS, dp_size=2))
    prefill, decode = ranks(await decided(decider(fleet)))
    assert prefill is None
    assert decode in (0, 1)


@timeless
async def test_requests_at_once_go_to_both_ranks_of_both_sides() -> None:
    _, at = two_ranks()
    decisions = [await decided(at) for _ in range(8)]
    assert sorted(decision.booking.prefill_rank or 0 for decision in decisions) == [0] * 4 + [1] * 4
    assert sorted(decision.booking.decode_rank or 0 for decision in decisions) == [0] * 4 + [1] * 4


@timeless
async def test_a_prefix_brings_its_prompt_back_to_its_rank() -> None:
    _, at = two_ranks()
    went: dict[tuple[bytes, ...], list[tuple[int | None, bool]]] = {BLOCKS: [], OTHERS: []}
    for blocks in (BLOCKS, OTHERS, BLOCKS, OTHERS, BLOCKS):
        decision = await decided(at, blocks=blocks, prompt_tokens=1300)
        at.handed_over(decision)
        at.finished(decision)
        went[blocks].append((decision.booking.prefill_rank, decision.choice.best.hit_tokens > 1000))
    for visits in went.values():
        first, _ = visits[0]
        assert visits == [(first, False), *[(first, True)] * (len(visits) - 1)]


@timeless
async def test_a_prompt_goes_where_its_prefix_is_and_not_where_it_would_begin() -> None:
    fleet, at = two_ranks()
    begins = home(BLOCKS, 0) % 2
    busy = [RankLoad(0, 0, 0), RankLoad(0, 0, 0)]
    busy[begins] = RankLoad(50_000, 0, 0)
    fleet.set_load(P0, load(*busy))
    first = await decided(at, blocks=BLOCKS, prompt_tokens=1300)
    at.handed_over(first)
    at.finished(first)
    assert first.booking.prefill_rank != begins
    fleet.set_load(P0, load(RankLoad(0, 0, 0), RankLoad(0, 0, 0)))
    second = await decided(at, blocks=BLOCKS, prompt_tokens=1300)
    assert second.booking.prefill_rank == first.booking.prefill_rank
    assert second.choice.best.hit_tokens > 1000


@timeless
async def test_a_rank_that_is_clearly_busier_loses_its_prefix() -> None:
    fleet, at = two_ranks()
    first = await decided(at, blocks=BLOCKS, prompt_tokens=1300)
    at.handed_over(first)
    at.finished(first)
    holder = first.booking.prefill_rank
    busy = [RankLoad(0, 0, 0), RankLoad(0, 0, 0)]
    busy[holder or 0] = RankLoad(50_000, 0, 0)
    fleet.set_load(P0, load(*busy))
    away = await decided(at, blocks=BLOCKS, prompt_tokens=1300)
    assert away.booking.prefill_rank != holder
    assert away.choice.best.hit_tokens == 0
    fleet.set_load(P0, load(RankLoad(100, 0, 0), RankLoad(100, 0, 0)))
    at.finished(away)
    assert (await decided(at, blocks=BLOCKS, prompt_tokens=1300)).choice.best.hit_tokens > 0


@timeless
async def test_a_restarted_prefill_has_nothing_on_any_rank() -> None:
    fleet, at = two_ranks()
    decision = await decided(at, blocks=BLOCKS, prompt_tokens=1300)
    at.handed_over(decision)
    at.finished(decision)
    fleet.set_facts(P0, replace(FACTS, dp_size=2, boot_fingerprint="another"))
    at.restarted(P0)
    assert at.owners.ranks.match(BLOCKS) == {}


@timeless
async def test_a_full_rank_gets_nothing_while_another_has_room() -> None:
    """The decode as a whole is less than half full: its rank 0 is not."""
    fleet, at = two_ranks()
    fleet.set_load(D0, load(RankLoad(0, 9_800, 9_800), RankLoad(0, 0, 0)))
    assert {ranks(await decided(at))[1] for _ in range(FITS)} == {1}
    assert await refused_for_now(at), "no rank has room, though the sum of both has"
    fleet.set_load(D0, load(RankLoad(0, 0, 0), RankLoad(0, 0, 0)))
    assert ranks(await decided(at))[1] == 0


@timeless
async def test_bookings_fill_both_ranks_of_a_decode_and_no_more() -> None:
    _, at = two_ranks()
    decisions = [await decided(at) for _ in range(2 * FITS)]
    counts = [sum(decision.booking.decode_rank == rank for decision in decisions) for rank in (0, 1)]
    assert counts == [FITS, FITS]
    assert await refused_for_now(at)
    at.finished(next(decision for decision in decisions if decision.booking.decode_rank == 1))
    assert ranks(await decided(at))[1] == 1


@timeless
async def test_a_full_batch_is_a_full_rank() -> None:
    fleet = up("p0", "d0", dp_size=2, max_running_requests=2)
    at = decider(fleet)
    fleet.set_load(D0, load(RankLoad(0, 0, 5_000), RankLoad(0, 0, 0)))
    decisions = [await decided(at, prompt_tokens=10, expected_output_tokens=10) for _ in range(4)]
    assert [decision.booking.decode_rank for decision in decisions] == [1, 1, 0, 0]
    assert await refused_for_now(at, prompt_tokens=10, expected_output_tokens=10)


@timeless
async def test_a_prompt_must_fit_one_rank() -> None:
    fleet = up("p0", "d0", dp_size=2, max_total_tokens=1000)
    at = decider(fleet)
    with pytest.raises(GatewayError, match="does not fit its KV pool of 1000"):
        await decided(at, prompt_tokens=1500)


@timeless
async def test_everything_is_released_on_the_rank_it_was_booked_on_once() -> None:
    _, at = two_ranks()
    decisions = [await decided(at) for _ in range(6)]
    timing = at.learned.prefill_timing(P0, FACTS.chunk_tokens)
    loop = asyncio.get_running_loop()
    for decision in decisions:
        at.handed_over(decision)
        at.handed_over(decision)
    assert at.bookings.on_prefill_ranks(P0, 2, timing, loop.time()) == [(0.0, 0, 0)] * 2
    assert [on.requests for on in at.bookings.on_decode_ranks(D0, 2)] == [3, 3]
    for decision in decisions:
        at.finished(decision)
        at.finished(decision)
    assert at.bookings.on_decode_ranks(D0, 2) == [(0, 0)] * 2
    assert at.bookings.live() == 0


@timeless
async def test_explain_names_the_ranks() -> None:
    _, at = two_ranks()
    decision = await decided(at)
    shown = AttemptRecord(decision, 1, 0, 0.0).as_json()
    assert (shown["prefill_rank"], shown["decode_rank"]) == ranks(decision)
    single = AttemptRecord(await decided(decider(up("p0", "d0"))), 1, 0, 0.0).as_json()
    assert (single["prefill_rank"], single["decode_rank"]) == (None, None)
