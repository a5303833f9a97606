"""What one client reads of one engine request, over all its attempts: the words and the protocol.

A stream that breaks is continued by another attempt, token by token. Whoever implements `ClientStream` knows one wire
form: what to ask the engine for, what of its events the client sees, and how the next attempt's events join on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.sse_frames import EventKind

Frames = Sequence[tuple[EventKind, bytes]]
"""Events of a stream, whole, each with its kind."""

TextOf = Callable[[Sequence[int]], str]
"""The text of token ids, as the model's tokenizer decodes them; U+FFFD where bytes of a character are missing.

It must hide or show special tokens as the stream's `skip_special_tokens` says. One that does not know a text raises
Inexact.
"""


class Inexact(Exception):
    """This stream cannot be continued token by token; the text says why, for an operator."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """What the client has of one stream, over all attempts.

    `ids` are all output ids that have come, also those whose `text` is still withheld (half a character, the beginning
    of a stop string). `ids_shown`: the client sees ids or values per token, so none of them can be taken back.
    `finished`: it has its finish reason, so that only usage and the terminator may be missing.
    """

    ids: Sequence[int]
    text: str
    ids_shown: bool
    finished: bool


class ClientStream(Protocol):
    """One client's stream of one engine request. Pure; used by one attempt at a time.

    `path` is the engine's route. `call_body` is what the next attempt asks for, without routing fields:
    `context_tokens` is the room of the decode that is asked (EngineFacts.context_tokens).
    """

    path: str
    skip_special_tokens: bool
    """Whether the client's text hides special tokens: how a TextOf must decode."""

    @property
    def finished(self) -> bool:
        """The client has its finish reason; `closing` says what is missing after it."""

    @property
    def ended_here(self) -> bool:
        """The stream was ended by `frames` itself, at a stop string that began before a seam: the events it returned
        are the last, terminator included, and the engine, which goes on, must be let go of."""

    def call_body(self, context_tokens: int | None) -> Mapping[str, Any]: ...

    def frames(self, frames: Frames) -> Frames:
        """The client's events for these of the engine's, which are kept (bounded) as they came."""

    def restart(self) -> None:
        """The client has nothing yet: forget what came, the next attempt begins anew."""

    def emitted(self) -> Emitted:
        """What has come so far, read only now. Raises Inexact where it cannot be known."""

    def go_on(self, prompt_ids: Sequence[int], text_of: TextOf | None) -> int:
        """Prepare for an attempt that continues: how many output ids its prompt ends with.

        `call_body` then asks for the rest, and `frames` joins it on. `text_of` is None without a tokenizer; it may be
        called until the text is clean again, a few events after the seam. Raises Inexact, and changes nothing then.
        """

    def closing(self, prompt_tokens: int | None) -> Frames:
        """What a stream that is `finished` still lacks: its usage event, unless it has one, and its terminator.

        Usage is given whether the client asked for it or not, unless `prompt_tokens` is None: they are not known. The
        ids in it are those of the last attempt.
        """
