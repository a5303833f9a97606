"""A prompt that kills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from failover.chaos.faults.of_engine import EngineFault
from failover.chaos.scenario import Value


class PoisonPrompt(EngineFault):
    """A prompt with the word `word` in it kills an engine as soon as it comes."""

    params: ClassVar[Mapping[str, Value]] = {"word": "arsenic"}

    def _fault(self) -> Mapping[str, Any]:
        return {"fault": "poison", **self._params}
