"""Plays without faults: cases that need more than one request, or a look at the servers in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from tests.conformance.stage import Stage

SIX = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
IDS = list(range(300, 308))
PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": IDS, "sampling_params": SIX},
    "/v1/completions": {"model": "tiny", "prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    },
}
METRICS = (
    *("num_running_reqs", "num_queue_reqs", "num_retracted_reqs", "token_usage", "num_used_tokens", "cache_hit_rate"),
    *("kv_available_tokens", "kv_evictable_tokens", "max_total_num_tokens", "page_size", "gen_throughput"),
    *("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
    *("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
    *("num_requests_total", "num_aborted_requests_total", "generation_tokens_total", "prompt_tokens_total"),
)
"""What a gateway or an operator looks at."""

Play = Callable[[Stage], Awaitable[None]]


def long(tokens: int = 3000) -> dict[str, Any]:
    """Sampling parameters of an answer that takes seconds."""
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def cached_prefix(stage: Stage) -> None:
    """The second request finds the first one's prompt in the prefill's cache."""
    await stage.pair("/generate", {"input_ids": IDS * 8, "sampling_params": SIX}, "first")
    await stage.pair("/generate", {"input_ids": [*IDS * 8, 400, 401], "sampling_params": SIX}, "second")
    await stage.pair("/generate", {"input_ids": IDS * 8, "sampling_params": SIX, "stream": True}, "again")


async def cached_prefix_chat(stage: Stage) -> None:
    """Cached tokens in an OpenAI answer's usage."""
    body = PATHS["/v1/chat/completions"]
    await stage.pair("/v1/chat/completions", body, "first")
    await stage.pair("/v1/chat/completions", body, "second")


async def _fourth_token(stage: Stage) -> int:
    _, decode = await stage.pair("/generate", PATHS["/generate"], "look")
    return int(decode.json()["output_ids"][3])


async def stop_string(stage: Stage) -> None:
    """Stop at the text of what would be the fourth token; everywhere, streamed and not."""
    token = await _fourth_token(stage)
    text = orjson.loads((await stage.quietly("decode", "/detokenize", {"tokens": [token]}))[1])["text"]
    stage.names[text] = "STOP"
    ways: tuple[dict[str, Any], ...] = ({"stop": text}, {"stop": [text], "no_stop_trim": True})
    for index, way in enumerate(ways):
        for stream in (False, True):
            body = {"input_ids": IDS, "sampling_params": {**SIX, **way}, "stream": stream}
            await stage.pair("/generate", body, f"{index}_{stream}")
    await stage.pair("/v1/completions", {**PATHS["/v1/completions"], "stop": text}, "completion")
    await stage.pair("/v1/completions", {**PATHS["/v1/completions"], "stop": text, "stream": True}, "completion_stream")


async def stop_token(stage: Stage) -> None:
    """Stop at the fourth token itself."""
    token = await _fourth_token(stage)
    stage.names[str(token)] = "STOP"
    for stream in (False, True):
        body = {"input_ids": IDS, "sampling_params": {**SIX, "stop_token_ids": [token]}, "stream": stream}
        await stage.pair("/generate", body, str(stream))


async def batch_room_list(stage: Stage) -> None:
    """A batch with its own host, port and room for each prompt."""
    room, host, port = stage.room(), stage.prefill.host, stage.prefill.bootstrap_port
    rooms = {"bootstrap_host": [host] * 2, "bootstrap_port": [port] * 2, "bootstrap_room": [room, room + 1]}
    await stage.pair("/generate", {"input_ids": [IDS, [400, 401]], "sampling_params": SIX, **rooms}, "generate")
    room = stage.room()
    rooms["bootstrap_room"] = [room, room + 1]
    await stage.pair("/v1/completions", {**PATHS["/v1/completions"], "prompt": ["a", "b"], **rooms}, "completion")


async def largest_room(stage: Stage) -> None:
    """The largest room there is."""
    await stage.pair("/generate", stage.with_room(PATHS["/generate"], 2**63 - 1))


def room_as(what: str, path: str = "/generate") -> Play:
    """A room of another type, or beyond 64 bits. (2^63 and more is a fault: it ends a prefill.)"""

    async def play(stage: Stage) -> None:
        room = stage.room()
        forms: dict[str, Any] = {"text": str(room), "float": 1.0, "bool": True}
        body = stage.with_room(PATHS[path], forms.get(what, 2**63))
        data = orjson.dumps(body)
        if what == "far too large":
            data = data.replace(str(2**63).encode(), str(2**64).encode())
        stage.give_up_s = 3.0
        await asyncio.gather(stage.ask("prefill", path, data).done(), stage.ask("decode", path, data).done())

    return play


async def metrics(stage: Stage) -> None:
    """Which of the figures a gateway looks at are on the metrics page, after a request."""
    await stage.pair("/generate", PATHS["/generate"])
    for leg in ("prefill", "decode"):
        text = (await stage.quietly(leg, "/metrics", method="GET"))[1].decode()
        there = {line.split("{")[0] for line in text.splitlines() if line.startswith("sglang:")}
        stage.facts[f"{leg} metrics"] = [name for name in METRICS if f"sglang:{name}" in there]


async def flush_while_busy(stage: Stage) -> None:
    """Flushing is refused while a request runs."""
    body = stage.with_room({"input_ids": IDS, "sampling_params": long(), "stream": True, "rid": stage.rid})
    _, decode = stage.both("/generate", body)
    await decode.first.wait()
    await stage.ask("decode", "/flush_cache", label="flush").done()
    await stage.abort("decode", stage.rid)
    await decode.done()
    del stage.calls["decode"]


async def idle_connection(stage: Stage) -> None:
    """How long the API keeps an idle connection open, in whole seconds."""
    reader, writer = await asyncio.open_connection(stage.decode.host, stage.decode.port)
    writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await asyncio.wait_for(reader.read(), 20.0)
    stage.facts["idle connection closed after"] = f"{round(loop.time() - started_s)} s"
    writer.close()


async def register_dp_rank(stage: Stage) -> None:
    """A room's rank is told and asked for."""
    room = stage.room()
    await stage.ask("bootstrap", "/register_dp_rank", {"bootstrap_room": room, "dp_rank": 0}, label="told").done()
    await stage.ask("bootstrap", "/query_dp_ranks", {"bootstrap_rooms": [room, 1]}, label="asked").done()


def one_leg_first(first: str) -> Play:
    """The other leg comes a second later: nothing is lost."""

    async def play(stage: Stage) -> None:
        body = stage.with_room(PATHS["/generate"])
        second = "decode" if first == "prefill" else "prefill"
        early = stage.ask(first, "/generate", body)
        await asyncio.sleep(1.0)
        stage.facts["the first leg waits"] = not early.ended()
        await stage.ask(second, "/generate", body).done()
        await early.done()

    return play


async def room_used_again(stage: Stage) -> None:
    """After the end of both legs a room works again (no gateway should try)."""
    room = stage.room()
    for label in ("first", "second"):
        await stage.pair("/generate", stage.with_room({"input_ids": IDS, "sampling_params": SIX}, room), label)


async def rid_used_again(stage: Stage) -> None:
    """A stream's clean-up, two seconds after its end, aborts whatever has its rid by then."""
    await stage.pair("/generate", {**PATHS["/generate"], "stream": True, "rid": stage.rid}, "first")
    body = stage.with_room({"input_ids": IDS, "sampling_params": long(3900), "rid": stage.rid})
    _, decode = await stage.pair("/generate", body, "second")
    stage.facts["cut short"] = len(decode.json()["output_ids"]) < 3900


async def many_rooms(stage: Stage) -> None:
    """More requests than run at once: all end well, and leave nothing."""
    bodies = [stage.with_room({"input_ids": [*IDS, 400 + at], "sampling_params": long(12)}) for at in range(24)]
    calls = [call for at, body in enumerate(bodies) for call in stage.both("/generate", body, str(at))]
    for call in calls:
        await call.done()
    stage.facts["statuses"] = sorted({call.reply["status"] for call in calls})
    stage.facts["tokens"] = sorted({len(call.json()["output_ids"]) for call in calls[1::2]})
    stage.calls.clear()
    await stage.settled()


async def decode_full(stage: Stage) -> None:
    """Prompts that do not fit the decode's memory together: the last waits for a place, and is answered."""
    stage.give_up_s = 60.0
    sizes = (3000, 2900, 2800)
    bodies = [stage.with_room({"input_ids": [300 + at] * n, "sampling_params": long(40)}) for at, n in enumerate(sizes)]
    calls = [call for at, body in enumerate(bodies) for call in stage.both("/generate", body, str(at))]
    waited = await stage.until(lambda: _queued(stage), 20.0)
    stage.facts["one waits for a place"] = waited
    for call in calls:
        await call.done()
    await stage.settled()


async def _queued(stage: Stage) -> bool:
    return bool((await stage.load("decode"))["disaggregation"]["decode_prealloc_queue_reqs"])


async def batching(stage: Stage) -> None:
    """32 prompts of 100 tokens at once take far less than 32 one after the other."""
    loop = asyncio.get_running_loop()

    def body(number: int) -> dict[str, Any]:
        return stage.with_room({"input_ids": [300 + number, *range(500, 599)], "sampling_params": long(16)})

    await stage.pair("/generate", body(1000), "warm")
    started_s = loop.time()
    for at in range(32):
        await stage.pair("/generate", body(at), f"single_{at}")
    single_s = loop.time() - started_s
    started_s = loop.time()
    calls = [call for at in range(32) for call in stage.both("/generate", body(100 + at), f"many_{at}")]
    for call in calls:
        await call.done()
    ratio = (loop.time() - started_s) / single_s
    stage.facts["32 at once, in time of 32 singles"] = "under a half" if ratio < 0.5 else "over a half"
    stage.facts["measured ratio"] = ratio
    stage.facts["measured seconds of 32 singles"] = single_s
    stage.calls.clear()
