"""What a whole answer teaches: true token counts, cached tokens, output length, decode speed."""

from __future__ import annotations

from gateway.context import Gateway
from gateway.decider import Decision
from gateway.explain import AttemptRecord
from gateway.openai_api import ParsedRequest, Unit
from gateway.reply import UnitSink

_MIN_STEPS = 8
"""Fewer decode steps than this say little about the time of one."""


def learn(
    gw: Gateway,
    request: ParsedRequest,
    unit: Unit,
    decision: Decision,
    note: AttemptRecord,
    sink: UnitSink,
    ended_s: float,
) -> None:
    """Feed the estimators and the index with what the engine said of a whole answer. `ended_s` is since arrival."""
    usage = sink.usage
    if usage is None:
        return
    learned, view = gw.decider.learned, decision.request
    gw.metrics.answered(usage.prompt_tokens, usage.completion_tokens)
    if unit.prompt_token_ids is None:
        learned.saw_prompt(view.model, len(unit.prompt_bytes), usage.prompt_tokens)
    learned.saw_output(view.model, usage.completion_tokens)
    if usage.cached_tokens is not None:
        note.cached_tokens = usage.cached_tokens
        gw.metrics.hit(decision.prefill.engine_id, decision.booking.work.cached_tokens, usage.cached_tokens)
    steps = usage.completion_tokens - 1
    if note.handed_over_s is not None and steps >= _MIN_STEPS:
        running, kv_tokens = gw.decider.bookings.beside(decision.booking)
        step_s = (ended_s - note.handed_over_s) / steps
        learned.saw_decode(decision.decode.engine_id, running, kv_tokens, step_s)
