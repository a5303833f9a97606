"""Where KV events come from, and who binds."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engines.kv_event_source import KvAddresses, addresses, kv_event_source
from engines.types import KvEventSource

ABOUT: dict[str, Any] = {
    **{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv"},
    **{"block_size": 16, "dp_size": 2},
}


def source(config: dict[str, Any] | None = None, **about: Any) -> KvEventSource | None:
    told = None if config is None else orjson.dumps(config).decode()
    return kv_event_source({"kv_events": {**ABOUT, **about}, "kv_events_config": told})


def test_a_source_is_read_from_what_the_server_says_and_from_its_launch_argument() -> None:
    assert kv_event_source({}) is kv_event_source({"kv_events": None, "kv_events_config": "{}"}) is None
    assert source() == KvEventSource("tcp://*:5557", 16, "kv", None, "", 2)
    assert source(replay_endpoint_port_base=6000) == KvEventSource("tcp://*:5557", 16, "kv", None, "tcp://*:6000", 2)
    config = {"endpoint": "tcp://10.0.0.9:5557", "bind": True, "replay_endpoint": "tcp://10.0.0.9:6000"}
    assert source(config) == KvEventSource("tcp://10.0.0.9:5557", 16, "kv", True, "tcp://10.0.0.9:6000", 2)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"kv_events": {**ABOUT, "publisher": "kafka"}}, "not a zmq publisher"),
        ({"kv_events": "yes"}, "not a zmq publisher"),
        ({"kv_events": {**ABOUT, "block_size": "16"}}, "block_size"),
        ({"kv_events": {**ABOUT, "dp_size": 0}}, "dp_size"),
        ({"kv_events": {**ABOUT, "endpoint_port_base": None}}, "endpoint_port_base"),
        ({"kv_events": ABOUT, "kv_events_config": "{"}, "not JSON"),
        ({"kv_events": {**ABOUT, "block_size": 2**31 - 1}}, "block_size is 2147483647, not an integer from 1 to 4096"),
        ({"kv_events": {**ABOUT, "dp_size": 513}}, "dp_size is 513, not an integer from 1 to 512"),
        ({"kv_events": {**ABOUT, "endpoint_port_base": 70_000}}, "endpoint_port_base is 70000"),
        ({"kv_events": {**ABOUT, "replay_endpoint_port_base": 70_000}}, "replay_endpoint_port_base is 70000"),
        ({"kv_events": ABOUT, "page_size": 3}, "16, not whole pages of 3"),
        ({"kv_events": ABOUT, "page_size": 32}, "16, not whole pages of 32"),
        ({"kv_events": ABOUT, "page_size": 8, "dcp_size": 4}, "16, not 4 pages of 8"),
    ],
)
def test_what_cannot_be_read_is_named(info: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kv_event_source(info)


@pytest.mark.parametrize(
    "told", [{"page_size": 16}, {"page_size": 4}, {"page_size": 8, "dcp_size": 2}, {"page_size": None}]
)
def test_a_block_of_events_is_a_page_of_all_that_share_a_context(told: dict[str, Any]) -> None:
    read = kv_event_source({"kv_events": {**ABOUT, "dp_size": 512}, **told})
    assert read is not None
    assert (read.block_tokens, read.dp_size) == (16, 512)


@pytest.mark.parametrize(
    ("endpoint", "bind", "rank", "subscribe", "we_bind"),
    [
        ("tcp://*:5557", None, 0, "tcp://10.1.1.1:5557", False),
        ("tcp://*:5557", None, 3, "tcp://10.1.1.1:5560", False),
        ("tcp://0.0.0.0:5557", None, 0, "tcp://10.1.1.1:5557", False),
        ("tcp://[::]:5557", None, 0, "tcp://10.1.1.1:5557", False),
        ("tcp://:::5557", None, 1, "tcp://10.1.1.1:5558", False),
        ("tcp://127.0.0.1:5557", None, 1, "tcp://127.0.0.1:5558", True),
        ("tcp://gateway:5557", None, 0, "tcp://*:5557", True),
        ("tcp://10.0.0.9:5557", True, 0, "tcp://10.0.0.9:5557", False),
        ("tcp://*:5557", False, 1, "tcp://*:5558", True),
        ("ipc:///tmp/kv", None, 0, "ipc:///tmp/kv", False),
        ("inproc://kv", None, 2, "inproc://kv_dp2", False),
    ],
)
def test_who_binds_and_where(endpoint: str, bind: bool | None, rank: int, subscribe: str, we_bind: bool) -> None:
    told = KvEventSource(endpoint, 1, bind=bind)
    assert addresses(told, "http://10.1.1.1:30000", rank) == KvAddresses(subscribe, we_bind, "")


def test_the_replay_is_always_the_servers_own_and_hosts_may_be_ipv6() -> None:
    told = KvEventSource("tcp://gateway:5557", 1, replay_endpoint="tcp://*:6000")
    assert addresses(told, "http://[fd00::1]:30000", 1) == KvAddresses("tcp://*:5558", True, "tcp://[fd00::1]:6001")
    told = KvEventSource("tcp://*:5557", 1, replay_endpoint="tcp://10.0.0.9:6000")
    assert addresses(told, "http://10.1.1.1:1", 0).replay == "tcp://10.0.0.9:6000"


@pytest.mark.parametrize("endpoint", ["", "udp://x:1", "tcp://host", "tcp://host:port", "tcp://*:65536", "tcp://h:0"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        addresses(KvEventSource(endpoint, 1), "http://h:1", 0)


def test_the_last_port_is_one_and_none_is_behind_it() -> None:
    for bind in (True, False):
        told = KvEventSource("tcp://*:65534", 1, bind=bind)
        assert addresses(told, "http://h:1", 1).subscribe.endswith(":65535")
        with pytest.raises(ValueError, match="no port"):
            addresses(told, "http://h:1", 2)
