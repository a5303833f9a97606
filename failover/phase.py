"""The attempt table: what each event of a leg means in each phase of an attempt. Pure and total.

The rule behind it: before hand-over a failed prefill ends the attempt, as its KV may be incomplete; after hand-over
the prefill's fate is only noted, as the decode has everything. A failed decode always ends the attempt.
"""

from __future__ import annotations

from enum import Enum

LOSS_GRACE_S = 0.3
"""A prefill whose connection broke may have handed over just before: wait this long for the decode's first output."""


class Phase(Enum):
    """Where an attempt stands."""

    DISPATCHED = "dispatched"
    PREFILL_LOST = "prefill_lost"
    """The prefill's connection broke before hand-over was known."""
    HELD = "held"
    """The decode's first output is here and waits for the prefill's answer."""
    HELD_WHOLE = "held_whole"
    """The decode has ended well and waits for the prefill's answer."""
    HANDED_OVER = "handed_over"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"


class Event(Enum):
    """What happened to a leg, or to the time."""

    PREFILL_ANSWERED = "prefill_answered"
    PREFILL_FAILED = "prefill_failed"
    """It answered that it failed (an error status, an abort, an error event)."""
    PREFILL_BROKE = "prefill_broke"
    """Its connection broke, or never came to be."""
    DECODE_OUTPUT = "decode_output"
    DECODE_ENDED = "decode_ended"
    DECODE_FAILED = "decode_failed"
    HOLD_PASSED = "hold_passed"
    GRACE_PASSED = "grace_passed"
    DEADLINE_PASSED = "deadline_passed"


class Action(Enum):
    """What the shell does next."""

    NOTHING = "nothing"
    KEEP = "keep"
    """Keep this output; the timer is running already."""
    HOLD = "hold"
    """Keep this output (if it is one), and wait for the prefill's answer, for a bounded time: one of
    `finish_reason abort` tells that the decode is about to stream from incomplete KV."""
    WAIT_GRACE = "wait_grace"
    """Start the LOSS_GRACE_S timer."""
    HAND_OVER = "hand_over"
    """The KV is on the decode: settle the prefill's booking."""
    RELAY = "relay"
    """Pass on what was kept, then this output."""
    FINISH = "finish"
    """Pass on what was kept; the answer is whole."""
    NOTE = "note"
    """Feeds the prefill's health and nothing else."""
    BLAME_PREFILL = "blame_prefill"
    BLAME_DECODE = "blame_decode"
    BLAME_SILENT = "blame_silent"
    """A deadline passed: the leg that should have spoken is at fault."""


_P, _E, _A = Phase, Event, Action

TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, Action]] = {
    (_P.DISPATCHED, _E.PREFILL_ANSWERED): (_P.HANDED_OVER, _A.HAND_OVER),
    (_P.DISPATCHED, _E.PREFILL_FAILED): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.DISPATCHED, _E.PREFILL_BROKE): (_P.PREFILL_LOST, _A.WAIT_GRACE),
    (_P.DISPATCHED, _E.DECODE_OUTPUT): (_P.HELD, _A.HOLD),
    (_P.DISPATCHED, _E.DECODE_ENDED): (_P.HELD_WHOLE, _A.HOLD),
    (_P.DISPATCHED, _E.DECODE_FAILED): (_P.FAILED, _A.BLAME_DECODE),
    (_P.DISPATCHED, _E.HOLD_PASSED): (_P.DISPATCHED, _A.NOTHING),
    (_P.DISPATCHED, _E.GRACE_PASSED): (_P.DISPATCHED, _A.NOTHING),
    (_P.DISPATCHED, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_SILENT),
    #
    (_P.PREFILL_LOST, _E.PREFILL_ANSWERED): (_P.PREFILL_LOST, _A.NOTHING),
    (_P.PREFILL_LOST, _E.PREFILL_FAILED): (_P.PREFILL_LOST, _A.NOTHING),
    (_P.PREFILL_LOST, _E.PREFILL_BROKE): (_P.PREFILL_LOST, _A.NOTHING),
    (_P.PREFILL_LOST, _E.DECODE_OUTPUT): (_P.STREAMING, _A.RELAY),
    (_P.PREFILL_LOST, _E.DECODE_ENDED): (_P.DONE, _A.FINISH),
    (_P.PREFILL_LOST, _E.DECODE_FAILED): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.PREFILL_LOST, _E.HOLD_PASSED): (_P.PREFILL_LOST, _A.NOTHING),
    (_P.PREFILL_LOST, _E.GRACE_PASSED): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.PREFILL_LOST, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_PREFILL),
    #
    (_P.HELD, _E.PREFILL_ANSWERED): (_P.STREAMING, _A.RELAY),
    (_P.HELD, _E.PREFILL_FAILED): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.HELD, _E.PREFILL_BROKE): (_P.STREAMING, _A.RELAY),
    (_P.HELD, _E.DECODE_OUTPUT): (_P.HELD, _A.KEEP),
    (_P.HELD, _E.DECODE_ENDED): (_P.HELD_WHOLE, _A.KEEP),
    (_P.HELD, _E.DECODE_FAILED): (_P.FAILED, _A.BLAME_DECODE),
    (_P.HELD, _E.HOLD_PASSED): (_P.STREAMING, _A.RELAY),
    (_P.HELD, _E.GRACE_PASSED): (_P.HELD, _A.NOTHING),
    (_P.HELD, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_SILENT),
    #
    (_P.HELD_WHOLE, _E.PREFILL_ANSWERED): (_P.DONE, _A.FINISH),
    (_P.HELD_WHOLE, _E.PREFILL_FAILED): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.HELD_WHOLE, _E.PREFILL_BROKE): (_P.DONE, _A.FINISH),
    (_P.HELD_WHOLE, _E.DECODE_OUTPUT): (_P.HELD_WHOLE, _A.NOTHING),
    (_P.HELD_WHOLE, _E.DECODE_ENDED): (_P.HELD_WHOLE, _A.NOTHING),
    (_P.HELD_WHOLE, _E.DECODE_FAILED): (_P.HELD_WHOLE, _A.NOTHING),
    (_P.HELD_WHOLE, _E.HOLD_PASSED): (_P.DONE, _A.FINISH),
    (_P.HELD_WHOLE, _E.GRACE_PASSED): (_P.HELD_WHOLE, _A.NOTHING),
    (_P.HELD_WHOLE, _E.DEADLINE_PASSED): (_P.DONE, _A.FINISH),
    #
    (_P.HANDED_OVER, _E.PREFILL_ANSWERED): (_P.HANDED_OVER, _A.NOTHING),
    (_P.HANDED_OVER, _E.PREFILL_FAILED): (_P.HANDED_OVER, _A.NOTE),
    (_P.HANDED_OVER, _E.PREFILL_BROKE): (_P.HANDED_OVER, _A.NOTE),
    (_P.HANDED_OVER, _E.DECODE_OUTPUT): (_P.STREAMING, _A.RELAY),
    (_P.HANDED_OVER, _E.DECODE_ENDED): (_P.DONE, _A.FINISH),
    (_P.HANDED_OVER, _E.DECODE_FAILED): (_P.FAILED, _A.BLAME_DECODE),
    (_P.HANDED_OVER, _E.HOLD_PASSED): (_P.HANDED_OVER, _A.NOTHING),
    (_P.HANDED_OVER, _E.GRACE_PASSED): (_P.HANDED_OVER, _A.NOTHING),
    (_P.HANDED_OVER, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_SILENT),
    #
    (_P.STREAMING, _E.PREFILL_ANSWERED): (_P.STREAMING, _A.HAND_OVER),
    (_P.STREAMING, _E.PREFILL_FAILED): (_P.STREAMING, _A.NOTE),
    (_P.STREAMING, _E.PREFILL_BROKE): (_P.STREAMING, _A.NOTE),
    (_P.STREAMING, _E.DECODE_OUTPUT): (_P.STREAMING, _A.RELAY),
    (_P.STREAMING, _E.DECODE_ENDED): (_P.DONE, _A.FINISH),
    (_P.STREAMING, _E.DECODE_FAILED): (_P.FAILED, _A.BLAME_DECODE),
    (_P.STREAMING, _E.HOLD_PASSED): (_P.STREAMING, _A.NOTHING),
    (_P.STREAMING, _E.GRACE_PASSED): (_P.STREAMING, _A.NOTHING),
    (_P.STREAMING, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_SILENT),
    #
    **{(_P.DONE, event): (_P.DONE, _A.NOTHING) for event in Event},
    **{(_P.FAILED, event): (_P.FAILED, _A.NOTHING) for event in Event},
}


NEEDING_PREFILL: dict[tuple[Phase, Event], tuple[Phase, Action]] = {
    (_P.DISPATCHED, _E.PREFILL_BROKE): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.DISPATCHED, _E.DECODE_OUTPUT): (_P.HELD, _A.KEEP),
    (_P.DISPATCHED, _E.DECODE_ENDED): (_P.HELD_WHOLE, _A.KEEP),
    (_P.HELD, _E.PREFILL_BROKE): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.HELD, _E.HOLD_PASSED): (_P.HELD, _A.NOTHING),
    (_P.HELD_WHOLE, _E.PREFILL_BROKE): (_P.FAILED, _A.BLAME_PREFILL),
    (_P.HELD_WHOLE, _E.HOLD_PASSED): (_P.HELD_WHOLE, _A.NOTHING),
    (_P.HELD_WHOLE, _E.DEADLINE_PASSED): (_P.FAILED, _A.BLAME_SILENT),
}
"""What is otherwise where the client's answer needs something of the prefill's: before that nothing is passed on, and
without it the attempt has failed."""


def step(phase: Phase, event: Event, *, needs_prefill: bool = False) -> tuple[Phase, Action]:
    """The next phase of an attempt, and what to do."""
    if needs_prefill and (phase, event) in NEEDING_PREFILL:
        return NEEDING_PREFILL[phase, event]
    return TRANSITIONS[phase, event]


def handed_over(phase: Phase) -> bool:
    """Whether the decode surely has the whole KV, so that the prefill's fate no longer matters."""
    return phase in (Phase.HANDED_OVER, Phase.STREAMING, Phase.DONE)
