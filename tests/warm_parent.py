"""The process that `tests/warm.py` starts servers from: it has imported what they run, and forks for each of them.

Argument 1 is the descriptor of a socket. A message on it is one program to run: JSON, and four descriptors: for its
output, for its errors, where it runs, and where its pid, and at its end its exit status, are written.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any, NamedTuple

import orjson

IMPORTED = ("engines.emulator.main", "gateway.app", "gateway.cli", "gateway.config")
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 20


class Child(NamedTuple):
    """One that was forked: what says that it has ended, and where that is told."""

    pidfd: int
    report: int


def forked(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every message until there are no more: returns the message in each child, None in the parent."""
    children: dict[int, Child] = {}
    with control, selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fileobj)
                    _tell_the_end(key.data, children.pop(key.data))
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    _take_place(*descriptors, *(each for child in children.values() for each in child))
                    return dict(orjson.loads(message))
                report = descriptors.pop()
                os.write(report, b"%d\n" % pid)
                children[pid] = Child(os.pidfd_open(pid), report)
                selector.register(children[pid].pidfd, selectors.EVENT_READ, pid)
                for descriptor in descriptors:
                    os.close(descriptor)


def _tell_the_end(pid: int, child: Child) -> None:
    """Report its exit status (negative: by that signal), and only then let its pid be used again."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    os.write(child.report, b"%d\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
    os.waitpid(pid, 0)
    os.close(child.pidfd)
    os.close(child.report)


def _take_place(output: int, errors: int, folder: int, *others: int) -> None:
    """In a child: as if it had been executed with these, and with nothing else open."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.fchdir(folder)
    for descriptor in (output, errors, folder, *others):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(message: dict[str, Any], parent: int) -> None:
    """Become `python -m MODULE ARGUMENTS`, and end when the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has already ended")
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.argv[1:] = message["arguments"]
    runpy.run_module(message["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run, which ends us
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    me = os.getpid()
    told = forked(socket.socket(fileno=int(sys.argv[1])))
    if told is not None:
        _run(told, me)
