"""What clients were told, and what is wrong with it. Pure.

A request has exactly one end: whole, one clear error, or its client had hung up. What a client has read of a stream is
always a beginning of the true answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """What one client got. `truths` and `texts` go by choice; `ended`: the body came to its proper end.

    `status` is None when no answer began, which only a client that `left` may see.
    """

    name: str
    truths: Sequence[str]
    texts: Sequence[str]
    status: int | None
    stream: bool
    ended: bool
    done: int = 0
    errors: int = 0
    left: bool = False

    @property
    def whole(self) -> bool:
        """It got all of the true answer, and was told so."""
        finished = self.ended and self.errors == 0 and self.done == int(self.stream)
        return self.status == 200 and finished and list(self.texts) == list(self.truths)

    @property
    def refused(self) -> bool:
        """It got an error with a real status, and no text."""
        return (self.status or 0) >= 400 and self.ended and self.errors == 1 and not any(self.texts)

    @property
    def broken(self) -> bool:
        """It got the beginning of a stream, and then one error event."""
        begun = self.status == 200 and self.stream and any(self.texts)
        return begun and self.ended and self.errors == 1 and self.done == 0


def problems(history: Iterable[Told]) -> list[str]:
    """Everything that no client may be told; empty for a good history."""
    return [f"{told.name}: {what}" for told in history for what in _wrong(told)]


def _wrong(told: Told) -> Iterator[str]:
    for index, (truth, text) in enumerate(zip(told.truths, told.texts, strict=True)):
        if not truth.startswith(text):
            yield f"choice {index} is not a beginning of the true text: {_first_difference(truth, text)}"
    if told.left:
        return
    if told.status is None:
        yield "no answer"
    elif not (told.whole or told.refused or told.broken):
        yield f"no proper end: status {told.status}, {told.done} terminators, {told.errors} errors, ended {told.ended}"


def _first_difference(truth: str, text: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(truth, text, strict=False)) if a != b), min(len(truth), len(text)))
    return f"{text[at : at + 20]!r} instead of {truth[at : at + 20]!r} at {at} of {len(truth)}"
