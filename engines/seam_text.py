"""The text after a seam: an engine that continues a stream knows nothing of the text before it. Pure.

Two things go wrong there. A character whose bytes are split by the seam is garbled by the engine's detokenizer, which
decodes the last prompt ids apart (`detokenizer_manager.py` of SGLang). And a stop string that begins before the seam is
never found, as the engine looks at its own output only (`Req.tail_str`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.client_stream import Inexact, TextOf

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes the missing bytes of a character to."""
CONTEXT_TOKENS = 5
"""Ids before the output that SGLang decodes with it (`INIT_INCREMENTAL_DETOKENIZATION_OFFSET`)."""


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings of a request, in its order; `trim`: a matched one is not shown."""

    strings: tuple[str, ...] = ()
    trim: bool = True

    @property
    def longest_chars(self) -> int:
        return max(map(len, self.strings), default=0)


@dataclass(frozen=True, slots=True)
class Piece:
    """What the client gets of one event. `stop`: the stop string that ends the stream here, with so many of its ids."""

    text: str
    stop: str | None = None
    kept_ids: int = 0


class SeamText:
    """Turns the engine's text after a seam into the client's, event by event, until `done`: then they are the same.

    `sent` ends what the client has; `unsent` follows it, clean text of ids that came before the seam. `half`: ids at
    the end of the engine's prompt whose last character is not complete, of which `unsent` has the complete ones;
    `context` are the ids before them. `text_of` is needed where there is a half, and else helps to count ids.
    """

    def __init__(
        self,
        sent: str,
        unsent: str,
        stops: Stops,
        *,
        context: Sequence[int] = (),
        half: Sequence[int] = (),
        text_of: TextOf | None = None,
    ) -> None:
        self._stops = stops
        reach = max(0, stops.longest_chars - 1)
        before = sent[-reach:] if reach else ""
        self._window = before + unsent
        self._sent = self._before = len(before)
        self._text_of = text_of
        self._context = list(context)
        self._ids = list(half)
        text = self._decode(text_of, self._ids) if text_of is not None and half else ""
        self._decoded = len(text.rstrip(REPLACEMENT))
        self._mends = text.endswith(REPLACEMENT)
        self._at_seam = self._window, self._decoded
        self._engine_begins = len(self._window) + self._mends
        self.done = False
        self._settle_done()

    def add(self, ids: Sequence[int], delta: str, finished: bool, matched: int | str | None = None) -> Piece:
        """The next event of the engine: its ids and its text, and what it stopped at if it has `finished`."""
        before = len(self._ids)
        self._ids += ids
        if self._mends and self._text_of is not None:
            self._mend(self._text_of, delta, finished, matched)
        else:
            self._window += delta
        stop = self._stopped()
        if stop is not None:
            at = self._find(stop)
            end = at if self._stops.trim else at + len(stop)
            self.done = True
            return Piece(self._window[self._sent : end], stop, self._ids_through(stop, before))
        if not finished and self._may_become_stop():
            return Piece("")
        text, self._sent = self._window[self._sent :], len(self._window)
        self._settle_done()
        return Piece(text)

    def _mend(self, text_of: TextOf, delta: str, finished: bool, matched: int | str | None) -> None:
        """Decode the ids ourselves until the engine's detokenizer has shown clean text: from there it is right."""
        is_token = finished and isinstance(matched, int) and self._stops.trim
        text = self._decode(text_of, self._ids[:-1] if is_token else self._ids)
        if not finished and text.endswith(REPLACEMENT):
            return
        self._window += text[self._decoded :]
        self._decoded = len(text)
        if finished and isinstance(matched, str) and (at := self._window.find(matched)) >= 0:
            self._window = self._window[: at if self._stops.trim else at + len(matched)]
        if finished or delta:
            self._mends = False

    def _decode(self, text_of: TextOf, ids: Sequence[int]) -> str:
        return text_of([*self._context, *ids])[len(text_of(self._context)) :]

    def _ids_through(self, stop: str, before: int) -> int:
        """How many ids of the newest event belong to the output: those after the stop do not."""
        count = len(self._ids) - before
        if self._text_of is None:
            return count
        window, decoded = self._at_seam
        try:
            for kept in range(1, count):
                text = self._decode(self._text_of, self._ids[: before + kept])
                if stop in window + text[decoded:]:
                    return kept
        except Inexact:
            pass
        return count

    def _stopped(self) -> str | None:
        """The stop string that is complete first, of those that the engine cannot see."""
        found = []
        for order, stop in enumerate(self._stops.strings):
            at = self._find(stop)
            if 0 <= at < self._engine_begins:
                found.append((at + len(stop), order, stop))
        return min(found)[2] if found else None

    def _find(self, stop: str) -> int:
        """Where it is; not wholly in what was sent before, where the engine has seen it and went on."""
        return self._window.find(stop, max(0, self._before - len(stop) + 1))

    def _may_become_stop(self) -> bool:
        """Whether the end of what is known may be the beginning of a stop string that the engine cannot see."""
        return any(
            len(stop) > len(self._window) - at and stop.startswith(self._window[at:])
            for at in range(min(self._engine_begins, len(self._window)))
            for stop in self._stops.strings
        )

    def _settle_done(self) -> None:
        waits = self._sent < len(self._window) or self._mends
        self.done = not waits and not self._may_become_stop()
