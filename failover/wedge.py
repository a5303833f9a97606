"""Finds the instance that says it is ready, has work, and does none of it. Pure: times are arguments, in seconds.

Progress is output of any leg on it, or a load snapshot that differs from the one before: counters of computed tokens,
busy time and decode steps, tokens held, requests running or waiting. SGLang takes a snapshot with every prefill and
idle turn of its scheduler and every 15 decode steps (`load_inquirer.py`, `scheduler.py:on_idle`), so

- a snapshot whose timestamp stands still while we wait for something says that the scheduler stands still;
- one that is new and still the same says so only while the instance has work of its own: requests that wait for the
  other server of their pair are no sign against this one.

How long is too long is measured by the instance's own pace: long forwards are no wedge. Loads that are missing prove
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from engines.types import EngineLoad

SHORTEST_S, LONGEST_S = 10.0, 120.0
"""No instance is called stuck before the first, however quick it is; each is after the second, however slow."""
_PACES = 8.0
_FORWARDS = 3.0
_KEEP_RATIO = 0.97
"""The pace is the longest pause between two signs of progress, forgotten slowly: halved in some 23 looks."""


class Owed(NamedTuple):
    """What an instance still owes to our requests. `predicted_s`: the longest prefill among them, 0 on decodes."""

    requests: int
    predicted_s: float = 0.0


NOTHING_OWED = Owed(0)


def signature(load: EngineLoad) -> tuple[float, ...]:
    """What changes in a snapshot whenever the instance does anything."""
    return (
        load.prefill_uncached_tokens_total,
        load.prefill_busy_us_total,
        load.decode_steps_total,
        load.used_tokens,
        load.total_tokens,
        load.running_requests,
        load.waiting_requests,
    )


def has_own_work(load: EngineLoad) -> bool:
    """Whether it has requests whose next step is its own.

    A prefill between two chunks of a request counts it neither as running nor as waiting, but its tokens as to be
    computed; so it does with those of requests that wait for a decode.
    """
    if load.running_requests + load.waiting_requests > load.waiting_for_peer_requests:
        return True
    return load.waiting_uncached_tokens > 0 and not load.waiting_for_peer_requests


@dataclass(slots=True)
class Watch:
    """One instance: `progress` with every output of it, `saw` with every load snapshot."""

    shortest_s: float = SHORTEST_S
    pace_s: float = 0.0
    _load: EngineLoad | None = None
    _output_s: float = -math.inf
    _moved_s: float = -math.inf
    """The last sign of progress, or the last moment at which there was nothing to wait for."""
    _ticked_s: float = -math.inf
    """The last moment at which its scheduler was seen to turn, or there was nothing to wait for."""
    is_moving: bool = False
    """Whether its last snapshot shows that it works, or could: its scheduler turns, and it has nothing to do."""

    def progress(self, now_s: float) -> None:
        """Output of a leg came."""
        self._output_s = now_s

    def saw(self, load: EngineLoad | None, owed: Owed, now_s: float) -> float:
        """For how long it has done nothing that it should have done; 0.0 while it moves, or nothing is known."""
        before, self._load = self._load, load
        if load is None or before is None:
            self.is_moving = False
            self._moved_s = self._ticked_s = now_s
            return 0.0
        moved = signature(load) != signature(before)
        ticked = moved or load.taken_s != before.taken_s
        free = not has_own_work(load)
        self.is_moving = moved or (ticked and free)
        if not owed.requests:
            self._moved_s = self._ticked_s = now_s
            return 0.0
        if moved or free:
            self._end_pause(now_s)
        if ticked:
            self._ticked_s = now_s
        if self._output_s > self._moved_s:
            self._end_pause(self._output_s)
        self._ticked_s = max(self._ticked_s, self._output_s)
        self.pace_s *= _KEEP_RATIO
        return max(0.0, now_s - min(self._moved_s, self._ticked_s))

    def patience_s(self, owed: Owed) -> float:
        """How long it may do nothing before it counts as stuck."""
        return min(LONGEST_S, max(self.shortest_s, _PACES * self.pace_s, _FORWARDS * owed.predicted_s))

    def _end_pause(self, now_s: float) -> None:
        self.pace_s = max(self.pace_s, now_s - self._moved_s)
        self._moved_s = now_s
