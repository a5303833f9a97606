"""One event of SGLang's `/v1/completions` stream as bytes: where its text and ids are, and what remains without ids.

Pure. Its writer is pydantic, whose fields come in one order: text, logprobs, finish_reason, matched_stop, token_ids,
prompt_token_ids. A quote inside a JSON string is escaped, so no generated text looks like the end of a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CHOICE = b'"choices":[{"index":0,"text":"'
_IDS = b',"token_ids":['
_PROMPT_IDS = b',"prompt_token_ids":['
UNSAID = b'"logprobs":null,"finish_reason":null,"matched_stop":null'
_TEXT_TO_IDS = b'",' + UNSAID + _IDS
_AFTER_IDS = b']}],"usage":null}\n\n'


def head_of(frame: bytes) -> bytes:
    """All of an event up to its text, the same for every event of an attempt; empty where it is of another form."""
    at = frame.find(_CHOICE)
    return frame[: at + len(_CHOICE)] if at > 0 and frame.startswith(b"data: {") else b""


def usual_parts(frame: bytes, head: bytes) -> tuple[int, int, int] | None:
    """Where the text ends and where the ids begin and end, in an event that says nothing else; None in another.

    It begins with `head`: not the first of its attempt, nor the last, without logprobs and running usage.
    """
    if not (head and frame.startswith(head) and frame.endswith(_AFTER_IDS)):
        return None
    ids_end = len(frame) - len(_AFTER_IDS)
    ids_begin = frame.rfind(b"[", 0, ids_end) + 1
    text_end = ids_begin - len(_TEXT_TO_IDS)
    return (text_end, ids_begin, ids_end) if frame.startswith(_TEXT_TO_IDS, text_end) else None


def without_usual_ids(frame: bytes, ids_begin: int, ids_end: int) -> bytes:
    return frame[: ids_begin - len(_IDS)] + frame[ids_end + 1 :]


def without_ids(frame: bytes) -> bytes:
    """The event without ids of output and prompt."""
    for field in (_IDS, _PROMPT_IDS):
        if (at := frame.rfind(field)) >= 0:
            frame = frame[:at] + frame[frame.index(b"]", at) + 1 :]
    return frame


@dataclass(frozen=True, slots=True)
class Choice:
    """The only choice of an event, and the event that holds it; the ids were taken out."""

    event: dict[str, Any]
    choice: dict[str, Any]
    ids: Sequence[int]
    prompt_ids: Sequence[int] | None

    @property
    def text(self) -> str:
        return str(self.choice.get("text") or "")

    @property
    def finish(self) -> str | None:
        found = self.choice.get("finish_reason")
        return found if isinstance(found, str) else None

    def through(self, kept_ids: int) -> Choice:
        """The same with its first ids alone, and with the logprobs of these."""
        choice = dict(self.choice)
        if isinstance(logprobs := choice.get("logprobs"), dict):
            lists = {name: rows[:kept_ids] for name, rows in logprobs.items() if isinstance(rows, list)}
            choice["logprobs"] = {**logprobs, **lists}
        return Choice({**self.event, "choices": [choice]}, choice, self.ids[:kept_ids], self.prompt_ids)


def choice_of(event: Mapping[str, Any]) -> Choice | None:
    """The only choice of an event, its ids taken out; None where there is none."""
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    choice = dict(choices[0])
    ids, prompt_ids = choice.pop("token_ids", None), choice.pop("prompt_token_ids", None)
    return Choice({**event, "choices": [choice]}, choice, ids or (), prompt_ids)
