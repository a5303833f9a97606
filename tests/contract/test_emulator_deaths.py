"""What is left when emulated servers die, freeze, restart or drain, as seen with a real SGLang."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import aiohttp
import orjson
import pytest

from engines.emulator.process import EmulatedServer
from engines.emulator.rank import CRASH_STATUS
from engines.types import Role
from tests.contract.emu_fleet import EmuFleet, emu_fleet, until
from tests.machine import Stopwatch, time_limit
from tests.warm import WarmServer

SPEED = 20.0
UNKNOWN_RANK = "Bootstrap info not found for dp_rank=3 cp_rank=3 tp_rank=3 pp_rank=3"
LONG = {"text": "go on", "sampling_params": {"max_new_tokens": 20_000, "temperature": 0, "ignore_eos": True}}
SHORT = {"text": "be short", "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}}


def post(fleet: EmuFleet, server: EmulatedServer, body: dict[str, Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(fleet.post(server, "/generate", body))


async def in_transfer(fleet: EmuFleet, count: int = 1) -> None:
    async def waiting() -> bool:
        load = (await fleet.get(fleet.decode, "/v1/loads"))["loads"][0]
        return bool(load["disaggregation"]["decode_transfer_queue_reqs"] == count)

    await until(waiting)


async def test_a_dead_prefill_fails_the_waiting_not_the_running() -> None:
    async with emu_fleet(SPEED) as fleet:
        running_body = fleet.with_room(LONG)
        prefilled, running = post(fleet, fleet.prefill, running_body), post(fleet, fleet.decode, running_body)
        assert (await prefilled).status == 200
        await fleet.hold(fleet.prefill, "bootstrap")
        waiting_body = fleet.with_room({**SHORT, "rid": "w"}, room=5)
        lost, waiting = post(fleet, fleet.prefill, waiting_body), post(fleet, fleet.decode, waiting_body)
        await in_transfer(fleet)
        await fleet.prefill.kill()
        watch = Stopwatch()
        with pytest.raises(aiohttp.ClientError):
            await lost
        answer = await waiting
        assert watch.took_s() < 3 * 5 / SPEED + 0.5
        address = f"127.0.0.1:{fleet.prefill.bootstrap_port}"
        reason = f"Lost connection with prefill instance (bootstrap_addr: {address})"
        assert answer.json()["message"] == (
            "Decode transfer failed for request rank=0 decode_req.req.rid='w' decode_req.req.bootstrap_room=5 "
            f"with exception KVTransferError(bootstrap_room=5): {reason}"
        )
        assert "5" in (await fleet.ledger(fleet.decode))["by_room"]

        async def released() -> bool:
            return "5" not in (await fleet.ledger(fleet.decode))["by_room"]

        await until(released, 30 / SPEED + 1)
        assert not running.done()
        rid = (await fleet.get(fleet.decode, "/emulator/requests"))["live"][0]["rid"]
        await fleet.abort(fleet.decode, rid)
        assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_dead_decode_fails_the_transfer_and_its_streams_are_cut() -> None:
    async with emu_fleet(SPEED) as fleet:
        stream_body = fleet.with_room({**LONG, "stream": True})
        first, stream = post(fleet, fleet.prefill, stream_body), post(fleet, fleet.decode, stream_body)
        assert (await first).status == 200
        hold = await fleet.hold(fleet.prefill, "transfer")
        body = fleet.with_room({**SHORT, "rid": "t"}, room=6)
        prefill, decode = post(fleet, fleet.prefill, body), post(fleet, fleet.decode, body)
        await fleet.held(fleet.prefill, hold)
        await fleet.decode.kill()
        for leg in (stream, decode):
            with pytest.raises(aiohttp.ClientError):
                await leg
        await fleet.release(fleet.prefill, hold)
        answer = await prefill
        assert answer.status == 500
        assert "Prefill transfer failed for request rank=0 req.rid='t'" in answer.text
        assert "Failed to send kv chunk of 6 to 127.0.0.1:" in answer.text
        await fleet.no_rooms(fleet.prefill)


async def test_a_frozen_decode_leaves_the_prefill_in_flight_until_it_dies() -> None:
    async with emu_fleet(SPEED) as fleet:
        hold = await fleet.hold(fleet.prefill, "transfer")
        body = fleet.with_room(SHORT)
        prefill, decode = post(fleet, fleet.prefill, body), post(fleet, fleet.decode, body)
        await fleet.held(fleet.prefill, hold)
        fleet.decode.send_signal(signal.SIGSTOP)
        await fleet.release(fleet.prefill, hold)
        await asyncio.sleep(0.3)
        load = (await fleet.get(fleet.prefill, "/v1/loads"))["loads"][0]
        assert load["disaggregation"]["prefill_inflight_queue_reqs"] == 1
        assert load["num_used_tokens"] == 8
        await fleet.decode.kill()
        assert "Failed to send kv chunk" in (await prefill).text
        with pytest.raises(aiohttp.ClientError):
            await decode


async def test_a_room_without_a_host_kills_the_decode() -> None:
    async with emu_fleet(SPEED) as fleet:
        with pytest.raises(aiohttp.ClientError):
            await fleet.post(fleet.decode, "/generate", {**SHORT, "bootstrap_room": 1})
        assert await fleet.decode.wait() == CRASH_STATUS


async def test_another_page_size_kills_the_decode_at_the_first_request() -> None:
    async with emu_fleet(SPEED) as fleet, WarmServer(Role.DECODE, arguments=("--page-size", "16")) as other:
        with pytest.raises(aiohttp.ClientError):
            await fleet.post(other, "/generate", fleet.with_room(SHORT))
        assert await other.wait() == CRASH_STATUS


async def test_alone_each_side_waits_for_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    # At this speed a heartbeat is due every 25 ms, and a busy machine would miss some.
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2000")
    async with emu_fleet(200.0) as fleet:
        await fleet.pair("/generate", SHORT)
        prefill = await fleet.post(fleet.prefill, "/generate", fleet.with_room(SHORT))
        decode = await fleet.post(fleet.decode, "/generate", fleet.with_room(SHORT))
        assert (prefill.status, decode.status) == (500, 500)
        assert prefill.json()["message"].endswith("timed out after 1.5s in KVPoll.Bootstrapping")
        assert decode.json()["message"].endswith("timed out after 1.5s in KVPoll.WaitingForInput")
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        stream = await fleet.post(fleet.decode, "/v1/chat/completions", fleet.with_room(chat))
        assert stream.status == 200
        error, done = stream.events()
        assert error["error"]["code"] == 500
        assert error["error"]["type"] == "INTERNAL_SERVER_ERROR"
        assert done == "[DONE]"
        generate = await fleet.post(fleet.prefill, "/generate", fleet.with_room({**SHORT, "stream": True}))
        assert generate.events()[0]["meta_info"]["finish_reason"]["status_code"] == 500
        await fleet.no_rooms(fleet.decode)


async def test_a_quickly_restarted_prefill_is_stale_to_its_decodes() -> None:
    async with emu_fleet(1.0) as fleet:
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        before = await fleet.get(fleet.prefill, "/server_info")
        await fleet.prefill.restart()
        after = await fleet.get(fleet.prefill, "/server_info")
        assert before["startup_time"] != after["startup_time"]
        assert before["random_seed"] != after["random_seed"]
        body = fleet.with_room({**SHORT, "rid": "stale"})
        both = [post(fleet, server, body) for server in (fleet.prefill, fleet.decode)]
        await in_transfer(fleet)
        await asyncio.sleep(0.5)
        assert not any(each.done() for each in both)
        for server in (fleet.decode, fleet.prefill):
            await fleet.abort(server, "stale")
        assert [(await each).status for each in both] == [500, 500]


async def test_a_restarted_prefill_is_known_again_after_missed_heartbeats() -> None:
    async with emu_fleet(SPEED) as fleet:
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        await fleet.prefill.kill()
        await asyncio.sleep(4 * 5 / SPEED)
        await fleet.prefill.start()
        assert (await fleet.pair("/generate", SHORT))[1].status == 200


async def test_sigterm_drains() -> None:
    async with emu_fleet(SPEED) as fleet:
        body = fleet.with_room({**LONG, "rid": "last"})
        prefill, decode = post(fleet, fleet.prefill, body), post(fleet, fleet.decode, body)
        assert (await prefill).status == 200
        fleet.decode.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            return (await fleet.call(fleet.decode, "GET", "/ready")).status == 503

        await until(drains)
        assert (await fleet.call(fleet.decode, "GET", "/health")).status == 503
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        await asyncio.sleep(2 * 5 / SPEED)
        assert fleet.decode.returncode is None
        await fleet.abort(fleet.decode, "last")
        await decode
        async with time_limit(5.0):
            assert await fleet.decode.wait() == 0


async def test_a_wrong_key_is_refused_and_unknown_paths_are_fastapis() -> None:
    async with WarmServer(Role.PLAIN, arguments=("--api-key", "secret")) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url + "/v1/models") as reply:
            assert (reply.status, await reply.json()) == (401, {"error": "Unauthorized"})
        headers = {"Authorization": "Bearer secret"}
        async with http.get(server.url + "/v1/models", headers=headers) as reply:
            assert reply.status == 200
        async with http.get(server.url + "/ready") as reply:
            assert reply.status == 200
        async with http.get(server.url + "/v1/completions", headers=headers) as reply:
            assert (reply.status, await reply.json()) == (405, {"detail": "Method Not Allowed"})


async def test_the_bootstrap_server_answers_as_recorded() -> None:
    query = "prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"
    async with WarmServer(Role.PREFILL) as server, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{server.bootstrap_port}"
        async with http.get(f"{url}/health") as reply:
            assert (reply.status, await reply.text()) == (200, "OK")
        async with http.get(f"{url}/route?{query.format(-1)}") as reply:
            topology = await reply.json()
        assert topology == {
            "attn_tp_size": 1,
            "attn_cp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "page_size": 1,
            "kv_cache_dtype": "auto",
            "follow_bootstrap_room": True,
            "enable_dsa_cache_layer_split": False,
            "decode_allocation_policy": "early",
            "enable_kv_cache_sharding": False,
            "prefill_http_port": server.port,
            "target_tp_rank": None,
            "target_tp_ranks": None,
            "target_cp_ranks": None,
            "target_pp_ranks": None,
            "required_dst_info_num": None,
            "required_prefill_response_num": None,
        }
        async with http.get(f"{url}/route?{query.format(0)}") as reply:
            assert sorted(await reply.json()) == ["rank_ip", "rank_port"]
        for path, status, text in (
            ("/route?engine_rank=-1", 400, "Missing inputs for bootstrap server."),
            (f"/route?{query.format(3)}", 404, UNKNOWN_RANK),
            ("/nope", 404, "404: Not Found"),
            ("/query_dp_ranks", 405, "405: Method Not Allowed"),
        ):
            async with http.get(url + path) as reply:
                assert (reply.status, await reply.text()) == (status, text)
        await http.post(f"{url}/register_dp_rank", json={"bootstrap_room": 4, "dp_rank": 0})
        async with http.post(f"{url}/query_dp_ranks", json={"bootstrap_rooms": [4, 5]}) as reply:
            assert await reply.json() == {"4": 0}


async def test_a_fleet_prints_its_servers_and_takes_them_with_it() -> None:
    command = [sys.executable, "-m", "engines.emulator", "fleet", "--prefill", "1", "--decode", "1", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    lines = [orjson.loads(await process.stdout.readline()) for _ in range(2)]
    assert [line["role"] for line in lines] == ["prefill", "decode"]
    assert (lines[0]["bootstrap_port"] is None, lines[1]["bootstrap_port"]) == (False, None)
    process.kill()
    await process.wait()

    async def gone() -> bool:
        return not any(_runs(line["pid"]) for line in lines)

    await until(gone)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
