"""Real fleets from TOML, or from URLs alone: whatever may not be connected to is refused before anything is. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from failover.chaos.real_fleet import RealFleet, address, host_and_port
from failover.chaos.scenario import ScenarioError
from failover.chaos.scenario_file import read
from failover.chaos.schedule import LINK, names

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "ready_s": (1, 3_600),
    "max_rate_per_s": (0.01, 1_000),
    "max_concurrent": (1, 2_000),
    "max_prompt_words": (20, 1_000_000),
    "max_output_tokens": (1, 1_000_000),
}


def parse(text: str, name: str, allow: Collection[str] = ()) -> RealFleet:
    """The fleet of a file's `text`, called `name` where it does not say; `allow`: more than the file allows.

    ScenarioError names the first field that is wrong, and how to mend it.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(name, f"this is not TOML: {error}") from error
    fleet: RealFleet = read(RealFleet, {"name": name, **table}, "")
    for bounded, (low, high) in _BOUNDS.items():
        if not low <= getattr(fleet, bounded) <= high:
            raise ScenarioError(bounded, f"must be between {low:g} and {high:g}, not {getattr(fleet, bounded):g}")
    fleet = replace(fleet, allow=(*fleet.allow, *allow))
    _check(fleet, {})
    _check_allowed(fleet, {}, 'add "{}" to allow, or leave it out')
    return fleet


def of_urls(urls: Collection[str], allow: Collection[str]) -> RealFleet:
    """The gateways at `urls`, and nothing else. Those of this machine are allowed, others by `allow` only."""
    fleet = RealFleet("--url", tuple(urls), tuple(allow))
    fields = {f"gateways[{number}]": "--url" for number in range(len(fleet.gateways))}
    fields |= {f"allow[{number}]": "--allow" for number in range(len(fleet.allow))}
    _check(fleet, fields)
    ours = tuple(at for at in fleet.connected.values() if _is_loopback(host_and_port(at)[0]))
    fleet = replace(fleet, allow=(*fleet.allow, *ours))
    _check_allowed(fleet, fields, "if it may be loaded and disturbed, say --allow {}")
    return fleet


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(fleet: RealFleet, fields: Mapping[str, str]) -> None:
    """That all addresses are some; `fields`: what those are called that came from no file."""
    if not fleet.gateways:
        raise ScenarioError("gateways", "name one at least, as in http://127.0.0.1:30000")
    for role in ("gateways", "prefills", "decodes"):
        urls: tuple[str, ...] = getattr(fleet, role)
        for number, url in enumerate(urls):
            where = f"{role}[{number}]"
            _check_url(url, fields.get(where, where))
        if len({*map(address, urls)}) < len(urls):
            raise ScenarioError(role, "one address is there twice")
    for number, at in enumerate(fleet.allow):
        where = f"allow[{number}]"
        _check_address(at, fields.get(where, where))
    if fleet.redis:
        _check_address(fleet.redis, "redis")
    for link, at in fleet.proxies.items():
        _check_proxy(fleet, link, at)
    if len({*fleet.proxies.values()}) < len(fleet.proxies):
        raise ScenarioError("proxies", "each link needs an address of its own")


def _check_url(url: str, field: str) -> None:
    try:
        address(url)
        parts = urlsplit(url)
    except ValueError as error:
        raise ScenarioError(field, f"{url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise ScenarioError(field, f"must be like http://HOST:PORT, not {url!r}")


def _check_address(at: str, field: str) -> None:
    try:
        good = "//" not in at and address(at) == at and host_and_port(at)[1] > 0
    except ValueError:
        good = False
    if not good:
        raise ScenarioError(field, f"must be HOST:PORT, not {at!r}")


def _check_proxy(fleet: RealFleet, link: str, at: str) -> None:
    field = f"proxies.{link!r}".replace("'", '"')
    possible = [name for name, role in names(fleet.plan).items() if role == LINK and name.startswith("gateway")]
    if link.startswith("client>"):
        raise ScenarioError(field, "leave it out: between the clients and a gateway there is one by itself")
    if link not in possible:
        of_kv = link.startswith("prefill") and link in names(fleet.plan)
        why = "KV moves by ways of its own, which no proxy can be put into" if of_kv else "this fleet has no such link"
        raise ScenarioError(field, f"{why}; it may be {', '.join(possible) or 'none, as no engine is named'}")
    _check_address(at, field)
    if at in (target := [address(url) for _, url in fleet.targets.values()]):
        raise ScenarioError(field, f"{at} is where {list(fleet.targets)[target.index(at)]} itself is")


def _check_allowed(fleet: RealFleet, fields: Mapping[str, str], fix: str) -> None:
    for name, at in fleet.connected.items():
        if at not in fleet.allow:
            role = name.rstrip("0123456789")
            where = name if name == "redis" else f"{role}s[{name.removeprefix(role)}]"
            raise ScenarioError(fields.get(where, where), f"{at} is not allowed: {fix.format(at)}")
