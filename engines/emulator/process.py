"""Emulated servers as child processes, for tests, the demo and the fleet command. A shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engines.server_process import ServerFailed as ServerFailed
from engines.server_process import ServerProcess
from engines.server_process import free_ports as free_ports
from engines.types import Role


class EmulatedServer(ServerProcess):
    """One emulated server in a child process. Ports default to free ones.

    `arguments`: more flags of `pdgate emulate`.
    """

    def __init__(
        self,
        role: Role,
        *,
        speed: float = 1.0,
        arguments: Sequence[str] = (),
        port: int | None = None,
        bootstrap_port: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        free = free_ports(2, host)
        port, bootstrap_port = port or free[0], bootstrap_port or free[1]
        self.arguments = (
            *("--role", role.value, "--host", host, "--port", str(port)),
            *("--bootstrap-port", str(bootstrap_port), "--speed", str(speed)),
            *arguments,
        )
        super().__init__(role, host=host, port=port, bootstrap_port=bootstrap_port)

    def command(self) -> Sequence[str]:
        # -P: a folder called `engines` in the working directory is not ours.
        return (sys.executable, "-P", "-m", "engines.emulator", *self.arguments, "--die-with", str(os.getpid()))
