"""The pairs of the fleet that must not be formed: those that cannot exchange KV, and those whose KV does not arrive.

The first is computed once for each state of the fleet, the second follows from what became of requests and canaries
(`failover/pair_health.py`). Both are told when their reasons change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random, SystemRandom
from typing import Any, Protocol

from engines.types import EngineId, EngineView, FleetSnapshot, Role
from failover.deadlines import Deadline
from failover.pair_health import PairHealth, PairState, against_the_pair, told, worst
from gateway.attempt import AttemptFailed
from routing.compatibility import Apart, Match, Pair, apart, pairs_apart

_log = logging.getLogger("pdgate.pairs")

TOLD_AT_ONCE = 8
_SHOWN = 256
_PROVED_PAIRS = 16_384
"""Of so many pairs it is remembered when a request's KV last went over them; a forgotten one gets a canary too many."""


class Attempted(Protocol):
    """One attempt on a pair (`gateway.decider.Decision`)."""

    @property
    def rid(self) -> str: ...
    @property
    def prefill(self) -> EngineView: ...
    @property
    def decode(self) -> EngineView: ...
    @property
    def decided_s(self) -> float: ...


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


class Pairs:
    """What `routing.compatibility` says of the fleet as it is, and the quarantine matrix over it.

    Told of every attempt: `booked`, then at most one of `handed_over` and `failed`, at last `finished`.
    """

    def __init__(self, clock: Callable[[], float] = _loop_s, rng: Random | None = None) -> None:
        self._clock = clock
        self._shape = -1
        self._apart: tuple[Apart, ...] = ()
        self._pairs: Mapping[Pair, Match] = {}
        self._forbidden: frozenset[Pair] = frozenset()
        self._epochs: dict[EngineId, int] = {}
        self._ready_since_s: dict[EngineId, float] = {}
        self._silent_s: dict[EngineId, tuple[float, float]] = {}
        """Since when, and until when, a prefill's bootstrap server was seen to be silent."""
        self._proved_s: OrderedDict[Pair, float] = OrderedDict()
        self._closed: tuple[tuple[int, int], frozenset[Pair]] = ((-1, -1), frozenset())
        self._told: frozenset[Pair] = frozenset()
        self._lines: tuple[tuple[int, int], tuple[str, ...]] = ((-1, -1), ())
        self._shut: frozenset[str] = frozenset()
        self._by_load: frozenset[Pair] = frozenset()
        self.health = PairHealth(rng or SystemRandom())

    def apart(self, fleet: FleetSnapshot) -> Sequence[Apart]:
        """All that cannot be paired, kind by kind."""
        self._look_at(fleet)
        return self._apart

    def forbidden(self, fleet: FleetSnapshot) -> frozenset[Pair]:
        """All pairs that no request may go to now. Never all there are, save until a first canary has tried them."""
        self._look_at(fleet)
        if not self.health.records:
            return self._forbidden
        versions = (fleet.shape, self.health.version)
        if self._closed[0] != versions:
            closed = self._forbidden | self.health.closed()
            self._closed = (versions, closed - self._opened(fleet, closed))
        return self._closed[1]

    def incompatible(self, pair: Pair) -> bool:
        """Whether a pair cannot exchange KV by what its servers say of themselves."""
        return pair in self._pairs

    def shut(self, model: str, fleet: FleetSnapshot) -> bool:
        """Whether all pairs of a model are in quarantine: an outage, however the servers are."""
        self.forbidden(fleet)
        return bool(self.health.records) and model in self._shut

    def may_open(
        self, prefills: Iterable[EngineView], decodes: Iterable[EngineView], excluded: frozenset[Pair] = frozenset()
    ) -> bool:
        """Whether one of these pairs is closed for now only: a reason to wait, not to refuse."""
        sides = {view.engine_id for view in prefills}, {view.engine_id for view in decodes}
        return any(
            pair[0] in sides[0] and pair[1] in sides[1] and pair not in excluded and pair not in self._pairs
            for pair in self.health.records
        )

    def why_none(self, fleet: FleetSnapshot) -> str:
        """The reasons, as one line for who finds no pair; "" where there are none."""
        reasons = dict.fromkeys(each.match.reason for each in self.apart(fleet))
        return "; ".join([*reasons, *self.lines()][:TOLD_AT_ONCE])

    def lines(self) -> tuple[str, ...]:
        """What is to be said of pairs in trouble, the worst first, at most TOLD_AT_ONCE."""
        records = self.health.records
        if not records:
            return ()
        now_s = self._clock()
        at = (self.health.version, int(now_s))  # at most once a second, as every decision asks
        if self._lines[0] != at:
            self._lines = (at, tuple(told(pair, records[pair], now_s) for pair in worst(records, TOLD_AT_ONCE)))
        return self._lines[1]

    def as_json(self) -> list[dict[str, Any]]:
        """The pairs in trouble, the worst first, a bounded number of them."""
        now_s, records = self._clock(), self.health.records
        return [
            {
                "prefill": pair[0],
                "decode": pair[1],
                "state": records[pair].state,
                "reason": records[pair].reason,
                "since_s": now_s - records[pair].since_s,
                "failures": records[pair].failures,
                "next_canary_s": max(0.0, records[pair].due_s - now_s),
                "tried_by": records[pair].trial or None,
                "half_open": pair not in self._closed[1] and records[pair].state is PairState.QUARANTINED,
            }
            for pair in worst(records, _SHOWN)
        ]

    def states(self, fleet: FleetSnapshot) -> dict[PairState, int]:
        """How many pairs that can exchange KV are in which state."""
        self._look_at(fleet)
        counts = dict.fromkeys(PairState, 0)
        for pair, record in self.health.records.items():
            counts[record.state] += pair not in self._pairs
        sides = [sum(view.facts is not None for view in fleet.with_role(role)) for role in (Role.PREFILL, Role.DECODE)]
        counts[PairState.OK] = max(0, sides[0] * sides[1] - len(self._pairs) - sum(counts.values()))
        return counts

    # ---- attempts --------------------------------------------------------------------------------------------------

    def booked(self, attempt: Attempted) -> None:
        """A request goes to a pair. Of one that is half open it is the only one, and what becomes of it decides."""
        pair = _pair(attempt)
        if self.health.state(pair) is PairState.QUARANTINED and pair not in self._by_load:
            self.health.trial_began(_pair(attempt), attempt.rid, self._clock())

    def handed_over(self, attempt: Attempted) -> None:
        """Its KV has arrived."""
        if self._is_of_now(attempt):
            self._proved_s[_pair(attempt)] = self._clock()
            self._proved_s.move_to_end(_pair(attempt))
            if len(self._proved_s) > _PROVED_PAIRS:
                self._proved_s.popitem(last=False)
            self.health.handed_over(_pair(attempt), attempt.decided_s, self._clock())
            self._tell()

    def failed(self, attempt: Attempted, failure: AttemptFailed) -> None:
        """It has failed; whether that speaks against its pair is decided here. Nobody is to blame for its own time."""
        against = None if failure.deadline is Deadline.TOTAL else against_the_pair(failure.outcomes)
        if against is not None and self._is_of_now(attempt):
            self.health.transfer_failed(_pair(attempt), against, attempt.decided_s, self._clock())
            self._tell()

    def finished(self, attempt: Attempted) -> None:
        """It is over, whatever was said of it before."""
        self.health.trial_void(_pair(attempt), attempt.rid, self._clock())

    def proved_s(self, pair: Pair) -> float | None:
        """When a request's KV last got over this pair; None where it is not remembered."""
        return self._proved_s.get(pair)

    def _is_of_now(self, attempt: Attempted) -> bool:
        """Whether both servers are still the processes that it ran on."""
        return all(self._epochs.get(view.engine_id) == view.epoch for view in (attempt.prefill, attempt.decode))

    # ---- the fleet and the time ------------------------------------------------------------------------------------

    def heartbeat(self, prefill: EngineId, *, answered: bool) -> None:
        """A prefill's bootstrap server was asked what decodes ask it all the time."""
        now_s = self._clock()
        if answered:
            self._silent_s.pop(prefill, None)
        else:
            since_s, _ = self._silent_s.get(prefill, (now_s, now_s))
            self._silent_s[prefill] = (since_s, now_s)

    def tick(self) -> None:
        """Let time pass."""
        self.health.tick(self._ready_since_s.get, self._clock())
        self._tell()

    def _look_at(self, fleet: FleetSnapshot) -> None:
        if fleet.shape == self._shape:
            return
        self._shape = fleet.shape
        self._note_restarts(fleet)
        found = tuple(apart(fleet.with_role(Role.PREFILL), fleet.with_role(Role.DECODE)))
        if found == self._apart:
            return
        known = {each.match for each in self._apart}
        self._apart, self._pairs = found, pairs_apart(found)
        self._forbidden = frozenset(self._pairs)
        self._closed = ((-1, -1), frozenset())
        for each in [each for each in found if each.match not in known][:TOLD_AT_ONCE]:
            _log.warning("%s", line(each))

    def _note_restarts(self, fleet: FleetSnapshot) -> None:
        """Epochs that grew, servers that are ready or no longer, servers that have left."""
        for view in fleet.engines:
            before = self._epochs.get(view.engine_id, 0)
            self._epochs[view.engine_id] = view.epoch
            if 0 < before < view.epoch:
                self._restarted(view, fleet)
            if not view.takes_rooms:
                self._ready_since_s.pop(view.engine_id, None)
                continue
            self._silent_s.pop(view.engine_id, None)
            if view.engine_id not in self._ready_since_s:
                self._ready_since_s[view.engine_id] = self._clock()
        if len(self._epochs) > len(fleet.engines):
            known = {view.engine_id for view in fleet.engines}
            for gone in self._epochs.keys() - known:
                del self._epochs[gone]
                self._ready_since_s.pop(gone, None)
                self._silent_s.pop(gone, None)
            self.health.forget_all_but(known)

    def _restarted(self, view: EngineView, fleet: FleetSnapshot) -> None:
        now_s = self._clock()
        if view.spec.role is Role.DECODE:
            self.health.decode_restarted(view.engine_id, now_s)
        elif view.spec.role is Role.PREFILL:
            since_s, until_s = self._silent_s.pop(view.engine_id, (now_s, now_s))
            decodes = [decode.engine_id for decode in fleet.with_role(Role.DECODE)]
            self.health.prefill_restarted(view.engine_id, decodes, until_s - since_s, now_s)
        self._tell()

    def _opened(self, fleet: FleetSnapshot, closed: frozenset[Pair]) -> set[Pair]:
        """What is open all the same: silent pairs where so many are that it must be load, and the least bad pair of a
        model that would else have none."""
        found: set[Pair] = set()
        ready = [view for view in fleet.engines if view.takes_rooms and view.facts is not None]
        by_model: dict[str, tuple[list[EngineId], list[EngineId]]] = {}
        for view in ready:
            assert view.facts is not None  # by the line above
            by_role = by_model.setdefault(view.facts.model, ([], []))
            by_role[view.spec.role is Role.DECODE].append(view.engine_id)
        shut, by_load = set(), set[Pair]()
        for model, (prefills, decodes) in by_model.items():
            sides = set(prefills), set(decodes)
            inside = {p for p in self.health.records if p[0] in sides[0] and p[1] in sides[1] and p not in self._pairs}
            loaded = _by_load(self.health.silent(inside), len(prefills) * len(decodes))
            found |= loaded
            by_load |= loaded
            if inside and not loaded and all((prefill, decode) in closed for prefill in prefills for decode in decodes):
                shut.add(model)
                least = self.health.least_bad(inside)
                found |= {least} if least is not None else set()
        self._by_load = frozenset(by_load)
        self._shut = frozenset(shut)
        return found

    def _tell(self) -> None:
        """Log which pairs have come into quarantine, and how many have left it."""
        closed = frozenset(
            pair for pair, record in self.health.records.items() if record.state is not PairState.SUSPECTED
        )
        if closed == self._told:
            return
        new, opened = closed - self._told, self._told - closed
        self._told = closed
        records = self.health.records
        for pair in worst({pair: records[pair] for pair in new}, TOLD_AT_ONCE):
            _log.warning("%s", told(pair, records[pair], self._clock()))
        if len(new) > TOLD_AT_ONCE:
            _log.warning("%d more pairs are quarantined", len(new) - TOLD_AT_ONCE)
        for pair in sorted(opened)[:TOLD_AT_ONCE]:
            _log.info("pair %s, %s is open again", *pair)


def _by_load(silent: set[Pair], pairs: int) -> set[Pair]:
    """All of them, where they are more than half of a model's pairs, over several servers of both sides."""
    spread = all(len({pair[side] for pair in silent}) > 1 for side in (0, 1))
    return silent if spread and 2 * len(silent) > pairs else set()


def _pair(attempt: Attempted) -> Pair:
    return attempt.prefill.engine_id, attempt.decode.engine_id


def line(found: Apart) -> str:
    """One line on servers that are not paired: how many, an example, and why."""
    pairs = len(found.prefills) * len(found.decodes)
    these = "one pair is" if pairs == 1 else f"{pairs} pairs are"
    return (
        f"{these} not formed ({found.match.fit}), such as {found.prefills[0]} and {found.decodes[0]}: "
        f"{found.match.reason}"
    )
