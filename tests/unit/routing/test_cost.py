from __future__ import annotations

from itertools import pairwise

import pytest

from engines.timing import H100_70B, LinkTiming, PrefillTiming, PrefillWork, decode_step_s, prefill_s
from engines.types import EngineId
from routing.cost import cost_terms, prefill_side, queue_s, transfer_s
from routing.types import CostTerms, DecodeState, PrefillState
from tests.unit.routing.fleets import decode, prefill, request, snapshot

P0, D0 = EngineId("p0"), EngineId("d0")


def terms(p: PrefillState | None = None, d: DecodeState | None = None, **fleet: object) -> CostTerms:
    p, d = p or prefill(), d or decode()
    return cost_terms(request(), p, d, snapshot([p], [d], **fleet))


def test_an_idle_pair_costs_prefill_and_what_is_left_of_the_transfer() -> None:
    idle = terms()
    assert idle.wait_s == idle.prefix_gain_s == 0.0
    assert idle.prefill_s == prefill_s(H100_70B.prefill, 12_000)
    last_chunk_bytes = 8192 * H100_70B.kv_bytes_per_token
    assert idle.transfer_s == pytest.approx(last_chunk_bytes / 50e9 + 0.005)
    assert idle.total_s == pytest.approx(idle.prefill_s + idle.transfer_s + idle.decode_s + idle.capacity_s, rel=1e-12)


def test_the_waits_overlap_and_the_longer_counts() -> None:
    full = decode(booked_tokens=600_000, booked_requests=50)
    alone = terms(d=full).wait_s
    assert alone > 0.0
    assert terms(prefill(booked_s=alone / 2), full).wait_s == alone
    assert terms(prefill(booked_s=alone * 2), full).wait_s == alone * 2


def test_a_hit_gains_what_is_not_computed() -> None:
    hit = terms(prefill(hit_tokens=8000, pending_hit_tokens=8000))
    assert hit.prefix_gain_s == pytest.approx(
        prefill_s(H100_70B.prefill, 12_000, 8000) - prefill_s(H100_70B.prefill, 12_000)
    )


def test_a_pending_prefix_counts_as_a_hit() -> None:
    pending = prefill(hit_tokens=1000, pending_hit_tokens=8000)
    assert prefill_side(request(), pending).hit_tokens == 8000


def test_loading_lessens_the_gain_and_never_makes_it_a_loss() -> None:
    device = terms(prefill(hit_tokens=8000)).prefix_gain_s
    assert terms(prefill(hit_tokens=8000, load_s=0.1)).prefix_gain_s == pytest.approx(device + 0.1)
    assert terms(prefill(hit_tokens=8000, load_s=100.0)).prefix_gain_s == 0.0


def test_the_last_prompt_token_is_computed_always() -> None:
    whole = prefill_side(request(), prefill(hit_tokens=50_000))
    assert whole.hit_tokens == 11_999
    assert whole.compute_s > 0.0


def test_a_slow_link_leaves_its_excess_over_the_compute() -> None:
    slow = LinkTiming(bytes_per_s=1e9, fixed_s=0.0)
    side = prefill_side(request(), prefill())
    sent_s = 12_000 * H100_70B.kv_bytes_per_token / 1e9
    overlapped_s = side.compute_s - side.first_chunk_s
    assert overlapped_s > 0.0
    assert terms(links={(P0, D0): slow}).transfer_s == pytest.approx(sent_s - overlapped_s)


def test_a_single_chunk_overlaps_nothing() -> None:
    side = prefill_side(request(prompt_tokens=4000), prefill())
    assert transfer_s(side, 4000, LinkTiming(1e9, 0.0), 1000.0) == pytest.approx(4000 * 1000 / 1e9)


def test_a_busy_nic_delays_only_what_the_wait_does_not_cover() -> None:
    free = terms().transfer_s
    assert terms(nic_free_s={D0: 0.1}).transfer_s == free
    assert terms(nic_free_s={D0: 5.0}).transfer_s > 3.0
    assert terms(prefill(booked_s=5.0), nic_free_s={P0: 5.0}).transfer_s == free


def test_what_the_decode_reuses_is_not_sent() -> None:
    assert terms(d=decode(reuse_tokens=12_000)).transfer_s == pytest.approx(0.005)


def test_the_decode_pays_for_steps_slower_than_idle() -> None:
    busy = decode(booked_tokens=200_000, booked_requests=20)
    step_s = decode_step_s(H100_70B.decode, 21, 212_350)
    assert terms(d=busy).decode_s == pytest.approx(0.1 * 350 * (step_s - H100_70B.decode.base_s))


def test_a_slower_kind_of_decode_is_measured_against_the_fastest() -> None:
    fast, slow = decode("d0"), decode("d1", timing=H100_70B.decode.__class__(0.03, 6e-5, 3e-8))
    fleet = snapshot([prefill()], [fast, slow])
    ours = cost_terms(request(), prefill(), fast, fleet).decode_s
    theirs = cost_terms(request(), prefill(), slow, fleet).decode_s
    assert theirs - ours == pytest.approx(0.1 * 350 * (0.03 - 0.014))


def test_capacity_is_convex_in_kv_use_beyond_its_bend_too() -> None:
    costs = [terms(d=decode(booked_tokens=booked)).capacity_s for booked in range(500_000, 700_000, 3000)]
    steps = [later - earlier for earlier, later in pairwise(costs)]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(steps))


def test_no_free_slot_is_a_wait_like_no_free_kv() -> None:
    assert terms(d=decode(booked_requests=255, booked_tokens=1000)).wait_s == 0.0
    assert terms(d=decode(booked_requests=256, booked_tokens=1000)).wait_s > 0.0


def test_the_queue_sums_forwards_not_requests() -> None:
    timing = PrefillTiming(base_s=1.0, per_token_s=0.0, per_token2_s=0.0, chunk_tokens=100)
    assert queue_s(timing, [PrefillWork(10)] * 10) == 1.0
    assert queue_s(timing, [PrefillWork(10)] * 11) == 2.0
    assert queue_s(timing, [PrefillWork(50, 50)]) == 0.0
