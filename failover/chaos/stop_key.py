"""The key that stops a run, where somebody sits at a terminal. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

KEY = "q"


@contextlib.contextmanager
def pressed(act: Callable[[], None]) -> Iterator[bool]:
    """Call `act` whenever the key is pressed; whether somebody could press it.

    Keys come one by one meanwhile and are not shown; Ctrl-C stays what it is.
    """
    fd = _terminal()
    if fd is None:
        yield False
        return
    loop, before = asyncio.get_running_loop(), termios.tcgetattr(fd)

    def read() -> None:
        keys = os.read(fd, 64)
        if not keys:
            loop.remove_reader(fd)
        if KEY.encode() in keys.lower():
            act()

    tty.setcbreak(fd, termios.TCSANOW)
    try:
        loop.add_reader(fd, read)
        yield True
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _terminal() -> int | None:
    """Standard input where it is a terminal that we have: who is in the background would be stopped by touching it."""
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):  # closed, or none at all
        return None
