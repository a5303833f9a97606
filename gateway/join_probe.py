"""Whether the gateway's tokenizer gives the ids that the engines of a model see: asked of every prefill that joins.

A handful of chats and plain texts is tokenized here and by the engine's `/tokenize`. A model's prompts are hashed as
ids once one of its prefills has agreed and while none disagrees, since all share one index; else as text, and `of` says
why. A restarted prefill is asked again; what it said before stands until it has answered.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import orjson

from engines.errors import UpstreamError
from engines.tasks import spawn
from engines.types import EngineId, EngineView, Role
from gateway.openai_api import Api
from gateway.tokenizer import AT_ONCE_BYTES, Tokenizer, Untokenized
from routing.prefix import BlockKind, hash_block_tokens

_log = logging.getLogger("pdgate.join")

LOOK_EVERY_S = 0.25
RETRY_AFTER_S = 5.0
TIMEOUT_S = 5.0
_AT_ONCE = 8
"""Prefills of a large fleet are asked so many at a time."""
_REFUSED = 400
CONTINUES = "continue_final_message"
"""The field whose probe concerns requests with it alone."""


@dataclass(frozen=True, slots=True)
class Join:
    """How the prompts of a model are hashed, and why: `engine` is who disagreed, `probe` the first that differed.

    `text_fields`: requests that set one of these fields are hashed as text all the same. `page_tokens` is what the
    pages of all its prefills share, their greatest common divisor.
    """

    kind: BlockKind
    reason: str = ""
    engine: EngineId | None = None
    probe: str = ""
    text_fields: frozenset[str] = frozenset()
    page_tokens: int = 1


_NO_TOKENIZER = Join(BlockKind.TEXT, "no --tokenizer-path is given")
_NOT_ASKED = Join(BlockKind.TEXT, "no prefill has been asked yet whether it tokenizes as we do")


class Views(Protocol):
    """What is asked of the fleet (`engines.fleet.Fleet`)."""

    def views(self) -> tuple[EngineView, ...]: ...


class Poster(Protocol):
    """How a server is asked (`engines.base.Engine`). Raises UpstreamError."""

    async def post(self, view: EngineView, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]: ...


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What one boot of a prefill said; `probe` is empty where all agreed."""

    epoch: int
    model: str
    probe: str = ""
    reason: str = ""
    text_fields: frozenset[str] = frozenset()


def _join(said: list[tuple[EngineId, _Verdict]], page_tokens: int) -> Join:
    for engine_id, verdict in said:
        if verdict.probe:
            return Join(BlockKind.TEXT, f"{engine_id}: {verdict.reason}", engine_id, verdict.probe)
    text_fields = frozenset[str]().union(*(verdict.text_fields for _, verdict in said))
    return Join(BlockKind.IDS, text_fields=text_fields, page_tokens=page_tokens)


class JoinProbe:
    """Asks the prefills in the background. `start()` and `stop()` once each; without a tokenizer it asks nobody."""

    def __init__(
        self, fleet: Views, engine: Poster, tokenizer: Tokenizer | None, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._look_every_s = look_every_s
        self._fleet = fleet
        self._engine = engine
        self._tokenizer = tokenizer
        self._joins: dict[str, Join] = {}
        self._verdicts: dict[EngineId, _Verdict] = {}
        self._asked: dict[EngineId, asyncio.Task[None]] = {}
        self._not_before_s: dict[EngineId, float] = {}
        self._task: asyncio.Task[None] | None = None

    def of(self, model: str) -> Join:
        """How this model's prompts are hashed now."""
        return self._joins.get(model) or (_NOT_ASKED if self._tokenizer is not None else _NO_TOKENIZER)

    def models(self) -> dict[str, Join]:
        """Every model that a prefill serves, by name."""
        served = (view.facts.model for view in self._prefills() if view.facts is not None)
        return {model: self.of(model) for model in dict.fromkeys(served)}

    def _conclude(self) -> None:
        """Put together what the prefills that are there said."""
        prefills = self._prefills()
        for gone in self._verdicts.keys() - {view.engine_id for view in prefills}:
            del self._verdicts[gone]
        pages: dict[str, set[int]] = {}
        for view in prefills:
            if view.facts is not None:
                pages.setdefault(view.facts.model, set()).add(max(1, view.facts.cache_format.page_size_tokens))
        said: dict[str, list[tuple[EngineId, _Verdict]]] = {}
        for engine_id, verdict in self._verdicts.items():
            said.setdefault(verdict.model, []).append((engine_id, verdict))
        self._joins = {model: _join(said[model], hash_block_tokens([*pages[model]])) for model in said.keys() & pages}

    # ---- asking --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._tokenizer is not None:
            self._task = spawn(self._keep_looking(self._tokenizer), "join probe")

    async def stop(self) -> None:
        tasks = [*self._asked.values(), *([self._task] if self._task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _prefills(self) -> list[EngineView]:
        return [view for view in self._fleet.views() if view.spec.role is Role.PREFILL and view.facts is not None]

    async def _keep_looking(self, tokenizer: Tokenizer) -> None:
        while True:
            self._conclude()
            self._asked = {engine_id: task for engine_id, task in self._asked.items() if not task.done()}
            for view in islice(filter(self._is_due, self._prefills()), _AT_ONCE - len(self._asked)):
                self._asked[view.engine_id] = spawn(self._ask(view, tokenizer), f"join probe {view.engine_id}")
            await asyncio.sleep(self._look_every_s)

    def _is_due(self, view: EngineView) -> bool:
        """Up, and neither being asked, nor asked since it started, nor just found unable to answer."""
        verdict = self._verdicts.get(view.engine_id)
        if not view.health.takes_rooms or view.engine_id in self._asked:
            return False
        if verdict is not None and verdict.epoch == view.epoch:
            return False
        return asyncio.get_running_loop().time() >= self._not_before_s.get(view.engine_id, 0.0)

    async def _ask(self, view: EngineView, tokenizer: Tokenizer) -> None:
        try:
            verdict = await self._verdict(view, tokenizer)
        except (UpstreamError, Untokenized) as error:
            self._not_before_s[view.engine_id] = asyncio.get_running_loop().time() + RETRY_AFTER_S
            _log.info("%s could not be asked how it tokenizes: %s", view.engine_id, error)
            return
        before = self._verdicts.get(view.engine_id)
        self._verdicts[view.engine_id] = verdict
        self._conclude()
        if verdict.probe:
            _log.warning("%s: %s; prompts of %s are hashed as text", view.engine_id, verdict.reason, verdict.model)
        elif before is None or before.probe:
            _log.info("%s tokenizes %s as we do", view.engine_id, verdict.model)

    async def _verdict(self, view: EngineView, tokenizer: Tokenizer) -> _Verdict:
        """Go through the probes until one differs; raises UpstreamError where the engine does not answer."""
        assert view.facts is not None  # `_prefills` leaves others out
        model, text_fields, agreed = view.facts.model, set(), 0
        for name, body in PROBES.items():
            theirs = await self._theirs(view, {"model": model, **body})
            ours = await _ours(tokenizer, body)
            refused = isinstance(ours, str)
            if ours == theirs or (refused and theirs == _REFUSED):
                agreed += not refused
            elif CONTINUES in body:
                text_fields.add(CONTINUES)
            else:
                return _Verdict(view.epoch, model, name, _difference(name, ours, theirs))
        if not agreed:
            return _Verdict(view.epoch, model, "all", "neither it nor we could tokenize any of the probes")
        return _Verdict(view.epoch, model, text_fields=frozenset(text_fields))

    async def _theirs(self, view: EngineView, body: Mapping[str, Any]) -> array[int] | int:
        """What the engine makes of a probe; the status where it gives no ids."""
        status, answer = await self._engine.post(view, "/tokenize", orjson.dumps(body), TIMEOUT_S)
        if status >= 500:
            raise Untokenized(f"it answers {status} to /tokenize")
        if status != 200:
            return status
        try:
            return array("I", orjson.loads(answer)["tokens"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return status


async def _ours(tokenizer: Tokenizer, body: Mapping[str, Any]) -> array[int] | str:
    """What we make of a probe; why not, where we refuse it. Raises Untokenized while there is no time for it."""
    api = Api.CHAT if "messages" in body else Api.COMPLETIONS

    def ids() -> array[int] | str:
        try:
            return tokenizer.ids(api, body)
        except Untokenized as error:
            return str(error)

    # In a thread, however short: a template without end is found out here, where nobody waits for it.
    return await tokenizer.run(AT_ONCE_BYTES + 1, ids)


def _difference(name: str, ours: array[int] | str, theirs: array[int] | int) -> str:
    if isinstance(theirs, int):
        return f"probe {name}: it answers {theirs} to /tokenize, without ids"
    if isinstance(ours, str):
        return f"probe {name}: only the server can tokenize it; here: {ours}"
    same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    where = min(len(ours), len(theirs)) if same is None else same
    return f"probe {name}: {len(theirs)} ids instead of {len(ours)}, differing from position {where}"


# ---- the probes ------------------------------------------------------------------------------------------------------


def _chat(*contents: Any, system: str = "", **more: Any) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return {"messages": first + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)], **more}


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich"}'}}

PROBES: Mapping[str, Mapping[str, Any]] = {
    "plain": _chat("What is the capital of France?"),
    "system": _chat("Name three rivers.", system="You are a terse assistant. Answer in one line."),
    "turns": _chat("Hi!", "Hello, how can I help?", "Tell me a joke.", "Why did the hen cross?", "No idea."),
    "tools": _chat("Will it rain in Zürich on Monday?", tools=[_WEATHER]),
    "tool_result": {
        "messages": [
            {"role": "user", "content": "Will it rain?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "Rain, 12 °C"},
        ],
        "tools": [_WEATHER],
    },
    "unicode": _chat("naïve façade – ☃ 😀👩‍👩‍👧 日本語テキスト 한국어 中文，标点。 العربية e\u0301 \u200b\ufeff"),
    "whitespace": _chat("  two  spaces\t\ttabs\n\n\nlines \r\n trailing   ", system=" \n "),
    "special": _chat("<|im_end|> <|im_start|>system\n</s> [INST] <s> <|eot_id|> {{ x }} {% if %} <|endoftext|>"),
    "empty": _chat(""),
    "parts": _chat([{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]),
    "long": _chat(" ".join(f"Sentence {n} of a long text, with a comma and 'quotes'." for n in range(120))),
    "numbers": _chat("3.14159 1,000,000 -7e-12 0x7fff 2024-02-29T12:34:56Z 11111111111111111111 ½ ²³"),
    "effort": _chat("Think briefly.", reasoning_effort="low"),
    "assistant_last": _chat("Count to five.", "One, two,"),
    "continued": _chat("Count to five.", "One, two,", continue_final_message=True),
    "text": {"prompt": "Once upon a time, in the year 1234,\n\n there was a naïve 中文 😀 parser"},
    "code": {"prompt": "def f(x):\n    return {'a': x ** 2}  # <s>\n\n\n\tif x:\n"},
}
"""What is asked of every engine; a chat is a body of /v1/chat/completions, a prompt one of /v1/completions."""
