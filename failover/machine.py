"""The health table of one instance, in its first form: readiness by probes, suspicion at the first sign. Pure, total.

Suspicion is immediate and costs nothing to undo: one refusal, reset or timeout stops new rooms until a probe succeeds.
An answer of the server that says 4xx or 500 is not an event here: it proves that the server lives.
"""

from __future__ import annotations

from enum import Enum

from engines.types import EngineLoad, FailureKind, Health, Outcome


class HealthEvent(Enum):
    """What was seen of an instance."""

    PROBE_READY = "probe_ready"
    PROBE_NOT_READY = "probe_not_ready"
    """It answered, and takes no new rooms (starting, draining, wrong role)."""
    PROBE_TIMED_OUT = "probe_timed_out"
    """It gave no answer in time, as a server under full load may; a second time in a row it is suspected."""
    PROBE_FAILED = "probe_failed"
    LEG_BROKE = "leg_broke"
    """A leg on it was refused, reset or timed out."""
    COUNTER_FELL = "counter_fell"
    """A number that only grows while a process lives is lower than it was: it may be another process."""
    SUSPECTED_ELSEWHERE = "suspected_elsewhere"
    """Another gateway suspects it."""
    LEAK_FOUND = "leak_found"
    """It still counts a request 60 s after it was told to drop it."""
    RESTARTED = "restarted"


_H, _E = Health, HealthEvent

TRANSITIONS: dict[tuple[Health, HealthEvent], Health] = {
    (_H.UNKNOWN, _E.PROBE_READY): _H.READY,
    (_H.UNKNOWN, _E.PROBE_NOT_READY): _H.NOT_READY,
    (_H.UNKNOWN, _E.PROBE_TIMED_OUT): _H.SUSPECTED,
    (_H.UNKNOWN, _E.PROBE_FAILED): _H.SUSPECTED,
    (_H.UNKNOWN, _E.LEG_BROKE): _H.SUSPECTED,
    (_H.UNKNOWN, _E.COUNTER_FELL): _H.SUSPECTED,
    (_H.UNKNOWN, _E.SUSPECTED_ELSEWHERE): _H.SUSPECTED,
    (_H.UNKNOWN, _E.LEAK_FOUND): _H.LEAKING,
    (_H.UNKNOWN, _E.RESTARTED): _H.UNKNOWN,
    (_H.READY, _E.PROBE_READY): _H.READY,
    (_H.READY, _E.PROBE_NOT_READY): _H.NOT_READY,
    (_H.READY, _E.PROBE_TIMED_OUT): _H.SLOW,
    (_H.READY, _E.PROBE_FAILED): _H.SUSPECTED,
    (_H.READY, _E.LEG_BROKE): _H.SUSPECTED,
    (_H.READY, _E.COUNTER_FELL): _H.SUSPECTED,
    (_H.READY, _E.SUSPECTED_ELSEWHERE): _H.SUSPECTED,
    (_H.READY, _E.LEAK_FOUND): _H.LEAKING,
    (_H.READY, _E.RESTARTED): _H.READY,
    (_H.SLOW, _E.PROBE_READY): _H.READY,
    (_H.SLOW, _E.PROBE_NOT_READY): _H.NOT_READY,
    (_H.SLOW, _E.PROBE_TIMED_OUT): _H.SUSPECTED,
    (_H.SLOW, _E.PROBE_FAILED): _H.SUSPECTED,
    (_H.SLOW, _E.LEG_BROKE): _H.SUSPECTED,
    (_H.SLOW, _E.COUNTER_FELL): _H.SUSPECTED,
    (_H.SLOW, _E.SUSPECTED_ELSEWHERE): _H.SUSPECTED,
    (_H.SLOW, _E.LEAK_FOUND): _H.LEAKING,
    (_H.SLOW, _E.RESTARTED): _H.SLOW,
    (_H.SUSPECTED, _E.PROBE_READY): _H.READY,
    (_H.SUSPECTED, _E.PROBE_NOT_READY): _H.NOT_READY,
    (_H.SUSPECTED, _E.PROBE_TIMED_OUT): _H.SUSPECTED,
    (_H.SUSPECTED, _E.PROBE_FAILED): _H.SUSPECTED,
    (_H.SUSPECTED, _E.LEG_BROKE): _H.SUSPECTED,
    (_H.SUSPECTED, _E.COUNTER_FELL): _H.SUSPECTED,
    (_H.SUSPECTED, _E.SUSPECTED_ELSEWHERE): _H.SUSPECTED,
    (_H.SUSPECTED, _E.LEAK_FOUND): _H.LEAKING,
    (_H.SUSPECTED, _E.RESTARTED): _H.SUSPECTED,
    (_H.NOT_READY, _E.PROBE_READY): _H.READY,
    (_H.NOT_READY, _E.PROBE_NOT_READY): _H.NOT_READY,
    (_H.NOT_READY, _E.PROBE_TIMED_OUT): _H.SUSPECTED,
    (_H.NOT_READY, _E.PROBE_FAILED): _H.SUSPECTED,
    (_H.NOT_READY, _E.LEG_BROKE): _H.SUSPECTED,
    (_H.NOT_READY, _E.COUNTER_FELL): _H.SUSPECTED,
    (_H.NOT_READY, _E.SUSPECTED_ELSEWHERE): _H.SUSPECTED,
    (_H.NOT_READY, _E.LEAK_FOUND): _H.LEAKING,
    (_H.NOT_READY, _E.RESTARTED): _H.NOT_READY,
    # A leak ends only with the process that leaks.
    (_H.LEAKING, _E.PROBE_READY): _H.LEAKING,
    (_H.LEAKING, _E.PROBE_NOT_READY): _H.LEAKING,
    (_H.LEAKING, _E.PROBE_TIMED_OUT): _H.LEAKING,
    (_H.LEAKING, _E.PROBE_FAILED): _H.LEAKING,
    (_H.LEAKING, _E.LEG_BROKE): _H.LEAKING,
    (_H.LEAKING, _E.COUNTER_FELL): _H.LEAKING,
    (_H.LEAKING, _E.SUSPECTED_ELSEWHERE): _H.LEAKING,
    (_H.LEAKING, _E.LEAK_FOUND): _H.LEAKING,
    (_H.LEAKING, _E.RESTARTED): _H.SUSPECTED,
}

_BROKEN = frozenset({FailureKind.CONNECT, FailureKind.RESET, FailureKind.TIMEOUT, FailureKind.TRUNCATED})


def step(health: Health, event: HealthEvent) -> Health:
    """The next state of an instance."""
    return TRANSITIONS[health, event]


def breaks(outcome: Outcome) -> bool:
    """Whether a leg's failure is a sign that its server, or the way to it, is gone."""
    return outcome.kind in _BROKEN


def is_news(before: Health, event: HealthEvent, after: Health) -> bool:
    """Whether other gateways should hear of this step: a server that took rooms is suspected, by what we saw ourselves.

    What was heard is not sent on, or a suspicion would go round for ever.
    """
    took_rooms = before in (Health.READY, Health.SLOW)
    return took_rooms and after is Health.SUSPECTED and event is not HealthEvent.SUSPECTED_ELSEWHERE


def fallen_counter(before: EngineLoad, now: EngineLoad) -> str:
    """Which number that only grows while a process lives is lower than it was, in words; "" when none is."""
    for name in ("prefill_uncached_tokens_total", "prefill_busy_us_total"):
        old, new = getattr(before, name), getattr(now, name)
        if new < old:
            return f"{name} fell from {old} to {new}"
    return ""
