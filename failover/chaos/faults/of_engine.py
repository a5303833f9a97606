"""What the faults inside emulated engines have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_process import ENGINES, ProcessFault
from failover.chaos.scenario import Value
from failover.chaos.world import Unable


class EngineFault(ProcessFault):
    """A fault that an emulated engine has itself (`POST /emulator/fault`); lifted, it is taken out of it again.

    It goes wrong with its next `count` requests, where there is such a parameter. One that died of it comes again.
    """

    targets: ClassVar[frozenset[str]] = ENGINES
    params: ClassVar[Mapping[str, Value]] = {"count": 1}

    @abstractmethod
    def _fault(self) -> Mapping[str, Any]:
        """The body of the call."""

    async def apply(self) -> str:
        if not self._process.running:
            raise Unable(f"{self._target} does not run")
        self._pid = self._process.pid
        await self._world.admin(self._target, "POST", "/emulator/fault", {"fault_id": self._id, **self._fault()})
        return ""

    async def lift(self) -> None:
        """Unable where an engine that runs does not answer: once it does, it can be lifted."""
        if self._still_runs:
            try:
                await self._world.admin(self._target, "DELETE", f"/emulator/fault/{self._id}")
            except Unable:
                if self._still_runs:  # else it has died of the fault meanwhile
                    raise
        if not self._still_runs:
            await self._revive()
        self._pid = None

    @property
    def _id(self) -> str:
        """One fault of a run; chosen here, so that it can be taken out also when its call was cancelled."""
        return f"chaos-{id(self)}"
