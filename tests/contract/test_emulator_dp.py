"""An emulated pair with two DP ranks on each side: which rank a request runs on, and what is told of each.

The replies were seen on SGLang 0.5.23 with `--dp-size 2`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from engines.emulator.rank import CRASH_STATUS
from engines.kv_events import decode_batch
from engines.types import Role
from tests.contract.emu_fleet import EmuFleet, Reply, emu_fleet, until
from tests.redis_servers import free_port
from tests.warm import WarmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEED = 20.0
DP = ("--dp-size", "2", "--max-total-tokens", "2000")
_even = itertools.count(2000, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(SPEED, DP) as up:
        yield up


def even() -> int:
    """A room of P's rank 0."""
    return next(_even)


def odd() -> int:
    return next(_even) + 1


def body(fleet: EmuFleet, room: int, prompt: str = "who are you", tokens: int = 3, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**fleet.with_room({"text": prompt, "sampling_params": params}, room), **fields}


async def run(
    fleet: EmuFleet, room: int, prefill: int | None, decode: int | None, prompt: str = "who are you", tokens: int = 3
) -> tuple[Reply, Reply]:
    """The same request to both, with the ranks that pdgate would name; None names none."""
    to_prefill = {"routed_dp_rank": prefill, "disagg_prefill_dp_rank": prefill}
    to_decode = {"routed_dp_rank": decode, "disagg_prefill_dp_rank": prefill}
    return await asyncio.gather(
        fleet.post(fleet.prefill, "/generate", body(fleet, room, prompt, tokens, **to_prefill)),
        fleet.post(fleet.decode, "/generate", body(fleet, room, prompt, tokens, **to_decode)),
    )


def rank_of(reply: Reply) -> int:
    assert reply.status == 200, reply
    return int(reply.json()["meta_info"]["dp_rank"])


async def test_named_ranks_run_it_whatever_the_room(fleet: EmuFleet) -> None:
    for prefill, decode, room in itertools.product((0, 1), (0, 1), (even(), odd())):
        replies = await run(fleet, room, prefill, decode)
        assert [rank_of(reply) for reply in replies] == [prefill, decode]
        assert len(replies[1].json()["output_ids"]) == 3


async def test_a_prefill_follows_the_room_and_a_decode_takes_turns(fleet: EmuFleet) -> None:
    ranks = []
    for room in (even(), even(), even(), even()):
        prefill, decode = await run(fleet, room, None, None)
        assert rank_of(prefill) == 0
        ranks.append(rank_of(decode))
    assert ranks in ([0, 1, 0, 1], [1, 0, 1, 0])


async def test_a_room_of_another_rank_needs_the_prefills_rank_named(fleet: EmuFleet) -> None:
    """All ranks think they are rank 0 when they look at the room, and only `disagg_prefill_dp_rank` stops the look."""
    room = odd()
    prefill = await fleet.post(fleet.prefill, "/generate", body(fleet, room))
    assert prefill.status == 500
    assert prefill.json()["message"].endswith(
        f"KVTransferError(bootstrap_room={room}): follow_bootstrap_room conflict: dispatched to dp_rank 0 but"
        f" bootstrap_room {room} implies dp_rank 1."
        " Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
    )
    assert prefill.json()["message"].startswith("Prefill bootstrap failed for request rank=0 req.rid=")
    named = await asyncio.gather(
        fleet.post(fleet.prefill, "/generate", body(fleet, room + 2, disagg_prefill_dp_rank=1)),
        fleet.post(fleet.decode, "/generate", body(fleet, room + 2)),
    )
    assert rank_of(named[0]) == 1
    assert named[1].status == 200


async def test_a_decode_looks_for_the_rank_it_is_told(fleet: EmuFleet) -> None:
    """Told rank 1 for a room of rank 0, where P runs it: both wait for each other until their own timeouts."""
    waiting = [
        asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", body(fleet, 4444, rid="p"))),
        asyncio.ensure_future(
            fleet.post(fleet.decode, "/generate", body(fleet, 4444, rid="d", disagg_prefill_dp_rank=1))
        ),
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.3)
    assert not done
    await fleet.abort(fleet.decode, "d")
    await fleet.abort(fleet.prefill, "p")
    prefill, decode = await asyncio.gather(*waiting)
    assert "Prefill bootstrap failed" in prefill.text
    assert "Decode transfer failed" in decode.text
    await fleet.no_rooms(fleet.decode)


async def test_ranks_that_do_not_exist(fleet: EmuFleet) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "bootstrap_room": even()}
    for server, rank in itertools.product((fleet.prefill, fleet.decode), (2, -1)):
        text = f"routed_dp_rank={rank} out of range [0, 2)"
        reply = await fleet.post(server, "/generate", body(fleet, even(), routed_dp_rank=rank))
        assert (reply.status, reply.json()) == (400, {"error": {"message": text}})
        reply = await fleet.post(server, "/v1/chat/completions", {**chat, "routed_dp_rank": rank})
        flat = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
        assert (reply.status, reply.json()) == (400, flat)
    reply = await fleet.post(fleet.decode, "/generate", body(fleet, even(), disagg_prefill_dp_rank=7))
    assert reply.status == 500
    assert reply.json()["message"].startswith("Decode handshake failed for request rank=0 decode_req.req.rid=")
    assert reply.json()["message"].endswith(
        "Could not fetch bootstrap info for: prefill_dp_rank: 7 prefill_cp_rank: 0 target_tp_rank: 0"
        " and target_pp_rank 0"
    )


async def test_the_old_name_of_the_rank_is_taken(fleet: EmuFleet) -> None:
    fields = {"data_parallel_rank": 1, "disagg_prefill_dp_rank": 1}
    replies = await asyncio.gather(
        fleet.post(fleet.prefill, "/generate", body(fleet, odd(), **fields)),
        fleet.post(fleet.decode, "/generate", body(fleet, next(_even) - 1, **fields)),
    )
    assert rank_of(replies[0]) == rank_of(replies[1]) == 1


async def test_each_rank_has_its_own_cache_pool_and_load(fleet: EmuFleet) -> None:
    prompt = "a prefix that one rank has " * 20
    cached = []
    for rank in (0, 1, 0, 1):
        prefill, _ = await run(fleet, even() + rank, rank, 0, prompt)
        cached.append(prefill.json()["meta_info"]["cached_tokens"])
    assert cached[0] == cached[1] == 0
    assert cached[2] == cached[3] > 500
    for server in (fleet.prefill, fleet.decode):
        whole, second = await fleet.get(server, "/v1/loads"), await fleet.get(server, "/v1/loads?dp_rank=1")
        assert [load["dp_rank"] for load in whole["loads"]] == [0, 1]
        assert [load["max_total_num_tokens"] for load in whole["loads"]] == [2000, 2000]
        assert [load["dp_rank"] for load in second["loads"]] == [1]
        assert (await fleet.get(server, "/v1/loads?dp_rank=2"))["loads"] == []


async def test_what_is_held_is_counted_on_its_rank_alone(fleet: EmuFleet) -> None:
    hold = await fleet.hold(fleet.decode, "token", 2)
    running = asyncio.ensure_future(run(fleet, odd(), 1, 1, tokens=9))
    await fleet.held(fleet.decode, hold)
    loads = (await fleet.get(fleet.decode, "/v1/loads"))["loads"]
    assert [load["num_running_reqs"] for load in loads] == [0, 1]
    assert loads[0]["num_used_tokens"] == 0 < loads[1]["num_used_tokens"]
    ledger = await fleet.ledger(fleet.decode)
    assert [bool(rank["by_room"]) for rank in ledger["ranks"]] == [False, True]
    assert ledger["by_room"] == ledger["ranks"][1]["by_room"]
    assert ledger["total_tokens"] == 4000
    await fleet.release(fleet.decode, hold)
    prefill, decode = await running
    assert (prefill.status, decode.status) == (200, 200)
    await fleet.no_rooms(fleet.decode)


async def test_an_abort_finds_its_request_on_any_rank(fleet: EmuFleet) -> None:
    for rank in (0, 1):
        waiting = asyncio.ensure_future(
            fleet.post(fleet.prefill, "/generate", body(fleet, even() + rank, rid="gone", disagg_prefill_dp_rank=rank))
        )
        await until(partial(_runs_on, fleet, "gone", rank))
        await fleet.abort(fleet.prefill, "gone")
        assert "Aborted by AbortReq." in (await waiting).text


async def _runs_on(fleet: EmuFleet, rid: str, rank: int) -> bool:
    live = (await fleet.get(fleet.prefill, "/emulator/requests"))["live"]
    return [(each["rid"], each["dp_rank"]) for each in live] == [(rid, rank)]


async def test_what_the_server_says_of_its_ranks(fleet: EmuFleet) -> None:
    for server, method in ((fleet.prefill, "follow_bootstrap_room"), (fleet.decode, "round_robin")):
        info = await fleet.get(server, "/server_info")
        assert (info["dp_size"], info["load_balance_method"], info["max_total_num_tokens"]) == (2, method, 2000)
        limits = [state["effective_max_running_requests_per_dp"] for state in info["internal_states"]]
        assert limits == [info["max_running_requests"]] * 2
        assert [state["world_size"] for state in info["internal_states"]] == [2, 2]
        metrics = (await fleet.call(server, "GET", "/metrics")).text
        for rank in "01":
            assert f'sglang:max_total_num_tokens{{dp_rank="{rank}",engine_type="{server.role}"' in metrics
    host, port = fleet.prefill.host, fleet.prefill.bootstrap_port
    addresses = []
    for rank in (-1, 0, 1, 2):
        rest = "&".join(f"{name}={min(rank, 0)}" for name in ("prefill_cp_rank", "target_tp_rank", "target_pp_rank"))
        async with fleet.http.get(f"http://{host}:{port}/route?prefill_dp_rank={rank}&{rest}") as reply:
            if rank == 2:
                text = "Bootstrap info not found for dp_rank=2 cp_rank=0 tp_rank=0 pp_rank=0"
                assert (reply.status, await reply.text()) == (404, text)
            else:
                addresses.append(await reply.json())
    topology, first, second = addresses
    assert (topology["dp_size"], topology["follow_bootstrap_room"], topology["attn_tp_size"]) == (2, True, 1)
    assert first["rank_port"] != second["rank_port"]


async def test_a_flush_empties_every_rank(fleet: EmuFleet) -> None:
    for rank in (0, 1):
        await run(fleet, even() + rank, rank, rank, "a prompt to forget " * 20)
    assert all(rank["cache_tokens"] for rank in (await fleet.ledger(fleet.prefill))["ranks"])
    await fleet.post(fleet.prefill, "/flush_cache", {})
    assert not any(rank["cache_tokens"] for rank in (await fleet.ledger(fleet.prefill))["ranks"])


async def test_a_request_without_a_room_kills_a_prefill_unless_it_names_a_rank(fleet: EmuFleet) -> None:
    roomless = {"text": "hi"}
    async with WarmServer(Role.PREFILL, speed=SPEED, arguments=DP) as prefill:
        for server, fields in ((fleet.decode, {}), (prefill, {"routed_dp_rank": 0}), (prefill, {"routed_dp_rank": 1})):
            reply = await fleet.post(server, "/generate", {**roomless, **fields})
            assert reply.status == 400
            assert "received without bootstrap room id" in reply.json()["error"]["message"]
        with pytest.raises(aiohttp.ClientError):
            await fleet.post(prefill, "/generate", roomless)
        assert await prefill.wait() == CRASH_STATUS


async def test_a_pair_of_one_rank_says_nothing_of_ranks() -> None:
    async with emu_fleet(SPEED) as single:
        prefill, decode = await single.pair("/generate", {"text": "hi", "routed_dp_rank": 0})
        assert prefill.json()["meta_info"]["dp_rank"] is decode.json()["meta_info"]["dp_rank"] is None
        reply = await single.post(single.prefill, "/generate", single.with_room({"text": "hi", "routed_dp_rank": 1}))
        assert reply.json() == {"error": {"message": "routed_dp_rank=1 out of range [0, 1)"}}
        assert (await single.ledger(single.prefill))["ranks"] == []


async def test_each_rank_publishes_its_events_on_its_own_port(fleet: EmuFleet) -> None:
    port = free_port(beside=1)
    config = f'{{"publisher": "zmq", "endpoint": "tcp://*:{port}"}}'
    context = zmq.asyncio.Context()
    async with WarmServer(Role.PREFILL, speed=SPEED, arguments=(*DP, "--kv-events-config", config)) as prefill:
        about = (await fleet.get(prefill, "/server_info"))["kv_events"]
        assert (about["endpoint_port_base"], about["dp_size"]) == (port, 2)
        try:
            for rank in (0, 1):
                with context.socket(zmq.SUB) as socket:
                    socket.setsockopt(zmq.SUBSCRIBE, b"")
                    socket.connect(f"tcp://127.0.0.1:{port + rank}")
                    batch = await _first_batch(EmuFleet(prefill, fleet.decode, fleet.http), rank, socket)
                    assert batch.dp_rank == rank
        finally:
            context.term()


async def _first_batch(fleet: EmuFleet, rank: int, socket: zmq.asyncio.Socket) -> Any:
    """What this rank publishes; prompts are sent until the subscription is there."""
    for _ in range(100):
        await run(fleet, even() + rank, rank, 0, f"events of room {next(_even)} " * 5)
        if await socket.poll(50):
            return decode_batch(0, (await socket.recv_multipart())[2])
    raise AssertionError("no events came")
