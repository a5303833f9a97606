"""Prefixes on a real SGLang: what is reused, what its KV events say, and what pdgate believes of both."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.scenarios.cluster import eventually
from tests.sglang.fleet import MODEL, PAGE_TOKENS, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETIONS = "/v1/completions"
BLOCK_TOKENS = 64
_serial = count(1)


def new_prompt(words: int = 150) -> str:
    """A prompt that no test has sent before."""
    return f"prompt {next(_serial)} of the cache: " + "the quick brown fox jumps " * (words // 5)


def body(prompt: str, tokens: int = 4) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def page_hashes(ids: Sequence[int]) -> list[int]:
    """SGLang's names of the whole pages of a prompt: chained SHA-256 of little-endian ids, the first 8 bytes signed."""
    hashes, digest = [], b""
    for at in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = struct.pack(f"<{PAGE_TOKENS}I", *ids[at : at + PAGE_TOKENS])
        digest = hashlib.sha256(digest + page).digest()
        hashes.append(int.from_bytes(digest[:8], "big", signed=True))
    return hashes


async def cached_tokens(fleet: RealFleet, prompt: str) -> tuple[int, int, int]:
    """Of one completion: prompt tokens, what the gateway predicted to be cached, what the engine found."""
    answer = await fleet.ask(body(prompt), COMPLETIONS)
    assert answer.status == 200, answer.body
    usage = answer.body["usage"]
    shown = (await fleet.explain(answer.request_id))["attempts"][-1]
    assert shown["prompt_index"] == "ids", shown
    return usage["prompt_tokens"], shown["hit_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


async def followed(fleet: RealFleet) -> None:
    """Wait until the gateway reads the prefill's KV events, and hashes ids."""

    async def missing() -> str:
        mode = await fleet.metric("pdgate_kv_events_mode", engine=fleet.prefill.url, mode="events")
        exact = await fleet.metric("pdgate_index_exact")
        return "" if (mode, exact) == (1, 1) else f"events {mode}, ids {exact}"

    await eventually(missing, 30.0)


@pytest.mark.smoke
async def test_a_prefix_is_found_again_as_predicted(fleet: RealFleet) -> None:
    await followed(fleet)
    prompt = new_prompt()
    tokens, predicted, found = await cached_tokens(fleet, prompt)
    assert predicted == 0
    assert found < BLOCK_TOKENS
    await asyncio.sleep(0.3)  # its events take a moment
    tokens, predicted, found = await cached_tokens(fleet, prompt)
    assert predicted == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert found == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS, "whole pages, of which our blocks are four"


async def test_events_name_pages_by_the_plain_rule(fleet: RealFleet) -> None:
    """Somebody else who listens sees the very hashes that the rule gives for the prompt's ids."""
    prompt = new_prompt()
    tokens = (await fleet.ask({"model": MODEL, "prompt": prompt}, "/tokenize")).body["tokens"]
    context = zmq.asyncio.Context()
    with context, context.socket(zmq.SUB) as socket:
        socket.connect(f"tcp://127.0.0.1:{fleet.events_port}")
        socket.subscribe(b"")
        await asyncio.sleep(0.5)
        assert (await fleet.ask(body(prompt), COMPLETIONS)).status == 200
        stored: list[int] = []
        async with asyncio.timeout(10):
            while len(stored) < len(tokens) // PAGE_TOKENS:
                _, _, payload = await socket.recv_multipart()
                events = msgspec.msgpack.decode(payload)[1]
                stored += [name for each in events if each["type"] == "BlockStored" for name in each["block_hashes"]]
    assert stored[: len(tokens) // PAGE_TOKENS] == page_hashes(tokens)


async def test_a_flushed_cache_is_forgotten(fleet: RealFleet) -> None:
    await followed(fleet)
    prompt = new_prompt()
    await cached_tokens(fleet, prompt)
    async with fleet.http.post(fleet.prefill.url + "/flush_cache") as reply:
        assert reply.status == 200

    async def missing() -> str:
        owned = await fleet.metric("pdgate_owned_blocks", engine=fleet.prefill.url)
        return f"{owned} blocks are still held" if owned else ""

    await eventually(missing, 10.0)
    assert (await cached_tokens(fleet, prompt))[1:] == (0, 0)


async def test_two_gateways_share_what_is_known(fleet: RealFleet) -> None:
    """What one gateway's request put into the cache, the other predicts."""
    await followed(fleet)
    if len(fleet.gateways) < 2:
        await fleet.add_gateway()
    other = fleet.gateways[1]
    prompt = new_prompt()
    tokens, _, _ = await cached_tokens(fleet, prompt)
    wanted = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    async def missing() -> str:
        async with fleet.http.post(other.url + COMPLETIONS, json=body(prompt)) as reply:
            answer = await reply.json()
            request_id = reply.headers["x-pdgate-request-id"]
        assert reply.status == 200, answer
        shown = (await fleet.get(f"{other.url}/pdgate/explain/{request_id}"))["attempts"][-1]
        return "" if shown["hit_tokens"] == wanted else f"it predicts {shown['hit_tokens']} of {wanted}"

    await eventually(missing, 15.0)
    seen = [(await fleet.get(gateway.url + "/pdgate/owners"))["engines"] for gateway in fleet.gateways[:2]]
    assert seen[0] == seen[1]
