"""What tests may do to a server: hold requests at a stage, and make the next ones go wrong. Pure registries.

`admin.py` serves them under `/emulator/`; the scheduler core asks `Holds.check`, the server asks `Faults.take`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engines.emulator.core import Job

ROLE_CHUNK, FINISH_CHUNK = "role_chunk", "finish_chunk"
"""Places in what is written of a stream: behind a chat's role chunk, and behind the last chunk before `[DONE]`."""
HOLD_STAGES = frozenset(
    {"bootstrap", "reserved", "prefill_chunk", "transfer", "handed_over", "token", ROLE_CHUNK, FINISH_CHUNK}
)
_COUNTED_STAGES = frozenset({"prefill_chunk", "token"})


class HoldState(StrEnum):
    """Whether a hold waits for a request, has one, or is over."""

    ARMED = "armed"
    HELD = "held"
    RELEASED = "released"


@dataclass(slots=True)
class Hold:
    """Stops the next request that comes to `stage` (for chunks and tokens: after the k-th), or only its stream."""

    hold_id: int
    stage: str
    count: int = 1
    rid: str = ""
    state: HoldState = HoldState.ARMED
    job: Job | None = None
    resume: Callable[[], None] | None = None
    """Goes on writing, where the hold stops only that."""


class Holds:
    """The holds of one server."""

    def __init__(self) -> None:
        self._holds: dict[int, Hold] = {}
        self._armed: list[Hold] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a hold gets hold of a request, or ends."""

    def arm(self, stage: str, count: int = 1, rid: str = "") -> Hold:
        """Add a hold; ValueError for an unknown stage. An empty `rid` matches any request."""
        if stage not in HOLD_STAGES:
            raise ValueError(f"unknown stage {stage!r}; one of {', '.join(sorted(HOLD_STAGES))}")
        hold = Hold(len(self._holds) + 1, stage, count, rid)
        self._holds[hold.hold_id] = hold
        self._armed.append(hold)
        return hold

    @property
    def armed(self) -> bool:
        """Whether any hold waits for a request."""
        return bool(self._armed)

    def get(self, hold_id: int) -> Hold | None:
        return self._holds.get(hold_id)

    def check(self, job: Job, stage: str, count: int) -> bool:
        """Whether `job`, now at `stage` (`count` chunks or tokens done), is stopped by a hold."""
        return bool(self._armed) and self.catch(job, stage, count) is not None

    def catch(self, job: Job, stage: str, count: int = 0) -> Hold | None:
        """The hold that now stops `job`, if any."""
        for hold in self._armed:
            counted = stage not in _COUNTED_STAGES or hold.count == count
            if hold.stage == stage and counted and hold.rid in ("", job.rid):
                hold.state, hold.job = HoldState.HELD, job
                self._armed.remove(hold)
                self.on_change()
                return hold
        return None

    def release(self, hold: Hold) -> Job | None:
        """End `hold`; the job that must now go on, if it held one."""
        held, hold.state = hold.state is HoldState.HELD, HoldState.RELEASED
        if hold in self._armed:
            self._armed.remove(hold)
        self.on_change()
        return hold.job if held else None

    def forget(self, job: Job) -> None:
        """`job` has ended: holds on it are over."""
        for hold in self._holds.values():
            if hold.job is job and hold.resume is None:
                hold.state = HoldState.RELEASED


STREAM_FAULTS = ("truncate_stream", "error_event", "stall", "die")
STANDING_FAULTS = frozenset({"stuck", "ill", "slow_scheduler", "leak", "poison"})
"""Those that are no request's: they stay until they are taken out."""
FAULTS = frozenset({"status", "abort_in_200", "partial_kv", "drop_connection", *STREAM_FAULTS, *STANDING_FAULTS})
FAULT_PLACES = frozenset({"token", ROLE_CHUNK, FINISH_CHUNK})


@dataclass(slots=True)
class Fault:
    """Makes the next `count` requests go wrong in the way called `name`; with a `rid`, only that one.

    A stream goes wrong when so many tokens were written as `after_tokens` says, or `at` another place of it. `die` ends
    the whole server, like kill -9, when what was written is out. Standing faults are the whole server's: `stuck` (no
    scheduler moves, health stays good), `ill` (health is bad, all works), `slow_scheduler` (`pause_s` lost in each
    round), `leak` (`tokens` of KV on each rank are nobody's), `poison` (a prompt with `word` in it kills).
    """

    name: str
    count: int = 1
    status: int = 500
    after_tokens: int = 0
    at: str = "token"
    rid: str = ""
    pause_s: float = 0.0
    tokens: int = 0
    word: str = ""
    fault_id: str = ""


class Faults:
    """The faults of one server, used up in the order they were set."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a fault is set or taken out."""

    def set(self, fault: Fault) -> None:
        """Add `fault`; ValueError for an unknown name or place, or for a poison without a word."""
        for value, known in ((fault.name, FAULTS), (fault.at, FAULT_PLACES)):
            if value not in known:
                raise ValueError(f"unknown fault or place {value!r}; one of {', '.join(sorted(known))}")
        if fault.name == "poison" and not fault.word:
            raise ValueError("poison needs a word")
        self._faults.append(fault)
        self.on_change()

    def remove(self, fault_id: str) -> None:
        """Take out what was set under that id, if it is not used up."""
        self._faults = [fault for fault in self._faults if fault.fault_id != fault_id]
        self.on_change()

    def clear(self) -> None:
        self._faults.clear()
        self.on_change()

    def standing(self, name: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.name == name]

    def take(self, *names: str, rid: str = "") -> Fault | None:
        """The next fault among `names`, counted down: of those for `rid` alone, or without one of those for any."""
        for fault in self._faults:
            if fault.name in names and fault.rid == rid:
                fault.count -= 1
                if fault.count <= 0:
                    self._faults.remove(fault)
                return fault
        return None
