"""`pdgate`: the sub-commands and where each is run.

Only the sub-command that was asked for is imported, so that each starts fast. To add one: a line in COMMANDS.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple, NoReturn

Declare = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """One sub-command: its line in the help, and what imports its (add_arguments, run)."""

    summary: str
    load: Callable[[], tuple[Declare, Run]]


def _module(name: str) -> Callable[[], tuple[Declare, Run]]:
    def load() -> tuple[Declare, Run]:
        module = importlib.import_module(name)
        return module.add_arguments, module.run

    return load


def _serve() -> tuple[Declare, Run]:
    from gateway import config

    def run(args: argparse.Namespace) -> int:
        try:
            wanted = config.from_args(args)
        except config.ConfigError as error:
            print(f"pdgate serve: error: {error}", file=sys.stderr)
            return 2
        app = importlib.import_module("gateway.app")
        code: int = app.run(wanted)
        return code

    return config.add_serve_arguments, run


COMMANDS: dict[str, Command] = {
    "serve": Command("run the gateway in front of a fleet", _serve),
    "demo": Command("start a fleet of emulated servers with a gateway, and show it at work", _module("gateway.demo")),
    "emulate": Command("run an emulated SGLang server, or a fleet of them", _module("engines.emulator.main")),
    "replay": Command("replay a trace against a gateway", _module("gateway.bench.replay")),
    "redis": Command("look into the Redis that gateways of a fleet share", _module("gateway.redis_cli")),
    "explain": Command("show why a request went where it went", _module("gateway.explain_cli")),
    "chaos": Command("break a fleet of emulated servers on purpose, and judge it", _module("failover.chaos.cli")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns its exit code, 2 for a command line that cannot be run."""
    words = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(prog="pdgate", description="A gateway for prefill/decode-disaggregated SGLang fleets.")
    parser.add_argument("--version", action="version", version=f"pdgate {version('pdgate')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary, allow_abbrev=False)
        if name == wanted:
            declare, run = command.load()
            declare(sub)
            sub.set_defaults(run=run)
    args = parser.parse_args(words)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130  # as shells report it


class _Parser(argparse.ArgumentParser):
    """Errors in one line: the usage of a command with many flags would bury them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
