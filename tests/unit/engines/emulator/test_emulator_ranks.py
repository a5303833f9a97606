"""DP ranks in the emulator's core: which prefill rank a decode asks, addresses of events, ledgers, flags."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from engines.emulator import fleet
from engines.emulator.config import Options, add_server_arguments, options_from
from engines.emulator.core import Ended, Job, PushAddresses, TellAbort, Timeouts
from engines.emulator.decode_node import DecodeNode
from engines.emulator.kv_pool import KvPool, Ledger, total_ledger
from engines.emulator.kv_publisher import KvEventsConfig, config_of_rank
from engines.emulator.output import Output, StopRule
from engines.emulator.prefill_node import PrefillNode
from engines.timing import TINY
from engines.token_rule import pack
from engines.types import Role


def job(room: int, prefill_rank: int | None = None) -> Job:
    ids = pack([1, 2, 3])
    return Job(f"r{room}", room, ids, 3, 5, Output(StopRule(5)), "peer", prefill_rank=prefill_rank)


def decode_node() -> DecodeNode:
    return DecodeNode(TINY, KvPool(1000, 1), Timeouts())


@pytest.mark.parametrize("known_first", [True, False])
@pytest.mark.parametrize(
    ("dp_size", "room", "named", "asked"),
    [(1, 7, None, 0), (2, 7, None, 1), (2, 8, None, 0), (4, 7, None, 3), (2, 7, 0, 0), (4, 4, 3, 3)],
)
def test_a_decode_asks_the_rank_it_is_told_or_the_rooms(
    dp_size: int, room: int, named: int | None, asked: int, known_first: bool
) -> None:
    node, one = decode_node(), job(room, named)
    if known_first:
        node.peer_known("peer", dp_size)
        node.submit(one, 0.0)
    else:
        node.submit(one, 0.0)
        node.peer_known("peer", dp_size)
    node.advance(0.0)
    assert one.prefill_rank == asked
    assert [type(event) for event in node.take_events()] == [PushAddresses]


@pytest.mark.parametrize("named", [2, -1])
def test_a_rank_that_the_prefill_does_not_have_fails_at_once(named: int) -> None:
    node, one = decode_node(), job(8, named)
    node.submit(one, 0.0)
    node.peer_known("peer", 2)
    [ended] = node.take_events()
    assert isinstance(ended, Ended)
    assert f"prefill_dp_rank: {named}" in ended.end.message
    assert (ended.end.status, node.pool.used_tokens) == (500, 0)


def test_an_abort_before_the_prefill_is_known_has_nobody_to_tell() -> None:
    node, one = decode_node(), job(8)
    node.submit(one, 0.0)
    node.abort("r8", 0.0)
    told = [event for event in node.take_events() if isinstance(event, TellAbort)]
    assert [event.job.prefill_rank for event in told] == [None]


def test_a_job_that_is_bound_to_fail_takes_no_room_of_a_prefill() -> None:
    node = PrefillNode(TINY, KvPool(1000, 1), Timeouts())
    one = job(5)
    one.failure = "conflict"
    node.submit(one, 0.0)
    node.addresses(5, "d", 0.0)
    [ended] = node.take_events()
    assert isinstance(ended, Ended)
    assert ended.end.message.startswith("Prefill bootstrap failed")
    assert ended.end.message.endswith("conflict")
    assert node.load().bootstrap == 0


def test_events_of_a_rank_have_their_own_addresses() -> None:
    config = KvEventsConfig(publisher="zmq", endpoint="tcp://*:5557", replay_endpoint="tcp://*:6000", topic="t")
    assert config_of_rank(config, 0) == config
    second = config_of_rank(config, 2)
    assert (second.endpoint, second.replay_endpoint, second.topic) == ("tcp://*:5559", "tcp://*:6002", "t")
    local = config_of_rank(KvEventsConfig(endpoint="inproc://cache"), 1)
    assert (local.endpoint, local.replay_endpoint) == ("inproc://cache_dp1", None)


def test_a_fleet_leaves_room_for_the_ranks_of_each_server() -> None:
    parser = argparse.ArgumentParser()
    fleet.add_arguments(parser)
    config = '{"publisher": "zmq", "endpoint": "tcp://*:6000"}'
    servers = fleet.servers(parser.parse_args(["--dp-size", "3", "--kv-events-config", config]))
    told = [server.arguments for server in servers if server.role is Role.PREFILL]
    texts = [arguments[arguments.index("--kv-events-config") + 1].encode() for arguments in told]
    ports = [msgspec.json.decode(text, type=KvEventsConfig).endpoint for text in texts]
    assert ports == ["tcp://*:6000", "tcp://*:6003"]
    assert all(arguments[arguments.index("--dp-size") + 1] == "3" for arguments in told)


def options(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return options_from(parser.parse_args(words), Role.PREFILL, 1, 0, "")


def test_the_flag() -> None:
    assert (options().dp_size, options("--dp-size", "4").dp_size) == (1, 4)
    with pytest.raises(ValueError, match="positive"):
        options("--dp-size", "-1")


def test_a_total_ledger_is_the_sum() -> None:
    first, second = Ledger(100, 60, 40, 10, 5, {"1": 20, "2": 10}), Ledger(100, 90, 10, 0, 0, {"2": 10})
    assert total_ledger([first, second]) == Ledger(200, 150, 50, 10, 5, {"1": 20, "2": 20})
    assert total_ledger([first]) == first
