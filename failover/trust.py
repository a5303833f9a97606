"""How much trust instances have left: failures in a row, and pauses between trials that went wrong. Pure but for `rng`.

Times are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from engines.types import EngineId
from failover.machine import CALM_S, MAX_FAULTS, pause_s


@dataclass(slots=True)
class _Record:
    faults: int = 0
    last_fault_s: float = 0.0
    failed_trials: int = 0
    last_trial_s: float = 0.0
    pauses_until_s: float = 0.0


class Trust:
    """The records of all instances of a fleet; one that never failed has none."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._records: dict[EngineId, _Record] = {}

    def failed(self, engine_id: EngineId, now_s: float, progress_s: float) -> bool:
        """A leg failed by its server's fault; whether MAX_FAULTS have, with no output (last: `progress_s`) between."""
        record = self._record(engine_id)
        if progress_s > record.last_fault_s:
            record.faults = 0
        record.faults += 1
        record.last_fault_s = now_s
        if record.faults < MAX_FAULTS:
            return False
        record.faults = 0
        return True

    def trial_failed(self, engine_id: EngineId, now_s: float) -> None:
        """A request on probation went wrong: the next pause is longer."""
        record = self._record(engine_id)
        if now_s - record.last_trial_s > CALM_S:
            record.failed_trials = 0
        record.failed_trials += 1
        record.last_trial_s = now_s
        record.pauses_until_s = now_s + pause_s(record.failed_trials, self._rng.random())

    def pauses(self, engine_id: EngineId, now_s: float) -> bool:
        """Whether its next trial is not due yet."""
        record = self._records.get(engine_id)
        return record is not None and now_s < record.pauses_until_s

    def forget(self, engine_id: EngineId) -> None:
        """It is another process now."""
        self._records.pop(engine_id, None)

    def _record(self, engine_id: EngineId) -> _Record:
        return self._records.setdefault(engine_id, _Record())
