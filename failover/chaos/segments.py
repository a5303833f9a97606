"""Which attempt wrote which part of an answer, found by the token rule alone. Pure.

The emulated model's tokens follow from the whole context and the attempt's key. So what a client has read is either the
text of exactly one row of segments, the next attempt going on where the one before was left, or it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.token_rule import EOS_TOKEN, ContextHash, pack
from failover.chaos.history import Attempt, Choice, Limits

Decode = Callable[[Sequence[int]], str]
"""The text of token ids without special tokens; U+FFFD where bytes of a character are missing."""

_INCOMPLETE = "\ufffd"
_PROMPT_TAIL_TOKENS = 5
"""SGLang decodes so many last ids of the prompt together with the answer: a character begun there is not shown."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a client read of one choice. With a `finish` it was told the end, so that nothing may be missing."""

    text: str
    ids: Sequence[int] | None
    finish: str = ""

    @property
    def finished(self) -> bool:
        return bool(self.finish)


@dataclass(frozen=True, slots=True)
class Whole:
    """The answer that was read: all its ids, those of withheld text too, and why it ended, if it did.

    `starts` says for each attempt that wrote something where its first token stands.
    """

    ids: tuple[int, ...]
    finish: str
    matched: int | str | None
    starts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """No row of segments gives what was read. The one that comes furthest fails at token `position` of `attempt`."""

    attempt: int
    position: int
    at_char: int
    expected: str
    got: str


def explain(choice: Choice, limits: Limits, read: Read, decode: Decode) -> Whole | Mismatch:
    """The answer that `read` is (the beginning of), or where it stops being one."""
    return _Search(choice, limits, read, decode).run()


@dataclass(slots=True)
class _Reach:
    """How far one row of segments has come: its ids, their text, and from which id on a character is incomplete."""

    ids: list[int]
    text: str = ""
    open_from: int = 0

    def cut(self, ids: int, chars: int, open_from: int) -> _Reach:
        return _Reach(self.ids[:ids], self.text[:chars], open_from)


class _Search:
    def __init__(self, choice: Choice, limits: Limits, read: Read, decode: Decode) -> None:
        self._choice, self._limits, self._read, self._decode = choice, limits, read, decode
        self._packed_prompt = pack(choice.prompt_ids)
        self._before = list(choice.prompt_ids[-_PROMPT_TAIL_TOKENS:])
        self._before_text = decode(self._before)
        self._longest_stop = max(map(len, limits.stop), default=0)
        self._stop_ids = frozenset(limits.stop_token_ids)
        self._best = Mismatch(0, -1, 0, "an attempt", "none")
        self._starts: list[tuple[int, int]] = []
        self._ends_otherwise: Whole | None = None

    def run(self) -> Whole | Mismatch:
        if not self._read.text and not self._read.ids and not self._read.finished:
            return Whole((), "", None, ())
        return self._from(0, _Reach([])) or self._ends_otherwise or self._best

    def _from(self, number: int, reach: _Reach) -> Whole | None:
        """The whole answer, if attempt `number` or later ones go on from `reach` with what was read."""
        attempts = self._choice.attempts
        while 0 < number < len(attempts) and _keys(attempts[number]) == _keys(attempts[number - 1]):
            number += 1  # it writes what the one before it would have written
        if number >= len(attempts):
            return None
        marks = [(len(reach.ids), len(reach.text), reach.open_from)]
        self._starts.append((number, len(reach.ids)))
        mine = _Reach(list(reach.ids), reach.text, reach.open_from)
        found = self._written(number, mine, marks)
        if found is not None:
            return found
        self._starts.pop()
        for mark in reversed(marks):
            wrote = mark[0] > len(reach.ids)
            if wrote:
                self._starts.append((number, len(reach.ids)))
            if (found := self._from(number + 1, mine.cut(*mark))) is not None:
                return found
            if wrote:
                self._starts.pop()
        return None

    def _written(self, number: int, reach: _Reach, marks: list[tuple[int, int, int]]) -> Whole | None:
        """Write on with an attempt's keys until it is all that was read, or something else; `marks` each good step."""
        attempt = self._choice.attempts[number]
        context = ContextHash(self._packed_prompt + pack(reach.ids), attempt.prefill_key)
        first = True
        while True:
            count = len(reach.ids)
            token = context.next_token(not self._limits.ignore_eos and count >= self._limits.min_tokens)
            reach.ids.append(token)
            piece = self._piece(reach)
            finish = self._finish(reach, piece)
            fits = self._fits(number, reach, piece, finish)
            if fits is not None:
                return fits if isinstance(fits, Whole) else None
            if piece and not piece.endswith(_INCOMPLETE):
                reach.text, reach.open_from = reach.text + piece, len(reach.ids)
            marks.append((len(reach.ids), len(reach.text), reach.open_from))
            if first:
                context = ContextHash(self._packed_prompt + pack(reach.ids), attempt.decode_key)
                first = False
            else:
                context.append(token)

    def _piece(self, reach: _Reach, stop: int | None = None) -> str:
        """The text of the ids behind the last whole character."""
        fresh = reach.ids[reach.open_from : stop]
        if reach.open_from:
            return self._decode(fresh)
        return self._decode([*self._before, *fresh])[len(self._before_text) :]

    def _finish(self, reach: _Reach, piece: str) -> tuple[str, str, int | str | None] | None:
        """Whether the answer ends here: its text, the reason, and what matched."""
        limits, token, count = self._limits, reach.ids[-1], len(reach.ids)
        text = reach.text + piece
        for stop in limits.stop:
            at = text.find(stop, max(0, len(reach.text) - self._longest_stop))
            if at >= 0:
                return text[: at + len(stop) if limits.no_stop_trim else at], "stop", stop
        if (token == EOS_TOKEN or token in self._stop_ids) and not limits.ignore_eos and count > limits.min_tokens:
            return reach.text + self._piece(reach, None if limits.no_stop_trim else count - 1), "stop", token
        return (text, "length", None) if count >= limits.max_tokens else None

    def _fits(
        self, number: int, reach: _Reach, piece: str, finish: tuple[str, str, int | str | None] | None
    ) -> Whole | Mismatch | None:
        """The whole answer where all is read, a mismatch where the last token cannot be, None to go on."""
        read, count = self._read, len(reach.ids)
        if read.ids is not None and count <= len(read.ids) and read.ids[count - 1] != reach.ids[-1]:
            return self._miss(number, reach, f"token {reach.ids[-1]}", f"token {read.ids[count - 1]}")
        if finish is not None:
            return self._fits_end(number, reach, finish)
        text = reach.text + ("" if piece.endswith(_INCOMPLETE) else piece)
        overlap = min(len(text), len(read.text))
        if text[len(reach.text) : overlap] != read.text[len(reach.text) : overlap]:
            return self._miss(number, reach, piece, read.text[len(reach.text) : overlap])
        read_all = len(read.text) <= len(text) and (read.ids is None or len(read.ids) <= count)
        if not read.finished:
            return Whole(tuple(reach.ids), "", None, tuple(self._starts)) if read_all else None
        too_far = len(text) > len(read.text) + self._longest_stop
        if too_far or (read.ids is not None and count > len(read.ids)):
            return self._miss(number, reach, piece, "the end")
        return None

    def _fits_end(
        self, number: int, reach: _Reach, finish: tuple[str, str, int | str | None]
    ) -> Whole | Mismatch | None:
        text, reason, matched = finish
        read, count = self._read, len(reach.ids)
        right = text == read.text if read.finished else text.startswith(read.text)
        if not right:
            return self._miss(number, reach, f"{text[len(reach.text) :]!r} and the end", read.text[len(reach.text) :])
        if read.ids is not None and (len(read.ids) > count or (read.finished and len(read.ids) < count)):
            return self._miss(number, reach, f"{count} tokens", f"{len(read.ids)} tokens")
        whole = Whole(tuple(reach.ids), reason, matched, tuple(self._starts))
        if read.finished and read.finish != reason:
            self._ends_otherwise = self._ends_otherwise or whole
            return self._miss(number, reach, reason, read.finish)
        return whole

    def _miss(self, number: int, reach: _Reach, expected: str, got: str) -> Mismatch:
        miss = Mismatch(number, len(reach.ids) - 1, len(reach.text), expected, got)
        if (miss.at_char, miss.position) > (self._best.at_char, self._best.position):
            self._best = miss
        return miss


def _keys(attempt: Attempt) -> tuple[bytes, bytes]:
    return attempt.prefill_key, attempt.decode_key
