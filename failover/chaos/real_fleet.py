"""A fleet that somebody else has started: where it is, and what may be done to it. Frozen data. Pure.

It holds no secret: a bearer token is named by its environment variable, so that a record may be given away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from failover.chaos.scenario import FleetPlan


@dataclass(frozen=True, slots=True)
class RealFleet:
    """`gateways`: URLs that clients ask. `allow`: the only HOST:PORT that are ever connected to.

    `proxies`: names of links to the HOST:PORT where `pdgate chaos` listens during a run and passes on, as in
    `"gateway0>decode0" = "127.0.0.1:9101"`; whoever runs the gateway points it there. `prefills` and `decodes` (URLs)
    and `redis` (HOST:PORT) are what such links lead to. `model`: none is the first that a gateway names. `api_key_env`:
    the environment variable with the token that gateways want. `reference`: ask every greedy prompt once before the
    faults. `ready_s`: the fleet must answer by then. The load is bounded by `max_...`, whatever a scenario says; a
    beginning that prompts share, of 512 words, comes on top of `max_prompt_words`.
    """

    name: str
    gateways: tuple[str, ...]
    allow: tuple[str, ...] = ()
    prefills: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    redis: str = ""
    proxies: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    api_key_env: str = ""
    reference: bool = False
    ready_s: float = 60.0
    max_rate_per_s: float = 5.0
    max_concurrent: int = 32
    max_prompt_words: int = 2_000
    max_output_tokens: int = 256

    @property
    def plan(self) -> FleetPlan:
        """The same as a scenario's fleet: what there is of each role."""
        return FleetPlan(len(self.prefills), len(self.decodes), len(self.gateways), redis=bool(self.redis))

    @property
    def targets(self) -> Mapping[str, tuple[str, str]]:
        """Every process that is named: its role, and its URL (of Redis its address)."""
        of = {"gateway": self.gateways, "prefill": self.prefills, "decode": self.decodes}
        named = {f"{role}{n}": (role, url) for role, urls in of.items() for n, url in enumerate(urls)}
        return {**named, "redis": ("redis", self.redis)} if self.redis else named

    @property
    def links(self) -> tuple[str, ...]:
        """The links that can be broken: those with a proxy, and those from our own clients to plain HTTP gateways."""
        plain = (n for n, url in enumerate(self.gateways) if urlsplit(url).scheme == "http")
        return (*(f"client>gateway{n}" for n in plain), *self.proxies)

    @property
    def connected(self) -> Mapping[str, str]:
        """The HOST:PORT of all that a run may connect to, by name: gateways, and what is behind a proxy."""
        behind = {link.partition(">")[2] for link in self.proxies}
        return {name: address(url) for name, (role, url) in self.targets.items() if role == "gateway" or name in behind}


def address(url: str) -> str:
    """HOST:PORT of a URL, or of what is already that; ValueError where it is neither."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname or (port := parts.port or {"http": 80, "https": 443}.get(parts.scheme)) is None:
        raise ValueError(f"{url!r} has no host and port")
    return f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}"


def host_and_port(at: str) -> tuple[str, int]:
    """The two parts of what `address` gave."""
    host, _, port = at.rpartition(":")
    return host.strip("[]"), int(port)
