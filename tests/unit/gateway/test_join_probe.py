"""Whether engines tokenize as the gateway does: who is asked, when, and what comes of the answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from engines.emulator.tokenizer_files import FOLDER
from engines.errors import UpstreamError
from engines.fleet import Fleet
from engines.types import EngineId, EngineView, FailureKind, Health
from gateway import tokenizer
from gateway.config import TokenizerConfig
from gateway.join_probe import CONTINUES, PROBES, RETRY_AFTER_S, Join, JoinProbe
from gateway.openai_api import Api
from gateway.tokenizer import Tokenizer
from routing.prefix import BlockKind
from tests.fakes import FACTS, timeless, up

LOOK_EVERY_S = 0.02
Answer = Callable[[EngineView, dict[str, Any]], tuple[int, bytes] | UpstreamError]


def loaded() -> Tokenizer:
    found = tokenizer.load(TokenizerConfig(str(FOLDER)))
    assert found is not None
    return found


OURS = loaded()


def agree(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
    ids = OURS.ids(Api.CHAT if "messages" in body else Api.COMPLETIONS, body)
    return 200, orjson.dumps({"tokens": ids.tolist(), "count": len(ids)})


def differ(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, orjson.dumps({"tokens": [*orjson.loads(agree(view, body)[1])["tokens"], 7]})


def only(field: str, otherwise: Answer = differ) -> Answer:
    """Agrees, but where a probe has this field."""
    return lambda view, body: (otherwise if body.get(field) else agree)(view, body)


class WithoutModel(Tokenizer):
    """To be made into tokenizers that have no model."""

    def __init__(self) -> None: ...

    async def run(self, size_bytes: int, work: Any) -> Any:
        return work()


class Engines:
    """Servers that answer /tokenize by `answers[url]`, or as we would."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.busy = 0

    async def post(self, view: EngineView, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        assert path == "/tokenize"
        assert not self.busy, "one after the other"
        name = view.engine_id.removeprefix("http://")
        self.asked.append((name, orjson.loads(body)))
        answer = self.answers.get(name, agree)(view, orjson.loads(body))
        if isinstance(answer, UpstreamError):
            raise answer
        return answer

    def times(self, name: str) -> int:
        """How often a server was asked the first probe."""
        return sum(asked == name and "France" in str(body) for asked, body in self.asked)


class World:
    """A join probe at work over a fleet. Tokenizing happens in real threads: wait for it in real time."""

    def __init__(self, fleet: Fleet, engines: Engines, own: Tokenizer | None = OURS) -> None:
        self.fleet, self.engines = fleet, engines
        self.joins = JoinProbe(fleet, engines, own, LOOK_EVERY_S)

    async def __aenter__(self) -> World:
        self.joins.start()
        await self.settled()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.joins.stop()

    async def settled(self) -> None:
        await asyncio.sleep(LOOK_EVERY_S * 1.5)
        while asked := [task for task in self.joins._asked.values() if not task.done()]:
            await asyncio.wait(asked)

    def restart(self, name: str, **facts: Any) -> None:
        engine = EngineId(f"http://{name}")
        before = self.fleet.view(engine).facts
        assert before is not None
        self.fleet.set_facts(engine, replace(before, boot_fingerprint=f"{before.boot_fingerprint}+", **facts))


async def joined(fleet: Fleet, **answers: Answer) -> Join:
    async with World(fleet, Engines(**answers)) as world:
        return world.joins.of("tiny")


async def test_engines_that_agree_make_it_ids() -> None:
    async with World(up("p0", "p1", "d0"), engines := Engines()) as world:
        assert world.joins.of("tiny") == Join(BlockKind.IDS)
        assert world.joins.models() == {"tiny": Join(BlockKind.IDS)}
        assert [engines.times(name) for name in ("p0", "p1", "d0")] == [1, 1, 0], "prefills are asked, once"
        assert len(engines.asked) == 2 * len(PROBES)
        assert all(body["model"] == "tiny" for _, body in engines.asked)
        await world.settled()
        assert len(engines.asked) == 2 * len(PROBES)


async def test_one_that_disagrees_makes_it_text_for_all() -> None:
    join = await joined(up("p0", "p1", "d0"), p1=differ)
    assert (join.kind, join.engine, join.probe) == (BlockKind.TEXT, "http://p1", "plain")
    assert join.reason.startswith("http://p1: probe plain: ")


@pytest.mark.parametrize("field", ["tools", "reasoning_effort", "prompt"])
async def test_the_first_probe_that_differs_is_named(field: str) -> None:
    name = next(name for name, body in PROBES.items() if field in body)
    assert (await joined(up("p0", "d0"), p0=only(field))).probe == name


async def test_where_they_differ_is_said() -> None:
    def at_two(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
        tokens = orjson.loads(agree(view, body)[1])["tokens"]
        return 200, orjson.dumps({"tokens": [*tokens[:2], 99, *tokens[3:]]})

    assert "differing from position 2" in (await joined(up("p0", "d0"), p0=at_two)).reason


async def test_continuing_an_answer_concerns_such_requests_alone() -> None:
    join = await joined(up("p0", "d0"), p0=only(CONTINUES))
    assert join == Join(BlockKind.IDS, text_fields=frozenset({CONTINUES}))


def refuse(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
    return 400, b"{}"


@pytest.mark.parametrize(
    "answer", [(400, b"no"), (404, b"no"), (200, b"no json"), (200, b"{}"), (200, b'{"tokens": [-1]}')]
)
async def test_an_engine_that_gives_no_ids_disagrees(answer: tuple[int, bytes]) -> None:
    join = await joined(up("p0", "d0"), p0=lambda view, body: answer)
    said = f"http://p0: probe plain: it answers {answer[0]} to /tokenize, without ids"
    assert (join.kind, join.reason) == (BlockKind.TEXT, said)


async def test_what_both_refuse_is_no_difference(tmp_path: Any) -> None:
    (tmp_path / "strict.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
    )
    strict = tokenizer.load(TokenizerConfig(str(FOLDER), str(tmp_path / "strict.jinja")))
    assert strict is not None

    def strictly(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
        if "messages" in body and body["messages"][0]["role"] == "system":
            return refuse(view, body)
        return 200, orjson.dumps(
            {"tokens": strict.ids(Api.CHAT if "messages" in body else Api.COMPLETIONS, body).tolist()}
        )

    async with World(up("p0", "d0"), Engines(p0=strictly), strict) as world:
        assert world.joins.of("tiny").kind is BlockKind.IDS

    def leniently(view: EngineView, body: dict[str, Any]) -> tuple[int, bytes]:
        status, answer = strictly(view, body)
        return (200, b'{"tokens": [1]}') if status == 400 else (status, answer)

    async with World(up("p0", "d0"), Engines(p0=leniently), strict) as world:
        assert (
            world.joins.of("tiny").reason
            == "http://p0: probe system: only the server can tokenize it; here: the chat template refuses it: no system"
        )


async def test_where_nothing_could_be_compared_nothing_is_known(tmp_path: Any) -> None:
    class Mute(WithoutModel):
        def ids(self, api: Api, body: Any) -> Any:
            raise tokenizer.Untokenized("no")

    async with World(up("p0", "d0"), Engines(p0=refuse), Mute()) as world:
        assert "neither" in world.joins.of("tiny").reason


async def test_before_an_answer_it_is_text() -> None:
    fleet = up("p0", "d0")
    fleet.set_health(EngineId("http://p0"), Health.SUSPECTED, "why")
    async with World(fleet, engines := Engines()) as world:
        assert world.joins.of("tiny").reason == "no prefill has been asked yet whether it tokenizes as we do"
        assert engines.asked == []
        fleet.set_health(EngineId("http://p0"), Health.READY)
        await world.settled()
        assert world.joins.of("tiny").kind is BlockKind.IDS


async def test_a_newcomer_is_heard_and_does_not_hold_up_the_others() -> None:
    fleet = up("p0", "p1", "d0")
    fleet.set_health(EngineId("http://p1"), Health.NOT_READY, "why")
    async with World(fleet, Engines(p1=differ)) as world:
        assert world.joins.of("tiny").kind is BlockKind.IDS
        fleet.set_health(EngineId("http://p1"), Health.READY)
        await world.settled()
        assert world.joins.of("tiny").engine == "http://p1"


async def test_a_restarted_engine_is_asked_again() -> None:
    async with World(up("p0", "d0"), engines := Engines()) as world:
        engines.answers["p0"] = differ
        world.restart("p0")
        assert world.joins.of("tiny").kind is BlockKind.IDS, "until it has answered"
        await world.settled()
        assert world.joins.of("tiny").kind is BlockKind.TEXT
        engines.answers["p0"] = agree
        world.restart("p0")
        await world.settled()
        assert world.joins.of("tiny").kind is BlockKind.IDS
        assert engines.times("p0") == 3


async def test_a_restart_as_another_model_leaves_the_old_one() -> None:
    async with World(up("p0", "p1", "d0"), Engines(p1=differ)) as world:
        world.restart("p1", model="other")
        await world.settled()
        assert world.joins.of("tiny").kind is BlockKind.IDS
        assert world.joins.of("other").kind is BlockKind.TEXT
        assert set(world.joins.models()) == {"tiny", "other"}


async def test_one_that_has_left_has_no_say() -> None:
    fleet = up("p0", "p1", "d0")
    async with World(fleet, Engines(p1=differ)) as world:
        assert world.joins.of("tiny").kind is BlockKind.TEXT
        del fleet._views[EngineId("http://p1")]
        fleet.set_health(EngineId("http://p0"), Health.READY, "look again")
        await world.settled()
        assert world.joins.of("tiny").kind is BlockKind.IDS


@pytest.mark.parametrize("trouble", [(503, b""), UpstreamError(FailureKind.TIMEOUT, "late")])
def test_an_engine_that_cannot_answer_now_is_asked_later(trouble: Any) -> None:
    @timeless
    async def asked_later() -> None:
        async with World(up("p0", "d0"), engines := Engines(p0=lambda view, body: trouble)) as world:
            assert world.joins.of("tiny").kind is BlockKind.TEXT
            assert engines.times("p0") == 1
            await asyncio.sleep(RETRY_AFTER_S / 2)
            assert engines.times("p0") == 1, "not at once"
            await asyncio.sleep(RETRY_AFTER_S)
            assert engines.times("p0") == 2

    asked_later()


async def test_a_refusal_for_other_reasons_is_no_agreement() -> None:
    """A key that is wrong, a path that is not there: nothing was said of the chat that we refuse too."""

    class Mute(WithoutModel):
        def ids(self, api: Api, body: Any) -> Any:
            raise tokenizer.Untokenized("no")

    async with World(up("p0", "d0"), Engines(p0=lambda view, body: (401, b"")), Mute()) as world:
        assert world.joins.of("tiny").reason.endswith("it answers 401 to /tokenize, without ids")


async def test_a_large_fleet_is_asked_a_few_at_a_time() -> None:
    names = [f"p{number}" for number in range(12)]
    most = 0

    class Slow(Engines):
        async def post(self, view: EngineView, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
            nonlocal most
            most = max(most, len(world.joins._asked))
            await asyncio.sleep(0)
            return await super().post(view, path, body, timeout_s)

    world = World(up(*names, "d0"), engines := Slow(), OURS)
    async with world:
        for _ in range(5):
            await world.settled()
        assert all(engines.times(name) == 1 for name in names)
        assert 1 < most <= 8


async def test_without_a_tokenizer_nobody_is_asked() -> None:
    async with World(up("p0", "d0"), engines := Engines(), None) as world:
        assert world.joins.of("tiny") == Join(BlockKind.TEXT, "no --tokenizer-path is given")
        assert engines.asked == []


async def test_pages_of_different_sizes_share_their_divisor() -> None:
    fleet = up("p0", "p1", "d0")
    for name, pages in (("p0", 16), ("p1", 24), ("d0", 5)):
        cache_format = replace(FACTS.cache_format, page_size_tokens=pages)
        fleet.set_facts(EngineId(f"http://{name}"), replace(FACTS, cache_format=cache_format))
    assert (await joined(fleet)).page_tokens == 8


def test_the_probes_are_of_every_kind() -> None:
    text = str(PROBES)
    assert len(PROBES) >= 12
    assert len({orjson.dumps(body) for body in PROBES.values()}) == len(PROBES)
    for needed in (
        "system",
        "tool_calls",
        "tools",
        "日本語",
        "😀",
        "\\n\\n",
        "<|im_start|>",
        "reasoning_effort",
        CONTINUES,
    ):
        assert needed in text
    assert max(len(orjson.dumps(body)) for body in PROBES.values()) > 5_000
    assert sum("prompt" in body for body in PROBES.values()) >= 2


async def test_a_template_without_end_is_found_out_in_a_thread() -> None:
    """The loop must not be where it is: no other request would go on."""
    where = []

    class Looks(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(OURS.__dict__)

        def ids(self, api: Api, body: Any) -> Any:
            where.append(threading.get_ident())
            return super().ids(api, body)

    async with World(up("p0", "d0"), Engines(), Looks()) as world:
        assert world.joins.of("tiny").kind is BlockKind.IDS
    assert len(where) == len(PROBES)
    assert threading.get_ident() not in where
