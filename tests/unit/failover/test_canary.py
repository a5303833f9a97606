"""Which pairs get a canary, and what its answers say beside each other."""

from __future__ import annotations

from random import Random

from engines.types import EngineId
from failover.canary import WITNESSES, Rounds, Texts, diagonal, disjoint, due, prompt, witnesses
from failover.pair_health import CANARY, Pair, PairHealth

P0, P1, D0, D1 = (EngineId(name) for name in ("p0", "p1", "d0", "d1"))
PS, DS = [P0, P1], [D0, D1]


def never(pair: Pair) -> float | None:
    return None


def test_no_two_rounds_have_a_prompt_in_common() -> None:
    assert prompt("a") != prompt("b")
    assert prompt("a").startswith("a"), "they differ from the first block on"


def test_a_round_has_its_time_and_goes_on_to_the_next_diagonal() -> None:
    rounds = Rounds(30.0, first_s=20.0)
    assert rounds.pairs(PS, DS, never, 19.9) == []
    assert rounds.pairs(PS, DS, never, 20.0) == [(P0, D0), (P1, D1)]
    assert rounds.pairs(PS, DS, never, 49.9) == []
    assert rounds.pairs(PS, DS, never, 50.0) == [(P0, D1), (P1, D0)]


def test_a_round_leaves_out_what_was_proved_since_its_last_turn() -> None:
    """With two prefills and two decodes a pair has its turn every second round."""
    proved = {(P0, D0): 40.5, (P1, D1): 39.5}
    assert Rounds(30.0, 100.0).pairs(PS, DS, proved.get, 100.0) == [(P1, D1)]


def test_without_an_interval_idle_pairs_have_no_turn() -> None:
    assert Rounds(0.0, 0.0).pairs(PS, DS, never, 1e9) == []
    assert not Rounds(0.0, 0.0).is_due(1e9)


def test_an_empty_side_has_no_round() -> None:
    assert list(diagonal([], DS, 1)) == []
    assert list(diagonal(PS, [], 1)) == []


def test_no_server_is_chosen_twice() -> None:
    assert disjoint([(P0, D0), (P0, D1), (P1, D1), (P1, D0)]) == [(P0, D0), (P1, D1)]
    assert disjoint([(P0, D0), (P1, D1)], busy={D0}) == [(P1, D1)]


def test_the_longest_due_is_first_and_what_is_tried_is_not_due() -> None:
    at = PairHealth(Random(1))
    at.prefill_restarted(P1, [D0, D1], None, 5.0)
    at.prefill_restarted(P0, [D0], None, 3.0)
    assert due(at.records, 4.9) == [(P0, D0)]
    assert due(at.records, 5.0) == [(P0, D0), (P1, D0), (P1, D1)]
    at.trial_began((P1, D0), CANARY, 5.0)
    assert due(at.records, 5.0) == [(P0, D0), (P1, D1)]


# ---- text ------------------------------------------------------------------------------------------------------------


def texts(*answers: tuple[Pair, tuple[int, ...]], distrusted: tuple[Pair, ...] = ()) -> Texts:
    asked = Texts("word")
    for pair, answer in answers:
        asked.add(pair, answer, trusted=pair not in distrusted)
    return asked


def test_what_most_answered_is_right() -> None:
    asked = texts(((P0, D0), (1, 2)), ((P1, D1), (1, 2)), ((P0, D1), (1, 3)))
    assert (asked.agreed(), asked.wrong(), asked.disputed) == ((1, 2), [(P0, D1)], False)
    assert asked.newly_wrong() == [(P0, D1)]
    assert asked.newly_wrong() == [], "once"


def test_one_word_against_another_is_asked_elsewhere() -> None:
    asked = texts(((P0, D0), (1, 2)), ((P1, D1), (1, 3)))
    assert (asked.agreed(), asked.wrong(), asked.disputed) == (None, [], True)
    asked.add((P0, D1), (1, 2), trusted=True)
    assert (asked.wrong(), asked.disputed) == ([(P1, D1)], False)


def test_a_pair_that_garbled_before_has_no_vote() -> None:
    asked = texts(((P0, D0), (1, 2)), ((P1, D1), (1, 3)), distrusted=((P0, D0),))
    assert asked.wrong() == [(P0, D0)]
    alone = texts(((P0, D0), (1, 2)), distrusted=((P0, D0),))
    assert (alone.agreed(), alone.wrong(), alone.disputed) == (None, [], False)


def test_an_answer_is_confirmed_by_another_trusted_pair_alone() -> None:
    both = texts(((P0, D0), (1, 2)), ((P1, D1), (1, 2)), distrusted=((P0, D0),))
    assert both.confirmed((P0, D0))
    assert not both.confirmed((P1, D1)), "who confirms it is not trusted"
    assert not texts(((P0, D0), (1, 2))).confirmed((P0, D0))


def test_witnesses_share_no_server_with_what_is_in_doubt_and_were_not_asked() -> None:
    assert list(witnesses([(P0, D0)], PS, DS, lambda pair: True)) == [(P1, D1)]
    assert list(witnesses([(P0, D0)], PS, DS, lambda pair: False)) == []
    assert list(witnesses([], PS, DS, lambda pair: True, asked=[(P0, D0), (P1, D1)])) == [(P0, D1), (P1, D0)]


def test_a_large_fleet_is_not_asked_as_a_whole() -> None:
    many = [EngineId(f"p{number}") for number in range(100)]
    asked: list[Pair] = []
    assert len(list(witnesses([(P0, D0)], many, DS, lambda pair: not asked.append(pair)))) == WITNESSES
    assert len(asked) == WITNESSES
