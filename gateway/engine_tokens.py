"""Token ids by way of an engine, for streams that broke where no tokenizer is configured.

Asked only when a stream must go on, never before: `/tokenize` for a prompt (a few are remembered), `/detokenize` for
what it has led to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from engines.base import Engine
from engines.client_stream import Inexact, TextOf
from engines.errors import UpstreamError
from engines.fleet import Fleet
from engines.types import EngineView

TIMEOUT_S = 2.0
MAX_PROMPTS = 64
"""Samples of one prompt, and streams that break together, share what was asked for it."""
MAX_IDS = 1_000_000
"""All that is remembered has at most so many ids."""
_SERVERS_ASKED = 2


class EngineTokens:
    """Asks whichever engine is up. Raises Inexact where none gives an answer in time."""

    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._prompts: OrderedDict[tuple[str, str], Sequence[int]] = OrderedDict()

    async def of_text(self, model: str, text: str) -> Sequence[int]:
        """The ids of a plain text, as engines see it in a completion."""
        name = (model, text)
        if (known := self._prompts.get(name)) is None:
            answer = await self._ask(model, "/tokenize", {"model": model, "prompt": text})
            known = _ids(answer.get("tokens"))
            self._remember(name, known)
        return known

    async def text_of(self, model: str, lists: Iterable[Sequence[int]], *, skip_special_tokens: bool) -> TextOf:
        """A decoder of just these lists of ids; others raise Inexact."""
        asked = [list(ids) for ids in dict.fromkeys(map(tuple, lists)) if ids]
        texts: dict[tuple[int, ...], str] = {(): ""}
        if asked:
            body = {"model": model, "tokens": asked, "skip_special_tokens": skip_special_tokens}
            found = (await self._ask(model, "/detokenize", body)).get("text")
            if not isinstance(found, list) or len(found) != len(asked):
                raise Inexact("an engine answers /detokenize without texts")
            texts.update(zip(map(tuple, asked), map(str, found), strict=True))

        def known(ids: Sequence[int]) -> str:
            if (text := texts.get(tuple(ids))) is None:
                raise Inexact("no tokenizer is configured (--tokenizer-path)")
            return text

        return known

    async def _ask(self, model: str, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        last = "no engine is up"
        for view in self._up(model)[:_SERVERS_ASKED]:
            try:
                status, answer = await self._engine.post(view, path, orjson.dumps(body), TIMEOUT_S)
                parsed = orjson.loads(answer) if status == 200 else None
            except (UpstreamError, orjson.JSONDecodeError) as error:
                last = f"{view.engine_id}: {error}"
                continue
            if isinstance(parsed, dict):
                return parsed
            last = f"{view.engine_id} answers {status}"
        raise Inexact(f"the token ids of the prompt cannot be known: {path}: {last}")

    def _up(self, model: str) -> list[EngineView]:
        views = [view for view in self._fleet.views() if view.facts is not None and view.facts.model == model]
        return [view for view in views if view.health.takes_rooms] or views

    def _remember(self, name: tuple[str, str], ids: Sequence[int]) -> None:
        self._prompts[name] = ids
        while len(self._prompts) > MAX_PROMPTS or sum(map(len, self._prompts.values())) > MAX_IDS:
            self._prompts.popitem(last=False)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise Inexact("an engine answers /tokenize without ids")
    return value
