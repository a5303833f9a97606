"""The command line: only what was asked for is imported; errors are one line and exit code 2."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from gateway import cli
from gateway.config import Config

FLEET = ["--pd-disaggregation", "--prefill", "http://p:1", "--decode", "http://d:1"]


def add_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def exit_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_serve_runs_the_gateway_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Config] = []

    def run(config: Config) -> int:
        ran.append(config)
        return 3

    add_module(monkeypatch, "gateway.app", run=run)
    assert cli.main(["serve", *FLEET, "--port", "5"]) == 3
    assert ran[0].server.port == 5


def test_serve_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pdgate serve: error: add --pd-disaggregation")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--cache-threshold", "0.5"], "--cache-threshold is a flag of sglang-router"),
        (["serve", "--port", "x"], "argument --port: invalid whole number value: 'x'"),
        (["serve", *FLEET, "--nonsense"], "unrecognized arguments: --nonsense"),
        (["serve", *FLEET, "--max-att", "1"], "unrecognized arguments: --max-att"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        ([], "COMMAND"),
    ],
)
def test_errors_are_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = exit_of(argv, capsys)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "serve"])
def test_each_command_runs_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "demo": "gateway.demo",
        "emulate": "engines.emulator.main",
        "replay": "gateway.bench.replay",
        "chaos": "failover.chaos.cli",
        "redis": "gateway.redis_cli",
        "explain": "gateway.explain_cli",
    }
    seen: list[str] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--word")

    def run(args: argparse.Namespace) -> int:
        seen.append(args.word)
        return 0

    add_module(monkeypatch, modules[name], add_arguments=add_arguments, run=run)
    assert cli.main([name, "--word", "hello"]) == 0
    assert seen == ["hello"]


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    add_module(monkeypatch, "gateway.demo", add_arguments=lambda parser: None, run=run)
    assert cli.main(["demo"]) == 130


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exit_of(["--version"], capsys)
    assert code == 0
    assert out.startswith("pdgate ")
    code, out, _ = exit_of(["--help"], capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_help_imports_no_command() -> None:
    program = (
        "import sys, runpy\nsys.argv = ['pdgate', '--help']\n"
        "try: runpy.run_module('gateway', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "slow = {'asyncio', 'aiohttp', 'orjson', 'rich', 'redis', 'gateway.app', 'gateway.config'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: pdgate" in done.stdout
