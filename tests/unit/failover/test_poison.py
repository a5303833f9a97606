"""The poison guard: remembers for a while, and only so much."""

from failover.poison import PoisonGuard


def test_refuses_for_its_time_only() -> None:
    guard = PoisonGuard(refused_s=10)
    guard.refuse(b"a", now_s=100)
    assert guard.is_refused(b"a", now_s=109.9)
    assert not guard.is_refused(b"b", now_s=101)
    assert not guard.is_refused(b"a", now_s=110)
    assert len(guard) == 0


def test_what_others_refuse_is_refused_for_as_long_as_they_do_and_not_told_on() -> None:
    guard = PoisonGuard(refused_s=10)
    told: list[bytes] = []
    guard.on_refused = told.append
    guard.hear(b"a", left_s=4, now_s=100)
    assert guard.is_refused(b"a", now_s=103.9)
    assert not guard.is_refused(b"a", now_s=104)
    guard.hear(b"b", left_s=1e9, now_s=100)
    assert not guard.is_refused(b"b", now_s=110), "nobody is believed for longer than we would refuse it"
    guard.hear(b"c", left_s=0, now_s=100)
    guard.hear(b"d", left_s=-5, now_s=100)
    assert len(guard) == 0
    assert told == []


def test_what_is_heard_never_shortens_what_is_known() -> None:
    guard = PoisonGuard(refused_s=10)
    guard.refuse(b"a", now_s=100)
    guard.hear(b"a", left_s=3, now_s=101)
    assert list(guard.refused(102)) == [(b"a", 8)]
    guard.hear(b"a", left_s=10, now_s=102)
    assert list(guard.refused(102)) == [(b"a", 10)]
    assert list(guard.refused(112)) == []


def test_what_is_heard_is_bounded_too() -> None:
    guard = PoisonGuard(refused_s=10, max_entries=3)
    for index in range(5):
        guard.hear(bytes([index]), left_s=5, now_s=0)
    assert len(guard) == 3


def test_own_refusals_are_told() -> None:
    guard = PoisonGuard()
    told: list[bytes] = []
    guard.on_refused = told.append
    guard.refuse(b"a", now_s=100)
    assert told == [b"a"]


def test_is_bounded_and_forgets_the_oldest() -> None:
    guard = PoisonGuard(refused_s=10, max_entries=3)
    for index in range(5):
        guard.refuse(bytes([index]), now_s=0)
    assert len(guard) == 3
    assert not guard.is_refused(bytes([0]), now_s=1)
    assert guard.is_refused(bytes([4]), now_s=1)
