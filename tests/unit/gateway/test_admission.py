"""Admission: linear in the body, whatever a batch repeats of it."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from gateway.admission import MAX_FIELDS, MAX_SHARED_BYTES, admit
from gateway.errors import GatewayError
from gateway.openai_api import Api, parse
from tests.fakes import FakeExchange, FakeUpstream, gateway


def admitted(body: dict[str, Any]) -> int:
    return len(
        admit(gateway(FakeUpstream(lambda url, body: FakeExchange())), parse(Api.COMPLETIONS, orjson.dumps(body)))
    )


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


async def test_an_integer_beyond_64_bits_is_found_in_what_is_shared() -> None:
    with pytest.raises(GatewayError) as raised:
        admitted({"prompt": ["a", "b"], "x": {"deep": [1, 2**63]}})
    assert raised.value.param == "x.deep"
