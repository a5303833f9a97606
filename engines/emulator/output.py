"""What one request has generated so far, and when it ends. Pure.

An `Output` is the token source of a job: `step` draws the next token of the context by the token rule and applies the
request's own limits and stop rules. It knows no wire format. Text is made as SGLang 0.5.23 makes it, so that half a
character is never shown, and a prompt that ends inside one loses it (`detokenizer_manager.py`, `Req` in
`schedule_batch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.emulator.tokens import WORDS, decode, encode
from engines.token_rule import EOS_TOKEN, FIRST_WORD_TOKEN, TOKEN_BYTES, VOCABULARY_TOKENS, ContextHash, unpack

_NO_IDS: frozenset[int] = frozenset()
_CONTEXT_TOKENS = 5
"""So many last ids of the prompt are decoded together with the answer (`INIT_INCREMENTAL_DETOKENIZATION_OFFSET`)."""
_INCOMPLETE = "\ufffd"


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

    __slots__ = (
        "_context",
        "_handed",
        "_prompt_tail",
        "_read",
        "_rule",
        "_shown",
        "_stop_tail_tokens",
        "closed",
        "finish",
        "ids",
        "withheld",
    )

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._context = ContextHash()
        self._handed: int | None = None
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.closed = False
        """It has ended, by itself or not: what is withheld of its text may be shown."""
        self.withheld = False
        """The text may end in the beginning of a stop string: SGLang sends neither it nor its ids."""
        self._stop_tail_tokens = 1 + max((len(encode(stop)) // TOKEN_BYTES for stop in rule.stop), default=0)
        self._prompt_tail: list[int] = []
        self._read = 0
        """How many ids have a complete text, which was shown."""
        self._shown = 0
        """How many characters were shown of the text behind them."""

    def start(self, packed: bytes | bytearray, sampling: bytes = b"", first_token: int | None = None) -> None:
        """Fix the context that the answer continues, and its first token where another server drew it."""
        self._context = ContextHash(packed, sampling)
        self._prompt_tail = unpack(packed[-_CONTEXT_TOKENS * TOKEN_BYTES :])
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
        if rule.stop:
            self._check_stop_strings()
        if self.finish is None and (token == EOS_TOKEN or rule.stop_token_ids):
            self._check_stop_tokens(token)
        if self.finish is None and len(self.ids) >= rule.max_new_tokens:
            self.finish = Finish("length")
        return self.finish is not None

    @property
    def text(self) -> str:
        """The whole text so far, without a matched stop."""
        text, finish = self._decoded(0, None), self.finish
        if finish is None or not isinstance(finish.matched, str):
            return text
        at = text.find(finish.matched)
        if at < 0:
            return text
        return text[: at + len(finish.matched) if self._rule.no_stop_trim else at]

    def take_delta(self) -> str:
        """The text that may be shown and was not yet."""
        ids, read = self.ids, self._read
        if read and len(ids) == read + 1 and self.finish is None and FIRST_WORD_TOKEN <= ids[read] < VOCABULARY_TOKENS:
            self._read += 1
            return WORDS[ids[read] - FIRST_WORD_TOKEN]
        fresh = self._decoded(read, None)
        if self.finish is not None or self.closed:
            return self._take_rest(fresh)
        if not fresh or fresh.endswith(_INCOMPLETE):
            fresh = fresh[: fresh.rfind(" ") + 1]
            delta, self._shown = fresh[self._shown :], len(fresh)
            return delta
        delta = fresh[self._shown :]
        self._read, self._shown = len(ids), 0
        return delta

    def _take_rest(self, fresh: str) -> str:
        """What is left to show at the end, where `fresh` is the text behind `_read`."""
        delta = fresh[self._shown :]
        if self.finish is not None and isinstance(self.finish.matched, str):
            delta = self.text[len(self._decoded(0, self._read)) + self._shown :]
        self._read, self._shown = len(self.ids), 0
        return delta

    def _decoded(self, start: int, stop: int | None) -> str:
        """The text of ids, without a matched stop token; what completes the prompt's last character is lost."""
        if stop is None and self.finish is not None and isinstance(self.finish.matched, int):
            stop = None if self._rule.no_stop_trim else len(self.ids) - 1
        before = [] if start else self._prompt_tail
        return decode([*before, *self.ids[start:stop]])[len(decode(before)) :]

    def _check_stop_tokens(self, token: int) -> None:
        rule = self._rule
        ends = token == EOS_TOKEN or token in rule.stop_token_ids
        if ends and not rule.ignore_eos and len(self.ids) > rule.min_new_tokens:
            self.finish = Finish("stop", token)

    def _check_stop_strings(self) -> None:
        tail = decode(self.ids[-self._stop_tail_tokens :], skip_special=False)
        matched = next((stop for stop in self._rule.stop if stop in tail), None)
        if matched is not None:
            self.finish = Finish("stop", matched)
        self.withheld = any(
            tail.endswith(stop[:length])
            for stop in self._rule.stop
            for length in range(1, min(len(stop), len(tail)) + 1)
        )
