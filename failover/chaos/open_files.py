"""What processes of this host have open, read from Linux's `/proc`. A shell."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

ESTABLISHED, CLOSE_WAIT, LISTEN = "01", "08", "0A"
"""States of a TCP socket, as `/proc/net/tcp` writes them; CLOSE_WAIT: the peer has closed it, its owner has not."""
_SOCKET = "socket:["
_LOCAL, _REMOTE, _STATE, _INODE = 1, 2, 3, 9


@dataclass(frozen=True, slots=True)
class Tcp:
    """One IPv4 socket of this host."""

    inode: str
    port: int
    peer_port: int
    state: str


def tcp_sockets() -> Mapping[str, Tcp]:
    """All of them by inode, but for those that nobody owns any more."""
    found = {}
    with open("/proc/net/tcp", encoding="ascii") as table:
        next(table)
        for line in table:
            words = line.split()
            inode = words[_INODE]
            if inode != "0":
                port, peer_port = (int(words[column].rpartition(":")[2], 16) for column in (_LOCAL, _REMOTE))
                found[inode] = Tcp(inode, port, peer_port, words[_STATE])
    return found


def targets(pid: int) -> list[str]:
    """What every descriptor of a process stands for: a path, or `socket:[INODE]`. Empty when it has ended."""
    found = []
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        for each in files:
            with contextlib.suppress(OSError):
                found.append(os.readlink(each.path))
    return found


def inodes(pid: int) -> set[str]:
    """Of all sockets that a process has open."""
    return {each[len(_SOCKET) : -1] for each in targets(pid) if each.startswith(_SOCKET)}


def other_files(pid: int) -> int:
    """How many descriptors are no sockets."""
    return sum(not each.startswith(_SOCKET) for each in targets(pid))
