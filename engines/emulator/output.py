"""What one request has generated so far, and when it ends. Pure.

An `Output` is the token source of a job: `step` draws the next token of the context by the token rule and applies the
request's own limits and stop rules. It knows no wire format.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.emulator.tokens import WORDS, decode
from engines.token_rule import EOS_TOKEN, FIRST_WORD_TOKEN, VOCABULARY_TOKENS, ContextHash

_NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StopRule:
    """When an answer ends: SGLang's sampling parameters of the same names."""

    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = _NO_IDS
    no_stop_trim: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended by itself: at its length, or at a stop that `matched` (a token id or a string)."""

    kind: str
    matched: int | str | None = None


class Output:
    """The answer of one request: its ids, its text, and its end."""

    __slots__ = ("_context", "_handed", "_rule", "_shown", "_text", "_visible", "finish", "ids")

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._context = ContextHash()
        self._handed: int | None = None
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self._shown = 0
        """How much the last `take_delta` had shown: ids where there are no stop strings, else characters."""
        self._text = ""
        """The text so far, kept only where there are stop strings to look for."""
        self._visible = 0
        """How many characters of it may be shown: a tail that could become a stop string is withheld."""

    def start(self, packed: bytes | bytearray, sampling: bytes = b"", first_token: int | None = None) -> None:
        """Fix the context that the answer continues, and its first token where another server drew it."""
        self._context = ContextHash(packed, sampling)
        self._handed = first_token

    def step(self) -> bool:
        """Draw one token; True when it was the last."""
        if self._handed is not None:
            token, self._handed = self._handed, None
            return self._accept(token)
        rule = self._rule
        return self._accept(self._context.next_token(not rule.ignore_eos and len(self.ids) >= rule.min_new_tokens))

    def _accept(self, token: int) -> bool:
        rule = self._rule
        self._context.append(token)
        self.ids.append(token)
        if token == EOS_TOKEN or rule.stop_token_ids:
            self._check_stop_tokens(token)
        if rule.stop and self.finish is None:
            self._check_stop_strings(token)
        if self.finish is None and len(self.ids) >= rule.max_new_tokens:
            self.finish = Finish("length")
        return self.finish is not None

    @property
    def text(self) -> str:
        """The whole text so far, without a matched stop."""
        if self._rule.stop:
            return self._text
        return decode(self._text_ids(0))

    def take_delta(self) -> str:
        """The text that may be shown and was not yet."""
        if not self._rule.stop:
            fresh, self._shown = self._text_ids(self._shown), len(self.ids)
            if len(fresh) == 1 and FIRST_WORD_TOKEN <= fresh[0] < VOCABULARY_TOKENS:
                return WORDS[fresh[0] - FIRST_WORD_TOKEN]
            return decode(fresh)
        end = len(self._text) if self.finish else self._visible
        delta, self._shown = self._text[self._shown : end], max(self._shown, end)
        return delta

    def _text_ids(self, start: int) -> list[int]:
        matched = self.finish is not None and isinstance(self.finish.matched, int)
        return self.ids[start : -1 if matched and not self._rule.no_stop_trim else None]

    def _check_stop_tokens(self, token: int) -> None:
        rule = self._rule
        ends = (token == EOS_TOKEN and not rule.ignore_eos) or token in rule.stop_token_ids
        if ends and len(self.ids) > rule.min_new_tokens:
            self.finish = Finish("stop", token)

    def _check_stop_strings(self, token: int) -> None:
        rule = self._rule
        self._text += decode([token])
        for stop in rule.stop:
            at = self._text.find(stop)
            if at >= 0 and len(self.ids) > rule.min_new_tokens:
                self.finish = Finish("stop", stop)
                self._text = self._text[: at + len(stop) if rule.no_stop_trim else at]
                return
        self._visible = len(self._text) - self._withheld_chars()

    def _withheld_chars(self) -> int:
        longest = 0
        for stop in self._rule.stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
