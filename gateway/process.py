"""What a process that serves needs of its surroundings: standard descriptors that exist, and enough further ones."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys

_YOUNG_OBJECTS = 50_000
"""Objects between two collections of the youngest."""


def prepare() -> None:
    """Make the most of what this process was started with; call it before any socket is made."""
    fill_standard_descriptors()
    raise_descriptor_limit()


def fill_standard_descriptors() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr.

    A socket would get the number otherwise: writes to stderr would go to a client, and libuv aborts on closing it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, for the life of the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def raise_descriptor_limit() -> None:
    """As many descriptors as may be had: a stream takes three, and the usual soft limit of 1024 is for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # what was given stays


def collect_rarely() -> None:
    """Keep collections of garbage short and rare; call it once all that stays for good is there.

    Request objects die by their counts. A collection of what the interpreter allows by default takes milliseconds
    every few requests, and looks at all that was ever loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 50)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that mean: end what runs, then go. SIGHUP is not among them under nohup, which ignores it."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else []))
