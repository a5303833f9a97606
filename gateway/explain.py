"""Why a request went where it went: the last decisions and what became of them, in a bounded ring.

Every value is of the moment of the decision, so that a decision can be read (and computed) again later. Records stay
long after their requests: texts are clipped, and the blocks of a prompt go when its request is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engines.types import Outcome
from gateway import pairs
from gateway.decider import Decision
from gateway.errors import clipped
from routing.compatibility import match
from routing.prefix import BlockKind
from routing.types import Candidate

_MAX_ATTEMPTS_SHOWN = 256
_MAX_OUTCOME_CHARS = 500


@dataclass(slots=True)
class AttemptRecord:
    """One attempt of a request. Times are seconds since the request arrived.

    `index` is the kind that its prompt was looked up in; `why_text` says why it was not the one of ids.
    """

    decision: Decision
    room: int
    choice_index: int
    decided_s: float
    index: BlockKind = BlockKind.TEXT
    why_text: str = ""
    handed_over_s: float | None = None
    first_output_s: float | None = None
    ended_s: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    verdict: str = ""
    cached_tokens: int | None = None
    course: Mapping[str, Any] = field(default_factory=dict)
    """The engine's route, why a chat is not asked for with ids, what happens if the stream breaks, where it goes on."""

    def note(self, outcome: Outcome) -> None:
        """A leg of it failed."""
        self.outcomes.append(replace(outcome, message=outcome.message[:_MAX_OUTCOME_CHARS]))

    def forget_prompt(self) -> None:
        """The request is over: nobody needs the blocks of its prompt any more, and they are megabytes."""
        self.decision = replace(self.decision, request=replace(self.decision.request, blocks=()))

    def as_json(self) -> dict[str, Any]:
        decision, request = self.decision, self.decision.request
        return {
            "rid": decision.rid,
            "room": str(self.room),  # 63 bits: more than a browser's number holds
            "choice_index": self.choice_index,
            "prefill": decision.prefill.engine_id,
            "decode": decision.decode.engine_id,
            "prefill_rank": decision.booking.prefill_rank,
            "decode_rank": decision.booking.decode_rank,
            "prefill_epoch": decision.prefill.epoch,
            "decode_epoch": decision.decode.epoch,
            "prompt_tokens": request.prompt_tokens,
            "prompt_index": self.index.value,
            "prompt_index_reason": self.why_text or None,
            "expected_output_tokens": request.expected_output_tokens,
            "hit_tokens": decision.choice.best.hit_tokens,
            "cached_tokens": self.cached_tokens,
            "waited_s": decision.waited_s,
            "decided_s": self.decided_s,
            "handed_over_s": self.handed_over_s,
            "first_output_s": self.first_output_s,
            "ended_s": self.ended_s,
            **_cost(decision.choice.best),
            "considered": [_candidate(candidate) for candidate in decision.choice.considered],
            "dropped": [{"engine": each.engine_id, "reason": each.reason} for each in decision.dropped],
            "panic": sorted(decision.panic),
            "pair_note": _pair_note(decision),
            "apart": [pairs.line(each) for each in decision.apart[: pairs.TOLD_AT_ONCE]],
            "pairs_in_trouble": list(decision.pairs_in_trouble),
            "versions": dict(decision.versions),
            "outcomes": [_outcome(outcome) for outcome in self.outcomes],
            "verdict": self.verdict,
            **self.course,
        }


@dataclass(slots=True)
class Record:
    """One request: its attempts in order, and how it ended."""

    request_id: str
    api: str
    model: str
    policy: str
    arrival_s: float
    aliases: tuple[str, ...] = ()
    attempts: list[AttemptRecord] = field(default_factory=list)
    status: int | None = None
    error: str = ""
    dropped_attempts: int = 0

    def close(self) -> None:
        """The request is over: keep only what is shown."""
        self.model, self.error = clipped(self.model), clipped(self.error)
        for attempt in self.attempts:
            attempt.forget_prompt()

    def add(self, attempt: AttemptRecord) -> None:
        if len(self.attempts) < _MAX_ATTEMPTS_SHOWN:
            self.attempts.append(attempt)
        else:
            self.dropped_attempts += 1

    def judged(self, decision: Decision, verdict: str) -> None:
        """Note on the attempt of `decision` what its failure led to; others may run at the same time."""
        for attempt in self.attempts:
            if attempt.decision is decision:
                attempt.verdict = verdict

    @property
    def total_attempts(self) -> int:
        """The most attempts that any one of its engine requests took."""
        counts: dict[int, int] = {}
        for attempt in self.attempts:
            counts[attempt.choice_index] = counts.get(attempt.choice_index, 0) + 1
        return max(counts.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "api": self.api,
            "model": self.model,
            "policy": self.policy,
            "status": self.status,
            "error": self.error or None,
            "attempts": [attempt.as_json() for attempt in self.attempts],
            "attempts_not_shown": self.dropped_attempts,
        }


class ExplainRing:
    """The newest `size` requests, found by their id (or by the rid the client had asked for)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._aliases: dict[str, str] = {}

    def add(self, record: Record) -> None:
        self._records[record.request_id] = record
        self._aliases.update((alias, record.request_id) for alias in record.aliases)
        while len(self._records) > self._size:
            _, oldest = self._records.popitem(last=False)
            for alias in oldest.aliases:
                if self._aliases.get(alias) == oldest.request_id:
                    del self._aliases[alias]

    def find(self, request_id: str) -> Record | None:
        return self._records.get(request_id) or self._records.get(self._aliases.get(request_id, ""))

    def newest(self) -> Record | None:
        return next(reversed(self._records.values()), None)

    def __len__(self) -> int:
        return len(self._records)


def _cost(candidate: Candidate) -> dict[str, Any]:
    terms = candidate.terms
    return {
        "terms": {
            "wait_s": terms.wait_s,
            "prefill_s": terms.prefill_s,
            "prefix_gain_s": terms.prefix_gain_s,
            "transfer_s": terms.transfer_s,
            "decode_s": terms.decode_s,
            "capacity_s": terms.capacity_s,
        },
        "total_s": terms.total_s,
    }


def _pair_note(decision: Decision) -> str | None:
    """What is worth a word about the chosen pair: how its servers differ, though they fit."""
    prefill, decode = decision.prefill.facts, decision.decode.facts
    return (match(prefill, decode).reason or None) if prefill is not None and decode is not None else None


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "prefill": candidate.prefill,
        "decode": candidate.decode,
        "hit_tokens": candidate.hit_tokens,
        **_cost(candidate),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "engine": outcome.engine_id,
        "leg": outcome.leg.value,
        "kind": outcome.kind.value,
        "stage": outcome.stage.value,
        "status": outcome.status,
        "definite": outcome.definite,
        "message": outcome.message,
    }
