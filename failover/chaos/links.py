"""The links of a run that have a proxy in them, and what addresses that leaves everybody with. A shell.

Gateways of one fleet must know an engine by the same URL. Where there are several, one door stands before each engine
that is behind a proxy, and gives each connection to the proxy of the gateway that has opened it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random

from engines.server_process import free_ports
from failover.chaos.commands import HOST, Addresses
from failover.chaos.door import Door
from failover.chaos.proxy import TcpProxy
from failover.chaos.world import PLAIN, Link, LinkRule, Unable

MAX_BREAKS = 10_000


class ClientLink:
    """A link from the clients to a gateway: it remembers when it broke what was open."""

    def __init__(self, proxy: TcpProxy, now_s: Callable[[], float]) -> None:
        self._proxy, self._now_s = proxy, now_s
        self._broke_s: list[float] = []

    def impose(self, forth: LinkRule = PLAIN, back: LinkRule = PLAIN, *, refuse: bool = False) -> Callable[[], None]:
        return self._proxy.impose(forth, back, refuse=refuse)

    def cut(self) -> int:
        self._note()
        return self._proxy.cut()

    def reset(self) -> int:
        self._note()
        return self._proxy.reset()

    def broke(self, from_s: float, to_s: float) -> bool:
        """Whether it broke all that was open at some moment from then till then."""
        return any(from_s <= at_s <= to_s for at_s in self._broke_s)

    def _note(self) -> None:
        del self._broke_s[:-MAX_BREAKS]
        self._broke_s.append(self._now_s())


class NamedLinks:
    """Proxies by the names of their links, and which of them are of clients."""

    def __init__(self, proxies: Mapping[str, TcpProxy], now_s: Callable[[], float]) -> None:
        self._proxies = proxies
        clients = {name: proxy for name, proxy in proxies.items() if name.startswith("client>")}
        self._clients = {name: ClientLink(proxy, now_s) for name, proxy in clients.items()}

    def named(self, name: str) -> Link:
        """Unable where there is no proxy."""
        if name not in self._proxies:
            raise Unable(f"there is no proxy in the link {name}")
        return self._clients.get(name) or self._proxies[name]

    def broke(self, gateway: str, from_s: float, to_s: float) -> bool:
        """Whether the link to a gateway broke all that its clients had open at some moment between."""
        link = self._clients.get(f"client>{gateway}")
        return link is not None and link.broke(from_s, to_s)


class Links(NamedLinks):
    """The proxies by the names of their links. `pid_of` tells a gateway's process, 0 while it has none."""

    def __init__(
        self,
        addresses: Addresses,
        wanted: Collection[str],
        rng: Random,
        pid_of: Callable[[str], int],
        now_s: Callable[[], float],
    ) -> None:
        self._addresses = addresses
        self._gateways = addresses.of("gateway")
        sources = {end for start, end in map(_ends, wanted) if start.startswith("prefill")}
        behind: set[str] = set()
        if len(self._gateways) > 1:
            behind = {end for start, end in map(_ends, wanted) if start in self._gateways and end != "redis"}
        ports = iter(free_ports(len(wanted) + len(sources) + len(behind), HOST, taken=addresses.all()))
        self._ports = dict(zip([*wanted, *sorted(behind)], ports, strict=False))
        """Where proxies listen, and (by the name of an engine) doors."""
        self._kv_ports = dict(zip(sorted(sources), ports, strict=True))
        wanted = {*wanted, *(f"{gateway}>{engine}" for gateway in self._gateways for engine in behind)}
        super().__init__({name: TcpProxy(HOST, self._target(name), rng) for name in sorted(wanted)}, now_s)
        self._doors = {
            engine: Door({each: self._proxies[f"{each}>{engine}"] for each in self._gateways}, pid_of)
            for engine in self._ports
            if ">" not in engine
        }
        engines = (*addresses.of("prefill"), *addresses.of("decode"))
        self.names: Mapping[str, str] = {
            self.engine_url(gateway, engine): engine for engine in engines for gateway in self._gateways
        }
        """The engines by the URLs that gateways know."""

    def _target(self, name: str) -> int:
        start, end = _ends(name)
        return self._kv_ports[end] if start.startswith("prefill") else self._addresses.ports[end]

    async def start(self) -> None:
        """Listen everywhere."""
        for name, port in self._ports.items():
            if name in self._doors:
                self._doors[name].open(port)
            elif _ends(name)[1] not in self._doors:
                await self._proxies[name].start(port)

    async def stop(self) -> None:
        """End all connections."""
        for door in self._doors.values():
            door.close()
        for proxy in self._proxies.values():
            await proxy.stop()

    def client_url(self, gateway: str) -> str:
        """Where clients find a gateway."""
        return f"http://{HOST}:{self._ports.get(f'client>{gateway}') or self._addresses.ports[gateway]}"

    def engine_url(self, gateway: str, engine: str) -> str:
        """Where a gateway finds an engine."""
        port = self._ports.get(engine) or self._ports.get(f"{gateway}>{engine}") or self._addresses.ports[engine]
        return f"http://{HOST}:{port}"

    def redis_url(self, gateway: str) -> str:
        return f"redis://{HOST}:{self._ports.get(f'{gateway}>redis') or self._addresses.ports['redis']}"

    def engine_flags(self, engine: str) -> list[str]:
        """What makes an engine send its KV through the proxies, and take it there."""
        flags = ["--kv-port", str(self._kv_ports[engine])] if engine in self._kv_ports else []
        for name, port in self._ports.items():
            start, end = _ends(name)
            if start == engine and end:
                flags += ["--kv-via", f"{HOST}:{self._kv_ports[end]}={HOST}:{port}"]
        return flags


def _ends(link: str) -> tuple[str, str]:
    start, _, end = link.partition(">")
    return start, end
