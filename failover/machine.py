"""The health table of an instance: what each event makes of each state. Pure, total; drawn in `docs/health.md`.

Suspicion is immediate and costs little to undo: one refusal or reset stops new rooms until a probe succeeds. What broke
under requests is trusted again only when a request has succeeded on it. A late answer is no evidence of a death.
"""

from __future__ import annotations

from enum import Enum

from engines.types import EngineLoad, FailureKind, Health, Outcome


class HealthEvent(Enum):
    """What was seen of an instance."""

    PROBE_READY = "probe_ready"
    """It takes new rooms (a prefill: its bootstrap server answers too), and says which boot it is."""
    PROBE_UNREAD = "probe_unread"
    """It is ready, but did not say in time which boot it is."""
    PROBE_NOT_READY = "probe_not_ready"
    """It answered, and takes no new rooms (starting, draining, wrong role)."""
    PROBE_TIMED_OUT = "probe_timed_out"
    """It gave no answer in time, as a server under full load may."""
    SILENT = "silent"
    """Nothing at all has come from it for SILENT_S: no answer to a probe, no load, no output of a request."""
    PROBE_FAILED = "probe_failed"
    """It, or a prefill's bootstrap server, refused or reset a probe."""
    LEG_TIMED_OUT = "leg_timed_out"
    """A leg on it missed a deadline, and nothing came from others."""
    LEG_BROKE = "leg_broke"
    """A leg on it was refused, reset or cut short."""
    KEEPS_FAILING = "keeps_failing"
    """MAX_FAULTS legs in a row failed on it by its own fault, without one that went well in between."""
    LEG_REFUSED = "leg_refused"
    """It answered 401, 403, 404 or 405: the operator's fault."""
    PROVED = "proved"
    """A request that was sent to it on probation went well."""
    PROGRESSED = "progressed"
    """Output of a request came from it, or its counters moved."""
    COUNTER_FELL = "counter_fell"
    """A number that only grows while a process lives is lower than it was: it may be another process."""
    SUSPECTED_ELSEWHERE = "suspected_elsewhere"
    """Another gateway suspects it."""
    WEDGE_FOUND = "wedge_found"
    """It has work and does none of it (`failover/wedge.py`)."""
    LEAK_FOUND = "leak_found"
    """It still counts a request 60 s after it was told to drop it."""
    RESTARTED = "restarted"
    """It is another process than it was."""


_E = HealthEvent
_STATES = tuple(Health)
_LETTERS = dict(zip("URSXBPNWL", _STATES, strict=True))
"""One letter a state, in the order of `Health`: X is SUSPECTED."""

_MATRIX: dict[HealthEvent, str] = {
    # from:                U R S X B P N W L
    _E.PROBE_READY: "        R R R R P P R W L",
    _E.PROBE_UNREAD: "       U R R X B P X W L",
    _E.PROBE_NOT_READY: "    N N N N B B N W L",
    _E.PROBE_TIMED_OUT: "    X S S X B B X W L",
    _E.SILENT: "             X X X X B B X W L",
    _E.PROBE_FAILED: "       X X X X B B X W L",
    _E.LEG_TIMED_OUT: "      X S S X B B N W L",
    _E.LEG_BROKE: "          B B B B B B B W L",
    _E.KEEPS_FAILING: "      B B B B B B B W L",
    _E.LEG_REFUSED: "        B B B B B B B W L",
    _E.PROVED: "             U R R X B R N W L",
    _E.PROGRESSED: "         U R R X B P N P L",
    _E.COUNTER_FELL: "       X X X X B B X W L",
    _E.SUSPECTED_ELSEWHERE: "X X X X B B X W L",
    _E.WEDGE_FOUND: "        W W W W W W W W L",
    _E.LEAK_FOUND: "         L L L L L L L L L",
    # What is stuck, or leaks, ends with its process.
    _E.RESTARTED: "          U R S X B P N X X",
}

TRANSITIONS: dict[tuple[Health, HealthEvent], Health] = {
    (before, event): _LETTERS[letter]
    for event, row in _MATRIX.items()
    for before, letter in zip(_STATES, row.split(), strict=True)
}

SILENT_S = 10.0
"""How long nothing must have come from a server that answers late before it counts as gone."""
MAX_FAULTS = 3
"""Failed answers in a row that stop new rooms: one may be the fault of a request, but not three of three."""

_BROKEN = frozenset({FailureKind.CONNECT, FailureKind.RESET, FailureKind.TIMEOUT, FailureKind.TRUNCATED})
_FAILED_TRIAL = frozenset({_E.LEG_BROKE, _E.LEG_TIMED_OUT, _E.KEEPS_FAILING, _E.LEG_REFUSED, _E.WEDGE_FOUND})
_HEARSAY = frozenset({_E.SUSPECTED_ELSEWHERE, _E.PROBE_TIMED_OUT})


def step(health: Health, event: HealthEvent) -> Health:
    """The next state of an instance."""
    return TRANSITIONS[health, event]


def breaks(outcome: Outcome) -> bool:
    """Whether a leg's failure is a sign that its server, or the way to it, is gone."""
    return outcome.kind in _BROKEN


def is_news(before: Health, event: HealthEvent, after: Health) -> bool:
    """Whether other gateways should hear of this step: a server that took rooms takes none, by what we saw ourselves.

    What was heard is not sent on, or a suspicion would go round for ever; one late answer is nobody's news.
    """
    took_rooms = before.takes_rooms or before is Health.SLOW
    suspected = after in (Health.SUSPECTED, Health.BROKEN) or (before is not after and event is _E.LEG_TIMED_OUT)
    return took_rooms and suspected and event not in _HEARSAY


def fails_trial(before: Health, event: HealthEvent) -> bool:
    """Whether this was a request on probation that went wrong: the next ones are sent after a longer pause."""
    return before is Health.PROBATION and event in _FAILED_TRIAL


CALM_S = 60.0
"""After so long without a failed trial the pauses begin anew."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


def pause_s(failed_trials: int, jitter: float) -> float:
    """How long a server whose trials failed gets no further ones: doubled each time. `jitter` is uniform in 0..1.

    Spread over 0.75..1.25 of it, so that gateways and servers that failed together do not come back together.
    """
    if failed_trials == 0:
        return 0.0
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failed_trials - 1, 16)) * (0.75 + 0.5 * jitter))


def fallen_counter(before: EngineLoad, now: EngineLoad) -> str:
    """Which number that only grows while a process lives is lower than it was, in words; "" when none is."""
    for name in ("prefill_uncached_tokens_total", "prefill_busy_us_total"):
        old, new = getattr(before, name), getattr(now, name)
        if new < old:
            return f"{name} fell from {old} to {new}"
    return ""
