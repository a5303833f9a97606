"""Output ids and text of one stream, kept as the JSON that they came in, and parsed only when somebody asks. Pure.

A stream that ends well is never parsed: keeping a chunk is two appends of bytes. What is kept is about as long as the
ids and the text themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import orjson

from engines.client_stream import Inexact

Chunk = tuple[list[int], str]
"""Ids and text of one event."""


class Capture:
    """Ids and text of one stream. `ids` and `text` are what it begins with; `whole`: they are all of each other."""

    __slots__ = ("_ids", "_texts", "base_ids", "base_text", "base_whole")

    def __init__(self, ids: Iterable[int] = (), text: str = "", whole: bool = True) -> None:
        self.base_ids = array("I", ids)
        self.base_text = text
        self.base_whole = whole
        self._ids = bytearray(b"[[")
        self._texts = bytearray(b'["')

    def add(self, ids: bytes, text: bytes) -> None:
        """One event: the inside of its list of ids, and the inside of its JSON string."""
        self._ids += ids + b"],["
        self._texts += text + b'","'

    def add_parsed(self, ids: Sequence[int], text: str) -> None:
        self.add(orjson.dumps(ids)[1:-1], orjson.dumps(text)[1:-1])

    def chunks(self) -> list[Chunk]:
        """Every event that was added, in order. Raises Inexact where they do not read as ids and text."""
        try:
            ids = orjson.loads(self._ids[:-2] + b"]") if len(self._ids) > 2 else []
            texts = orjson.loads(self._texts[:-2] + b"]") if len(self._texts) > 2 else []
        except orjson.JSONDecodeError:
            raise Inexact("the engine's events do not read as ids and text") from None
        return list(zip(ids, texts, strict=True))

    def ids(self) -> list[int]:
        return [*self.base_ids, *(token for ids, _ in self.chunks() for token in ids)]

    def text(self) -> str:
        return self.base_text + "".join(text for _, text in self.chunks())
