"""The demo's client: whoever waits for its streams to begin is told of every one."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from gateway.demo_guest import Guest

FINISH = b'data: {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
TEXT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, TEXT + TEXT + FINISH), (200, FINISH), (200, b""), (503, b'{"error": {"message": "no"}}')],
    ids=["text", "over at once", "broken", "refused"],
)
async def test_a_stream_is_announced_once_whatever_becomes_of_it(status: int, body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            status=status, body=body, content_type="text/event-stream" if status == 200 else "application/json"
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    begun: list[bool] = []
    try:
        async with aiohttp.ClientSession() as http:
            guest = Guest(f"http://127.0.0.1:{runner.addresses[0][1]}", http, lambda question, tokens: {})
            await guest.stream("?", 1, lambda: begun.append(True))
    finally:
        await runner.cleanup()
    assert begun == [True]
