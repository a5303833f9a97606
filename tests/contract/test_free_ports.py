"""Ports for servers that are about to start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engines import server_process
from engines.server_process import ServerFailed, free_ports

CLIENTS_FROM = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_nobody_else_gets_them() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert max(ports) < CLIENTS_FROM, "else an outgoing connection may take one before its server listens"


def test_those_that_listen_and_those_that_will_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(1)[0]
    monkeypatch.setattr(server_process, "_PORTS", range(first, first + 3))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", first))
        assert first not in free_ports(1)
        assert free_ports(1, taken=[first + 1]) == [first + 2]
        with pytest.raises(ServerFailed, match="0 of 1 ports"):
            free_ports(1, taken=[first + 1, first + 2])
