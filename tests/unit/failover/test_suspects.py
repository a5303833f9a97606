"""One content is tried by one attempt at a time once a server has ended under it, and not at all after two."""

from __future__ import annotations

import pytest

from engines.types import EngineId, Leg
from failover.suspects import May, Suspects, Victim, may_try

P0, P1, D0, D1 = (
    Victim(leg, EngineId(f"http://{leg}{number}"), 1) for leg in (Leg.PREFILL, Leg.DECODE) for number in (0, 1)
)


@pytest.mark.parametrize(
    ("ended", "in_doubt", "at_risk", "may"),
    [
        (0, 0, 0, May.GO),
        (0, 0, 9, May.GO),
        (1, 0, 0, May.GO),
        (1, 0, 1, May.WAIT),
        (0, 1, 0, May.GO),
        (0, 1, 1, May.WAIT),
        (0, 2, 0, May.WAIT),
        (1, 1, 0, May.WAIT),
        (2, 0, 0, May.NEVER),
        (3, 1, 5, May.NEVER),
    ],
)
def test_the_rule(ended: int, in_doubt: int, at_risk: int, may: May) -> None:
    assert may_try(ended, in_doubt, at_risk) is may


def lost(suspects: Suspects, *victims: Victim, now_s: float = 0.0, content: bytes = b"a") -> None:
    suspects.broke(content, victims, now_s)
    suspects.found(content, victims, victims)


def test_what_has_ended_nobody_may_be_tried_at_will() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert suspects.may_try(b"a", 0.0) is May.GO
        suspects.begins(b"a")
    lost(suspects, P0, content=b"b")
    assert suspects.may_try(b"a", 0.0) is May.GO
    for _ in range(5):
        suspects.ends(b"a")
    assert len(suspects) == 1


def test_after_one_death_one_goes_and_others_wait_for_it() -> None:
    suspects = Suspects()
    changes: list[bytes] = []
    suspects.on_change = changes.append
    lost(suspects, P0)
    assert changes == [b"a"]
    suspects.begins(b"a")
    assert suspects.may_try(b"a", 0.0) is May.WAIT
    suspects.ends(b"a")
    assert changes == [b"a", b"a"]
    assert suspects.may_try(b"a", 0.0) is May.GO
    lost(suspects, P1)
    assert suspects.may_try(b"a", 0.0) is May.NEVER
    assert suspects.deaths(b"a", 0.0) == 2


def test_one_that_harmed_nobody_frees_all() -> None:
    suspects = Suspects()
    lost(suspects, P0)
    suspects.begins(b"a")
    suspects.begins(b"a")
    changes: list[bytes] = []
    suspects.on_change = changes.append
    suspects.harmless(b"a")
    assert changes == [b"a"]
    assert suspects.may_try(b"a", 0.0) is May.GO
    suspects.harmless(b"a")
    assert changes == [b"a"], "that was known"


def test_a_process_counts_once_and_each_role_for_itself() -> None:
    suspects = Suspects()
    lost(suspects, P0)
    lost(suspects, P0)
    lost(suspects, D0)
    assert suspects.deaths(b"a", 0.0) == 1
    lost(suspects, Victim(P0.leg, P0.engine_id, 2))
    assert suspects.deaths(b"a", 0.0) == 2, "another process of it"


def test_who_may_have_ended_counts_until_it_is_known() -> None:
    suspects = Suspects()
    suspects.begins(b"a")
    suspects.broke(b"a", [P0], 0.0)
    assert suspects.may_try(b"a", 0.0) is May.WAIT
    assert suspects.deaths(b"a", 0.0) == 0
    suspects.found(b"a", [P0], [])
    assert suspects.may_try(b"a", 0.0) is May.GO
    suspects.broke(b"a", [P0], 0.0)
    suspects.broke(b"a", [P0], 0.0)
    suspects.found(b"a", [P0], [])
    assert suspects.may_try(b"a", 0.0) is May.WAIT, "another has not looked yet"
    suspects.found(b"a", [P0], [P0])
    suspects.ends(b"a")
    assert (suspects.may_try(b"a", 0.0), suspects.deaths(b"a", 0.0)) == (May.GO, 1)


def test_suspicion_ends_with_its_time_and_is_bounded() -> None:
    suspects = Suspects(remembered_s=10.0, max_entries=3)
    lost(suspects, P0, P1, now_s=100.0)
    assert suspects.may_try(b"a", 109.9) is May.NEVER
    assert suspects.may_try(b"a", 110.0) is May.GO
    assert len(suspects) == 0
    for number in range(9):
        lost(suspects, P0, content=bytes([number]))
    assert len(suspects) == 3
    suspects.found(b"\x00", [P0], [P0])
    assert len(suspects) == 3, "what was forgotten stays so"
