"""What faults and the driver may see and touch of a run's processes and links: the contract of `processes.py`.

Names: `prefill0`, `decode1`, `gateway0`, `redis`; links `client>gateway0`, `gateway0>prefill1`, `gateway0>redis`,
`prefill0>decode1` (the KV itself).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from failover.chaos.record import Instance, Mark


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

    def impose(self, forth: LinkRule = PLAIN, back: LinkRule = PLAIN, *, refuse: bool = False) -> Callable[[], None]:
        """From now on, for open connections and those to come, until what this returns is called; twice is once.

        Rules that are on at once add up: delays are summed, the least bandwidth counts. `refuse`: new connections are.
        """

    def cut(self) -> int:
        """End all open connections in order (FIN), behind what is under way; how many there were."""

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

    async def start(self, flags: Sequence[str] = (), before: Sequence[str] = ()) -> None:
        """A new process in its place, at the same address, unless one runs; returns when it answers.

        This one time `flags` follow its own, and `before` precedes its command, as in `nice -n 5`. Unable if it does
        not come to answer.
        """


class World(Protocol):
    """The run's processes and links. Every method raises `Unable` where a run (on a real fleet) has no such thing."""

    def process(self, name: str) -> Process:
        """The process of that name; killing it is announced by `mark`."""

    def names(self, role: str) -> Sequence[str]:
        """The processes of a role: prefill, decode, gateway, redis."""

    def seen(self, gateway: str, engine: str) -> str:
        """The URL by which a gateway knows an engine: that of the proxy, where there is one between them."""

    def link(self, name: str) -> Link:
        """The proxy in that link; it was put there when the run began."""

    async def admin(
        self, name: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Call an emulated engine's endpoints (`/emulator/...`) or a gateway's (`/admin/...`); its JSON answer.

        Unable when it cannot.
        """

    async def redis(self, *words: str | int) -> Any:
        """Run one command on the run's Redis."""

    def mark(self, name: str, what: str) -> None:
        """Note for the record that something befell an instance now."""


class ClientLinks(Protocol):
    """Where the clients of a run find its gateways."""

    def client_url(self, gateway: str) -> str:
        """Where clients find a gateway."""

    def broke(self, gateway: str, from_s: float, to_s: float) -> bool:
        """Whether the link to a gateway broke all that its clients had open at some moment between."""


class RunWorld(World, Protocol):
    """What a run needs beside. Times are seconds since its load began."""

    @property
    def links(self) -> ClientLinks: ...

    @property
    def instances(self) -> tuple[Instance, ...]: ...

    @property
    def marks(self) -> Sequence[Mark]: ...

    def now_s(self) -> float: ...

    def begin(self) -> None:
        """The load begins now."""

    def hurry(self) -> None:
        """The run is stopped: from now on nothing is started, and nobody gets time to end. Twice is once."""

    async def heal(self) -> list[str]:
        """Nothing stands still, and but for a hurry everything runs, as far as that is possible; what does not."""


class Unable(Exception):
    """This cannot be done to this target, or not now; the words say why."""


class NotAnyMore(Unable):
    """The run is being stopped: nothing is started any more."""
