"""`pdgate emulate fleet`: several emulated servers on this machine, as child processes. A shell."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import Iterator

import orjson

from engines.emulator.config import add_model_arguments
from engines.emulator.kv_publisher import with_port_offset
from engines.emulator.process import EmulatedServer, ServerFailed
from engines.types import Role

_VALUE_FLAGS = (
    "profile",
    "model",
    "max_total_tokens",
    "page_size",
    "random_seed",
    "context_length",
    "chunked_prefill_size",
    "max_running_requests",
    "kv_bytes_per_token",
    "api_key",
    "transfer_backend",
    "dp_size",
    "sampling_defaults",
    "reasoning_parser",
    "chat_template",
)
_SWITCHES = ("disable_radix_cache", "enable_deterministic_inference", "incremental_streaming_output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the fleet command."""
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="how many prefill servers")
    parser.add_argument("--decode", type=int, default=2, metavar="N", help="how many decode servers")
    parser.add_argument("--plain", type=int, default=0, metavar="N", help="how many plain servers")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each server")
    parser.add_argument("--no-cache-report", action="store_true", help="do not report cached tokens in usage")
    add_model_arguments(parser)


def servers(args: argparse.Namespace) -> list[EmulatedServer]:
    """The servers that `args` ask for, not started yet."""
    flags = [] if args.no_cache_report else ["--enable-cache-report"]
    flags += [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(args, name)]
    for name in _VALUE_FLAGS:
        value = getattr(args, name)
        if value not in (None, ""):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    publishers = itertools.count()
    counts = ((Role.PREFILL, args.prefill), (Role.DECODE, args.decode), (Role.PLAIN, args.plain))
    return [
        EmulatedServer(role, speed=args.speed, arguments=[*flags, *_kv_events(args, role, publishers)], host=args.host)
        for role, count in counts
        for _ in range(count)
    ]


def _kv_events(args: argparse.Namespace, role: Role, publishers: Iterator[int]) -> list[str]:
    """A decode has no radix cache, hence no events; each of the others needs ports of its own."""
    if not args.kv_events_config or role is Role.DECODE:
        return []
    return ["--kv-events-config", with_port_offset(args.kv_events_config, next(publishers) * (args.dp_size or 1))]


def run(args: argparse.Namespace) -> int:
    """Start the fleet, print where it is, and serve until SIGTERM or SIGINT; the exit status."""
    counts = (args.prefill, args.decode, args.plain)
    if min(counts) < 0 or not any(counts):
        print(
            "emulate fleet: --prefill, --decode and --plain are counts, at least one of them above 0", file=sys.stderr
        )
        return 2
    try:
        fleet = servers(args)
    except ValueError as error:
        print(f"emulate fleet: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_run(fleet, args.json))


async def _run(fleet: list[EmulatedServer], as_json: bool) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        for server in fleet:
            await server.launch()
        for server in fleet:
            await server.wait_ready()
            print(describe(server, as_json), flush=True)
        await stopped.wait()
    except ServerFailed as error:
        print(f"emulate fleet: {error}", flush=True)
        return 1
    finally:
        for server in fleet:
            await server.stop()
    return 0


def describe(server: EmulatedServer, as_json: bool) -> str:
    """One line about a ready server."""
    bootstrap = server.bootstrap_port if server.role is Role.PREFILL else None
    if as_json:
        facts = {"role": server.role.value, "url": server.url, "bootstrap_port": bootstrap, "pid": server.pid}
        return orjson.dumps(facts).decode()
    return f"{server.role.value:8} {server.url}" + (f"  bootstrap port {bootstrap}" if bootstrap else "")
