"""The stages of a request that may last only so long: how long, what follows when one passes, and in which words. Pure.

How long a server may be silent follows from what is known of it: a pair that is dead but connected is found in seconds,
and a slow one is not blamed for what was predicted. Every limit lies between a floor and a bound that are configured;
all bounds are far below the 300 s after which SGLang itself gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engines.types import EngineId, Leg


class Deadline(StrEnum):
    """A stage that has a deadline; the label of its metric."""

    QUEUE = "queue"
    """Waiting in the gateway for a pair with room."""
    FIRST_TOKEN = "first_token"
    """From dispatch to hand-over, and from there to the first output."""
    STALL = "stall"
    """Between two outputs of a stream, or from hand-over to a whole answer."""
    TOTAL = "total"
    """From arrival to the end."""


class Then(StrEnum):
    """What becomes of the request."""

    ASK_LATER = "ask_later"
    """It is refused; no server is at fault."""
    ANOTHER_PAIR = "another_pair"
    """It is begun anew on another pair, as its client has nothing of it yet."""
    GO_ON_ELSEWHERE = "go_on_elsewhere"
    """It goes on elsewhere from what its client has, where that can be done exactly."""
    NOTHING = "nothing"
    """It is over; no server is at fault."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows when a deadline passes. `status` and `code` are of the error, where one is left to be told."""

    then: Then
    status: int
    code: str
    safe_to_retry: bool
    """Whether client libraries should ask again by themselves. Asking again does no harm after any deadline."""

    @property
    def blames(self) -> bool:
        """Whether the silent server is at fault, which its health should know."""
        return self.then in (Then.ANOTHER_PAIR, Then.GO_ON_ELSEWHERE)


RULES: dict[Deadline, Rule] = {
    Deadline.QUEUE: Rule(Then.ASK_LATER, 429, "queue_timeout", safe_to_retry=True),
    Deadline.FIRST_TOKEN: Rule(Then.ANOTHER_PAIR, 504, "first_token_timeout", safe_to_retry=True),
    Deadline.STALL: Rule(Then.GO_ON_ELSEWHERE, 504, "stall_timeout", safe_to_retry=True),
    Deadline.TOTAL: Rule(Then.NOTHING, 504, "deadline_exceeded", safe_to_retry=False),
}


# ---- how long --------------------------------------------------------------------------------------------------------

FIRST_OUTPUT_FACTOR = 5.0
"""A first output may take so many times what was predicted, beyond the floor. Predictions of one prefill lie within a
factor of 2 once they are learned (the estimator clips at 3); the rest is for a queue that others filled meanwhile."""
BUSY_FACTOR = 4.0
"""A pair whose servers both answer others may take so many times longer still: it works, but not on this."""
STALL_STEPS = 30.0
"""A stream may pause for so many steps of its decode: outputs may come in groups (a stream interval, speculation), and
a step with many new requests, or a retraction, lasts for several."""
STALL_GAPS = 4.0
"""Or for so many times the longest pause that it has made: it shows how its server and its parsers group outputs."""
KNOWN_GAPS = 8
"""A stream that has paused so often shows its own pace."""
WHOLE_FLOORS = 4.0
"""A server with nothing to stream is heard by probes alone, which come every few seconds and may be late when it is
busy: it may be silent for so many times longer."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a limit may be, in seconds: `floor_s` is granted to every server, more than `bound_s` to none."""

    floor_s: float
    bound_s: float

    def of(self, wanted_s: float) -> float:
        return min(self.bound_s, max(self.floor_s, wanted_s))


def first_output_quiet_s(bounds: Bounds, predicted_s: float, error_ratio: float | None) -> float:
    """How long a pair may give no first output while one of its servers gives no sign of life at all.

    `predicted_s`: queue, prefill of what is not cached, and transfer, as predicted when the pair was chosen.
    `error_ratio`: mean error of such predictions for this prefill; None where nothing was measured yet, and the
    prediction is worth nothing.
    """
    if error_ratio is None:
        return bounds.bound_s
    return bounds.of(bounds.floor_s + FIRST_OUTPUT_FACTOR * predicted_s * (1.0 + error_ratio))


def stall_quiet_s(bounds: Bounds, step_s: float | None, largest_gap_s: float, gaps: int) -> float:
    """How long a stream may pause while its decode gives no output to others either.

    `step_s`: the learned time of one step over what the decode has in its batch; None where nothing was measured yet.
    `largest_gap_s` is of the `gaps` pauses of this stream so far.
    """
    if step_s is None and gaps < KNOWN_GAPS:
        return bounds.bound_s
    return bounds.of(max(STALL_STEPS * (step_s or 0.0), STALL_GAPS * largest_gap_s))


def limit_s(quiet_s: float, since_s: float, heard_s: float, bound_s: float) -> float:
    """How long silence since `since_s` may last: `quiet_s`, counted anew from when the server was heard of last.

    So a server that works for others is waited for, up to `bound_s`; one that is frozen is found `quiet_s` after its
    last sign. Ask again when the limit has passed: the server may have been heard of meanwhile.
    """
    return min(bound_s, quiet_s + max(0.0, heard_s - since_s))


def silent_leg(waited_for: Leg, since_s: float, prefill_heard_s: float, decode_heard_s: float) -> Leg:
    """Which leg is to blame when `waited_for` has said nothing since `since_s`.

    A prefill computes only when its decode has reserved the KV: if it was heard of since and the decode was not, it
    waits itself. A decode that has the KV waits for nobody.
    """
    return Leg.DECODE if prefill_heard_s > since_s >= decode_heard_s else waited_for


# ---- in which words --------------------------------------------------------------------------------------------------


def silence_text(deadline: Deadline, leg: Leg, engine_id: EngineId, silent_s: float) -> str:
    """What happened, for the client and the log. `silent_s`: since the last sign of this attempt."""
    match deadline:
        case Deadline.STALL:
            return f"stalled: the {leg} server {engine_id} gave no further output in time ({silent_s:.1f} s)"
        case Deadline.TOTAL:
            return f"out of time: the last {silent_s:.1f} s were spent waiting for the {leg} server {engine_id}"
        case _:
            return f"no first token in time: no sign of the {leg} server {engine_id} for {silent_s:.1f} s"


def queue_text(waited_s: float, kv_tokens: int) -> str:
    """The same for a request that never left the queue."""
    return f"no pair had room for {kv_tokens} tokens within {waited_s:.1f} s; {advice(Deadline.QUEUE, begun=False)}"


def advice(deadline: Deadline, *, begun: bool) -> str:
    """Whether asking again is safe, in words. `begun`: the client has a part of the answer."""
    if deadline is Deadline.TOTAL:
        return "asking again is safe, but may take as long" + (" and begins the answer anew" if begun else "")
    if begun:
        return "asking again is safe, and begins the answer anew"
    return "nothing of the answer was sent: asking again is safe"
