"""What a server says of the pages of KV that it caches, in the words of its events.

A leaf: standard library only, frozen data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Medium(StrEnum):
    """Where a server keeps a page of KV, in the words of its events."""

    GPU = "GPU"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages are on `medium` now. Hashes are the server's own, signed 64-bit.

    `parent` is the page before them, None at the start of a prompt, where `cache_salt` and `lora` name what it belongs
    to. `token_ids` are those of all pages, `page_tokens` for each.
    """

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    page_tokens: int
    medium: Medium = Medium.GPU
    cache_salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """These pages are no longer on `medium`."""

    hashes: Sequence[int]
    medium: Medium = Medium.GPU


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """The server has forgotten all pages, on every medium."""


KvEvent = PagesStored | PagesRemoved | PagesCleared
