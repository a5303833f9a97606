"""Whose KV of dead gateways engines still hold, by the engines' own ledgers looked at again and again. Pure.

A room begins with the process id of the gateway that made it (`engines/sglang_wire.py`), so that rooms tell whose they
are also when nobody can be asked any more. Times are of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from engines.sglang_wire import process_of
from failover.chaos.record import Orphan

MAX_ORPHANS = 20_000
"""A gateway has at most as many attempts under way, on two engines each."""


@dataclass(slots=True)
class _Process:
    gateway: str
    begun_s: float
    ids: set[int] = field(default_factory=set)


class Orphans:
    """What was seen of one run. A gateway's process is known by when it was begun."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, float], _Process] = {}
        self._found: dict[tuple[str, str], Orphan] = {}

    def learn(self, gateway: str, begun_s: float, process_id: int) -> None:
        """The process that a gateway has had since then makes rooms with this process id."""
        self._processes.setdefault((gateway, begun_s), _Process(gateway, begun_s)).ids.add(process_id)

    def knows(self, gateway: str, at_s: float) -> bool:
        """Whether rooms are known of the process that a gateway had then."""
        return self._process_at(gateway, at_s) is not None

    def look(self, at_s: float, engine: str, by_room: Iterable[str], deaths: Mapping[str, Iterable[float]]) -> None:
        """An engine holds KV of these rooms now; `deaths`: when processes of which gateway have died."""
        dead = dict(self._dead(deaths))
        for room in by_room if dead else ():
            key = (engine, room)
            if key in self._found:
                self._found[key] = replace(self._found[key], seen_s=at_s)
            elif (of := dead.get(process_of(int(room)))) is not None and len(self._found) < MAX_ORPHANS:
                gateway, died_s = of
                self._found[key] = Orphan(gateway, died_s, engine, room, at_s)

    @property
    def found(self) -> tuple[Orphan, ...]:
        """Each with when it was seen last."""
        return tuple(self._found.values())

    def _dead(self, deaths: Mapping[str, Iterable[float]]) -> Iterator[tuple[int, tuple[str, float]]]:
        """Process ids of the dead, with whose they were and when it died."""
        for gateway, times in deaths.items():
            for died_s in times:
                if (process := self._process_at(gateway, died_s)) is not None:
                    yield from ((each, (gateway, died_s)) for each in process.ids)

    def _process_at(self, gateway: str, at_s: float) -> _Process | None:
        begun = [each for each in self._processes.values() if each.gateway == gateway and each.begun_s <= at_s]
        return max(begun, key=lambda each: each.begun_s, default=None)
