"""Where a broken stream goes on: after which of its output ids, and with what text still to come. Pure.

The engine that continues decodes from the end of its prompt, so the text must be clean there: no half of a character,
nothing withheld. Ids that the client never saw can be dropped and generated again; else the text is mended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.capture import Capture
from engines.client_stream import Emitted, Inexact, TextOf
from engines.seam_text import CONTEXT_TOKENS, REPLACEMENT, SeamText, Stops

_CANDIDATES = 16
_HALVES_TOKENS = 32
"""So many ids in a row that end inside a character are looked through for text without halves: a bound on the work."""


@dataclass(frozen=True, slots=True)
class Seam:
    """The next prompt ends with so many output ids. `text` joins what comes on, None where nothing is to be done.

    `whole`: the client has all the text of these ids.
    """

    kept_tokens: int
    text: SeamText | None
    whole: bool


def candidates(prompt_ids: Sequence[int], emitted: Emitted) -> list[list[int]]:
    """The ids whose texts decide where a stream goes on, likely ones first: for whom must ask another for them.

    A TextOf of these alone is enough where ids are not shown and the text has no half character that was shown in
    part; elsewhere `seam_at` asks for others, and a TextOf that does not know them raises Inexact.
    """
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    ids = list(emitted.ids)
    first = max(0, len(ids) - _CANDIDATES)
    return [context, *(context + ids[:kept] for kept in range(len(ids), first - 1, -1))]


def stops_of(params: Mapping[str, Any]) -> Stops:
    """The stop strings of a body of the OpenAI routes, or of `sampling_params` of `/generate`."""
    stop = params.get("stop")
    strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return Stops(tuple(each for each in strings if each and isinstance(each, str)), not params.get("no_stop_trim"))


def why_not(params: Mapping[str, Any]) -> str:
    """Why generation with these parameters (as for `stops_of`) cannot be continued exactly; "" where it can."""
    if params.get("stop_regex"):
        return "a stop_regex may match across the seam, where nobody looks"
    if params.get("repetition_penalty") not in (None, 1) or any(params.get(name) for name in _PENALTIES):
        return "penalties count output tokens only, and would begin anew"
    return ""


_PENALTIES = ("frequency_penalty", "presence_penalty")


def seam_at(
    prompt_ids: Sequence[int], emitted: Emitted, capture: Capture, stops: Stops, text_of: TextOf | None
) -> Seam:
    """Where to go on, by the tokenizer, or without one only where it is provable. Raises Inexact."""
    if text_of is None:
        kept = _provably_whole(emitted, capture)
        return Seam(kept, _unless_done(SeamText(emitted.text, "", stops)), True)
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    ids, sent = list(emitted.ids), emitted.text
    skipped = len(text_of(context))
    last, shorter = len(ids) if emitted.ids_shown else 0, 0
    for kept in range(len(ids), -1, -1):
        text = text_of(context + ids[:kept])[skipped:] if kept else ""
        if text == sent and kept >= last:
            joined = SeamText(sent, "", stops, context=_context(prompt_ids, ids[:kept]), text_of=text_of)
            return Seam(kept, _unless_done(joined), True)
        clean = not text.endswith(REPLACEMENT)
        if emitted.ids_shown and kept == len(ids) and clean and text.startswith(sent):
            unsent, context = text[len(sent) :], _context(prompt_ids, ids)
            return Seam(kept, SeamText(sent, unsent, stops, context=context, text_of=text_of), False)
        if clean and sent.startswith(text):
            return _mended([*context, *ids], len(context) + kept, sent, len(text), stops, text_of, len(ids))
        shorter += len(text) < len(sent)
        if shorter and (clean or shorter == _HALVES_TOKENS):
            break
    raise Inexact("the text that was sent is not what the tokenizer makes of the ids")


def _context(prompt_ids: Sequence[int], ids: Sequence[int]) -> list[int]:
    return [*prompt_ids[-CONTEXT_TOKENS:], *ids][-CONTEXT_TOKENS:]


def _mended(
    all_ids: list[int], at: int, sent: str, clean_chars: int, stops: Stops, text_of: TextOf, kept_tokens: int
) -> Seam:
    """All ids are kept: `clean_chars` of the text belong to the ids up to `at`, the rest ends inside a character."""
    context, half = all_ids[max(0, at - CONTEXT_TOKENS) : at], all_ids[at:]
    text = text_of(context + half)[len(text_of(context)) :].rstrip(REPLACEMENT)
    shown = sent[clean_chars:]
    if not text.startswith(shown):
        raise Inexact("the text that was sent is not what the tokenizer makes of the ids")
    joined = SeamText(sent, text[len(shown) :], stops, context=context, half=half, text_of=text_of)
    return Seam(kept_tokens, joined, False)


def _provably_whole(emitted: Emitted, capture: Capture) -> int:
    """How many ids the sent text is all of, as SGLang's detokenizer works: without a tokenizer.

    One id whose text came with it and does not end as the printable part of an unfinished character does: those end
    with a space or a CJK character (`find_printable_text`). Ids after it that brought no text are dropped.
    """
    kept, whole = len(capture.base_ids), capture.base_whole
    count = kept
    for ids, text in capture.chunks():
        count += len(ids)
        if text:
            whole = len(ids) == 1 and not (text.endswith((" ", REPLACEMENT)) or _is_cjk(text[-1]))
            kept = count
    if not whole or (emitted.ids_shown and kept < count):
        raise Inexact("without a tokenizer nobody knows whether part of a character is withheld")
    return kept


def _is_cjk(char: str) -> bool:
    """A superset of what SGLang calls a Chinese character."""
    return 0x2E80 <= ord(char) <= 0xFAFF or 0x20000 <= ord(char) <= 0x2FA1F


def _unless_done(text: SeamText) -> SeamText | None:
    return None if text.done else text
