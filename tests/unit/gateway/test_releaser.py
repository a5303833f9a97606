"""The releaser: a grace after whole answers, aborts until a leg ends, sockets closed at last, leaks named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from engines import tasks
from engines.fleet import Fleet
from engines.types import EngineId, EngineLoad, Leg
from failover.release import WATCH_S
from gateway.bookings import Bookings
from gateway.observability import Metrics
from gateway.releaser import Releaser
from tests.fakes import FACTS, attempt, now_s, timeless, up

P0, D0 = EngineId("http://p0"), EngineId("http://d0")


class Run:
    """An attempt with open legs that end when a test says so, or after a number of aborts."""

    def __init__(self, *legs: Leg, ends_after: int = 99) -> None:
        self.attempt = attempt()
        self._open = list(legs or (Leg.DECODE, Leg.PREFILL))
        self._changed = asyncio.Event()
        self._ends_after = ends_after
        self.aborts: list[tuple[float, Leg]] = []
        self.closed: list[Leg] = []
        self.dropped = False

    @property
    def open_legs(self) -> tuple[Leg, ...]:
        return tuple(self._open)

    def end(self, leg: Leg) -> None:
        if leg in self._open:
            self._open.remove(leg)
        if not self._open:
            self._changed.set()

    def drop_output(self) -> None:
        self.dropped = True

    async def wait_ended(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def post_abort(self, leg: Leg) -> None:
        self.aborts.append((round(now_s() - 1000, 3), leg))
        if len(self.aborts) >= self._ends_after:
            self.end(leg)

    def close(self, leg: Leg) -> None:
        self.closed.append(leg)
        self.end(leg)


class Leaks:
    """A monitor that is told of leaks."""

    def __init__(self) -> None:
        self.found: list[EngineId] = []

    def leak_found(self, engine_id: EngineId) -> None:
        self.found.append(engine_id)


def releaser(fleet: Fleet | None = None) -> tuple[Releaser, Leaks]:
    leaks = Leaks()
    return Releaser(fleet or up("p0", "d0"), Bookings(), leaks, Metrics()), leaks  # type: ignore[arg-type]


async def idle(released: Releaser) -> None:
    await asyncio.gather(*released._tasks)


@timeless
async def test_nothing_is_done_for_legs_that_have_ended() -> None:
    released, _ = releaser()
    run = Run()
    for leg in Leg:
        run.end(leg)
    released.let_go(run, whole=False)  # type: ignore[arg-type]
    assert released.pending == 0
    assert not run.aborts


@timeless
async def test_a_whole_answer_gives_the_prefill_a_moment_to_answer() -> None:
    released, _ = releaser()
    run = Run(Leg.PREFILL)
    released.let_go(run, whole=True)  # type: ignore[arg-type]
    await asyncio.sleep(0.9)
    run.end(Leg.PREFILL)
    await idle(released)
    assert not run.aborts
    assert not run.dropped


@timeless
async def test_a_prefill_that_is_silent_after_a_whole_answer_is_told_to_stop() -> None:
    released, _ = releaser()
    run = Run(Leg.PREFILL, ends_after=1)
    released.let_go(run, whole=True)  # type: ignore[arg-type]
    await idle(released)
    assert run.aborts == [(1.0, Leg.PREFILL)]


@timeless
async def test_a_cancelled_attempt_is_aborted_at_once_the_decode_first() -> None:
    released, _ = releaser()
    run = Run(ends_after=2)
    released.let_go(run, whole=False)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert run.dropped
    assert run.aborts == [(0.0, Leg.DECODE), (0.0, Leg.PREFILL)]
    run.end(Leg.DECODE)
    await idle(released)


@timeless
async def test_what_does_not_end_is_closed_after_five_seconds() -> None:
    released, _ = releaser()
    run = Run(Leg.DECODE)
    released.let_go(run, whole=False)  # type: ignore[arg-type]
    await asyncio.sleep(4.9)
    assert [at_s for at_s, _ in run.aborts] == [0.0, 0.25, 1.0, 3.0]
    assert not run.closed
    await asyncio.sleep(0.2)
    assert run.closed == [Leg.DECODE]
    assert released.pending == 1, "its server is watched"
    await released.drained(0.0)


@pytest.mark.parametrize(
    ("change", "leaks"),
    [
        (lambda fleet: fleet.set_load(D0, EngineLoad(9.0, 0, 0, 0, 0, 0, 100)), []),
        (lambda fleet: fleet.set_load(D0, EngineLoad(9.0, 1, 0, 0, 5, 5, 100)), [D0]),
        (lambda fleet: fleet.set_load(D0, EngineLoad(9.0, 0, 1, 0, 5, 5, 100)), [D0]),
        (lambda fleet: fleet.set_load(D0, EngineLoad(9.0, 7, 2, 0, 5, 5, 100)), []),
        (lambda fleet: fleet.set_facts(D0, replace(FACTS, boot_fingerprint="other")), []),
    ],
    ids=["gone", "runs on", "waits on", "others call it", "restarted"],
)
def test_a_server_that_goes_on_counting_is_leaking(change: Callable[[Fleet], object], leaks: list[EngineId]) -> None:
    @timeless
    async def watches() -> None:
        fleet = up("p0", "d0")
        released, found = releaser(fleet)
        run = Run(Leg.DECODE)
        released.let_go(run, whole=False)  # type: ignore[arg-type]
        await asyncio.sleep(6.0)
        change(fleet)
        begun_s = now_s()
        await idle(released)
        assert found.found == leaks
        assert now_s() - begun_s < WATCH_S + 1

    watches()


@pytest.mark.parametrize("whole", [True, False])
def test_shutting_down_closes_what_is_left(whole: bool) -> None:
    @timeless
    async def closes() -> None:
        released, _ = releaser()
        run = Run()
        released.let_go(run, whole=whole)  # type: ignore[arg-type]
        begun_s = now_s()
        await released.drained(0.5)
        assert now_s() - begun_s == 0.5
        assert set(run.closed) == set(Leg)
        assert released.pending == 0
        await asyncio.sleep(0)
        assert not [name for name in tasks.running() if name.startswith("release")]

    closes()


@timeless
async def test_shutting_down_waits_for_what_ends_in_time() -> None:
    released, _ = releaser()
    run = Run(ends_after=3)
    released.let_go(run, whole=False)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_later(0.3, run.end, Leg.PREFILL)
    await released.drained(6.0)
    assert not run.closed
    assert now_s() - 1000 < 1.0
