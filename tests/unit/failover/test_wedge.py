"""The wedge detector: work, and no progress for long; never a slow, an idle, a foreign or an unknown one."""

from dataclasses import replace

import pytest

from engines.types import EngineLoad
from failover.wedge import LONGEST_S, NOTHING_OWED, SHORTEST_S, Owed, Watch, has_own_work, signature

LOAD = EngineLoad(
    taken_s=1000.0,
    running_requests=1,
    waiting_requests=0,
    waiting_uncached_tokens=0,
    used_tokens=500,
    total_tokens=500,
    max_total_tokens=10_000,
)
ONE = Owed(1)


class Server:
    """A server that is looked at twice a second."""

    def __init__(self, load: EngineLoad = LOAD, owed: Owed = ONE) -> None:
        self.load: EngineLoad | None = load
        self.owed = owed
        self.watch = Watch()
        self.now_s = 0.0

    def looked_at(self, seconds: float, *, ticks: bool = True, **grows: float) -> float:
        """For how long it counts as idle after so many seconds; `grows` is added to its load at each look."""
        idle_s = 0.0
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            if self.load is not None:
                changes = {name: getattr(self.load, name) + by for name, by in grows.items()}
                taken_s = self.load.taken_s + (0.5 if ticks else 0.0)
                self.load = replace(self.load, taken_s=taken_s, **changes)
            idle_s = self.watch.saw(self.load, self.owed, self.now_s)
        return idle_s

    @property
    def is_stuck(self) -> bool:
        idle_s = self.watch.saw(self.load, self.owed, self.now_s)
        return idle_s >= self.watch.patience_s(self.owed)


def test_one_whose_figures_stand_still_under_work_is_stuck_after_ten_seconds() -> None:
    server = Server()
    server.looked_at(SHORTEST_S)
    assert not server.is_stuck
    server.looked_at(1.0)
    assert server.is_stuck


@pytest.mark.parametrize(
    "name",
    [
        "prefill_uncached_tokens_total",
        "prefill_busy_us_total",
        "decode_steps_total",
        "used_tokens",
        "total_tokens",
        "running_requests",
    ],
)
def test_any_figure_that_moves_is_progress(name: str) -> None:
    server = Server()
    assert server.looked_at(60.0, **{name: 1}) == 0.0  # type: ignore[arg-type]
    assert not server.is_stuck


def test_output_of_any_leg_is_progress_though_snapshots_are_old() -> None:
    server = Server()
    for _ in range(100):
        server.watch.progress(server.now_s)
        assert server.looked_at(1.0, ticks=False) <= 1.5
    server.looked_at(SHORTEST_S + 1.0, ticks=False)
    assert server.is_stuck


def test_one_that_owes_us_nothing_is_not_stuck() -> None:
    server = Server(owed=NOTHING_OWED)
    assert server.looked_at(600.0, ticks=False) == 0.0
    server.owed = ONE
    assert server.looked_at(SHORTEST_S - 1.0, ticks=False) < SHORTEST_S, "it counts from when there was work"


def test_one_that_waits_for_its_peer_is_stuck_only_when_its_scheduler_stands_still() -> None:
    waits = replace(LOAD, running_requests=0, waiting_requests=3, waiting_for_peer_requests=3)
    assert not has_own_work(waits)
    server = Server(waits)
    assert server.looked_at(600.0) < 1.0
    server.looked_at(SHORTEST_S + 1.0, ticks=False)
    assert server.is_stuck


@pytest.mark.parametrize(
    ("running", "waiting", "for_peer", "uncached", "own"),
    [
        (0, 0, 0, 0, False),
        (1, 0, 0, 0, True),
        (0, 2, 1, 0, True),
        (0, 2, 2, 500, False),
        (0, 0, 0, 500, True),
        (1, 2, 2, 500, True),
    ],
)
def test_own_work_is_what_no_peer_is_waited_for(
    running: int, waiting: int, for_peer: int, uncached: int, own: bool
) -> None:
    load = replace(
        LOAD,
        running_requests=running,
        waiting_requests=waiting,
        waiting_for_peer_requests=for_peer,
        waiting_uncached_tokens=uncached,
    )
    assert has_own_work(load) is own


def test_nothing_is_proved_without_snapshots() -> None:
    server = Server()
    server.looked_at(SHORTEST_S - 1.0)
    server.load = None
    assert server.looked_at(600.0) == 0.0
    server.load = LOAD
    server.looked_at(SHORTEST_S - 1.0)
    assert not server.is_stuck


def test_a_gap_between_looks_alone_is_no_proof() -> None:
    """The gateway itself was stopped for a minute: the first snapshot after it shows that the server was not."""
    server = Server()
    server.looked_at(5.0, used_tokens=1)
    server.now_s += 60.0
    server.looked_at(0.5, used_tokens=100)
    assert not server.is_stuck


def test_patience_follows_its_own_pace_and_is_bounded() -> None:
    slow = Server()
    for _ in range(5):  # forwards of four seconds
        slow.looked_at(4.0)
        slow.looked_at(0.5, prefill_busy_us_total=1)
    patience_s = slow.watch.patience_s(ONE)
    assert 8 * 4.0 * 0.7 < patience_s < 8 * 5.0
    assert Server().watch.patience_s(ONE) == SHORTEST_S
    assert Server().watch.patience_s(Owed(1, predicted_s=20.0)) == 60.0
    assert Server().watch.patience_s(Owed(1, predicted_s=1e6)) == LONGEST_S


def test_an_old_slow_spell_is_forgotten() -> None:
    server = Server()
    server.looked_at(8.0)
    server.looked_at(0.5, used_tokens=1)
    before_s = server.watch.patience_s(ONE)
    server.looked_at(60.0, used_tokens=1)
    assert before_s > 40.0
    assert server.watch.patience_s(ONE) == SHORTEST_S


def test_it_moves_again_when_its_figures_do_or_when_it_is_free() -> None:
    server = Server()
    moving = []
    for seconds, ticks, grows in ((20.0, True, 0), (0.5, True, -1)):
        server.looked_at(seconds, ticks=ticks, used_tokens=grows)
        moving.append(server.watch.is_moving)
    server.load = replace(LOAD, running_requests=0)
    for ticks in (False, True):
        server.looked_at(1.0, ticks=ticks)
        moving.append(server.watch.is_moving)
    assert moving == [False, True, False, True]


def test_the_time_of_a_snapshot_is_not_part_of_what_it_says() -> None:
    assert signature(LOAD) == signature(replace(LOAD, taken_s=2000.0))
