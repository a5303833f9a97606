"""Whether so many servers of a role are late that this is ignored: computed once for each state of the fleet, told."""

from __future__ import annotations

import logging

from engines.types import FleetSnapshot, Role
from routing.filters import roles_in_panic

_log = logging.getLogger("pdgate.panic")


class Panic:
    """What `routing.filters.roles_in_panic` says of the fleet as it is."""

    def __init__(self) -> None:
        self._shape = -1
        self._roles: frozenset[Role] = frozenset()

    def roles(self, fleet: FleetSnapshot) -> frozenset[Role]:
        """The roles whose late servers get rooms all the same."""
        if fleet.shape != self._shape:
            self._shape = fleet.shape
            before, self._roles = self._roles, roles_in_panic(fleet)
            for role in sorted(self._roles - before):
                _log.warning("most %s servers are late with their answers: that is ignored, they get rooms", role)
            for role in sorted(before - self._roles):
                _log.info("enough %s servers answer in time again", role)
        return self._roles
