"""What faults and the driver may see and touch of a run's processes and links: the contract of `processes.py`.

Names: `prefill0`, `decode1`, `gateway0`, `redis`; links `client>gateway0`, `gateway0>prefill1`, `gateway0>redis`,
`prefill0>decode1` (the KV itself).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LinkRule:
    """How bytes pass a link now, in each direction; the default is a plain link.

    `delay_s` (and up to `jitter_s` more, by chance) for each piece, in order; `bytes_per_s` None: as fast as they come.
    `silent`: nothing passes, and nobody is told (half-open); what was sent meanwhile passes when it ends.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    silent: bool = False


PLAIN = LinkRule()


class Link(Protocol):
    """One TCP link with a proxy in it. No byte is lost by a change of rules; only `cut` and `reset` end connections."""

    def set_rules(self, forth: LinkRule, back: LinkRule) -> None:
        """From now on, for connections that are open and those to come."""

    def refuse(self, refused: bool) -> None:
        """New connections are refused while it is True."""

    def cut(self) -> int:
        """End all open connections in order (FIN); how many there were."""

    def reset(self) -> int:
        """Break all open connections (RST); how many there were."""


class Process(Protocol):
    """One process of the run."""

    name: str
    role: str
    url: str

    @property
    def pid(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def send_signal(self, number: signal.Signals) -> None:
        """No effect when it has ended."""

    async def wait(self) -> int:
        """Its exit status, when it has ended."""

    async def start(self) -> None:
        """A new process in its place, at the same address; returns when it answers."""


class World(Protocol):
    """The run's processes and links. Every method raises `Unable` where a run (on a real fleet) has no such thing."""

    def process(self, name: str) -> Process:
        """The process of that name; killing it is announced by `mark`."""

    def link(self, name: str) -> Link:
        """The proxy in that link; it was put there when the run began."""

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Call an emulated engine's own endpoints (`/emulator/...`); its JSON answer. Unable when it cannot."""

    async def redis(self, *words: str | int) -> Any:
        """Run one command on the run's Redis."""

    def mark(self, name: str, what: str) -> None:
        """Note for the record that something befell an instance now."""


class Unable(Exception):
    """This cannot be done to this target, or not now; the words say why."""
