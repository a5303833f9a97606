"""The text after a seam, event by event: split characters, stop strings that begin before it, what was unsent."""

from __future__ import annotations

import pytest

from engines.seam_text import Piece, SeamText, Stops

BYTES = {
    **{1: b"a", 2: b"S", 3: b"T", 4: b"O", 5: b"P", 8: b" ", 9: b"\xc3", 10: b"\xa9"},
    **{6: b"\xf0\x9f", 7: b"\x98\x80", 11: b"\x98", 12: b"\x80"},
}


def text_of(ids: list[int]) -> str:
    return b"".join(BYTES.get(token, b"") for token in ids).decode("utf-8", "replace")


def test_where_nothing_can_go_wrong_nothing_is_done() -> None:
    assert SeamText("abc", "", Stops()).done
    assert SeamText("abc", "", Stops(("STOP",))).done
    assert SeamText("", "", Stops(("STOP",))).done


def test_a_stop_string_that_begins_before_the_seam_ends_the_stream() -> None:
    seam = SeamText("abST", "", Stops(("STOP",)))
    assert not seam.done
    assert seam.add([4], "O", False) == Piece("")
    assert seam.add([5], "P", False) == Piece("", "STOP", 1)
    assert seam.done


def test_what_does_not_become_one_is_shown_at_last() -> None:
    seam = SeamText("abST", "", Stops(("STOP",)))
    assert seam.add([4], "O", False) == Piece("")
    assert seam.add([1], "a", False) == Piece("Oa")
    assert seam.done


def test_the_end_shows_what_was_withheld() -> None:
    seam = SeamText("ST", "", Stops(("STOP",)))
    assert seam.add([4], "O", True) == Piece("O")


def test_an_untrimmed_stop_is_shown_to_its_end() -> None:
    seam = SeamText("abST", "", Stops(("STOP",), trim=False))
    assert seam.add([4, 5, 1], "OPa", False) == Piece("OP", "STOP", 3)


def test_ids_after_the_stop_are_not_of_the_output() -> None:
    seam = SeamText("aST", "", Stops(("STOP",)), context=[1, 2, 3], text_of=text_of)
    assert seam.add([4, 5, 1, 1], "OPaa", False) == Piece("", "STOP", 2)


def test_of_several_stops_the_one_that_is_complete_first() -> None:
    seam = SeamText("aST", "", Stops(("STOPS", "TO")))
    assert seam.add([4, 5, 2], "OPS", False) == Piece("", "TO", 3)


def test_all_but_one_character_of_it_may_be_before_the_seam() -> None:
    assert SeamText("abSTO", "", Stops(("STOP",))).add([5], "P", False) == Piece("", "STOP", 1)


def test_a_stop_string_wholly_before_the_seam_was_none_then() -> None:
    seam = SeamText("aTOS", "", Stops(("STOPS", "TO")))
    assert seam.add([1], "a", False) == Piece("a")


def test_one_that_begins_after_the_seam_is_for_the_engine_to_find() -> None:
    seam = SeamText("aS", "", Stops(("STOP",), trim=False))
    assert seam.add([1, 2, 3, 4, 5], "aSTOP", True, matched="STOP") == Piece("aSTOP")


def test_a_stop_wholly_after_the_seam_is_the_engines() -> None:
    seam = SeamText("ab", "", Stops(("STOP",)))
    assert seam.done


def test_unsent_text_comes_first() -> None:
    seam = SeamText("ab", "ST", Stops(("STOP",)))
    assert seam.add([1], "a", False) == Piece("STa")
    assert seam.done


def test_unsent_text_may_be_of_the_stop() -> None:
    seam = SeamText("ab", "aST", Stops(("STOP",)))
    assert seam.add([4, 5], "OP", False) == Piece("a", "STOP", 2)


@pytest.mark.parametrize("delta", ["", "\ufffd"])
def test_half_a_character_is_made_whole(delta: str) -> None:
    seam = SeamText("a", "", Stops(), context=[1], half=[6], text_of=text_of)
    assert not seam.done
    assert seam.add([7], delta, False) == Piece("\U0001f600")


def test_half_a_character_may_stay_one_for_a_while() -> None:
    seam = SeamText("a", "", Stops(), context=[1], half=[6], text_of=text_of)
    assert seam.add([11], "", False) == Piece("")
    assert seam.add([12, 1], "a", False) == Piece("\U0001f600a")
    assert seam.done


def test_the_engine_is_trusted_once_its_detokenizer_has_shown_clean_text() -> None:
    seam = SeamText("a", "", Stops(), context=[1], half=[6], text_of=text_of)
    assert seam.add([7], "", False) == Piece("\U0001f600")
    assert not seam.done
    assert seam.add([1], "anything", False) == Piece("a")
    assert seam.done


def test_a_stop_token_has_no_text_at_the_end() -> None:
    seam = SeamText("a", "", Stops(), context=[1], half=[6], text_of=text_of)
    assert seam.add([7, 1], "", True, matched=1) == Piece("\U0001f600")


def test_a_stop_string_that_the_engine_found_is_cut() -> None:
    seam = SeamText("a", "", Stops(("STOP",)), context=[1], half=[6], text_of=text_of)
    assert seam.add([7, 8, 2, 3, 4, 5], " ", True, matched="STOP") == Piece("\U0001f600 ")


def test_a_stop_string_may_begin_inside_a_character() -> None:
    seam = SeamText("a", "", Stops(("\u00e9a",)), context=[1], half=[9], text_of=text_of)
    assert seam.add([10], "", False) == Piece("")
    assert seam.add([1], "a", False) == Piece("", "\u00e9a", 1)


def test_an_answer_that_ends_with_half_a_character_shows_that() -> None:
    seam = SeamText("a", "", Stops(), context=[1], half=[6], text_of=text_of)
    assert seam.add([8], " ", True) == Piece("\ufffd ")
