"""One listener before one engine, for several gateways: whoever opens a connection gets it through its own proxy.

A shell of Linux: whose connection it is, is read from `/proc`, as nothing on the wire tells gateways of one host apart.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

from failover.chaos.commands import HOST
from failover.chaos.open_files import inodes, tcp_sockets
from failover.chaos.proxy import TcpProxy

_BACKLOG = 1024


class Door:
    """`proxies`: by the names of the gateways, whose processes `pid_of` tells."""

    def __init__(self, proxies: Mapping[str, TcpProxy], pid_of: Callable[[str], int]) -> None:
        self._proxies = proxies
        self._pid_of = pid_of
        self._listener: socket.socket | None = None

    def open(self, port: int) -> None:
        """Begin to listen."""
        self._listener = socket.create_server((HOST, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Nobody comes in any more; connections stay."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, (_, port) = self._listener.accept()
        except OSError:
            return  # it has gone again
        to_port = self._listener.getsockname()[1]
        every = tcp_sockets().values()
        inode = next((each.inode for each in every if (each.port, each.peer_port) == (port, to_port)), "")
        owner = next((each for each in self._proxies if inode in inodes(self._pid_of(each))), None)
        if owner is None:
            client.close()  # whoever it was has ended meanwhile
        else:
            self._proxies[owner].take(client)
