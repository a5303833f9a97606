"""The stop key, on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
from collections.abc import Iterator

import pytest

from failover.chaos import stop_key


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Its end; the other is standard input, and ours."""
    end, terminal = os.openpty()
    monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp())
    with os.fdopen(terminal, "rb", buffering=0) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield end
    os.close(end)


async def typed(keyboard: int, keys: bytes) -> int:
    """How often the key was seen."""
    seen: list[None] = []
    with stop_key.pressed(lambda: seen.append(None)) as can_press:
        assert can_press
        os.write(keyboard, keys)
        await asyncio.sleep(0.05)
    return len(seen)


@pytest.mark.parametrize(("keys", "count"), [(b"q", 1), (b"Q", 1), (b"abc\n", 0), (b"xyq", 1)])
async def test_only_the_key_counts_and_no_return_is_needed(keyboard: int, keys: bytes, count: int) -> None:
    assert await typed(keyboard, keys) == count


async def test_the_terminal_is_as_before_afterwards(keyboard: int) -> None:
    before = termios.tcgetattr(sys.stdin.fileno())
    await typed(keyboard, b"q")
    assert termios.tcgetattr(sys.stdin.fileno()) == before
    with pytest.raises(KeyError), stop_key.pressed(lambda: None):
        raise KeyError
    assert termios.tcgetattr(sys.stdin.fileno()) == before


async def test_ctrl_c_stays_a_signal(keyboard: int) -> None:
    with stop_key.pressed(lambda: None):
        assert termios.tcgetattr(sys.stdin.fileno())[3] & termios.ISIG


async def test_who_is_in_the_background_touches_nothing(keyboard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp() + 1)
    with stop_key.pressed(lambda: None) as can_press:
        assert not can_press


async def test_no_terminal_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with stop_key.pressed(lambda: None) as can_press:
        assert not can_press
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        with stop_key.pressed(lambda: None) as can_press:
            assert not can_press
    os.close(write_end)
