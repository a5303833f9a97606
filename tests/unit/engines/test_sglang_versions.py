"""Versions: which are served, by which row, and what is said of those that are not known."""

from __future__ import annotations

import pytest

from engines import sglang_versions as versions


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.15.post1", (0, 5, 15)),
        ("v0.6.0rc1", (0, 6, 0)),
        ("0.5.23+cpu", (0, 5, 23)),
        ("", None),
        ("main", None),
        ("0.5", None),
    ],
)
def test_versions_are_read(text: str, number: versions.Version | None) -> None:
    assert versions.parsed(text) == number


def test_rows_are_in_order_and_only_grow() -> None:
    numbers = [versions.parsed(row.since) for row in versions.ROWS]
    assert None not in numbers
    assert numbers == sorted(set(numbers), key=str)
    for older, newer in zip(versions.ROWS, versions.ROWS[1:], strict=False):
        assert older.route_fields < newer.route_fields, "a decode reads all that an older prefill tells"


@pytest.mark.parametrize(
    ("version", "since"),
    [
        ("0.5.20", "0.5.20"),
        ("0.5.21.post2", "0.5.21"),
        ("0.5.23", "0.5.23"),
        ("0.5.24", "0.5.23"),
        ("1.0.0", "0.5.23"),
        ("", "0.5.23"),
        ("main", "0.5.23"),
    ],
)
def test_a_version_has_the_newest_row_that_is_not_newer(version: str, since: str) -> None:
    assert versions.row_of(version).since == since


@pytest.mark.parametrize("version", ["0.5.19", "0.5.9", "0.4.10.post2"])
def test_an_old_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(
        versions.UnservedVersion, match=rf"^SGLang {version} is not served: 0\.5\.20 or newer is needed"
    ):
        versions.row_of(version)


@pytest.mark.parametrize(
    ("version", "known", "said"),
    [
        ("0.5.23", True, ""),
        ("0.5.21.post1", True, ""),
        ("0.5.24", False, "SGLang 0.5.24 is newer than 0.5.23"),
        ("main", False, "its version 'main' cannot be read"),
    ],
)
def test_an_unknown_version_is_warned_of(version: str, known: bool, said: str) -> None:
    assert versions.is_known(version) is known
    assert versions.warning(version).startswith(said)
    assert bool(versions.warning(version)) is not known


@pytest.mark.parametrize(
    ("versions_", "holds"),
    [
        (versions.Versions("0.5.21"), [False, True, True]),
        (versions.Versions("0.5.20", until="0.5.23"), [True, True, False]),
    ],
)
def test_ranges_hold_their_first_version_and_not_their_end(versions_: versions.Versions, holds: list[bool]) -> None:
    assert [versions_.holds(version) for version in ("0.5.20", "0.5.21", "0.5.23")] == holds
    assert not versions_.holds("main")
