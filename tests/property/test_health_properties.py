"""The health table as a graph, and the wedge detector: it spares whoever moves, and finds whoever does not."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engines.types import EngineLoad, Health
from failover.machine import TRANSITIONS, HealthEvent, pause_s, step
from failover.wedge import LONGEST_S, SHORTEST_S, Owed, Watch

E = HealthEvent
PROBES = (E.PROBE_READY, E.PROVED)
"""What a server that is well brings about: a good probe, and a request that succeeds."""


def reached(start: Health, events: frozenset[HealthEvent]) -> set[Health]:
    found, look_at = {start}, [start]
    while look_at:
        before = look_at.pop()
        for event in events:
            if (after := TRANSITIONS[before, event]) not in found:
                found.add(after)
                look_at.append(after)
    return found


def test_every_state_is_reached_from_the_first() -> None:
    assert reached(Health.UNKNOWN, frozenset(HealthEvent)) == set(Health)


def test_every_state_leads_back_to_ready_without_an_operator_save_what_must_restart() -> None:
    for health in Health:
        ready = Health.READY in reached(health, frozenset(PROBES))
        assert ready is (health not in (Health.WEDGED, Health.LEAKING))
        assert Health.READY in reached(health, frozenset({*PROBES, E.RESTARTED}))


@given(st.lists(st.sampled_from(HealthEvent)))
def test_a_server_that_is_well_is_ready_soon_whatever_was(events: list[HealthEvent]) -> None:
    health = Health.UNKNOWN
    for event in events:
        health = step(health, event)
    if health in (Health.WEDGED, Health.LEAKING):
        health = step(health, E.RESTARTED)
    for event in PROBES:
        health = step(health, event)
    assert health is Health.READY


@given(st.sampled_from(Health), st.lists(st.sampled_from([E.PROBE_TIMED_OUT, E.PROBE_UNREAD, E.LEG_TIMED_OUT])))
def test_lateness_alone_never_says_more_than_that_it_is_late(health: Health, events: list[HealthEvent]) -> None:
    for event in events:
        before, health = health, step(health, event)
        if before in (Health.READY, Health.SLOW):
            assert health in (Health.READY, Health.SLOW)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_pauses_are_bounded_and_grow(failed: int, jitter: float) -> None:
    assert 0.0 <= pause_s(failed, jitter) <= 37.5
    assert pause_s(failed, jitter) <= pause_s(failed + 1, jitter)


LOOKS = st.lists(st.tuples(st.floats(0.1, 3.0), st.sampled_from(["still", "counter", "output", "unread"])), max_size=80)
BUSY = EngineLoad(1.0, 3, 0, 0, 500, 500, 10_000)


@given(LOOKS, st.booleans(), st.integers(1, 300))
def test_whoever_moved_lately_is_not_stuck_and_whoever_never_does_is_in_the_end(
    looks: list[tuple[float, str]], ticks: bool, requests: int
) -> None:
    watch, owed, load = Watch(), Owed(requests), BUSY
    now_s = moved_s = 0.0
    watch.saw(load, owed, now_s)
    for gap_s, what in looks:
        now_s += gap_s
        if what == "counter":
            load = replace(load, used_tokens=load.used_tokens + 1)
        if what == "output":
            watch.progress(now_s)
        if ticks:
            load = replace(load, taken_s=load.taken_s + gap_s)
        idle_s = watch.saw(None if what == "unread" else load, owed, now_s)
        if what != "still":
            moved_s = now_s
        assert idle_s <= now_s - moved_s + 1e-6
        if now_s - moved_s < SHORTEST_S:
            assert idle_s < watch.patience_s(owed)
    for _ in range(int(2 * LONGEST_S)):
        now_s += 1.0
        idle_s = watch.saw(load, owed, now_s)
    assert idle_s >= watch.patience_s(owed)
