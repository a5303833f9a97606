"""The poison guard: remembers for a while, and only so much."""

from failover.poison import PoisonGuard


def test_refuses_for_its_time_only() -> None:
    guard = PoisonGuard(refused_s=10)
    guard.refuse(b"a", now_s=100)
    assert guard.is_refused(b"a", now_s=109.9)
    assert not guard.is_refused(b"b", now_s=101)
    assert not guard.is_refused(b"a", now_s=110)
    assert len(guard) == 0


def test_is_bounded_and_forgets_the_oldest() -> None:
    guard = PoisonGuard(refused_s=10, max_entries=3)
    for index in range(5):
        guard.refuse(bytes([index]), now_s=0)
    assert len(guard) == 3
    assert not guard.is_refused(bytes([0]), now_s=1)
    assert guard.is_refused(bytes([4]), now_s=1)
