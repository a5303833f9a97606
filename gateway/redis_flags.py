"""How the flags about Redis are read, by `pdgate serve` and by `pdgate redis`. Pure."""

from __future__ import annotations

import argparse
import re
from string import ascii_letters, digits
from urllib.parse import urlsplit

from routing import redis_url as urls

MEMORY = "memory"
"""Given as a URL: keep ownership in this process."""
_MAX_NAMESPACE = 100
_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_MIN_BYTES = 16 << 20
_WILDCARDS = ("", "0.0.0.0", "::")
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")


def redis_url(text: str) -> str:
    """A URL that can be parsed; ArgumentTypeError says what is wrong."""
    try:
        urls.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def redis_url_or_memory(text: str) -> str:
    try:
        return text if text == MEMORY else redis_url(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or it is `{MEMORY}`: ownership in this process alone") from None


def namespace(text: str) -> str:
    if not 0 < len(text) <= _MAX_NAMESPACE or not set(text) <= set(ascii_letters + digits + "._-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 1 to {_MAX_NAMESPACE} letters, digits, dots, dashes and underscores"
        )
    return text


def size_bytes(text: str) -> int:
    """Bytes, or with a unit of 1,024: `256mb`."""
    found = re.fullmatch(r"(\d+)(kb|mb|gb)?", text.lower())
    size = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if size < _MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} must be bytes, or kb, mb or gb (256mb), and at least 16mb")
    return size


def advertise_url(text: str) -> str:
    """An address of this very gateway, without a path."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname not in (None, *_WILDCARDS) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise argparse.ArgumentTypeError(f"{text!r} must be http://HOST:PORT, at which other gateways reach this one")
    return text.rstrip("/")


def listener_address(host: str, port: int, redis_url: str) -> str:
    """Where other gateways reach a listener; empty where that cannot be said.

    One on loopback is reached by gateways on its host only: those there are where Redis is reached by loopback, too.
    """
    if host in _WILDCARDS:
        return ""
    if host in _LOOPBACKS:
        place = urlsplit(redis_url)
        if place.scheme != "unix" and (place.hostname or "") not in _LOOPBACKS:
            return ""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def notes(url: str | None, given_namespace: bool, given_size: bool, given_address: bool = False) -> tuple[str, ...]:
    """What the operator gave and nothing will use."""
    found = []
    if given_namespace and url in (None, MEMORY):
        found.append("--redis-namespace is not used: it tells fleets apart within a Redis given by --redis-url")
    if given_address and url in (None, MEMORY):
        found.append("--advertise-url is not used: it is for other gateways that share a Redis given by --redis-url")
    if given_size and url is not None:
        found.append("--redis-max-bytes is not used: it bounds a private Redis, and --redis-url is given")
    return tuple(found)
