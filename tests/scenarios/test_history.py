"""The history checker finds every kind of wrong history, and nothing in a good one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scenarios.history import Told, problems

WHOLE = Told("w", ["one two"], ["one two"], 200, stream=False, ended=True)
STREAM = replace(WHOLE, stream=True, done=1)
BROKEN = replace(STREAM, texts=["one"], done=0, errors=1)
REFUSED = Told("r", ["one two"], [""], 503, stream=True, ended=True, errors=1)
LEFT = Told("l", ["one two"], [""], None, stream=True, ended=False, left=True)

GOOD = [WHOLE, STREAM, BROKEN, REFUSED, LEFT, replace(LEFT, status=200, texts=["one"])]
BAD = {
    "empty 200": replace(WHOLE, texts=[""]),
    "short 200": replace(WHOLE, texts=["one"]),
    "wrong text": replace(STREAM, texts=["one twp"]),
    "text past the end": replace(STREAM, texts=["one two three"]),
    "text after the error's text": replace(BROKEN, texts=["one 2"]),
    "no terminator": replace(STREAM, done=0),
    "two terminators": replace(STREAM, done=2),
    "terminator after an error": replace(BROKEN, done=1),
    "error after the whole text": replace(STREAM, errors=1),
    "two errors": replace(BROKEN, errors=2),
    "cut": replace(STREAM, done=0, ended=False),
    "cut after an error": replace(BROKEN, ended=False),
    "refused without words": replace(REFUSED, errors=0),
    "no answer": replace(WHOLE, status=None, texts=[""]),
    "wrong text before leaving": replace(LEFT, texts=["two"]),
    "one choice of two": replace(WHOLE, truths=["a", "b"], texts=["a", ""]),
}


def test_a_good_history_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize("what", BAD)
def test_a_bad_history_is_found(what: str) -> None:
    assert len(problems([*GOOD, BAD[what]])) >= 1
