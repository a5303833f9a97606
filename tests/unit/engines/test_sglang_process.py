"""How real servers are started, from what an environment says; a stand-in takes the place of the interpreter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.server_process import ServerFailed
from engines.sglang_process import NoEnvironment, SglangServer, default_directory, load
from engines.types import Role
from tests.sglang_cpu.write_launch import launch as launch_of

READY_SERVER = """
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
print("started", json.dumps(sys.argv[1:]), os.environ["MARK"], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def environment(folder: Path, script: str = READY_SERVER, **fields: Any) -> Path:
    """An environment whose interpreter runs `script` whatever module it is asked for."""
    python = folder / "python"
    (folder / "server.py").write_text(script)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "server.py"} "$@"\n')
    python.chmod(0o755)
    told = {
        "python": str(python),
        "model_dir": str(folder / "model"),
        "served_model_name": "tiny",
        "environment": {"MARK": "from the environment"},
        "arguments": ["--device", "cpu"],
        "prefill": ["--only-prefill"],
        "decode": ["--only-decode"],
        **fields,
    }
    (folder / "launch.json").write_text(json.dumps(told))
    return folder


def said(server: SglangServer) -> str:
    assert server.log is not None
    return server.log.read_text()


def test_the_directory_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDGATE_SGLANG_DIR", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("PDGATE_SGLANG_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "pdgate" / "sglang-0.5.23"


def test_no_environment_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match="make sglang"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"python": "/nowhere/python"}, "/nowhere/python"),
        ({"python": 5}, '"python" must be a text'),
        ({"model_dir": None}, '"model_dir" must be a text: the folder'),
        ({"environment": []}, '"environment" must be an object'),
        ({"arguments": "--model-path M"}, '"arguments" must be a list'),
        ({"decode": 5}, '"decode" must be a list'),
    ],
)
def test_an_environment_that_cannot_be_used(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(NoEnvironment, match=told):
        load(environment(tmp_path, **fields))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    for text in ("{", "[]", '"x"', ""):
        (environment(tmp_path) / "launch.json").write_text(text)
        with pytest.raises(NoEnvironment, match=r"launch\.json cannot be used"):
            load(tmp_path)


def test_what_make_sglang_writes_can_be_read(tmp_path: Path) -> None:
    told = {**launch_of(tmp_path), "python": sys.executable}
    (tmp_path / "launch.json").write_text(json.dumps(told))
    launch = load(tmp_path)
    assert launch.served_model_name == "tiny"
    assert launch.model_dir == tmp_path / "model"
    assert launch.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "--disaggregation-transfer-backend" in launch.by_role[Role.PREFILL]
    assert "--disaggregation-transfer-backend" not in launch.by_role[Role.PLAIN]


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        (Role.PREFILL, ["--only-prefill", "--more", "--disaggregation-mode", "prefill"]),
        (Role.DECODE, ["--only-decode", "--more", "--disaggregation-mode", "decode"]),
        (Role.PLAIN, ["--more"]),
    ],
)
async def test_a_server_starts_with_its_flags_and_ends(tmp_path: Path, role: Role, flags: list[str]) -> None:
    server = SglangServer(
        role, load(environment(tmp_path)), arguments=["--more"], environment={"MARK": "from the test"}
    )
    async with server:
        arguments = json.loads(said(server).split("started ")[1].rsplit("]", 1)[0] + "]")
        assert arguments[:2] == ["-m", "sglang.launch_server"]
        assert arguments[2:4] == ["--device", "cpu"]
        assert [each for each in arguments if each in flags] == flags
        assert ("--disaggregation-bootstrap-port" in arguments) == (role is not Role.PLAIN)
        assert "from the test" in said(server)
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_server_that_ends_at_once_says_where_its_output_is(tmp_path: Path) -> None:
    server = SglangServer(Role.DECODE, load(environment(tmp_path, "print('no such model'); raise SystemExit(3)")))
    with pytest.raises(ServerFailed, match=r"ended with 3: no such model \(its output: .*decode-"):
        await server.start()
    assert "no such model" in said(server)


async def test_children_of_a_server_are_killed_and_frozen_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '60'])\nprint('child', child.pid, flush=True)\n"
    )
    server = SglangServer(Role.PLAIN, load(environment(tmp_path, script + READY_SERVER)))
    async with server:
        child = int(said(server).split("child ")[1].split()[0])
        server.send_signal(signal.SIGSTOP)
        await until(lambda: state_of(child) == "T")
        server.send_signal(signal.SIGCONT)
        await until(lambda: state_of(child) == "S")
        await server.kill()
        await until(lambda: state_of(child) in ("", "Z"))


async def test_children_that_a_server_leaves_behind_are_killed(tmp_path: Path) -> None:
    script = (
        "import subprocess\nprint('child', subprocess.Popen(['sleep', '60']).pid, flush=True)\nraise SystemExit(1)\n"
    )
    server = SglangServer(Role.PLAIN, load(environment(tmp_path, script)))
    await server.launch()
    await server.wait()
    child = int(said(server).split("child ")[1].split()[0])
    assert state_of(child) == "S"
    await server.stop()
    await until(lambda: state_of(child) in ("", "Z"))


async def test_it_keeps_its_ports_over_a_restart(tmp_path: Path) -> None:
    async with SglangServer(Role.PREFILL, load(environment(tmp_path))) as server:
        before = server.pid, server.port, server.bootstrap_port
        await server.restart()
        assert (server.port, server.bootstrap_port) == before[1:]
        assert server.pid != before[0]


def state_of(pid: int) -> str:
    """The kernel's letter for it; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
