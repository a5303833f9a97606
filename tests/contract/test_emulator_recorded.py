"""The emulator against recorded failures of a real SGLang 0.5.23: the same requests, aborts, drops and deaths.

`tests/data/sglang/faults.json` holds the excerpts. The recorded prefill's and decode's limits were 20 and 30 s; here
all runs SPEED times faster, and only who waits for a limit is sent to servers that have them: a busy machine takes as
long for other things. Counts of prompt tokens belong to the recorded model's tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from engines.emulator.process import EmulatedServer
from engines.types import Role
from tests.conformance.compare import differences, reduced
from tests.conformance.stage import Call, Stage
from tests.machine import Stopwatch
from tests.warm import WarmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

Pair = tuple[EmulatedServer, EmulatedServer]
SPEED = 25.0
GIVE_UP_S = 30.0
"""Whatever has not come by then hangs, on any machine."""
LIMITS = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30"}
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "sglang" / "faults.json").read_text())
RECORDED_NAMES = {"30298": "PORT", "43517": "RANK PORT", "20.0s": "BOOTSTRAP LIMIT", "30.0s": "WAITING LIMIT"}
OWN_NAMES = {f"{20 / SPEED}s": "BOOTSTRAP LIMIT", f"{30 / SPEED}s": "WAITING LIMIT"}
TOKENIZER = ("*.prompt_tokens", "*.cached_tokens", "!*.cached_tokens_details")
CUT = (*TOKENIZER, "*completion_tokens", "*.output_ids*", "*.weight_versions*", "*.length")
"""Where the end comes from outside, how far the answer had come is no part of the comparison."""


@asynccontextmanager
async def pair(environment: Mapping[str, str]) -> AsyncIterator[Pair]:
    """A pair that is started with this environment; what is restarted of it has none."""
    prefill = WarmServer(Role.PREFILL, speed=SPEED, arguments=("--model", "tiny"))
    decode = WarmServer(Role.DECODE, speed=SPEED, arguments=("--model", "tiny"), bootstrap_port=prefill.bootstrap_port)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            for server in (prefill, decode):
                await server.launch()
        for server in (prefill, decode):
            await server.wait_ready()
        yield prefill, decode
    finally:
        for server in (prefill, decode):
            await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Pair]:
    async with pair({}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited_servers() -> AsyncIterator[Pair]:
    async with pair(LIMITS) as running:
        yield running


@asynccontextmanager
async def a_stage(prefill: EmulatedServer, decode: EmulatedServer) -> AsyncIterator[Stage]:
    """The pair, with empty caches."""
    async with aiohttp.ClientSession() as http:
        ready = Stage(prefill, decode, http, lambda *_: pytest.fail("no third server"))
        ready.give_up_s = GIVE_UP_S
        ready.names |= {**OWN_NAMES, str(prefill.bootstrap_port): "PORT"}
        for leg in ("prefill", "decode"):
            await ready.quietly(leg, "/flush_cache")
        yield ready
        await ready.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(servers: Pair) -> AsyncIterator[Stage]:
    """A pair that is idle; a decode knows nothing of a prefill that was not there before it."""
    prefill, decode = servers
    if prefill.returncode is not None:
        await prefill.launch()
        await decode.stop()
    if decode.returncode is not None:
        await decode.launch()
    for server in servers:
        await server.wait_ready()
    async with a_stage(*servers) as ready:
        yield ready


@pytest_asyncio.fixture(loop_scope="module")
async def limited_stage(limited_servers: Pair) -> AsyncIterator[Stage]:
    """A pair whose time limits are those of the record."""
    async with a_stage(*limited_servers) as ready:
        yield ready


def send(stage: Stage, name: str, room: int, leg: str = "", **changes: Any) -> Call:
    """Send the recorded request `name` in `room`, its reply under the same name."""
    recorded = RECORDED[name]["request"]
    body = {**recorded["body"], **changes, "bootstrap_room": room}
    if "bootstrap_host" in body:
        body["bootstrap_host"] = recorded["body"]["bootstrap_host"]
        if recorded["body"]["bootstrap_port"] == 30298:
            body["bootstrap_port"] = stage.prefill.bootstrap_port
    leg = leg or ("prefill" if name.endswith(("_p", "_prefill")) or "prefill_only" in name else "decode")
    watch, call = Stopwatch(), stage.ask(leg, recorded["path"], body, label=name)
    call._task.add_done_callback(lambda _: call.reply.update(counted_s=watch.of(call.reply["elapsed_s"])))
    return call


async def both(stage: Stage, prefill: str, decode: str, **changes: Any) -> tuple[Call, Call]:
    room = stage.room()
    calls = send(stage, prefill, room, "prefill", **changes), send(stage, decode, room, "decode", **changes)
    await asyncio.gather(*(call.done() for call in calls))
    return calls


async def held_transfer(stage: Stage) -> int:
    """Hold the next transfer of the prefill."""
    return int(orjson.loads((await stage.quietly("prefill", "/emulator/hold", {"stage": "transfer"}))[1])["hold_id"])


async def held(stage: Stage, hold: int) -> None:
    """Wait until that hold has a request."""
    await stage.quietly("prefill", f"/emulator/hold/{hold}?wait_s={GIVE_UP_S}", method="GET")


async def release(stage: Stage, hold: int) -> None:
    await stage.quietly("prefill", f"/emulator/hold/{hold}", method="DELETE")


async def have_come(stage: Stage, leg: str, room: int, count: int = 1, tokens: int = 0) -> None:
    """Wait until a leg has, or had, so many requests in a room that have so many tokens."""

    async def there() -> bool:
        known = orjson.loads((await stage.quietly(leg, "/emulator/requests", method="GET"))[1])
        come = (each for each in (*known["live"], *known["recent"]) if each["room"] == room)
        return sum(each["output_tokens"] >= tokens for each in come) >= count

    assert await stage.until(there, GIVE_UP_S)


async def some_tokens(call: Call) -> bool:
    return call.tokens() > 2


def agrees(stage: Stage, *names: str, loose: tuple[str, ...] = TOKENIZER) -> None:
    """What the emulator answered under `names` is what SGLang did, and took as long in its own time."""
    for name in names:
        real, own = RECORDED[name], stage.calls[name].reply
        rooms = {str(real["request"]["body"]["bootstrap_room"]): "ROOM"}
        own_rooms = {known: "ROOM" for known, called in stage.names.items() if called.startswith("ROOM")}
        want = reduced({"names": {**RECORDED_NAMES, **rooms}, "replies": {name: real}}, loose)
        got = reduced({"names": {**stage.names, **own_rooms}, "replies": {name: own}}, loose)
        assert list(differences(want, got)) == []
        if real["elapsed_s"] > 5.0 and real["end"] == "whole" and not own.get("untimed"):
            assert own["elapsed_s"] * SPEED >= real["elapsed_s"] * 0.5, name
            assert own["counted_s"] * SPEED <= real["elapsed_s"] * 1.5, name


@pytest.mark.parametrize(
    "name",
    [
        *("fail_prefill_only_t20_30", "fail_prefill_only_stream_t20_30", "fail_decode_only_t20_30"),
        *("fail_decode_only_stream_t20_30", "fail_decode_only_chat_t20_30", "fail_decode_only_chat_stream_t20_30"),
        *("wrong_bootstrap_host_decode", "wrong_bootstrap_port_decode"),
    ],
)
async def test_a_leg_alone_ends_by_its_time_limit(limited_stage: Stage, name: str) -> None:
    call = send(limited_stage, name, limited_stage.room())
    port = RECORDED[name]["request"]["body"]["bootstrap_port"]
    assert port == 30298 or name == "wrong_bootstrap_port_decode"
    await call.done()
    agrees(limited_stage, name)


@pytest.mark.parametrize(
    "name", ["fail_prefill_only_abort", "fail_decode_only_abort", "fail_decode_only_chat_stream_abort"]
)
async def test_a_waiting_leg_is_aborted(stage: Stage, name: str) -> None:
    call = send(stage, name, stage.room())
    leg = "prefill" if "prefill" in name else "decode"
    assert await stage.waiting(leg)
    await asyncio.sleep(0.1)
    await stage.abort(leg, RECORDED[name]["request"]["body"]["rid"])
    await call.done()
    agrees(stage, name)


@pytest.mark.parametrize("prefix", ["abort_mid", "abort_mid_ns"])
async def test_an_abort_cuts_a_running_answer_short(stage: Stage, prefix: str) -> None:
    room = stage.room()
    prefill, decode = send(stage, f"{prefix}_prefill", room), send(stage, f"{prefix}_decode", room)
    await prefill.done()
    await have_come(stage, "decode", room, tokens=95)  # as many as the shorter of the recorded ones
    await stage.abort("decode", RECORDED[f"{prefix}_decode"]["request"]["body"]["rid"])
    await decode.done()
    agrees(stage, f"{prefix}_prefill", f"{prefix}_decode", loose=CUT)


async def test_an_abort_of_the_prefill_after_hand_over_changes_nothing(stage: Stage) -> None:
    room = stage.room()
    prefill, decode = send(stage, "abortP_mid_prefill", room), send(stage, "abortP_mid_decode", room)
    await prefill.done()
    await decode.first.wait()
    await stage.abort("prefill", RECORDED["abortP_mid_prefill"]["request"]["body"]["rid"])
    await decode.done()
    agrees(stage, "abortP_mid_prefill", "abortP_mid_decode", loose=(*TOKENIZER, "*.output_ids*"))


async def test_a_decode_that_comes_after_a_dropped_prefill_hangs(stage: Stage) -> None:
    room = stage.room()
    prefill = send(stage, "disc_prefill_only", room)
    assert await stage.waiting("prefill")
    await prefill.drop()
    await stage.settled("prefill")
    decode = send(stage, "disc_prefill_only_decode", room, "decode")
    await asyncio.sleep(25.0 / SPEED)
    await decode.drop()
    decode.reply["end"] = "silent"
    agrees(stage, "disc_prefill_only", "disc_prefill_only_decode")


async def test_a_prefill_that_comes_after_a_dropped_decode_fails_at_once(stage: Stage) -> None:
    room = stage.room()
    decode = send(stage, "disc_decode_only", room)
    assert await stage.waiting("decode")
    await asyncio.sleep(0.1)
    await decode.drop()
    await stage.settled("decode")
    prefill = await send(stage, "disc_decode_only_prefill", room).done()
    assert prefill.reply["counted_s"] < 0.5
    agrees(stage, "disc_decode_only", "disc_decode_only_prefill")


async def test_a_live_rid_is_refused(stage: Stage) -> None:
    first = send(stage, "dup_rid_1", stage.room(), "prefill")
    assert await stage.waiting("prefill")
    await send(stage, "dup_rid_2", stage.room(), "prefill").done()
    await first.drop()
    first.reply["end"] = "silent"
    agrees(stage, "dup_rid_1", "dup_rid_2")


async def test_of_two_decodes_in_one_room_one_is_answered(stage: Stage) -> None:
    room = stage.room()
    decodes = [send(stage, "dup_room_d1", room, "decode"), send(stage, "dup_room_d2", room, "decode")]
    assert await stage.waiting("decode", 2)
    hold = await held_transfer(stage)  # else the first prefill could be done, and the room with it, before the second
    prefills = [send(stage, "dup_room_p1", room, "prefill"), send(stage, "dup_room_p2", room, "prefill")]
    await have_come(stage, "prefill", room, 2)
    await held(stage, hold)
    await release(stage, hold)
    await asyncio.gather(*(call.done() for call in prefills))
    await asyncio.wait([call._task for call in decodes], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([call._task for call in decodes], timeout=15.0 / SPEED)
    for call in decodes:
        if not call.ended():
            await call.drop()
            call.reply["end"] = "silent"
    assert sorted(call.reply["end"] for call in decodes) == ["silent", "whole"]
    answered = next(call for call in decodes if call.reply["end"] == "whole")
    stage.calls["dup_room_d1"] = answered
    agrees(stage, "dup_room_d1", "dup_room_p1", "dup_room_p2", loose=(*TOKENIZER, "*.id"))


async def test_either_leg_may_come_first(stage: Stage) -> None:
    for early, late, leg in (
        ("order_decode_first", "order_decode_first_p", "decode"),
        ("order_prefill_first_p", "order_prefill_first", "prefill"),
    ):
        room = stage.room()
        first = send(stage, early, room, leg)
        await asyncio.sleep(3.0 / SPEED)
        assert not first.ended()
        await send(stage, late, room, "prefill" if leg == "decode" else "decode").done()
        await first.done()
        agrees(stage, early, late)


async def test_rooms_may_be_large_and_used_again(stage: Stage) -> None:
    room = stage.room()
    for number in (1, 2):
        names = f"reuse_room_{number}_prefill", f"reuse_room_{number}_decode"
        calls = send(stage, names[0], room), send(stage, names[1], room)
        await asyncio.gather(*(call.done() for call in calls))
        agrees(stage, *names)
    largest = send(stage, "room_max63_p", 2**63 - 1), send(stage, "room_max63_d", 2**63 - 1)
    await asyncio.gather(*(call.done() for call in largest))
    agrees(stage, "room_max63_p", "room_max63_d")


async def test_two_prompts_in_one_room_are_not_noticed(stage: Stage) -> None:
    await both(stage, "mismatch_p", "mismatch_d")
    agrees(stage, "mismatch_p", "mismatch_d")


@pytest.mark.parametrize("name", ["room_neg_p", "nohost_prefill"])
async def test_a_prefill_waits_in_an_odd_room(stage: Stage, name: str) -> None:
    call = send(stage, name, -5 if name == "room_neg_p" else stage.room())
    await asyncio.sleep(4.0 / SPEED)
    await call.drop()
    call.reply["end"] = "silent"
    agrees(stage, name)


async def test_two_samples_in_one_room_hang_the_decode(stage: Stage) -> None:
    room = stage.room()
    prefill, decode = send(stage, "pd_n2_prefill", room), send(stage, "pd_n2_decode", room)
    await prefill.done()
    await asyncio.sleep(15.0 / SPEED)
    await decode.drop()
    decode.reply["end"] = "silent"
    agrees(stage, "pd_n2_prefill", "pd_n2_decode", loose=(*TOKENIZER, "*.id"))


async def test_a_killed_decode_cuts_streams_and_answers_nothing_else(stage: Stage) -> None:
    rooms = stage.room(), stage.room()
    calls = [send(stage, f"kill_decode_direct_{name}", rooms[0]) for name in ("prefill", "stream")]
    calls += [send(stage, f"kill_decode_direct_{name}", rooms[1]) for name in ("ns_prefill", "ns")]
    for prefill in calls[::2]:
        await prefill.done()
    assert await stage.until(lambda: some_tokens(calls[1]), GIVE_UP_S)
    await stage.decode.kill()
    for call in calls:
        await call.done()
    agrees(stage, *stage.calls, loose=CUT)


async def test_a_decode_frozen_and_killed_in_the_transfer_fails_the_prefill(stage: Stage) -> None:
    hold = await held_transfer(stage)
    room = stage.room()
    calls = send(stage, "k3_decode_frozen_prefill", room), send(stage, "k3_decode_frozen_decode", room)
    await held(stage, hold)
    stage.decode.send_signal(signal.SIGSTOP)
    await release(stage, hold)
    await asyncio.sleep(3.0 / SPEED)
    assert not calls[0].ended()
    await stage.decode.kill()
    for call in calls:
        await call.done()
    said = re.search(r"127\.0\.0\.1:(\d+)", calls[0].reply["body"])
    assert said is not None
    stage.names[said[1]] = "RANK PORT"
    agrees(stage, *stage.calls)


async def test_a_room_without_a_host_kills_a_decode(stage: Stage) -> None:
    await send(stage, "nohost_decode", stage.room()).done()
    agrees(stage, "nohost_decode")
    assert await stage.decode.wait() != 0


async def test_a_terminated_decode_serves_on_while_it_has_requests(stage: Stage) -> None:
    room = stage.room()
    prefill, stream = send(stage, "sigterm_decode_p", room), send(stage, "sigterm_decode_stream", room)
    await prefill.done()
    await stream.first.wait()
    stage.decode.send_signal(signal.SIGTERM)

    async def ill() -> bool:
        return (await stage.quietly("decode", "/health", method="GET"))[0] == RECORDED["sigterm_decode_health"][
            "status"
        ]

    assert await stage.until(ill, GIVE_UP_S)
    late = send(stage, "sigterm_decode_new", stage.room(), "decode")
    await stream.done()
    assert not late.ended()
    await late.drop()
    late.reply["end"] = "silent"
    agrees(stage, *stage.calls, loose=(*TOKENIZER, "*.output_ids*"))
    assert await stage.decode.wait() == 0


async def test_a_killed_prefill_fails_waiting_decodes_only(stage: Stage) -> None:
    room, shorter = stage.room(), {"sampling_params": {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True}}
    running_p = send(stage, "kill_prefill_running_p", room, **shorter)
    running = send(stage, "kill_prefill_running_d", room, **shorter)
    await running_p.done()
    waiting = [send(stage, f"kill_prefill_waiting_d{tail}", stage.room()) for tail in ("", "_chat_stream")]
    only = send(stage, "kill_prefill_only_p", stage.room(), "prefill")
    assert await stage.waiting("decode", 3)
    await stage.prefill.kill()
    for call in (*waiting, only, running):
        await call.done()
    running.untimed()
    await send(stage, "kill_prefill_then_decode_new", stage.room()).done()
    agrees(stage, *stage.calls, loose=CUT)
