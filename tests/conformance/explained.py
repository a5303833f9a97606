"""Differences that stay, each with its reason. docs/emulator.md lists exactly these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.conformance.compare import Difference


@dataclass(frozen=True, slots=True)
class Explained:
    """A difference that is known: `case` and `path` are patterns (`*`; an index is written `?`)."""

    case: str
    path: str
    reason: str


EXPLAINED: tuple[Explained, ...] = (
    Explained(
        "tokenize decomposed text",
        "decode.body.*",
        "SGLang normalizes the text of a Qwen2 model to NFC; the emulator's tokenizer keeps bytes as they are, so that"
        " a longer text always extends the ids of its start",
    ),
    Explained(
        "room without a host kills a decode",
        "decode.time",
        "a scheduler that dies freezes its server for 5 s before the connections close; the emulator ends at once",
    ),
    Explained("page sizes that differ", "decode.time", "as above"),
    Explained(
        "two samples in one room",
        "prefill.body*.meta_info.cached_tokens*",
        "for n > 1 SGLang first sends one copy of the prompt alone to fill the cache; the emulator does not, a gateway"
        " never sends n > 1 to a pair",
    ),
)


def explanation(case: str, difference: Difference, rows: Iterable[Explained] = EXPLAINED) -> Explained | None:
    """The row that explains `difference` of `case`."""
    for row in rows:
        if fnmatchcase(case, row.case) and fnmatchcase(difference.path, row.path):
            return row
    return None


def as_markdown() -> str:
    """The table for the document."""
    lines = ["| case | where | why |", "|---|---|---|"]
    lines += [f"| {row.case} | `{row.path}` | {row.reason} |" for row in EXPLAINED]
    return "\n".join(lines)
