"""The pairs of the fleet that must not be formed: computed once for each state of it, told when the reasons change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from engines.types import FleetSnapshot, Role
from routing.compatibility import Apart, Match, Pair, apart, pairs_apart

_log = logging.getLogger("pdgate.pairs")

TOLD_AT_ONCE = 8


class Pairs:
    """What `routing.compatibility` says of the fleet as it is."""

    def __init__(self) -> None:
        self._version = -1
        self._apart: tuple[Apart, ...] = ()
        self._pairs: Mapping[Pair, Match] = {}
        self._forbidden: frozenset[Pair] = frozenset()

    def apart(self, fleet: FleetSnapshot) -> Sequence[Apart]:
        """All that must not be paired, kind by kind."""
        self._look_at(fleet)
        return self._apart

    def forbidden(self, fleet: FleetSnapshot) -> frozenset[Pair]:
        """The same, pair by pair."""
        self._look_at(fleet)
        return self._forbidden

    def why_none(self, fleet: FleetSnapshot) -> str:
        """The reasons, as one line for who finds no pair; "" where there are none."""
        reasons = dict.fromkeys(each.match.reason for each in self.apart(fleet))
        return "; ".join(list(reasons)[:TOLD_AT_ONCE])

    def _look_at(self, fleet: FleetSnapshot) -> None:
        if fleet.version == self._version:
            return
        self._version = fleet.version
        found = tuple(apart(fleet.with_role(Role.PREFILL), fleet.with_role(Role.DECODE)))
        if found == self._apart:
            return
        known = {each.match for each in self._apart}
        self._apart, self._pairs = found, pairs_apart(found)
        self._forbidden = frozenset(self._pairs)
        for each in [each for each in found if each.match not in known][:TOLD_AT_ONCE]:
            _log.warning("%s", line(each))


def line(found: Apart) -> str:
    """One line on servers that are not paired: how many, an example, and why."""
    pairs = len(found.prefills) * len(found.decodes)
    these = "one pair is" if pairs == 1 else f"{pairs} pairs are"
    return (
        f"{these} not formed ({found.match.fit}), such as {found.prefills[0]} and {found.decodes[0]}: "
        f"{found.match.reason}"
    )
