"""`pdgate demo`: a fleet of servers and a gateway as processes, shown at work and under kills.

It drives the gateway from outside, as a client would, and checks every answer: against the emulated model's own rule,
or, where the servers are real, against what they answered undisturbed. Exit code 0 only if everything checked out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich import box
from rich.console import Console
from rich.table import Table

from engines.server_process import die_with_parent, free_ports
from engines.sglang_process import NoEnvironment
from gateway.demo_fleets import DemoFleet, EmulatedFleet, SglangFleet
from gateway.demo_guest import CHAT_S, READY_S, Chat, Guest
from gateway.explain_cli import show


@dataclass(slots=True)
class Report:
    """What was seen; `checks` are (what, whether, detail)."""

    second_cached_tokens: int = 0
    leaked_kv_tokens: int = -1
    explain: list[dict[str, Any]] = field(default_factory=list)
    checks: list[tuple[str, bool, str]] = field(default_factory=list)

    def check(self, what: str, passed: bool, detail: str) -> None:
        self.checks.append((what, passed, detail))

    @property
    def whole(self) -> bool:
        return bool(self.checks) and all(passed for _, passed, _ in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "whole": self.whole,
            "second_cached_tokens": self.second_cached_tokens,
            "leaked_kv_tokens": self.leaked_kv_tokens,
            "explain": self.explain,
            "checks": [{"what": what, "passed": passed, "detail": detail} for what, passed, detail in self.checks],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `pdgate demo`."""
    parser.add_argument(
        "--engine",
        choices=["emulated", "sglang"],
        default="emulated",
        help="sglang: real SGLang servers, from an environment that `make sglang` has built",
    )
    parser.add_argument(
        "--sglang-dir", metavar="DIR", type=Path, help="that environment, if it is not where it belongs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to standard error")
    parser.add_argument("--out", metavar="FILE", help="write the JSON object to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 only if everything checked out."""
    console = Console(stderr=args.json, highlight=False)
    report = Report()
    if args.out and not Path(args.out).absolute().parent.is_dir():
        print(f"pdgate demo: --out {args.out}: there is no such folder", file=sys.stderr)
        return 2
    try:
        fleet = SglangFleet(args.sglang_dir) if args.engine == "sglang" else EmulatedFleet()
    except NoEnvironment as error:
        print(f"pdgate demo: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_demo(fleet, report, console))
    except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        report.check("the demo ran to its end", False, f"{type(error).__name__}: {error}")
    text = json.dumps(report.as_json(), indent=2)
    if args.out:
        Path(args.out).write_text(text + "\n")
    if args.json:
        print(text)
    _show_summary(report, console)
    return 0 if report.whole else 1


async def _demo(fleet: DemoFleet, report: Report, console: Console) -> None:
    async with AsyncExitStack() as stack:
        console.print(f"starting {fleet.story} and a gateway …{fleet.patience}")
        for server in fleet.servers:
            stack.push_async_callback(server.stop)
            await server.launch()
        for server in fleet.servers:
            await server.wait_ready(max(server.ready_timeout_s, READY_S))
            console.print(f"{server.role} {server.url} is up")
        url = await stack.enter_async_context(_gateway(fleet))
        guest = Guest(url, await stack.enter_async_context(aiohttp.ClientSession()), fleet.body)
        await guest.wait_ready(pairs=len(fleet.prefills) * len(fleet.decodes))
        await fleet.prepare(guest)
        console.print(f"gateway at {url}, OpenAI API under {url}/v1\n")
        await _shared_prefix(guest, fleet, report, console)
        if len(fleet.decodes) > 1:
            await _kill_a_decode(guest, fleet, report, console)
        await _kill_a_prefill(guest, fleet, report, console)
        await _nothing_leaked(guest, fleet, report, console)


async def _shared_prefix(guest: Guest, fleet: DemoFleet, report: Report, console: Console) -> None:
    """Two chats with one long system prompt: the second is sent where the prefix is."""
    console.rule("two streamed chats with the same long system prompt")
    first = await guest.stream("What is the oldest exhibit?", 24)
    second = await guest.stream("And the newest?", 24)
    for chat in (first, second):
        record = await guest.explain(chat.request_id)
        show(record, console)
        attempt = record["attempts"][-1]
        report.explain += [
            {"request_id": chat.request_id, "chosen": candidate["prefill"] == chat.prefill and index == 0, **candidate}
            for index, candidate in enumerate(attempt["considered"])
        ]
    report.second_cached_tokens = second.cached_tokens
    console.print(f"first answer: {first.text[:70]!r} …")
    console.print(f"second answer: {second.text[:70]!r} … ({second.cached_tokens} prompt tokens were cached)\n")
    await _check_whole("both chats are whole", [first, second], fleet, guest, report)
    same = second.prefill == first.prefill
    where = f"both prefilled on {second.prefill}" if same else f"{first.prefill}, then {second.prefill}"
    report.check("the second went to the prefix's owner", same, where)
    report.check("the engine found the prefix cached", second.cached_tokens > 0, f"{second.cached_tokens} tokens")


async def _kill_a_decode(guest: Guest, fleet: DemoFleet, report: Report, console: Console) -> None:
    """Streams run on both decodes, greedy and sampled ones, and chats that are not streamed; one decode is killed.

    It is one that is surely amid a stream, however late the news of that comes here on a busy machine.
    """
    console.rule("a decode is killed during running streams")
    calls = [f"Tell me about exhibit {number}." for number in range(fleet.calls)]
    rooms = [f"Describe hall {number}." for number in range(fleet.streams)]
    await fleet.learn(rooms, fleet.long_tokens, guest.call)
    await fleet.learn(calls, fleet.call_tokens, guest.call)
    running = asyncio.Semaphore(0)
    async with fleet.catching(guest) as amid_streams:
        streams = [
            asyncio.ensure_future(guest.stream(room, fleet.long_tokens, running.release, sampled=number % 2 == 1))
            for number, room in enumerate(rooms)
        ]
        others = [asyncio.ensure_future(guest.call(question, fleet.call_tokens)) for question in calls]
        for _ in streams:
            await asyncio.wait_for(running.acquire(), CHAT_S)
        victim = await amid_streams()
        live = [sum(not chat.done() for chat in each) for each in (streams, others)]
        await victim.kill(signal.SIGKILL)
    console.print(f"killed decode {victim.url} with {live[0]} streams and {live[1]} other chats running")
    streamed, whole = await asyncio.gather(*streams), await asyncio.gather(*others)
    _tell(console, [*streamed, *whole])
    greedy, sampled = streamed[::2], streamed[1::2]
    await _check_whole("greedy streams are whole though a decode died", greedy, fleet, guest, report)
    await _check_whole("sampled streams are whole though a decode died", sampled, fleet, guest, report)
    await _check_whole("chats that are not streamed too", whole, fleet, guest, report)
    went_on = [chat for chat in streamed if chat.text and await _resumed(guest, chat)]
    report.check("the kill was felt", bool(went_on), f"{len(went_on)} of {len(streamed)} streams went on elsewhere")


async def _resumed(guest: Guest, chat: Chat) -> bool:
    """Whether an attempt went on from tokens that its client had."""
    return any(attempt["emitted_tokens"] for attempt in (await guest.explain(chat.request_id))["attempts"])


async def _kill_a_prefill(guest: Guest, fleet: DemoFleet, report: Report, console: Console) -> None:
    """Streams are running; the prefill that made most of them is killed, which must touch none."""
    console.rule("a prefill is killed during running streams")
    questions = [f"Describe room {number}." for number in range(fleet.streams)]
    await fleet.learn(questions, fleet.long_tokens, guest.call)
    running = asyncio.Semaphore(0)
    streams = [
        asyncio.ensure_future(guest.stream(question, fleet.long_tokens, running.release)) for question in questions
    ]
    for _ in streams:
        await asyncio.wait_for(running.acquire(), CHAT_S)
    live = sum(not chat.done() for chat in streams)
    await fleet.prefills[0].kill(signal.SIGKILL)
    console.print(f"killed prefill {fleet.prefills[0].url} with {live} streams running")
    chats = await asyncio.gather(*streams)
    _tell(console, chats)
    await _check_whole("streams are whole though a prefill died", chats, fleet, guest, report)
    once = all(chat.attempts == 1 for chat in chats)
    report.check("every stream took one attempt", once, f"{sum(chat.attempts for chat in chats)} for {len(chats)}")


async def _nothing_leaked(guest: Guest, fleet: DemoFleet, report: Report, console: Console) -> None:
    """Every token of KV on the survivors is accounted for, by the servers' own word."""
    alive = [server for server in fleet.servers if server.returncode is None]
    loop = asyncio.get_running_loop()
    until_s = loop.time() + fleet.release_s
    while True:
        report.leaked_kv_tokens = sum([await fleet.held_kv_tokens(server, guest.get) for server in alive])
        if report.leaked_kv_tokens == 0 or loop.time() > until_s:
            break
        await asyncio.sleep(0.1)
    report.check(
        "no KV leaked", report.leaked_kv_tokens == 0, f"{report.leaked_kv_tokens} tokens on {len(alive)} servers"
    )
    console.print()


async def _check_whole(what: str, chats: Sequence[Chat], fleet: DemoFleet, guest: Guest, report: Report) -> None:
    """Every chat came without an error, and with the very text that it must have."""
    exact, trouble = 0, ""
    for chat in chats:
        if not chat.error and await fleet.is_true(chat, guest):
            exact += 1
        else:
            trouble = trouble or f"; {chat.error or 'an answer differs from ' + fleet.oracle}"
    report.check(what, exact == len(chats), f"{exact} of {len(chats)} exact{trouble}")


@asynccontextmanager
async def _gateway(fleet: DemoFleet) -> AsyncIterator[str]:
    """A gateway process in front of these servers; its URL."""
    (port,) = free_ports(1)
    flags = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    flags += ["--tokenizer-path", str(fleet.tokenizer_path)]
    for server in fleet.prefills:
        flags += ["--prefill", server.url, str(server.bootstrap_port)]
    for server in fleet.decodes:
        flags += ["--decode", server.url]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "gateway",
        "serve",
        *flags,
        preexec_fn=die_with_parent,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


def _tell(console: Console, chats: Sequence[Chat]) -> None:
    attempts = sum(chat.attempts for chat in chats)
    console.print(f"{len(chats)} chats, {attempts} attempts in all, {sum(bool(chat.error) for chat in chats)} errors\n")


def _show_summary(report: Report, console: Console) -> None:
    table = Table(title="summary", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("check")
    table.add_column("result")
    table.add_column("detail")
    for what, passed, detail in report.checks:
        table.add_row(what, "[green]ok[/]" if passed else "[red]FAILED[/]", detail)
    console.print(table)
