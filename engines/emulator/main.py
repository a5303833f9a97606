"""`pdgate emulate`: one emulated SGLang server, or (`pdgate emulate fleet`) several as child processes."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import secrets
import signal
import sys

import uvloop

import engines.emulator.fleet as fleet
from engines.emulator.app import serve
from engines.emulator.config import add_server_arguments, options_from
from engines.types import Role

_PR_SET_PDEATHSIG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pdgate emulate` and its `fleet` command."""
    parser.add_argument("--role", choices=[role.value for role in Role], help="what the server does")
    parser.add_argument("--port", type=int, help="port of the API")
    parser.add_argument("--die-with", type=int, metavar="PID", help="end when the process PID, our parent, ends")
    add_server_arguments(parser)
    commands = parser.add_subparsers(dest="emulate_command", metavar="fleet")
    fleet.add_arguments(commands.add_parser("fleet", help="start several servers and print their addresses"))


def run(args: argparse.Namespace) -> int:
    """Run what `args` ask for until it is told to end; the exit status."""
    if args.emulate_command == "fleet":
        return fleet.run(args)
    if args.role is None or args.port is None:
        print("emulate: --role and --port are needed", file=sys.stderr)
        return 2
    if args.die_with is not None:
        _die_with_parent(args.die_with)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        options = options_from(args, Role(args.role), args.port, secrets.randbits(30), " ".join(sys.argv[1:]))
    except ValueError as error:
        print(f"emulate: {error}", file=sys.stderr)
        return 2
    if args.die_with is None:
        print(f"emulated {args.role} server on http://{args.host}:{args.port}, model {options.model}", file=sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options))
    except OSError as error:
        print(f"emulate: cannot listen on {args.host} port {args.port} or its bootstrap port: {error}", file=sys.stderr)
        return 1
    return 0


def _die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("emulate: the parent has already ended")
