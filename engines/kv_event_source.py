"""Where a server's KV events come from: read from what it says of itself, turned into addresses for one rank. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from engines.types import KvEventSource

_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_LOCAL = ("ipc://", "inproc://")
MAX_BLOCK_TOKENS = 4096
"""Pages are of 1 to 256 tokens, times the ranks that share a context."""
MAX_DP_SIZE = 512
"""Each rank takes a socket or two and a task of ours."""
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class KvAddresses:
    """The sockets of one rank, as we use them. With `bind` the server connects to us. `replay` may be empty."""

    subscribe: str
    bind: bool
    replay: str


def kv_event_source(server_info: Mapping[str, Any]) -> KvEventSource | None:
    """The source that `/server_info` tells of; None when there is none. ValueError naming what cannot be read."""
    about = server_info.get("kv_events")
    if about is None:
        return None
    if not isinstance(about, Mapping) or about.get("publisher", "zmq") != "zmq":
        raise ValueError(f"server_info.kv_events is {about!r}, not a zmq publisher")
    config = _launch_config(server_info.get("kv_events_config"))
    bind = config.get("bind")
    _check_block_tokens(_positive(about, "block_size", MAX_BLOCK_TOKENS), server_info)
    return KvEventSource(
        endpoint=str(config.get("endpoint") or f"tcp://{about.get('endpoint_host') or '*'}:{_port(about, 'endpoint')}"),
        block_tokens=_positive(about, "block_size", MAX_BLOCK_TOKENS),
        topic=str(about.get("topic") or ""),
        bind=bind if isinstance(bind, bool) else None,
        replay_endpoint=_replay_endpoint(about, config),
        dp_size=_positive(about, "dp_size", MAX_DP_SIZE),
    )


def _launch_config(value: object) -> Mapping[str, Any]:
    """The launch argument: JSON text, or nothing where it is not told."""
    if isinstance(value, str) and value:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"server_info.kv_events_config is not JSON: {error}") from error
    return value if isinstance(value, Mapping) else {}


def _replay_endpoint(about: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if config.get("replay_endpoint"):
        return str(config["replay_endpoint"])
    return f"tcp://*:{_port(about, 'replay_endpoint')}" if about.get("replay_endpoint_port_base") else ""


def _port(about: Mapping[str, Any], name: str) -> int:
    return _positive(about, f"{name}_port_base", _MAX_PORT)


def _positive(about: Mapping[str, Any], name: str, most: int) -> int:
    value = about.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"server_info.kv_events.{name} is {value!r}, not an integer from 1 to {most}")
    return value


def _check_block_tokens(block_tokens: int, server_info: Mapping[str, Any]) -> None:
    """A block of events is a page of every rank that shares a context: `dcp_size` of them, where that is told."""
    page_tokens, sharing = server_info.get("page_size"), server_info.get("dcp_size")
    if not isinstance(page_tokens, int) or page_tokens < 1:
        return
    if isinstance(sharing, int) and sharing >= 1 and block_tokens != page_tokens * sharing:
        raise ValueError(f"server_info.kv_events.block_size is {block_tokens}, not {sharing} pages of {page_tokens}")
    if block_tokens % page_tokens:
        raise ValueError(f"server_info.kv_events.block_size is {block_tokens}, not whole pages of {page_tokens}")


def server_binds(source: KvEventSource) -> bool:
    """Whether the server listens for subscribers, by SGLang's own rule."""
    if source.bind is not None:
        return source.bind
    return source.endpoint.startswith(_LOCAL) or _host_port(source.endpoint)[0] in _WILDCARDS


def addresses(source: KvEventSource, server_url: str, rank: int) -> KvAddresses:
    """What to connect to, or to bind, for DP rank `rank` of the server at `server_url`.

    Wildcards become the server's own host. A host name that we must bind becomes all interfaces: names are not bound.
    ValueError when an endpoint is none.
    """
    host = urlsplit(server_url).hostname or "127.0.0.1"
    replay = _dialled(source.replay_endpoint, host, rank) if source.replay_endpoint else ""
    if server_binds(source):
        return KvAddresses(_dialled(source.endpoint, host, rank), False, replay)
    return KvAddresses(_bound(source.endpoint, rank), True, replay)


def _dialled(endpoint: str, server_host: str, rank: int) -> str:
    if endpoint.startswith(_LOCAL):
        return _local(endpoint, rank)
    host, port = _host_port(endpoint)
    return f"tcp://{_bracketed(server_host if host in _WILDCARDS else host)}:{_port_of(rank, port)}"


def _bound(endpoint: str, rank: int) -> str:
    if endpoint.startswith(_LOCAL):
        return _local(endpoint, rank)
    host, port = _host_port(endpoint)
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        host = "*"
    return f"tcp://{_bracketed(host)}:{_port_of(rank, port)}"


def _port_of(rank: int, base: int) -> int:
    if not 1 <= base <= _MAX_PORT - rank:
        raise ValueError(f"KV event endpoint of rank {rank}: {base} + {rank} is no port")
    return base + rank


def _local(endpoint: str, rank: int) -> str:
    return f"{endpoint}_dp{rank}" if rank else endpoint


def _host_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not port.isdigit():
        raise ValueError(f"KV event endpoint {endpoint!r} is not tcp://host:port, ipc:// or inproc://")
    return host, int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
