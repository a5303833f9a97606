"""What the emulator does when requests are aborted, dropped, or meet each other: SGLang's behaviour, seen running.

The servers here survive; those that die are in test_emulator_deaths.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer, free_ports
from engines.emulator.tokens import encode
from engines.token_rule import unpack, verify_segment
from engines.types import Role
from failover.chaos.proxy import TcpProxy
from failover.chaos.world import LinkRule
from tests.contract.emu_fleet import EmuFleet, emu_fleet, until
from tests.machine import Stopwatch, time_limit
from tests.warm import WarmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEED = 10.0
LONG = {"text": "go on", "sampling_params": {"max_new_tokens": 20_000, "temperature": 0, "ignore_eos": True}}
SHORT = {"text": "be short", "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(speed=SPEED) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_leaks(fleet: EmuFleet) -> AsyncIterator[None]:
    yield
    await fleet.no_rooms(fleet.prefill)
    await fleet.no_rooms(fleet.decode)


async def live(fleet: EmuFleet, rid: str, decode: bool = True) -> None:
    """Wait until the request is registered."""
    server = fleet.decode if decode else fleet.prefill

    async def registered() -> bool:
        return any(each["rid"] == rid for each in (await fleet.get(server, "/emulator/requests"))["live"])

    await until(registered)


def text_500(start: str, rid: str, room: int, reason: str) -> dict[str, Any]:
    name = "req" if start.startswith("Prefill") else "decode_req.req"
    message = (
        f"{start} failed for request rank=0 {name}.rid='{rid}' {name}.bootstrap_room={room} "
        f"with exception KVTransferError(bootstrap_room={room}): {reason}"
    )
    return {"object": "error", "message": message, "type": "500", "param": None, "code": 500}


async def test_abort_in_the_prefill_bootstrap_queue(fleet: EmuFleet) -> None:
    body = fleet.with_room({**SHORT, "rid": "pb"}, room=1)
    waiting = asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", body))
    await live(fleet, "pb", decode=False)
    reply = await fleet.abort(fleet.prefill, "pb")
    assert (reply.status, reply.text) == (200, "")
    answer = await waiting
    assert answer.status == 500
    assert answer.json() == text_500("Prefill bootstrap", "pb", 1, "Aborted by AbortReq.")


async def test_abort_in_the_decode_transfer_queue_tells_the_prefill(fleet: EmuFleet) -> None:
    hold = await fleet.hold(fleet.prefill, "bootstrap")
    body = fleet.with_room({**SHORT, "rid": "dt"}, room=2)
    prefill = asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", body))
    await fleet.held(fleet.prefill, hold)
    decode = asyncio.ensure_future(fleet.post(fleet.decode, "/generate", body))

    async def transferring() -> bool:
        load = (await fleet.get(fleet.decode, "/v1/loads"))["loads"][0]
        return bool(load["disaggregation"]["decode_transfer_queue_reqs"] == 1 and load["num_used_tokens"] == 8)

    await until(transferring)
    await fleet.abort(fleet.decode, "dt")
    assert (await decode).json() == text_500("Decode transfer", "dt", 2, "Aborted by AbortReq.")
    unknown = "Failed due to an unknown reason from another rank"
    assert (await prefill).json() == text_500("Prefill bootstrap", "dt", 2, unknown)


async def test_a_prefill_that_comes_after_its_decode_gave_up_fails_at_once(fleet: EmuFleet) -> None:
    warm = await fleet.pair("/generate", SHORT)
    assert warm[1].status == 200
    body = fleet.with_room({**SHORT, "rid": "late"}, room=3)
    decode = asyncio.ensure_future(fleet.post(fleet.decode, "/generate", body))
    await live(fleet, "late")
    await fleet.abort(fleet.decode, "late")
    assert (await decode).status == 500
    reply = await fleet.post(fleet.prefill, "/generate", body)
    assert reply.json()["message"].endswith("Failed due to an unknown reason from another rank")


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_in_the_middle_of_decoding(fleet: EmuFleet, stream: bool) -> None:
    body = fleet.with_room({**LONG, "rid": f"mid{stream}", "stream": stream})
    both = [asyncio.ensure_future(fleet.post(server, "/generate", body)) for server in (fleet.prefill, fleet.decode)]
    assert (await both[0]).status == 200

    async def has_some_tokens() -> bool:
        known = (await fleet.get(fleet.decode, "/emulator/requests"))["live"]
        return any(each["rid"] == f"mid{stream}" and each["output_tokens"] > 1 for each in known)

    await until(has_some_tokens)
    await fleet.abort(fleet.prefill, f"mid{stream}")
    await asyncio.sleep(0.05)
    assert not both[1].done()
    await fleet.abort(fleet.decode, f"mid{stream}")
    reply = await both[1]
    answer = reply.events()[-2] if stream else reply.json()
    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert reply.status == 200
    assert answer["meta_info"]["finish_reason"] == aborted
    prompt = [byte + 3 for byte in b"go on"]
    assert verify_segment(prompt, answer["output_ids"], ignore_eos=True) == len(answer["output_ids"]) > 1


async def test_abort_matches_by_prefix_but_only_for_a_live_rid(fleet: EmuFleet) -> None:
    posts = [
        asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", fleet.with_room({**SHORT, "rid": rid})))
        for rid in ("req-1", "req-10", "other")
    ]
    for rid in ("req-1", "req-10", "other"):
        await live(fleet, rid, decode=False)
    await fleet.abort(fleet.prefill, "req-")
    await asyncio.sleep(0.05)
    assert not any(post.done() for post in posts)
    await fleet.abort(fleet.prefill, "req-1")
    assert [(await post).status for post in posts[:2]] == [500, 500]
    assert not posts[2].done()
    await fleet.abort(fleet.prefill, "other")
    assert (await posts[2]).status == 500


async def test_a_live_rid_is_refused(fleet: EmuFleet) -> None:
    first = asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", fleet.with_room({**SHORT, "rid": "same"})))
    await live(fleet, "same", decode=False)
    again = await fleet.post(fleet.prefill, "/generate", fleet.with_room({**SHORT, "rid": "same"}))
    assert (again.status, again.json()) == (400, {"error": {"message": "Duplicate request ID detected: same"}})
    await fleet.abort(fleet.prefill, "same")
    await first


async def test_of_two_requests_in_one_room_one_works_and_one_hangs(fleet: EmuFleet) -> None:
    hold = await fleet.hold(fleet.prefill, "transfer")
    bodies = [fleet.with_room({**SHORT, "rid": f"twin{at}"}, room=7001) for at in range(2)]
    decodes = [asyncio.ensure_future(fleet.post(fleet.decode, "/generate", body)) for body in bodies]
    for at in range(2):
        await live(fleet, f"twin{at}")
    first = asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", bodies[0]))
    await fleet.held(fleet.prefill, hold)
    assert (await fleet.post(fleet.prefill, "/generate", bodies[1])).status == 200
    await fleet.release(fleet.prefill, hold)
    assert (await first).status == 200
    done, _ = await asyncio.wait(decodes, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.3)
    hanging = [decode for decode in decodes if not decode.done()]
    assert (len(done), len(hanging)) == (1, 1)
    assert done.pop().result().status == 200
    for at in range(2):
        await fleet.abort(fleet.decode, f"twin{at}")
    assert (await hanging.pop()).status == 500


async def test_a_wrong_bootstrap_address_fails_the_handshake_after_fourteen_seconds(fleet: EmuFleet) -> None:
    body = {**fleet.with_room({**SHORT, "rid": "wrong"}, room=9), "bootstrap_port": 1}
    watch, started_s = Stopwatch(), asyncio.get_running_loop().time()
    reply = await fleet.post(fleet.decode, "/generate", body)
    elapsed_s, took_s = asyncio.get_running_loop().time() - started_s, watch.took_s()
    assert reply.json() == text_500("Decode handshake", "wrong", 9, "Aborted by AbortReq.")
    assert elapsed_s >= 14 / SPEED
    assert took_s < 14 / SPEED + 2


async def _drop(fleet: EmuFleet, url: str, body: dict[str, Any], after_s: float) -> None:
    """Post and close the connection without waiting for an answer."""
    async with aiohttp.ClientSession() as http:
        try:
            async with asyncio.timeout(after_s), http.post(url + "/generate", json=body) as reply:
                await reply.read()
        except TimeoutError:
            return
    raise AssertionError("the request ended before it could be dropped")


async def test_a_dropped_stream_is_aborted_at_once() -> None:
    async with emu_fleet(speed=1.0) as slow:
        body = slow.with_room({**LONG, "stream": True})
        prefill = asyncio.ensure_future(slow.post(slow.prefill, "/generate", body))
        await _drop(slow, slow.decode.url, body, 0.5)
        await prefill
        await slow.no_rooms(slow.decode, within_s=1.5)  # SGLang's second abort would come after 2 s


async def test_a_dropped_whole_request_is_noticed_at_the_next_poll(fleet: EmuFleet) -> None:
    body = fleet.with_room({**LONG, "rid": "dropped"})
    prefill = asyncio.ensure_future(fleet.post(fleet.prefill, "/generate", body))
    await _drop(fleet, fleet.decode.url, body, 0.1)
    await prefill
    assert (await fleet.ledger(fleet.decode))["by_room"]
    await fleet.no_rooms(fleet.decode, within_s=4 / SPEED + 0.5)


async def test_dropping_the_prefill_leg_aborts_the_prefill(fleet: EmuFleet) -> None:
    await _drop(fleet, fleet.prefill.url, fleet.with_room({**SHORT, "stream": True}), 0.1)

    async def gone() -> bool:
        return not (await fleet.get(fleet.prefill, "/emulator/requests"))["live"]

    await until(gone, 1.0)


@pytest.mark.parametrize(
    ("side", "stage", "held_tokens", "other_tokens"),
    [
        ("decode", "reserved", 3000, 0),
        ("prefill", "bootstrap", 0, 3000),
        ("prefill", "prefill_chunk", 3000, 3000),
        ("prefill", "transfer", 3000, 3000),
        ("decode", "handed_over", 3000, 0),
        ("decode", "token", 3000, 0),
    ],
)
async def test_a_hold_stops_a_request_at_its_stage(
    fleet: EmuFleet, side: str, stage: str, held_tokens: int, other_tokens: int
) -> None:
    server, other = (fleet.prefill, fleet.decode) if side == "prefill" else (fleet.decode, fleet.prefill)
    await fleet.post(fleet.prefill, "/flush_cache", {})
    hold = await fleet.hold(server, stage)
    body = fleet.with_room({**SHORT, "text": f"{stage:3000}", "rid": f"held-{stage}"})
    both = [asyncio.ensure_future(fleet.post(each, "/generate", body)) for each in (fleet.prefill, fleet.decode)]
    held = await fleet.held(server, hold)
    assert (held["rid"], held["room"], held["stage"]) == (f"held-{stage}", body["bootstrap_room"], stage)
    room = str(body["bootstrap_room"])

    async def as_wanted() -> bool:
        ledgers = [await fleet.ledger(each) for each in (server, other)]
        return [ledger["by_room"].get(room, 0) for ledger in ledgers] == [held_tokens, other_tokens]

    await until(as_wanted)
    await asyncio.sleep(0.1)
    assert await as_wanted(), "nothing goes on"
    await fleet.release(server, hold)
    assert [(await each).status for each in both] == [200, 200]


async def test_a_hold_at_a_token_stops_the_stream_there(fleet: EmuFleet) -> None:
    hold = await fleet.hold(fleet.decode, "token", k=3)
    body = fleet.with_room({"prompt": "x", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True})
    prefill = asyncio.ensure_future(fleet.post(fleet.prefill, "/v1/completions", body))
    async with fleet.http.post(fleet.decode.url + "/v1/completions", json=body) as reply:
        await fleet.held(fleet.decode, hold)
        await asyncio.sleep(0.1)
        got = b"".join([await reply.content.readline() for _ in range(6)])
        assert got.count(b"data:") == 3
        await fleet.release(fleet.decode, hold)
        assert (await reply.read()).count(b"data:") == 4
    await prefill


async def test_incomplete_kv_gives_wrong_text(fleet: EmuFleet) -> None:
    right = (await fleet.pair("/generate", SHORT))[1].json()
    await fleet.post(fleet.prefill, "/emulator/fault", {"fault": "abort_in_200"})
    prefill, decode = await fleet.pair("/generate", SHORT)
    assert prefill.status == 200
    assert prefill.json()["meta_info"]["finish_reason"]["type"] == "abort"
    wrong = decode.json()["output_ids"]
    assert wrong[0] == right["output_ids"][0]
    assert wrong[1] != right["output_ids"][1]


async def test_different_prompts_give_the_text_of_what_came(fleet: EmuFleet) -> None:
    body = fleet.with_room({**SHORT, "text": "the one"})
    other = {**body, "text": "another"}
    _, decode = await asyncio.gather(
        fleet.post(fleet.prefill, "/generate", body), fleet.post(fleet.decode, "/generate", other)
    )
    prompt = [byte + 3 for byte in b"the one"]
    assert verify_segment(prompt, decode.json()["output_ids"], ignore_eos=True) == 5


@pytest.mark.parametrize("fault", ["truncate_stream", "error_event", "stall"])
async def test_stream_faults(fleet: EmuFleet, fault: str) -> None:
    await fleet.post(fleet.decode, "/emulator/fault", {"fault": fault, "after_tokens": 3})
    body = {**LONG, "stream": True, "rid": fault}
    full = fleet.with_room({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "rid": body["rid"]})
    prefill = asyncio.ensure_future(fleet.post(fleet.prefill, "/v1/completions", full))
    data = b""
    async with fleet.http.post(fleet.decode.url + "/v1/completions", json=full) as reply:
        try:
            async with time_limit(0.5):
                while chunk := await reply.content.readany():
                    data += chunk
            ended = "whole"
        except aiohttp.ClientPayloadError:
            ended = "cut"
        except TimeoutError:
            ended = "stalled"
    await prefill
    assert ended == {"truncate_stream": "cut", "error_event": "whole", "stall": "stalled"}[fault]
    assert data.count(b'"text":') == 3
    assert (b"[DONE]" in data) == (b'"error"' in data) == (fault == "error_event")


@pytest.mark.parametrize("fault", ["truncate_stream", "error_event"])
async def test_stream_faults_reach_a_prefills_only_token(fleet: EmuFleet, fault: str) -> None:
    await fleet.post(fleet.prefill, "/emulator/fault", {"fault": fault, "after_tokens": 1})
    full = fleet.with_room({"prompt": "x", "max_tokens": 5, "stream": True})
    decode = asyncio.ensure_future(fleet.post(fleet.decode, "/v1/completions", full))
    if fault == "truncate_stream":
        with pytest.raises(aiohttp.ClientPayloadError):
            await fleet.post(fleet.prefill, "/v1/completions", full)
    else:
        assert "injected" in (await fleet.post(fleet.prefill, "/v1/completions", full)).text
    await decode


async def test_request_faults(fleet: EmuFleet) -> None:
    await fleet.post(fleet.decode, "/emulator/fault", {"fault": "status", "status": 503, "count": 2})
    statuses = [(await fleet.post(fleet.decode, "/generate", fleet.with_room(SHORT))).status for _ in range(2)]
    assert statuses == [503, 503]
    await fleet.post(fleet.decode, "/emulator/fault", {"fault": "drop_connection"})
    with pytest.raises(aiohttp.ClientError):
        await fleet.post(fleet.decode, "/generate", fleet.with_room(SHORT))
    await fleet.post(fleet.decode, "/emulator/fault", {"fault": "status"})
    await fleet.call(fleet.decode, "DELETE", "/emulator/fault")
    assert (await fleet.pair("/generate", SHORT))[1].status == 200
    assert (await fleet.post(fleet.decode, "/emulator/fault", {"fault": "nonsense"})).status == 400


async def test_the_decode_reports_what_the_prefill_had_cached(fleet: EmuFleet) -> None:
    body = {**SHORT, "text": "cached " * 50}
    first, second = [(await fleet.pair("/generate", body))[1].json()["meta_info"] for _ in range(2)]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == 349
    assert second["cached_tokens_details"] == {"device": 349, "host": 0}


async def test_an_idle_connection_is_closed_after_five_seconds(fleet: EmuFleet) -> None:
    reader, writer = await asyncio.open_connection(fleet.decode.host, fleet.decode.port)
    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
    watch, started_s = Stopwatch(), asyncio.get_running_loop().time()
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    async with time_limit(8.0):
        assert await reader.read() == b""
    assert asyncio.get_running_loop().time() - started_s > 4.5
    assert watch.took_s() < 7
    writer.close()


# ---- faults that stand until they are taken out ------------------------------------------------------------------


@contextlib.asynccontextmanager
async def standing(fleet: EmuFleet, server: EmulatedServer, name: str, **fields: object) -> AsyncIterator[None]:
    """A fault that is taken out by its id."""
    reply = await fleet.post(server, "/emulator/fault", {"fault": name, "fault_id": name, **fields})
    assert reply.status == 200, reply.text
    yield
    assert (await fleet.call(server, "DELETE", f"/emulator/fault/{name}")).status == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_stuck_server_says_that_it_is_well_and_does_nothing(fleet: EmuFleet, side: str) -> None:
    server: EmulatedServer = getattr(fleet, side)
    async with standing(fleet, server, "stuck"):
        both = asyncio.ensure_future(fleet.pair("/generate", SHORT))
        statuses = [(await fleet.call(server, "GET", path)).status for path in ("/ready", "/health")]
        assert statuses == [200, 200]
        await asyncio.sleep(0.2)
        assert not both.done()
    assert [reply.status for reply in await both] == [200, 200]


async def test_an_ill_server_works(fleet: EmuFleet) -> None:
    async with standing(fleet, fleet.decode, "ill"):
        statuses = [(await fleet.call(fleet.decode, "GET", path)).status for path in ("/ready", "/health")]
        assert statuses == [503, 503]
        assert [reply.status for reply in await fleet.pair("/generate", SHORT)] == [200, 200]
    assert (await fleet.call(fleet.decode, "GET", "/ready")).status == 200


async def test_a_slow_scheduler_loses_time_in_each_round(fleet: EmuFleet) -> None:
    async def takes_s() -> tuple[float, float]:
        """By the clock, and what of it counts."""
        watch, began_s = Stopwatch(), asyncio.get_running_loop().time()
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        return asyncio.get_running_loop().time() - began_s, watch.took_s()

    async with standing(fleet, fleet.decode, "slow_scheduler", pause_s=0.1):
        by_clock_s, counted_s = await takes_s()
    assert by_clock_s > 0.3
    assert counted_s < 1.5
    assert (await takes_s())[1] < 0.3


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_leaked_kv_belongs_to_nobody_until_it_is_found(fleet: EmuFleet, side: str) -> None:
    server: EmulatedServer = getattr(fleet, side)
    before = (await fleet.get(server, "/v1/loads"))["loads"][0]["num_used_tokens"]
    async with standing(fleet, server, "leak", tokens=1000):
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        assert (await fleet.ledger(server))["by_room"] == {"leaked": 1000}
        assert (await fleet.get(server, "/v1/loads"))["loads"][0]["num_used_tokens"] == before + 1000
    assert (await fleet.ledger(server))["by_room"] == {}
    async with standing(fleet, server, "leak", tokens=10**9):
        ledger = await fleet.ledger(server)
        assert (ledger["by_room"], ledger["free_tokens"]) == ({"leaked": ledger["total_tokens"]}, 0)


async def test_a_fault_is_taken_out_by_its_id_alone(fleet: EmuFleet) -> None:
    async with standing(fleet, fleet.decode, "leak", tokens=10):
        async with standing(fleet, fleet.decode, "status", status=503, count=100):
            assert (await fleet.post(fleet.decode, "/generate", fleet.with_room(SHORT))).status == 503
        assert (await fleet.pair("/generate", SHORT))[1].status == 200
        assert (await fleet.ledger(fleet.decode))["by_room"] == {"leaked": 10}
    assert (await fleet.post(fleet.decode, "/emulator/fault", {"fault": "poison"})).status == 400


async def test_partial_kv_fails_the_prefill_and_leaves_the_decode_waiting(fleet: EmuFleet) -> None:
    await fleet.post(fleet.prefill, "/emulator/fault", {"fault": "partial_kv"})
    body = fleet.with_room({**SHORT, "rid": "partial"})
    decode = asyncio.ensure_future(fleet.post(fleet.decode, "/generate", body))
    reply = await fleet.post(fleet.prefill, "/generate", body)
    assert reply.status == 500
    assert f"Failed to send kv chunk of {body['bootstrap_room']} to 127.0.0.1:" in reply.json()["message"]
    await asyncio.sleep(0.1)
    assert not decode.done()
    await fleet.abort(fleet.decode, "partial")
    assert (await decode).status == 500
    assert (await fleet.pair("/generate", SHORT))[1].status == 200


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_poison_prompt_kills_the_server_that_gets_it(as_ids: bool) -> None:
    async with emu_fleet(speed=SPEED) as fleet:
        async with standing(fleet, fleet.prefill, "poison", word="arsenic"):
            assert (await fleet.pair("/generate", {**SHORT, "text": "arseni c"}))[1].status == 200
        await fleet.post(fleet.prefill, "/emulator/fault", {"fault": "poison", "word": "arsenic"})
        text = "a spoonful of arsenic, please"
        prompt = {"input_ids": unpack(encode(text))} if as_ids else {"text": text}
        body = {**prompt, "sampling_params": SHORT["sampling_params"]}
        with pytest.raises(aiohttp.ClientError):
            await fleet.post(fleet.prefill, "/generate", fleet.with_room(body))
        assert await fleet.prefill.wait() == 131
        assert fleet.decode.returncode is None


async def test_a_hold_ends_by_itself_when_its_time_is_over(fleet: EmuFleet) -> None:
    reply = await fleet.post(fleet.decode, "/emulator/hold", {"stage": "token", "k": 2, "for_s": 1.0})
    armed_s, watch = asyncio.get_running_loop().time(), Stopwatch()
    assert [each.status for each in await fleet.pair("/generate", SHORT)] == [200, 200]
    assert asyncio.get_running_loop().time() - armed_s > 0.8, (
        "the emulator's clock may have begun before its answer came"
    )
    assert watch.took_s() < 2.0
    hold = await fleet.get(fleet.decode, f"/emulator/hold/{reply.json()['hold_id']}")
    assert hold["state"] == "released"
    assert hold["rid"]


async def test_kv_goes_by_way_of_a_proxy_where_a_prefill_is_told_to() -> None:
    kv_port = free_ports(1)[0]
    proxy = TcpProxy("127.0.0.1", kv_port, random.Random(1))
    way = f"127.0.0.1:{kv_port}=127.0.0.1:{await proxy.start()}"
    async with (
        WarmServer(Role.PREFILL, speed=SPEED, arguments=("--kv-via", way)) as prefill,
        WarmServer(Role.DECODE, speed=SPEED, arguments=("--kv-port", str(kv_port))) as decode,
        aiohttp.ClientSession() as http,
    ):
        fleet = EmuFleet(prefill, decode, http)
        assert [reply.status for reply in await fleet.pair("/generate", SHORT)] == [200, 200]
        assert proxy.bytes_forth > 8 * 16
        assert 0 < proxy.bytes_back < 100, "the acknowledgement"
        lift = proxy.impose(forth=LinkRule(silent=True))
        both = asyncio.ensure_future(fleet.pair("/generate", SHORT))
        await asyncio.sleep(0.2)
        assert not both.done()
        lift()
        assert [reply.status for reply in await both] == [200, 200]
    await proxy.stop()
