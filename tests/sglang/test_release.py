"""Whatever clients do, both real nodes get back what they gave: by their own word, fresh, nothing is used or queued."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.scenarios.client import Answer
from tests.sglang.fleet import MODEL, RealFleet, grown

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
LONG_TOKENS = 1500
AT_ONCE = 12


def long_body(stream: bool = True, **fields: Any) -> dict[str, Any]:
    """Of an answer that takes seconds."""
    greedy = {"max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "prompt": "tell me everything", "stream": stream, **greedy, **fields}


@pytest.mark.smoke
async def test_a_client_that_hangs_up_frees_both_sides(fleet: RealFleet) -> None:
    answer = Answer()
    asking = asyncio.ensure_future(fleet.ask(long_body(), COMPLETIONS, answer))
    await grown(answer, 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await fleet.idle(5.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_ends_the_request_and_frees_both_sides(fleet: RealFleet, stream: bool) -> None:
    answer, rid = Answer(), f"mine-{stream}"
    asking = asyncio.ensure_future(fleet.ask(long_body(stream, rid=rid), COMPLETIONS, answer))
    if stream:
        await grown(answer, 3)
    else:
        await asyncio.sleep(1.5)
    async with fleet.http.post(fleet.url + "/abort_request", json={"rid": rid}) as reply:
        assert reply.status == 200
    await asyncio.wait_for(asking, 10.0)
    await fleet.idle(5.0)


async def test_two_hundred_mixed_requests_leave_nothing(fleet: RealFleet) -> None:
    """Streams and not, of all routes, whole, aborted by name, and given up by their clients at any time."""
    rng = Random(7)
    room = asyncio.Semaphore(AT_ONCE)
    outcomes: list[str] = []

    async def one(number: int) -> None:
        end = rng.choice(["whole", "whole", "aborted", "left"])
        path = rng.choice([CHAT, COMPLETIONS, GENERATE])
        stream, after_s = rng.random() < 0.5, rng.uniform(0.0, 1.0)
        tokens = rng.randrange(1, 60) if end == "whole" else LONG_TOKENS
        body = of(path, f"request {number} says " + "hello world " * rng.randrange(1, 60), tokens, stream)
        async with room:
            answer = Answer()
            asking = asyncio.ensure_future(fleet.ask({**body, "rid": f"mixed-{number}"}, path, answer))
            if end == "left":
                await asyncio.sleep(after_s)
                asking.cancel()
            elif end == "aborted":
                await asyncio.sleep(after_s)
                async with fleet.http.post(fleet.url + "/abort_request", json={"rid": f"mixed-{number}"}) as reply:
                    assert reply.status == 200
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
                await asyncio.wait_for(asking, 60.0)
            if end == "whole":
                assert (answer.status, answer.errors, answer.ended) == (200, [], True), answer
                assert answer.done == stream
            outcomes.append(end)

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(one(number))
    assert len(outcomes) == 200
    assert set(outcomes) == {"whole", "aborted", "left"}
    await fleet.idle(10.0)
    assert await fleet.metric("pdgate_live_bookings") == 0
    assert await fleet.metric("pdgate_releases_pending") == 0


def of(path: str, text: str, tokens: int, stream: bool) -> dict[str, Any]:
    """A greedy body of any route, of exactly so many tokens."""
    if path == GENERATE:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"text": text, "sampling_params": sampling, "stream": stream}
    common = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {**common, **prompt}
