"""What a run has left behind: KV on engines, and what gateways and Redis still count. A shell: it only asks.

Everything is asked of those that hold it: the engines' ledgers, the gateways' own gauges, what they have open. Their
connections to engines are no leftovers: a pool keeps them, and the engines say that nothing is alive on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping

from failover.chaos import explained
from failover.chaos.children import Child
from failover.chaos.explained import JOURNAL, Canary
from failover.chaos.history import Ledger
from failover.chaos.open_files import CLOSE_WAIT, LISTEN, inodes, other_files, tcp_sockets
from failover.chaos.processes import ENGINES, Processes
from failover.chaos.world import Unable
from failover.journal import FailoverKeys

GAUGES = (
    "pdgate_live_bookings",
    "pdgate_queue_requests",
    "pdgate_queue_bytes",
    "pdgate_releases_pending",
    "pdgate_pinned_requests",
    "pdgate_prefill_turns_waiting",
    "pdgate_kv_unaccounted_tokens",
    "pdgate_booked_uncached_tokens",
    "pdgate_booked_kv_tokens",
    "pdgate_booked_elsewhere_tokens",
)
"""What is 0 in an idle gateway."""
UNCLEAN = ("Traceback", "crashed", "never retrieved", " ERROR ")
"""What no log of a gateway may hold."""
_JOURNALS = FailoverKeys("*", "*").attempts("*").decode()
_CLIENTS = "sockets of clients in"
_POLL_S = 0.1
_SHOWN_CHARS = 120


class Leftovers:
    """Asks until nothing is left. `before` is called once, when all is idle and the load has not begun."""

    def __init__(self, world: Processes) -> None:
        self._world = world
        self._files: dict[str, int] = {}
        self.ledgers: tuple[Ledger, ...] = ()
        self.counts: dict[str, int] = {}

    async def before(self) -> None:
        """Note what an idle gateway has open."""
        self._files = {gateway.name: other_files(gateway.pid) for gateway in self._world.of("gateway")}

    async def wait(self, within_s: float, *, with_clients: bool = True) -> bool:
        """Wait until nothing is left; False if something is after that time. `ledgers` and `counts` are of the end.

        `with_clients` False: gateways are still asked for other things, so that connections to them do not count.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while True:
            await self.look()
            counts = [n for name, n in self.counts.items() if with_clients or not name.startswith(_CLIENTS)]
            if not any(counts) and not any(ledger.by_room for ledger in self.ledgers):
                return True
            if loop.time() > until_s:
                return False
            await asyncio.sleep(_POLL_S)

    async def look(self) -> None:
        """Ask everybody once; what gateways' own canaries hold does not count."""
        self.counts = {}
        for gateway in self._world.of("gateway"):
            self._count_open(gateway)  # before our own calls open anything there
        canaries = await self._canaries()
        found = [await self._ask_engine(engine) for engine in self._world.of(*ENGINES)]
        for gateway in self._world.of("gateway"):
            await self._ask_gateway(gateway)
        if self._world.of("redis"):
            await self._ask_redis()
        canaries |= await self._canaries()
        self.ledgers = explained.ledgers((each for each in found if each is not None), canaries)
        self.counts = explained.counts(self.counts, canaries)
        for child in self._world.of("gateway", "redis"):
            self.counts[f"crashes of {child.name}"] = len(child.crashes)

    def log_errors(self) -> dict[str, int]:
        """Gateways whose log holds what none should."""
        found = {}
        for gateway in self._world.of("gateway"):
            text = gateway.log.read_text(errors="replace") if gateway.log.exists() else ""
            first = _first_error(text)
            found[f"errors in the log of {gateway.name}" + (f" ({first[:_SHOWN_CHARS]})" if first else "")] = int(
                bool(first)
            )
        return found

    async def _canaries(self) -> set[Canary]:
        """Those that are under way now; of gateways that answer."""
        found = set[Canary]()
        for gateway in self._world.of("gateway"):
            with contextlib.suppress(Unable):  # that is counted elsewhere
                told = await self._world.told(gateway.name, "/pdgate/canaries")
                for each in told["under_way"]:
                    prefill, decode = (self._world.name_of(each[leg]) for leg in ("prefill", "decode"))
                    tokens = int(each["uncached_tokens"]), int(each["kv_tokens"])
                    found.add(Canary(gateway.name, str(each["room"]), prefill, decode, *tokens))
        return found

    async def _ask_engine(self, engine: Child) -> Ledger | None:
        try:
            told = await self._world.admin(engine.name, "GET", "/emulator/ledger")
            live = await self._world.admin(engine.name, "GET", "/emulator/requests")
        except Unable:
            self.counts[f"engines that do not answer: {engine.name}"] = 1
            return None
        self.counts[f"cached tokens that are locked on {engine.name}"] = told["locked_cache_tokens"]
        self.counts[f"requests alive on {engine.name}"] = len(live["live"])
        return Ledger(engine.name, told["by_room"])

    async def _ask_gateway(self, gateway: Child) -> None:
        try:
            text = await self._world.text(gateway.name, "/metrics")
        except Unable:
            self.counts[f"gateways that do not answer: {gateway.name}"] = 1
            return
        for name, value in gauges(text).items():
            self.counts[f"{name} of {gateway.name}"] = value
        with contextlib.suppress(Unable):  # that is counted already
            replicas = (await self._world.told(gateway.name, "/readyz"))["replicas"]
            others = len(self._world.of("gateway")) - replicas["live"] if replicas is not None else 0
            self.counts[f"gateways that {gateway.name} does not know of"] = max(0, others)

    def _count_open(self, gateway: Child) -> None:
        """Sockets of its clients, and those that it should have closed; gateways may ask each other whether they live.

        Also what else it has open, beyond what it had when it was idle.
        """
        more = other_files(gateway.pid) - self._files.get(gateway.name, 0)
        self.counts[f"open files of {gateway.name}"] = max(0, more)
        everyone = tcp_sockets()
        mine = [everyone[inode] for inode in inodes(gateway.pid) if inode in everyone]
        peers = {inode for each in self._world.of("gateway") for inode in inodes(each.pid)}
        of_peers = {(everyone[inode].peer_port, everyone[inode].port) for inode in peers & everyone.keys()}
        port = self._world.addresses.ports[gateway.name]
        taken = [each for each in mine if each.port == port and each.state != LISTEN]
        clients = sum((each.port, each.peer_port) not in of_peers for each in taken)
        self.counts[f"{_CLIENTS} {gateway.name}"] = clients
        left = sum(each.state == CLOSE_WAIT for each in mine)
        self.counts[f"sockets in {gateway.name} whose peers have closed them"] = left

    async def _ask_redis(self) -> None:
        """How many attempts are in the journals of gateways, dead ones included."""
        try:
            names = await self._world.redis("KEYS", _JOURNALS)
            self.counts[JOURNAL] = sum([await self._world.redis("HLEN", name) for name in names])
        except Unable:
            self.counts["Redis that does not answer"] = 1


def gauges(text: str) -> Mapping[str, int]:
    """The sums of GAUGES over their labels, in Prometheus' text; what is not known is 0."""
    sums = dict.fromkeys(GAUGES, 0)
    for line in text.splitlines():
        sample, _, value = line.rpartition(" ")
        name = sample.partition("{")[0]
        if name in sums and not math.isnan(float(value)):
            sums[name] += math.ceil(abs(float(value)))
    return sums


def _first_error(text: str) -> str:
    """The first line of a log that says that something went wrong which was not foreseen; empty if there is none."""
    return next((line for line in text.splitlines() if any(word in line for word in UNCLEAN)), "")
