"""The watch that does not count what the machine made a test wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests import machine
from tests.machine import Stopwatch, time_limit

Waits = dict[int, float]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Waits], None]:
    """Sets the clock, and how long each process has waited by then."""
    monkeypatch.setattr(machine, "_stolen_s", lambda: 0.0)

    def put(now_s: float, waits: Waits) -> None:
        monkeypatch.setattr(machine.time, "monotonic", lambda: now_s)
        monkeypatch.setattr(machine, "_waited_s", lambda pid: iter(waits.items()))

    return put


def test_what_processes_waited_since_it_was_made_does_not_count(at: Callable[[float, Waits], None]) -> None:
    at(100.0, {1: 7.0, 2: 5.0})
    watch = Stopwatch()
    at(110.0, {1: 8.0, 2: 5.5})
    assert watch.took_s() == 8.5
    assert watch.of(4.0) == 2.5


def test_those_that_have_ended_and_those_that_are_new_are_watched(at: Callable[[float, Waits], None]) -> None:
    at(100.0, {1: 7.0, 2: 5.0})
    watch = Stopwatch()
    at(105.0, {1: 7.0, 2: 6.0, 3: 0.5})
    assert watch.took_s() == 3.5
    at(110.0, {1: 7.0})
    assert watch.took_s() == 8.5


def test_a_quarter_counts_whatever_the_machine_did(at: Callable[[float, Waits], None]) -> None:
    at(100.0, {1: 0.0})
    watch = Stopwatch()
    at(104.0, {1: 50.0})
    assert watch.took_s() == 1.0
    assert not watch.passed(1.1)
    assert watch.passed(0.9)


def test_where_the_kernel_says_nothing_all_counts(at: Callable[[float, Waits], None]) -> None:
    at(100.0, {})
    watch = Stopwatch()
    at(104.0, {})
    assert watch.took_s() == 4.0


def test_the_kernel_is_understood() -> None:
    """Of processes that all want to compute, on however many cores, each waits for most of the time."""
    if not dict(machine._waited_s(os.getpid())):
        pytest.skip("this kernel keeps no account of it")
    rivals = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        watch, began_s = Stopwatch(), time.monotonic()
        while time.monotonic() < began_s + 0.4:
            pass
        assert len(watch._first) > len(rivals)
        assert 0.1 <= watch.took_s() < 0.3
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


async def test_a_limit_is_kept() -> None:
    watch = Stopwatch()
    with pytest.raises(TimeoutError):
        async with time_limit(0.05):
            await asyncio.sleep(10.0)
    assert 0.05 <= watch.took_s() < 1.0
    async with time_limit(1.0):
        await asyncio.sleep(0.0)


async def test_a_limit_waits_for_a_late_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "passed", lambda self, limit_s: False)
    async with time_limit(0.02):
        await asyncio.sleep(0.2)
