"""SIGTERM under load: who has connected by then is answered, though nothing of him was read yet."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import orjson
import pytest

from tests.scenarios.client import ask, chat, expected_text, new_prompt
from tests.scenarios.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_who_waited_to_be_accepted_is_answered(one_pair: Cluster) -> None:
    prompts = [new_prompt() for _ in range(5)]
    async with aiohttp.ClientSession() as fresh:
        one_pair.gateway.send_signal(signal.SIGSTOP)
        asking = [asyncio.ensure_future(ask(fresh, one_pair.url, chat(each, 5))) for each in prompts]
        await asyncio.sleep(0.3)  # the kernel has their requests by then
        one_pair.gateway.send_signal(signal.SIGTERM)
        one_pair.gateway.send_signal(signal.SIGCONT)
        answers = await asyncio.gather(*asking)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200
        assert answer.text() == expected_text(prompt, 5)
    assert await one_pair.gateway.wait(10.0) == 0


async def test_who_has_connected_may_take_a_moment_to_ask(one_pair: Cluster) -> None:
    prompt = new_prompt()
    body = orjson.dumps(chat(prompt, 5))
    host, port = one_pair.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(0.2)
    one_pair.gateway.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.7)
    lines = ("POST /v1/chat/completions HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", "Connection: close")
    writer.write("\r\n".join((*lines, "", "")).encode() + body)
    answer = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert orjson.dumps(expected_text(prompt, 5)) in answer
    assert await one_pair.gateway.wait(10.0) == 0
