"""The index of ids: exact counts, chains that APIs share, blocks over unlike pages, and what falls back to text."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest

from engines.emulator.tokenizer_files import FOLDER
from engines.emulator.tokens import chat_text, encode
from engines.timing import TINY
from engines.token_rule import unpack
from gateway import lifecycle
from gateway.candidates import hit_tokens
from gateway.config import TokenizerConfig
from gateway.context import Gateway
from gateway.join_probe import Join
from gateway.learned import Learned
from gateway.lifecycle import Arrival
from gateway.openai_api import Api, Unit, expand, parse
from gateway.prompt import Prompt, block_tokens, id_block_tokens, identify, request_view
from gateway.tokenizer import AT_ONCE_BYTES, Tokenizer, Untokenized
from routing.prefix import BlockKind
from tests.fakes import FakeClient, FakeExchange, FakeUpstream, gateway, now_s, probed, request, timeless, up, usage

TEXT = "0123456789abcdef" * 100
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]}
CHAT_IDS = unpack(encode(chat_text(CHAT)))


class Joined:
    """A join probe that has found `join`."""

    def __init__(self, join: Join) -> None:
        self.join = join

    def of(self, model: str) -> Join:
        return self.join


async def world(join: Join = Join(BlockKind.IDS)) -> Gateway:  # noqa: B008
    gw = await probed(gateway(FakeUpstream(), "p0", "d0", tokenizer=TokenizerConfig(str(FOLDER))))
    return replace(gw, joins=Joined(join))  # type: ignore[arg-type]


def with_ids(test: Callable[[Gateway], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await test(await world())

    return run


def units(api: Api, **body: Any) -> tuple[Unit, ...]:
    return expand(parse(api, orjson.dumps({"model": "tiny", **body})))


async def prompt(gw: Gateway, api: Api, **body: Any) -> Prompt:
    return await identify(gw, api, units(api, **body)[0], "tiny")


@with_ids
async def test_a_chat_is_known_by_its_exact_ids(gw: Gateway) -> None:
    known = await prompt(gw, Api.CHAT, **CHAT)
    assert known.ids == array("I", CHAT_IDS)
    assert (known.kind, known.tokens, known.block_tokens, known.why_text) == ("ids", len(CHAT_IDS), 64.0, "")
    assert len(known.blocks) == len(CHAT_IDS) // 64


@with_ids
async def test_equal_ids_are_equal_blocks_whichever_api_they_came_by(gw: Gateway) -> None:
    chat = await prompt(gw, Api.CHAT, **CHAT)
    text = chat_text(CHAT)
    assert (await prompt(gw, Api.COMPLETIONS, prompt=text)).blocks == chat.blocks
    assert (await prompt(gw, Api.GENERATE, text=text)).blocks == chat.blocks
    given = [
        await prompt(gw, Api.GENERATE, input_ids=CHAT_IDS),
        await prompt(gw, Api.COMPLETIONS, prompt=CHAT_IDS),
        await prompt(gw, Api.CHAT, messages=[{"role": "user", "content": "?"}], input_ids=CHAT_IDS),
    ]
    assert all(each.blocks == chat.blocks and each.ids == chat.ids and each.given for each in given)


@with_ids
async def test_what_keeps_kv_apart_keeps_ids_apart(gw: Gateway) -> None:
    same = (await prompt(gw, Api.CHAT, **CHAT)).blocks
    for apart in ({"cache_salt": "a"}, {"extra_key": "a"}, {"lora_path": "a"}):
        assert not set((await prompt(gw, Api.CHAT, **CHAT, **apart)).blocks) & set(same)


@timeless
async def test_the_two_kinds_share_no_block() -> None:
    by_ids, by_text = await world(), await world(Join(BlockKind.TEXT, "why not"))
    for api, body in ((Api.CHAT, CHAT), (Api.GENERATE, {"input_ids": CHAT_IDS}), (Api.COMPLETIONS, {"prompt": TEXT})):
        ids, text = await prompt(by_ids, api, **body), await prompt(by_text, api, **body)
        assert ids.blocks
        assert text.blocks
        assert not set(ids.blocks) & set(text.blocks)
        assert (text.kind, text.why_text) == (BlockKind.TEXT, "why not")


@timeless
async def test_the_kind_alone_keeps_them_apart() -> None:
    """Even if a tokenizer were named as what the index of text calls ids."""
    by_ids, by_text = await world(), await world(Join(BlockKind.TEXT))
    assert by_ids.tokenizer is not None
    by_ids.tokenizer.fingerprint = "token ids"
    ids, text = [await prompt(gw, Api.GENERATE, input_ids=[7] * 128) for gw in (by_ids, by_text)]
    assert len(ids.blocks) == len(text.blocks) == 2
    assert not set(ids.blocks) & set(text.blocks)


@with_ids
async def test_what_cannot_be_tokenized_here_is_text_with_the_reason(gw: Gateway) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
    for api, body, why in (
        (Api.CHAT, {"messages": [picture]}, "only the engine"),
        (Api.CHAT, {"messages": [{"role": "wizard", "content": TEXT}]}, "a role"),
        (Api.CHAT, {**CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        (Api.GENERATE, {"text": TEXT, "image_data": ["x"]}, "only the engine"),
        (Api.CHAT, {"messages": [{"role": "system", "content": TEXT, "tools": [{}]}]}, "tools that"),
        (Api.CHAT, {"messages": [{"role": "assistant", "content": TEXT, "tool_calls": 5}]}, "tool_calls that"),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "only the engine"),
    ):
        known = await prompt(gw, api, **body)
        assert known.kind is BlockKind.TEXT
        assert known.ids is None
        assert why in known.why_text


async def test_what_no_context_can_hold_is_not_tokenized() -> None:
    gw = replace(await world(), fleet=up("p0", "d0", context_tokens=50))
    assert (await prompt(gw, Api.COMPLETIONS, prompt="x" * 1_600)).kind is BlockKind.IDS
    known = await prompt(gw, Api.COMPLETIONS, prompt="x" * 1_601)
    assert (known.kind, known.why_text) == (BlockKind.TEXT, "it is far longer than the context")


WORDS = "words " * 500


@pytest.mark.parametrize(
    ("api", "body", "is_long"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": "hi"}]}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": WORDS}]}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": "é" * 1100}]}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": "hi"}] * 300}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": WORDS}}]}, True),
        (Api.CHAT, {**CHAT, "chat_template_kwargs": {"documents": [WORDS]}}, True),
        (Api.CHAT, {**CHAT, "chat_template_kwargs": {"documents": [{"text": WORDS}]}}, True),
        (Api.CHAT, {**CHAT, "chat_template_kwargs": {WORDS: 1}}, True),
        (Api.CHAT, {**CHAT, "chat_template_kwargs": {"numbers": [1] * 3000}}, True),
        (Api.CHAT, {"messages": [{"role": "tool", "content": [{"type": "tool_reference", "name": WORDS}]}]}, True),
        (Api.GENERATE, {"input_ids": [1] * 500}, False),
        (Api.GENERATE, {"input_ids": [1] * 600}, True),
        (Api.COMPLETIONS, {"prompt": "hi"}, False),
        (Api.COMPLETIONS, {"prompt": WORDS}, True),
    ],
)
def test_what_there_is_much_to_render_of_goes_to_a_thread(api: Api, body: dict[str, Any], is_long: bool) -> None:
    sizes = []

    class Sized:
        fingerprint = "x"

        async def run(self, size_bytes: int, work: object) -> None:
            sizes.append(size_bytes)
            raise Untokenized("no")

    async def go() -> None:
        await prompt(replace(await world(), tokenizer=Sized()), api, **body)  # type: ignore[arg-type]

    timeless(go)()
    assert [size_bytes > AT_ONCE_BYTES for size_bytes in sizes] == [is_long]


@timeless
async def test_fields_that_engines_treat_otherwise_are_text() -> None:
    gw = await world(Join(BlockKind.IDS, text_fields=frozenset({"continue_final_message"})))
    assert (await prompt(gw, Api.CHAT, **CHAT)).kind is BlockKind.IDS
    known = await prompt(gw, Api.CHAT, **CHAT, continue_final_message=True)
    assert (known.kind, known.why_text) == ("text", "the engines do not tokenize continue_final_message as we do")


async def test_a_long_prompt_is_the_same_from_a_thread() -> None:
    gw = await world()
    long = {"messages": [{"role": "user", "content": TEXT * 20}]}
    assert (await prompt(gw, Api.CHAT, **long)).ids == array("I", unpack(encode(chat_text(long))))
    assert gw.tokenizer is not None
    gw.tokenizer.close()


@with_ids
async def test_a_tokenizer_that_has_no_time_is_no_error(gw: Gateway) -> None:
    class Busy:
        fingerprint = "x"

        async def run(self, size_bytes: int, work: object) -> None:
            raise Untokenized("too many prompts wait to be tokenized")

    known = await prompt(replace(gw, tokenizer=Busy()), Api.CHAT, **CHAT)  # type: ignore[arg-type]
    assert (known.kind, known.why_text) == (BlockKind.TEXT, "too many prompts wait to be tokenized")


@with_ids
async def test_only_what_the_client_counted_can_be_too_long(gw: Gateway) -> None:
    async def counted(api: Api, **body: Any) -> int:
        asked = parse(api, orjson.dumps({"model": "tiny", **body}))
        known = await prompt(gw, api, **body)
        return request_view(gw, asked, expand(asked)[0], "tiny", known, now_s(), now_s() + 5).prompt_tokens

    assert await counted(Api.COMPLETIONS, prompt=TEXT) == 1600
    assert await counted(Api.COMPLETIONS, prompt="x" * 1_900 + " y") == 1_902
    gw_of_few = replace(gw, fleet=up("p0", "d0", context_tokens=1_000))
    asked = units(Api.COMPLETIONS, prompt=TEXT)
    known = await identify(gw_of_few, Api.COMPLETIONS, asked[0], "tiny")
    parsed = parse(Api.COMPLETIONS, orjson.dumps({"model": "tiny", "prompt": TEXT}))
    view = request_view(gw_of_few, parsed, asked[0], "tiny", known, now_s(), now_s() + 5)
    assert (known.tokens, view.prompt_tokens) == (1_600, 999), "the engine refuses it, in its own words"
    assert await counted(Api.GENERATE, input_ids=[1] * 9_000) == 9_000


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "block"), [(1, 64), (8, 64), (16, 64), (24, 72), (32, 64), (48, 48), (64, 64), (128, 128), (100, 100)]
)
def test_a_block_is_about_64_tokens_in_whole_pages(pages: int, block: int) -> None:
    assert id_block_tokens(pages) == block


@timeless
async def test_unlike_pages_share_blocks_and_each_reuses_whole_pages() -> None:
    """Pages of 16 and of 24 tokens: hashed at multiples of 8, of 128 tokens in common 128 and 120 can be reused."""
    gw = await world(Join(BlockKind.IDS, page_tokens=8))
    known = await prompt(gw, Api.CHAT, **CHAT)
    view = request(prompt_tokens=known.tokens, blocks=known.blocks, block_tokens=known.block_tokens)
    assert [hit_tokens(2, view, pages) for pages in (16, 24)] == [128, 120]
    other = await prompt(await world(Join(BlockKind.IDS, page_tokens=16)), Api.CHAT, **CHAT)
    assert not set(other.blocks) & set(known.blocks), "what is hashed at other blocks is another index"


@timeless
async def test_a_whole_prompt_is_never_all_hit() -> None:
    view = request(prompt_tokens=128, block_tokens=64.0)
    assert [hit_tokens(2, view, pages) for pages in (1, 16, 64)] == [127, 112, 64]


def test_capacity_is_in_blocks_of_the_kind_that_is_used() -> None:
    learned = Learned(TINY)
    assert block_tokens("tiny", Joined(Join(BlockKind.IDS, page_tokens=48)), learned) == 48.0  # type: ignore[arg-type]
    assert block_tokens("tiny", Joined(Join(BlockKind.TEXT)), learned) == 64.0  # type: ignore[arg-type]
    for _ in range(30):
        learned.saw_prompt("tiny", 200, 100)
    text = block_tokens("tiny", Joined(Join(BlockKind.TEXT)), learned)  # type: ignore[arg-type]
    assert text == pytest.approx(128.0, rel=0.1)


# ---- a whole request -------------------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, own: Tokenizer) -> None:
        self.own, self.fingerprint, self.asked = own, own.fingerprint, 0
        self.vocabulary_tokens = own.vocabulary_tokens

    def ids(self, api: Api, body: Any) -> array[int]:
        self.asked += 1
        return self.own.ids(api, body)

    async def run(self, size_bytes: int, work: Callable[[], Prompt]) -> Prompt:
        return work()


def answer(url: str, body: bytes) -> FakeExchange:
    choice = {"index": 0, "text": "hi", "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    rid = orjson.loads(body)["rid"]
    return FakeExchange(200, orjson.dumps({"id": rid, "choices": [choice], "usage": usage()}), whole=True)


@pytest.mark.parametrize(
    ("api", "body", "prompts"),
    [
        (Api.CHAT, {**CHAT, "n": 5}, 1),
        (Api.COMPLETIONS, {"prompt": [TEXT, "other"], "n": 3}, 2),
        (Api.COMPLETIONS, {"prompt": TEXT}, 1),
    ],
)
def test_each_prompt_is_tokenized_once_and_its_index_is_explained(api: Api, body: dict[str, Any], prompts: int) -> None:
    @timeless
    async def run() -> None:
        gw = await world()
        assert gw.tokenizer is not None
        counting = Counting(gw.tokenizer)
        upstream = cast("FakeUpstream", gw.upstream)
        upstream.answer = answer
        gw = replace(gw, tokenizer=cast("Tokenizer", counting))
        raw = orjson.dumps({"model": "tiny", "stream": False, **body})
        await lifecycle.handle(gw, Arrival(api, raw, {}, now_s()), client := FakeClient())
        assert client.status == 200
        assert counting.asked == prompts
        record = gw.explain.newest()
        assert record is not None
        shown = record.as_json()["attempts"]
        assert len(shown) == prompts * body.get("n", 1)
        for each in shown:
            assert (each["prompt_index"], each["prompt_index_reason"]) == ("ids", None)
        assert shown[0]["prompt_tokens"] == (len(CHAT_IDS) if api is Api.CHAT else len(TEXT))

    run()


@timeless
async def test_why_a_prompt_is_in_the_index_of_text_is_explained() -> None:
    gw = await world(Join(BlockKind.TEXT, "they differ"))
    cast("FakeUpstream", gw.upstream).answer = answer
    raw = orjson.dumps({"model": "tiny", **CHAT})
    await lifecycle.handle(gw, Arrival(Api.CHAT, raw, {}, now_s()), FakeClient())
    record = gw.explain.newest()
    assert record is not None
    (shown,) = record.as_json()["attempts"]
    assert (shown["prompt_index"], shown["prompt_index_reason"]) == ("text", "they differ")
