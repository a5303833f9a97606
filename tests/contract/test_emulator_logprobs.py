"""Prompt logprobs of emulated servers: where they are, and where they are null, as recorded of SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from tests.contract.emu_fleet import EmuFleet, Reply, emu_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED = orjson.loads((Path(__file__).parents[1] / "data" / "prompt_logprobs.json").read_bytes())
ROWS = [
    row
    for row in RECORDED
    if isinstance(row["request"].get("input_ids") or row["request"].get("prompt"), list) and "flat" not in row["name"]
]
"""Texts have other tokens there. Flat arrays are not emulated."""
IDS = [5, 6, 7, 8, 9, 10]
SHORT = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[EmuFleet]:
    async with emu_fleet(20.0, plain=True) as started:
        yield started


def logprobs(answer: Any) -> Any:
    """What an answer, or each event of a stream, says of logprobs: names and sizes, null where it is null."""
    if isinstance(answer, list):
        return [logprobs(each) for each in answer if isinstance(each, dict) and each.get("choices", True)]
    if "choices" in answer:
        return shape(answer["choices"][0]["logprobs"])
    return {name: shape(value) for name, value in answer["meta_info"].items() if "logprob" in name}


def shape(value: Any) -> Any:
    if isinstance(value, list):
        return [shape(each) for each in value]
    if isinstance(value, dict):
        known = {name: shape(each) for name, each in value.items()}
        return known if "tokens" in value else list(known.values())  # else the names are tokens
    return value if value is None else 0


def parsed(reply: Reply) -> Any:
    assert reply.status == 200, reply
    return reply.events() if reply.text.startswith("data:") else reply.json()


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
async def test_every_role_says_what_sglang_says(fleet: EmuFleet, row: dict[str, Any]) -> None:
    prefill, decode = await fleet.pair(row["path"], row["request"])
    plain = await fleet.post(fleet.extra[0], row["path"], row["request"])
    for reply, recorded in ((prefill, row["prefill"]), (decode, row["decode"]), (plain, row["plain"])):
        assert logprobs(parsed(reply)) == logprobs(recorded)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_comes_with_the_first_output(fleet: EmuFleet, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1, "stream": stream}
    answer = parsed(await fleet.post(fleet.extra[0], "/v1/completions", body))
    first = answer[0]["choices"][0] if stream else answer["choices"][0]
    assert first["text"].startswith("hello")
    assert first["logprobs"]["tokens"][:5] == list("hello")
    assert len(first["logprobs"]["tokens"]) == (6 if stream else 7)
    assert first["logprobs"]["token_logprobs"][0] is None


async def test_positions_of_a_list(fleet: EmuFleet) -> None:
    body = {
        "input_ids": [IDS, IDS],
        "sampling_params": SHORT,
        "return_logprob": [True, True],
        "logprob_start_len": [0, 4],
        "top_logprobs_num": [0, 2],
        "token_ids_logprob": [[5], [5, 6]],
    }
    whole, tail = (answer["meta_info"] for answer in parsed(await fleet.post(fleet.extra[0], "/generate", body)))
    assert [entry[1] for entry in whole["input_token_logprobs"]] == IDS
    assert [entry[1] for entry in tail["input_token_logprobs"]] == IDS[4:]
    assert ("input_top_logprobs" in whole, len(tail["input_top_logprobs"])) == (False, 2)
    assert (len(whole["output_token_ids_logprobs"][0]), len(tail["output_token_ids_logprobs"][0])) == (1, 2)


async def test_texts_are_there_where_asked_for(fleet: EmuFleet) -> None:
    body = {"text": "hi", "sampling_params": SHORT, "return_logprob": True, "logprob_start_len": 0}
    for asked, texts in ((True, ["h", "i"]), (False, [None, None])):
        answer = parsed(await fleet.post(fleet.extra[0], "/generate", {**body, "return_text_in_logprobs": asked}))
        assert [entry[2] for entry in answer["meta_info"]["input_token_logprobs"]] == texts


async def test_a_start_behind_the_prompt_is_refused_by_the_scheduler(fleet: EmuFleet) -> None:
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": SHORT, "return_logprob": True, "logprob_start_len": 5}
    said = (
        "req.logprob_start_len=5 is higher than the number of input tokens len(req.origin_input_ids)=4. "
        "Please use a smaller logprob_start_len."
    )
    for server in (fleet.extra[0], fleet.prefill, fleet.decode):
        reply = await fleet.post(server, "/generate", fleet.with_room(body))
        assert (reply.status, reply.json()) == (400, {"error": {"message": said}})
        event, done = (await fleet.post(server, "/generate", fleet.with_room({**body, "stream": True}))).events()
        assert event["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": said,
            "status_code": 400,
            "err_type": "BadRequestError",
        }
        assert done == "[DONE]"


async def test_what_has_logprobs_is_computed_and_not_taken_from_the_cache(fleet: EmuFleet) -> None:
    ids = list(range(100, 180))

    async def cached(**fields: Any) -> int:
        body = {"input_ids": ids, "sampling_params": SHORT, **fields}
        return int(parsed(await fleet.post(fleet.extra[0], "/generate", body))["meta_info"]["cached_tokens"])

    await cached()
    assert await cached() == 79
    assert await cached(return_logprob=True) == 79
    assert await cached(return_logprob=True, logprob_start_len=0) == 0
    assert await cached(return_logprob=True, logprob_start_len=30) == 30
    assert await cached(return_logprob=False, logprob_start_len=30) == 79
