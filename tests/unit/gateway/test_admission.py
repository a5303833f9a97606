"""Admission: linear in the body, whatever a batch repeats of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest

from engines.emulator.tokenizer_files import FOLDER
from engines.token_rule import VOCABULARY_TOKENS
from gateway.admission import MAX_FIELDS, MAX_SHARED_BYTES, admit
from gateway.config import TokenizerConfig
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.join_probe import Join
from gateway.openai_api import Api, parse
from routing.prefix import BlockKind
from tests.fakes import FakeExchange, FakeUpstream, gateway, probed

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Joins:
    """A join probe that has found these."""

    def __init__(self, joins: Mapping[str, Join]) -> None:
        self.joins = joins

    def of(self, model: str) -> Join:
        return self.joins.get(model) or Join(BlockKind.TEXT)


def admitted(body: dict[str, Any]) -> int:
    return len(
        admit(gateway(FakeUpstream(lambda url, body: FakeExchange())), parse(Api.COMPLETIONS, orjson.dumps(body)))
    )


def refused(gw: Gateway, api: Api, body: dict[str, Any]) -> tuple[int, str | None] | None:
    """The status and field by which a request is refused; None where it is let in."""
    try:
        admit(gw, parse(api, orjson.dumps(body)))
    except GatewayError as error:
        return error.status, error.param
    return None


async def test_what_a_batch_shares_is_looked_at_once() -> None:
    begun_s = time.process_time()
    assert admitted({"prompt": ["a"] * 5000, "x": [[0]] * 2000}) == 5000
    assert time.process_time() - begun_s < 1.0


async def test_a_batch_that_repeats_too_much_is_refused() -> None:
    shared = "y" * (MAX_SHARED_BYTES // 5000)
    with pytest.raises(GatewayError, match="send several requests"):
        admitted({"prompt": ["a"] * 5000, "x": shared})
    assert admitted({"prompt": ["a"], "x": shared}) == 1


async def test_bodies_of_very_many_fields_are_refused() -> None:
    with pytest.raises(GatewayError, match=f"more than {MAX_FIELDS} fields"):
        admitted({"prompt": "a", **{f"f{number}": 1 for number in range(MAX_FIELDS)}})


@pytest.mark.parametrize("params", [[{"min_p": 0.5, "seed": 1}, {}], [{}, {"beam_width": 3}]])
async def test_every_prompts_own_fields_are_looked_at(params: list[dict[str, Any]]) -> None:
    with pytest.raises(GatewayError) as raised:
        admit(
            gateway(FakeUpstream(lambda url, body: FakeExchange())),
            parse(Api.GENERATE, orjson.dumps({"text": ["a", "b"], "sampling_params": params})),
        )
    assert raised.value.status == 400
    assert (raised.value.param or "").startswith("sampling_params.")


@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        (Api.GENERATE, {"input_ids": [5, -1]}, "input_ids"),
        (Api.GENERATE, {"input_ids": [[5], [5, -1]]}, "input_ids"),
        (Api.COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
        (Api.COMPLETIONS, {"prompt": [[5], [-1]]}, "prompt"),
        (Api.CHAT, {**CHAT, "input_ids": [-1]}, "input_ids"),
        (Api.CHAT, {**CHAT, "stop_token_ids": [-1]}, "stop_token_ids"),
        (Api.COMPLETIONS, {"prompt": ["a", "b"], "stop_token_ids": [5, -1]}, "stop_token_ids"),
        (
            Api.GENERATE,
            {"text": ["a", "b"], "sampling_params": [{}, {"stop_token_ids": [-1]}]},
            "sampling_params.stop_token_ids",
        ),
    ],
)
async def test_negative_ids_are_refused_by_every_gateway(api: Api, body: dict[str, Any], field: str) -> None:
    assert refused(gateway(FakeUpstream()), api, body) == (400, field)


@pytest.mark.parametrize(("model", "kind"), [("tiny", BlockKind.IDS), (None, BlockKind.IDS), ("tiny", BlockKind.TEXT)])
@pytest.mark.parametrize("token", [VOCABULARY_TOKENS - 1, VOCABULARY_TOKENS])
@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        (Api.GENERATE, {"input_ids": "TOKEN"}, "input_ids"),
        (Api.COMPLETIONS, {"prompt": "TOKEN"}, "prompt"),
        (Api.CHAT, {**CHAT, "input_ids": "TOKEN"}, "input_ids"),
        (Api.CHAT, {**CHAT, "stop_token_ids": "TOKEN"}, "stop_token_ids"),
    ],
)
async def test_ids_beyond_a_proven_vocabulary_are_refused(
    model: str | None, kind: BlockKind, token: int, api: Api, body: dict[str, Any], field: str
) -> None:
    gw = await probed(gateway(FakeUpstream(), "p0", "d0", tokenizer=TokenizerConfig(str(FOLDER))))
    gw = replace(gw, joins=Joins({"tiny": Join(kind)}))  # type: ignore[arg-type]
    body = {name: [5, token] if value == "TOKEN" else value for name, value in body.items()}
    body |= {} if model is None else {"model": model}
    foreign = kind is BlockKind.IDS and token == VOCABULARY_TOKENS
    assert refused(gw, api, body) == ((400, field) if foreign else None)


async def test_no_tokenizer_knows_no_vocabulary() -> None:
    gw = await probed(gateway(FakeUpstream(), "p0", "d0"))
    assert refused(gw, Api.GENERATE, {"input_ids": [5, 1_000_000]}) is None


async def test_the_ids_of_a_large_batch_are_looked_at_once() -> None:
    begun_s = time.process_time()
    assert admitted({"prompt": ["a"] * 5000, "stop_token_ids": [*range(2000)]}) == 5000
    assert time.process_time() - begun_s < 1.0


async def test_an_integer_beyond_64_bits_is_found_in_what_is_shared() -> None:
    with pytest.raises(GatewayError) as raised:
        admitted({"prompt": ["a", "b"], "x": {"deep": [1, 2**63]}})
    assert raised.value.param == "x.deep"
