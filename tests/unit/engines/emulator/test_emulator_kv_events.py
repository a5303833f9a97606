"""What the emulator's cache says of itself, and how its requests' namespaces keep KV apart."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest

from engines.emulator import fleet
from engines.emulator.kv_event_log import KvEventLog
from engines.emulator.kv_pool import KvPool
from engines.emulator.kv_publisher import KvEventsConfig, parse_config, with_port_offset
from engines.emulator.parse import Api, BadRequest, Limits, parse_request
from engines.emulator.radix import SHARED, CacheNamespace, RadixCache
from engines.kv_events import decode_batch, page_digests, page_hash
from engines.kv_types import KvEvent, PagesCleared, PagesRemoved, PagesStored
from engines.token_rule import pack
from engines.types import Role

SALTED = CacheNamespace("salt")


def hashes(tokens: range | list[int], salt: str = "") -> list[int]:
    return [page_hash(digest) for digest in page_digests(list(tokens), 2, salt)]


def taken(log: KvEventLog) -> tuple[KvEvent, ...]:
    payload = log.take(1.0)
    return () if payload is None else decode_batch(0, payload).events


def test_an_insertion_is_one_event_and_splits_change_no_hash() -> None:
    log = KvEventLog(2)
    cache = RadixCache(2, log)
    cache.insert(pack(range(9)))
    first = hashes(range(8))
    assert taken(log) == (PagesStored(first, None, list(range(8)), 2),)
    other = [*range(4), 90, 91, 92, 93]
    cache.insert(pack(other))
    second = hashes(other)
    assert second[:2] == first[:2]
    assert taken(log) == (PagesStored(second[2:], first[1], other[4:], 2),)
    cache.insert(pack(range(10)))
    assert taken(log) == (PagesStored(hashes(range(10))[4:], first[3], [8, 9], 2),)
    cache.insert(pack(range(10)))
    assert taken(log) == ()


def test_eviction_names_the_pages_that_went_and_a_flush_names_none() -> None:
    log = KvEventLog(2)
    pool = KvPool(8, 2, RadixCache(2, log))
    assert pool.reserve(1, "room", 4)
    pool.release_into_cache(1, pack(range(8)), SALTED)
    stored = hashes(range(8), "salt")
    assert taken(log) == (PagesStored(stored, None, list(range(8)), 2, cache_salt="salt"),)
    assert pool.reserve(2, "room", 1)
    assert taken(log) == (PagesRemoved(stored[3:]),)
    pool.release(2)
    assert pool.reserve(3, "room", 1)
    pool.release_into_cache(3, pack([*range(6), 8, 9]), SALTED)
    other = hashes([*range(6), 8, 9], "salt")
    assert taken(log) == (PagesStored(other[3:], stored[2], [8, 9], 2, cache_salt="salt"),)
    pool.flush_cache()
    assert taken(log) == (PagesCleared(),)
    assert pool.available_tokens == pool.ledger().free_tokens == 8
    assert taken(log) == ()


def test_a_flush_keeps_what_is_locked() -> None:
    log = KvEventLog(2)
    cache = RadixCache(2, log)
    cache.insert(pack([1, 2]))
    cache.insert(pack([3, 4]))
    node, _ = cache.match(pack([1, 2]))
    cache.lock(node)
    taken(log)
    assert cache.flush() == 1
    assert taken(log) == (PagesRemoved(hashes([3, 4])),)


def test_namespaces_share_nothing_and_are_evicted_like_all() -> None:
    cache = RadixCache(2)
    spaces = [SHARED, SALTED, CacheNamespace("", "salt"), CacheNamespace("sa", "lt"), CacheNamespace("salt", "x")]
    for count, space in enumerate(spaces):
        assert cache.match(pack(range(6)), space)[1] == 0
        assert cache.insert(pack(range(6)), space) == 3
        assert cache.insert(pack([0, 1, 7, 8]), space) == 1  # splits
        assert cache.total_pages == 4 * (count + 1)
    for space in spaces:
        assert cache.match(pack(range(6)), space)[1] == 6
        assert cache.match(pack([0, 1, 7, 8, 9, 9]), space)[1] == 4
    assert cache.evict(100) == 20
    assert all(cache.match(pack(range(6)), space)[1] == 0 for space in spaces)


def test_requests_name_their_namespace() -> None:
    limits = Limits(1000, 1000)
    body: dict[str, Any] = {"text": ["a", "b"], "cache_salt": ["s", ""], "extra_key": "k"}
    items = parse_request(Api.GENERATE, body, limits).items
    assert [item.namespace for item in items] == [CacheNamespace("s", "k"), CacheNamespace("", "k")]
    chat = {"messages": [{"role": "user", "content": "x"}], "cache_salt": "s"}
    assert parse_request(Api.CHAT, chat, limits).items[0].namespace == CacheNamespace("s")
    assert parse_request(Api.COMPLETIONS, {"prompt": "x", "cache_salt": ""}, limits).items[0].namespace is SHARED
    with pytest.raises(BadRequest):
        parse_request(Api.GENERATE, {"text": "a", "cache_salt": 3}, limits)


def test_the_configuration_is_sglangs() -> None:
    assert parse_config("") == KvEventsConfig()
    assert not parse_config('{"endpoint": "tcp://*:1"}').on
    assert parse_config('{"publisher": "zmq"}') == KvEventsConfig("zmq", "tcp://*:5557", None, None, 10_000, 100_000)
    for wrong in (
        *("{", "[]", '{"publisher": "kafka"}', '{"publisher": "zmq", "endpont": "x"}', '{"hwm": "1"}'),
        *('{"endpoint": "udp://x:1"}', '{"endpoint": "tcp://x"}', '{"replay_endpoint": "x"}', '{"format": "dynamo"}'),
    ):
        with pytest.raises(ValueError, match="--kv-events-config"):
            parse_config(wrong)


def test_each_server_of_a_fleet_publishes_on_its_own_ports() -> None:
    parser = argparse.ArgumentParser()
    fleet.add_arguments(parser)
    config = '{"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:7000"}'
    args = parser.parse_args(["--prefill", "2", "--decode", "1", "--plain", "1", "--kv-events-config", config])
    servers = fleet.servers(args)
    configs = {server: _config(server.arguments) for server in servers}
    ports = [
        (each.endpoint, each.replay_endpoint) if each is not None else None for each in (configs[s] for s in servers)
    ]
    assert [server.role for server in servers] == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.PLAIN]
    assert ports == [
        ("tcp://*:6000", "tcp://*:7000"),
        ("tcp://*:6001", "tcp://*:7001"),
        None,
        ("tcp://*:6002", "tcp://*:7002"),
    ]
    assert parse_config(with_port_offset('{"endpoint": "ipc:///tmp/x"}', 3)).endpoint == "ipc:///tmp/x_3"
    args.kv_events_config = "{"
    assert fleet.run(args) == 2


def _config(arguments: tuple[str, ...]) -> KvEventsConfig | None:
    if "--kv-events-config" not in arguments:
        return None
    text = arguments[arguments.index("--kv-events-config") + 1]
    return msgspec.json.decode(text.encode(), type=KvEventsConfig)
