"""From a request to what routing may know of it: namespaces that never mix, counts that are exact or cautious."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import orjson
import pytest

from gateway.context import Gateway
from gateway.openai_api import Api, expand, parse
from gateway.prompt import Prompt, identify, request_view
from routing.types import RequestView
from tests.fakes import FakeUpstream, gateway, now_s, probed, timeless

TEXT = "0123456789abcdef" * 100
"""1,600 bytes: six whole blocks."""


def views(gw: Gateway, api: Api, **body: Any) -> list[RequestView]:
    """Without a tokenizer nothing is waited for: one step of each coroutine gives its prompt."""
    request = parse(api, orjson.dumps({"model": "tiny", **body}))
    prompts = [(unit, at_once(identify(gw, api, unit, "tiny"))) for unit in expand(request)]
    return [request_view(gw, request, unit, "tiny", prompt, now_s(), now_s() + 5.0) for unit, prompt in prompts]


def at_once(work: Coroutine[Any, Any, Prompt]) -> Prompt:
    try:
        work.send(None)
    except StopIteration as done:
        return cast("Prompt", done.value)
    raise AssertionError("it waited")


def view(gw: Gateway, api: Api = Api.COMPLETIONS, **body: Any) -> RequestView:
    (only,) = views(gw, api, **({"prompt": TEXT} if api is Api.COMPLETIONS and "prompt" not in body else {}) | body)
    return only


def chat(text: str = TEXT, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text, **message}]}


def timeless_with_gateway(test: Callable[[Gateway], None]) -> Callable[[], None]:
    async def run() -> None:
        test(await probed(gateway(FakeUpstream(), "p0", "d0")))

    return timeless(run)


@timeless_with_gateway
def test_a_prompt_is_cut_into_whole_blocks(gw: Gateway) -> None:
    asked = view(gw, prompt=TEXT)
    assert len(asked.blocks) == 6
    assert asked.prompt_tokens == 400
    assert asked.block_tokens == 64.0
    assert view(gw, prompt=TEXT[:255]).blocks == ()


@timeless_with_gateway
def test_equal_beginnings_have_equal_blocks(gw: Gateway) -> None:
    one, other = view(gw, prompt=TEXT), view(gw, prompt=TEXT[:1100] + "different" * 100)
    assert one.blocks[:4] == other.blocks[:4]
    assert not set(one.blocks[4:]) & set(other.blocks)


@timeless_with_gateway
def test_a_longer_chat_begins_with_the_blocks_of_the_shorter(gw: Gateway) -> None:
    first = chat()["messages"]
    shorter = view(gw, Api.CHAT, messages=first)
    longer = view(gw, Api.CHAT, messages=[*first, {"role": "assistant", "content": "ok"}, *first])
    assert longer.blocks[: len(shorter.blocks)] == shorter.blocks


@pytest.mark.parametrize(
    "apart",
    [
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"lora_path": "a"},
        {"cache_salt": "b"},
        {"cache_salt": "a", "extra_key": "a"},
    ],
    ids=lambda apart: "-".join(f"{name}_{value}" for name, value in apart.items()),
)
def test_what_keeps_kv_apart_keeps_blocks_apart(apart: dict[str, str]) -> None:
    @timeless_with_gateway
    def differs(gw: Gateway) -> None:
        assert not set(view(gw, **apart).blocks) & set(view(gw).blocks)
        others = [{"cache_salt": "x"}, {"extra_key": "x"}, {"lora_path": "x"}]
        assert not any(set(view(gw, **apart).blocks) & set(view(gw, **other).blocks) for other in others)
        assert view(gw, **apart).blocks == view(gw, **apart).blocks

    differs()


@timeless_with_gateway
def test_salt_and_key_do_not_stand_for_each_other(gw: Gateway) -> None:
    assert not set(view(gw, cache_salt="a").blocks) & set(view(gw, extra_key="a").blocks)


@timeless_with_gateway
def test_an_empty_salt_is_none(gw: Gateway) -> None:
    assert view(gw, cache_salt="", extra_key=None).blocks == view(gw).blocks


@timeless_with_gateway
def test_the_prompts_of_a_list_have_their_own_salts(gw: Gateway) -> None:
    """A salt each: the same text under two salts shares nothing, and each what a single request would have."""
    one, two = views(gw, Api.COMPLETIONS, prompt=[TEXT, TEXT], cache_salt=["a", "b"], lora_path=["l", "l"])
    assert not set(one.blocks) & set(two.blocks)
    assert one.blocks == view(gw, cache_salt="a", lora_path="l").blocks
    assert two.blocks == view(gw, cache_salt="b", lora_path="l").blocks


@timeless_with_gateway
def test_a_template_sets_chats_apart_from_plain_prompts(gw: Gateway) -> None:
    same = [view(gw, Api.COMPLETIONS, prompt=TEXT).blocks, view(gw, Api.GENERATE, text=TEXT).blocks]
    assert same[0] == same[1], "both are plain text"
    assert not set(view(gw, Api.CHAT, **chat()).blocks) & set(same[0])


@timeless_with_gateway
def test_ids_and_text_never_mix(gw: Gateway) -> None:
    ids = [0x61616161] * 400
    as_ids, as_text = view(gw, Api.GENERATE, input_ids=ids), view(gw, Api.GENERATE, text="a" * 1600)
    assert len(as_ids.blocks) == len(as_text.blocks) == 6
    assert not set(as_ids.blocks) & set(as_text.blocks)


@timeless_with_gateway
def test_ids_are_counted_exactly(gw: Gateway) -> None:
    for _ in range(10):
        gw.decider.learned.saw_prompt("tiny", 200, 100)
    asked = view(gw, Api.GENERATE, input_ids=list(range(300)))
    assert (asked.prompt_tokens, asked.block_tokens) == (300, 64.0)
    assert view(gw).block_tokens == pytest.approx(128.0)


@timeless_with_gateway
def test_an_estimate_never_refuses_what_may_fit_and_a_count_does(gw: Gateway) -> None:
    assert view(gw, prompt="x" * 400_000).prompt_tokens == 7_999
    assert view(gw, Api.GENERATE, input_ids=[1] * 9_000).prompt_tokens == 9_000


@timeless_with_gateway
def test_output_is_bounded_by_request_and_context(gw: Gateway) -> None:
    assert view(gw, max_tokens=7).max_output_tokens == 7
    assert view(gw).max_output_tokens == 16
    unlimited = view(gw, Api.CHAT, **chat())
    assert unlimited.max_output_tokens == 8_000 - unlimited.prompt_tokens
    assert view(gw, prompt="x" * 400_000, max_tokens=500).max_output_tokens == 1
    assert view(gw, max_tokens=7).expected_output_tokens == 7


@timeless
async def test_a_model_nobody_serves_yet_can_be_asked_for() -> None:
    asked = view(gateway(FakeUpstream(), "p0", "d0"))
    assert (asked.prompt_tokens, asked.max_output_tokens) == (400, 1)


@timeless_with_gateway
def test_every_view_has_a_name_of_its_own(gw: Gateway) -> None:
    assert len({view(gw).request_id for _ in range(50)}) == 50


@timeless_with_gateway
def test_the_size_of_the_body_is_counted_for_the_queue(gw: Gateway) -> None:
    assert view(gw).body_bytes > len(TEXT)


@timeless_with_gateway
def test_the_body_of_a_batch_is_counted_once(gw: Gateway) -> None:
    body = {"prompt": [TEXT] * 7, "n": 3}
    body_bytes = len(orjson.dumps({"model": "tiny", **body}))
    parts = views(gw, Api.COMPLETIONS, **body)
    assert body_bytes <= sum(part.body_bytes for part in parts) < body_bytes + len(parts)
