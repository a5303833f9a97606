"""Where a broken stream goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines.capture import Capture
from engines.client_stream import Emitted, Inexact
from engines.seam import Seam, candidates, seam_at, stops_of
from engines.seam_text import Stops

PIECES = {1: b"a", 2: b"bc", 6: b"\xf0\x9f", 7: b"\x98\x80", 8: b"d \xf0\x9f", 9: b""}
PROMPT = [1, 1, 1, 1, 1, 1, 2]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")


def at(ids: list[int], text: str, *, shown: bool = False) -> Seam:
    return seam_at(PROMPT, Emitted(ids, text, shown, False), Capture(), Stops(), text_of)


def test_after_the_last_id_whose_text_was_sent() -> None:
    assert at([1, 2], "abc") == Seam(2, None, True)
    assert at([1, 2, 9], "abc") == Seam(3, None, True)
    assert at([1, 2, 6], "abc") == Seam(2, None, True)
    assert at([1, 6, 6], "a") == Seam(1, None, True)
    assert at([6], "") == Seam(0, None, True)
    assert at([], "") == Seam(0, None, True)


def test_ids_that_are_shown_are_kept_and_their_text_is_mended() -> None:
    seam = at([1, 2, 6], "abc", shown=True)
    assert (seam.kept_tokens, seam.whole) == (3, False)
    assert seam.text is not None
    assert seam.text.add([7, 1], "x", False).text == "\U0001f600a"


def test_a_character_that_was_shown_in_part_of_its_token_is_mended() -> None:
    seam = at([1, 8], "ad ")
    assert (seam.kept_tokens, seam.whole) == (2, False)
    assert seam.text is not None
    assert seam.text.add([7], "", False).text == "\U0001f600"


def test_shown_ids_whose_text_was_withheld_whole_bring_it_later() -> None:
    seam = at([1, 2], "a", shown=True)
    assert (seam.kept_tokens, seam.whole) == (2, False)
    assert seam.text is not None
    assert seam.text.add([1], "a", False).text == "bca"


def test_a_text_in_the_middle_of_a_token_is_continued_there() -> None:
    seam = at([1, 2], "ab")
    assert seam.kept_tokens == 2
    assert seam.text is not None
    assert seam.text.add([1], "a", False).text == "ca"


def test_characters_may_break_off_in_several_tokens_in_a_row() -> None:
    seam = at([1, 8, 8, 8], "ad \ufffdd \ufffdd ")
    assert seam.text is not None
    assert seam.text.add([7], "", False).text == "\U0001f600"
    with pytest.raises(Inexact, match="tokenizer"):
        at([1] + [8] * 33, "a" + "d \ufffd" * 32 + "d ")


def test_another_text_is_refused() -> None:
    for ids, text in (([1, 2], "xyz"), ([1, 2], "abcdefghijkl"), ([8], "e ")):
        with pytest.raises(Inexact, match="tokenizer"):
            at(ids, text)


def test_the_candidates_are_what_is_asked_where_nothing_is_mended() -> None:
    ids = [1, 2, 1, 2, 6]
    asked: list[list[int]] = []

    def noting(some: Sequence[int]) -> str:
        asked.append(list(some))
        return text_of(some)

    seam_at(PROMPT, Emitted(ids, "abcabc", False, False), Capture(), Stops(), noting)
    known = candidates(PROMPT, Emitted(ids, "abcabc", False, False))
    assert all(some in known for some in asked)
    assert known[:2] == [PROMPT[-5:], PROMPT[-5:] + ids]
    assert len(candidates(PROMPT, Emitted([1] * 1000, "", False, False))) == 18


def test_stop_strings_of_a_body() -> None:
    assert stops_of({}) == Stops()
    assert stops_of({"stop": "x"}) == Stops(("x",))
    assert stops_of({"stop": ["x", "", None, "yz"], "no_stop_trim": True}) == Stops(("x", "yz"), trim=False)
    assert stops_of({"stop": ["x", "yz"]}).longest_chars == 2
