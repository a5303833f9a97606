"""Whose health a failed leg speaks against, and how. Pure.

A server's word against its peer is no evidence of its own: it is a reason to look at the peer, and for
`failover/pair_health.py` to count against the pair. Else one decode with a broken link would stop every prefill.
"""

from __future__ import annotations

from typing import NamedTuple

from engines.types import EngineId, FailureKind, Outcome
from failover.machine import HealthEvent, breaks
from failover.retry import Fault, classify, culprit

Pair = tuple[EngineId, EngineId]
_NO_EVENT = frozenset({Fault.CALLER, Fault.INSTANCE_LIMIT, Fault.OURS, Fault.SATURATION})


class Sign(NamedTuple):
    """What a failed leg says of an instance.

    `event` is None where there is none for it; then `look` asks for a probe at once, and `counts` says that the
    failure is one of those of which MAX_FAULTS in a row are an event.
    """

    engine_id: EngineId
    event: HealthEvent | None = None
    look: bool = False
    counts: bool = False


def sign_of(outcome: Outcome, pair: Pair | None = None) -> Sign:
    """What the failure of one leg of `pair` says, and of whom; without a pair nobody but its own server is named."""
    own = outcome.engine_id
    fault = classify(outcome)
    if fault in _NO_EVENT:
        return Sign(own)
    if fault is Fault.OPERATOR:
        return Sign(own, HealthEvent.LEG_REFUSED)
    named = own if pair is None else culprit(outcome, pair)
    if named != own:
        return Sign(named, look=True)
    if outcome.kind is FailureKind.TIMEOUT:
        return Sign(own, HealthEvent.LEG_TIMED_OUT, look=True, counts=True)
    if breaks(outcome):
        return Sign(own, HealthEvent.LEG_BROKE, look=True)
    return Sign(own, counts=True)
