"""More load never makes a pair cheaper, a longer hit never dearer; every term but the gain is a cost."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engines.timing import DecodeTiming, LinkTiming, PrefillTiming, PrefillWork
from engines.types import EngineId
from routing.cost import cost_terms, queue_s
from routing.types import DecodeState, PrefillState, RequestView, RoutingSnapshot
from tests.unit.routing.fleets import decode, prefill, request, snapshot

ROUNDING_S = 1e-9
SECONDS = st.floats(0, 30)
TOKENS = st.integers(0, 140_000)
MORE = st.integers(1, 50_000)
PREFILL_TIMINGS = st.builds(
    PrefillTiming, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-8), st.integers(1, 20_000)
)
DECODE_TIMINGS = st.builds(DecodeTiming, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6))
LINKS = st.builds(LinkTiming, st.floats(1e7, 1e12), st.floats(0, 0.1))
PREFILLS = st.builds(
    lambda **fields: prefill(**fields),
    timing=PREFILL_TIMINGS,
    booked_s=SECONDS,
    hit_tokens=TOKENS,
    pending_hit_tokens=TOKENS,
    load_s=st.one_of(st.just(0.0), SECONDS),
)
DECODES = st.builds(
    lambda **fields: decode(**fields),
    timing=DECODE_TIMINGS,
    capacity_tokens=st.integers(1, 700_000),
    booked_tokens=st.integers(0, 800_000),
    booked_requests=st.integers(0, 400),
    reuse_tokens=TOKENS,
)
REQUESTS = st.builds(
    lambda **fields: request(**fields),
    prompt_tokens=st.integers(1, 130_000),
    expected_output_tokens=st.integers(1, 30_000),
)
NICS = st.dictionaries(st.sampled_from([EngineId("p0"), EngineId("d0")]), SECONDS)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[RequestView, PrefillState, DecodeState, RoutingSnapshot]:
    p, d = draw(PREFILLS), draw(DECODES)
    return draw(REQUESTS), p, d, snapshot([p], [d], default_link=draw(LINKS), nic_free_s=draw(NICS))


Scene = tuple[RequestView, PrefillState, DecodeState, RoutingSnapshot]


def at_least(more: float, less: float) -> bool:
    return more >= less - ROUNDING_S * max(1.0, abs(less))


def total_s(scene: Scene) -> float:
    return cost_terms(*scene).total_s


@given(scenes())
def test_every_term_is_a_cost_and_the_hit_a_gain(scene: Scene) -> None:
    terms = cost_terms(*scene)
    assert terms.prefix_gain_s <= 0.0 <= terms.prefill_s + terms.prefix_gain_s
    assert min(terms.wait_s, terms.prefill_s, terms.decode_s, terms.capacity_s) >= 0.0
    assert at_least(terms.transfer_s, 0.0)


@given(scenes(), SECONDS)
def test_a_longer_queue_never_lowers_the_cost(scene: Scene, more_s: float) -> None:
    wanted, p, d, fleet = scene
    assert at_least(total_s((wanted, replace(p, booked_s=p.booked_s + more_s), d, fleet)), total_s(scene))


@given(scenes(), MORE)
def test_a_longer_hit_never_raises_the_cost(scene: Scene, more: int) -> None:
    wanted, p, d, fleet = scene
    longer = replace(p, hit_tokens=p.hit_tokens + more)
    if not p.hit_tokens and not p.pending_hit_tokens:
        longer = replace(longer, load_s=0.0)
    assert at_least(total_s(scene), total_s((wanted, longer, d, fleet)))


@given(scenes(), MORE)
def test_more_booked_tokens_never_lower_the_cost(scene: Scene, more: int) -> None:
    wanted, p, d, fleet = scene
    assert at_least(total_s((wanted, p, replace(d, booked_tokens=d.booked_tokens + more), fleet)), total_s(scene))


@given(scenes(), st.integers(1, 300))
def test_more_booked_requests_never_lower_the_cost(scene: Scene, more: int) -> None:
    wanted, p, d, fleet = scene
    assert at_least(total_s((wanted, p, replace(d, booked_requests=d.booked_requests + more), fleet)), total_s(scene))


@given(scenes(), MORE)
def test_a_longer_prompt_never_costs_less(scene: Scene, more: int) -> None:
    wanted, p, d, fleet = scene
    longer = replace(wanted, prompt_tokens=wanted.prompt_tokens + more)
    capped = min(p.hit_tokens, wanted.prompt_tokens - 1)
    p = replace(p, hit_tokens=capped, pending_hit_tokens=capped)
    d = replace(d, reuse_tokens=min(d.reuse_tokens, wanted.prompt_tokens))
    assert at_least(total_s((longer, p, d, fleet)), total_s((wanted, p, d, fleet)))


@given(scenes(), MORE)
def test_what_a_decode_reuses_never_raises_the_cost(scene: Scene, more: int) -> None:
    wanted, p, d, fleet = scene
    assert at_least(total_s(scene), total_s((wanted, p, replace(d, reuse_tokens=d.reuse_tokens + more), fleet)))


@given(scenes(), st.floats(1, 100))
def test_a_slower_link_never_lowers_the_cost(scene: Scene, factor: float) -> None:
    wanted, p, d, fleet = scene
    link = fleet.default_link
    slower = replace(fleet, default_link=LinkTiming(link.bytes_per_s / factor, link.fixed_s * factor))
    assert at_least(total_s((wanted, p, d, slower)), total_s(scene))


@given(PREFILL_TIMINGS, st.lists(st.builds(PrefillWork, TOKENS, TOKENS), max_size=8), st.builds(PrefillWork, TOKENS))
def test_more_work_never_shortens_a_queue(timing: PrefillTiming, works: list[PrefillWork], more: PrefillWork) -> None:
    assert at_least(queue_s(timing, [*works, more]), queue_s(timing, works))
    assert queue_s(timing, works) == queue_s(timing, works[::-1])
