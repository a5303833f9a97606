"""What differs between SGLang versions, as far as pdgate depends on it. Pure.

Every row was read from the sources of its release. What all served versions share is no row: `/ready`, the four
parameters of `/route`, `/v1/loads`, `startup_time` and `launch_command` in `/server_info`, KV events as maps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")

Version = tuple[int, int, int]


def parsed(version: str) -> Version | None:
    """The three numbers of `version`; post-releases and builds count as their release. None where it has none."""
    found = _NUMBERS.match(version)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of versions: `since` the first, `until` the first after it ("" where it has not ended)."""

    since: str
    until: str = ""

    def holds(self, version: str) -> bool:
        """Whether `version` is in the range; False where it cannot be read."""
        number, first, end = parsed(version), parsed(self.since), parsed(self.until)
        return number is not None and first is not None and first <= number and (end is None or number < end)


_ROUTE_FIELDS = frozenset(
    {
        "attn_tp_size",
        "attn_cp_size",
        "dp_size",
        "pp_size",
        "page_size",
        "kv_cache_dtype",
        "follow_bootstrap_room",
        "enable_dsa_cache_layer_split",
        "prefill_http_port",
        "target_tp_rank",
        "target_tp_ranks",
        "target_cp_ranks",
        "target_pp_ranks",
        "required_dst_info_num",
        "required_prefill_response_num",
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """What holds from the version `since` up to the next row.

    `route_fields`: the fields of a prefill's `/route` that a decode of this version can read. It builds its
    `PrefillServerInfo` from all that it is told: one field more, and it never learns of that prefill.
    """

    since: str
    route_fields: frozenset[str]


ROWS = (
    Row("0.5.20", _ROUTE_FIELDS),
    Row("0.5.21", _ROUTE_FIELDS | {"dsv41_spec_layout"}),
    Row("0.5.22", _ROUTE_FIELDS | {"dsv41_spec_layout", "decode_allocation_policy"}),
    Row(
        "0.5.23",
        _ROUTE_FIELDS | {"dsv41_spec_layout", "decode_allocation_policy", "kv_layout", "enable_kv_cache_sharding"},
    ),
)
"""Oldest first."""
OLDEST, NEWEST = ROWS[0].since, ROWS[-1].since
_WHY_NOT_OLDER = "older ones have no /ready and do not tell their launch_command, by which a restart is noticed"


class UnservedVersion(ValueError):
    """A server of a version that pdgate does not serve; the message names it and says why."""


def row_of(version: str) -> Row:
    """The row of `version`; that of the newest where it is newer or cannot be read. Raises UnservedVersion."""
    number = parsed(version)
    if number is None:
        return ROWS[-1]
    rows = [row for row in ROWS if Versions(row.since).holds(version)]
    if not rows:
        raise UnservedVersion(f"SGLang {version} is not served: {OLDEST} or newer is needed ({_WHY_NOT_OLDER})")
    return rows[-1]


def is_known(version: str) -> bool:
    """Whether the sources of `version` were read: it has a row of its own."""
    return any(parsed(row.since) == parsed(version) for row in ROWS)


def warning(version: str) -> str:
    """What an operator should know of a version that is served; "" where there is nothing."""
    if is_known(version):
        return ""
    if parsed(version) is None:
        return f"its version {version!r} cannot be read; it is taken for SGLang {NEWEST}"
    return f"SGLang {version} is newer than {NEWEST}, the newest that pdgate knows; it is served as {NEWEST} would be"
