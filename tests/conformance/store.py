"""What the real side answered, kept as files: an interrupted run goes on, and a changed emulator is judged at once.

The text of a case's own play is part of the key, that of the helpers which plays share is not: after changing one of
those, run with `--fresh`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from engines.sglang_process import VERSION, Launch
from tests.conformance import stage
from tests.conformance.cases import Case
from tests.conformance.sides import REAL_FLAGS, TIME_LIMITS


class Store:
    """Observations by case; the key holds the case, how it is played, SGLang's version, its flags and the model."""

    def __init__(self, launch: Launch, fresh: bool = False) -> None:
        self._folder = launch.directory / "conformance"
        self._folder.mkdir(exist_ok=True)
        self._fresh = fresh
        model = hashlib.sha256()
        for file in sorted(launch.model_dir.iterdir()):
            model.update(file.name.encode() + b"\0" + file.read_bytes())
        flags = [launch.arguments, sorted(map(str, launch.by_role.items())), sorted(launch.environment.items())]
        told = [VERSION, model.hexdigest(), *flags, REAL_FLAGS, TIME_LIMITS, inspect.getsource(stage)]
        self._base = json.dumps(told, default=str)

    def get(self, case: Case) -> dict[str, Any] | None:
        """What was seen, if it is kept and may be used."""
        file = self._file(case)
        if self._fresh or not file.exists():
            return None
        seen: dict[str, Any] = json.loads(file.read_text())
        return seen

    def put(self, case: Case, seen: dict[str, Any]) -> None:
        """Keep an observation."""
        file = self._file(case)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(seen))
        partial.replace(file)

    def _file(self, case: Case) -> Path:
        asked = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        for unasked in ("choreography", "loose", "timed", "fault"):
            del asked[unasked]
        asked["play"] = _source(case)
        key = hashlib.sha256((self._base + json.dumps(asked, default=repr, sort_keys=True)).encode()).hexdigest()
        return self._folder / f"{case.name.replace('/', ' ')}-{key[:16]}.json"


def _source(case: Case) -> str:
    """The text of the play, and the values it was made with."""
    play = case.choreography
    if play is None:
        return ""
    bound = inspect.getclosurevars(play).nonlocals
    return inspect.getsource(play) + repr(sorted(bound.items()))
