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

from engines.server_process import ServerProcess, die_with_parent, free_ports
from engines.sglang_process import NoEnvironment
from gateway.demo_fleets import DemoFleet, EmulatedFleet, SglangFleet
from gateway.explain_cli import show

_READY_S = 20.0
_CHAT_S = 60.0
_SYSTEM = "You are the guide of a museum of failures. " + " ".join(
    f"Rule {number}: never lose, repeat or splice a token, however many servers die." for number in range(1, 60)
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One answer as a client saw it."""

    question: str
    text: str
    prefill: str
    decode: str
    attempts: int
    request_id: str
    cached_tokens: int
    error: str = ""


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
            await server.wait_ready()
            console.print(f"{server.role} {server.url} is up")
        url = await stack.enter_async_context(_gateway(fleet))
        guest = Guest(url, await stack.enter_async_context(aiohttp.ClientSession()), fleet)
        await guest.wait_ready(pairs=len(fleet.prefills) * len(fleet.decodes))
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
    await _check_whole("both chats are whole", [first, second], 24, fleet, guest, report)
    same = second.prefill == first.prefill
    where = f"both prefilled on {second.prefill}" if same else f"{first.prefill}, then {second.prefill}"
    report.check("the second went to the prefix's owner", same, where)
    report.check("the engine found the prefix cached", second.cached_tokens > 0, f"{second.cached_tokens} tokens")


async def _kill_a_decode(guest: Guest, fleet: DemoFleet, report: Report, console: Console) -> None:
    """Non-streamed chats are under way on both decodes; one of the two is killed."""
    console.rule("a decode is killed during non-streamed chats")
    questions = [f"Tell me about exhibit {number}." for number in range(fleet.calls)]
    await fleet.learn(questions, fleet.long_tokens, guest.call)
    calls = [asyncio.ensure_future(guest.call(question, fleet.long_tokens)) for question in questions]
    victim = await guest.busiest(fleet.decodes, at_least=2)
    await victim.kill(signal.SIGKILL)
    console.print(f"killed decode {victim.url}")
    chats = await asyncio.gather(*calls)
    retried = sum(chat.attempts > 1 for chat in chats)
    _tell(console, chats)
    await _check_whole("chats are whole though a decode died", chats, fleet.long_tokens, fleet, guest, report)
    report.check("the kill was felt", retried > 0, f"{retried} of {len(chats)} took another attempt")


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
        await asyncio.wait_for(running.acquire(), _CHAT_S)
    await fleet.prefills[0].kill(signal.SIGKILL)
    console.print(f"killed prefill {fleet.prefills[0].url} with {len(streams)} streams running")
    chats = await asyncio.gather(*streams)
    _tell(console, chats)
    await _check_whole("streams are whole though a prefill died", chats, fleet.long_tokens, fleet, guest, report)
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


async def _check_whole(
    what: str, chats: Sequence[Chat], tokens: int, fleet: DemoFleet, guest: Guest, report: Report
) -> None:
    """Every chat came without an error, and with the very text that it must have."""
    exact, trouble = 0, ""
    for chat in chats:
        if not chat.error and chat.text == await fleet.expected(chat.question, tokens, guest.call):
            exact += 1
        else:
            trouble = trouble or f"; {chat.error or 'an answer differs from ' + fleet.oracle}"
    report.check(what, exact == len(chats), f"{exact} of {len(chats)} exact{trouble}")


class Guest:
    """A client of the gateway."""

    def __init__(self, url: str, http: aiohttp.ClientSession, fleet: DemoFleet) -> None:
        self.url = url
        self._http = http
        self._fleet = fleet

    async def get(self, url: str) -> Any:
        async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
            return await answer.json()

    async def wait_ready(self, pairs: int) -> None:
        """Wait until the gateway has found all its pairs; RuntimeError if it does not."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _READY_S
        while loop.time() < until_s:
            try:
                if (await self.get(f"{self.url}/readyz"))["pairs"] >= pairs:
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the gateway did not find {pairs} pairs within {_READY_S:g} s")

    async def explain(self, request_id: str) -> dict[str, Any]:
        record: dict[str, Any] = await self.get(f"{self.url}/pdgate/explain/{request_id}")
        return record

    async def busiest(self, decodes: Sequence[ServerProcess], at_least: int) -> ServerProcess:
        """The decode with most requests running, once it has some."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CHAT_S
        while loop.time() < until_s:
            loads = [(await self.get(f"{server.url}/v1/loads"))["loads"][0] for server in decodes]
            running, busiest = max((load["num_running_reqs"], index) for index, load in enumerate(loads))
            if running >= at_least:
                return decodes[busiest]
            await asyncio.sleep(0.01)
        raise RuntimeError("no decode got any work")

    async def call(self, question: str, tokens: int) -> Chat:
        """One chat, not streamed."""
        body = self._fleet.body(question, tokens)
        async with self._post(body) as answer:
            parsed = await answer.json()
            if answer.status != 200:
                return _chat(question, "", answer.headers, None, parsed["error"]["message"])
            text = parsed["choices"][0]["message"]["content"]
            return _chat(question, text, answer.headers, parsed["usage"])

    async def stream(self, question: str, tokens: int, on_first: Any = None) -> Chat:
        """One streamed chat; `on_first` is called at its first content."""
        body = {**self._fleet.body(question, tokens), "stream": True, "stream_options": {"include_usage": True}}
        text, usage, error, done = "", None, "", False
        async with self._post(body) as answer:
            if answer.status != 200:
                return _chat(question, "", answer.headers, None, (await answer.json())["error"]["message"])
            async for event in _events(answer):
                if event == "[DONE]":
                    done = True
                    continue
                chunk = json.loads(event)
                error = error or chunk.get("error", {}).get("message", "")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    if text and on_first is not None:
                        on_first()
                        on_first = None
        return _chat(question, text, answer.headers, usage, error or ("" if done else "the stream just ended"))

    def _post(self, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=_CHAT_S)
        return self._http.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def _chat(question: str, text: str, headers: Any, usage: Any, error: str = "") -> Chat:
    details = (usage or {}).get("prompt_tokens_details") or {}
    return Chat(
        question,
        text,
        headers.get("x-pdgate-prefill", ""),
        headers.get("x-pdgate-decode", ""),
        int(headers.get("x-pdgate-attempts", 0)),
        headers.get("x-pdgate-request-id", ""),
        details.get("cached_tokens") or 0,
        error,
    )


@asynccontextmanager
async def _gateway(fleet: DemoFleet) -> AsyncIterator[str]:
    """A gateway process in front of these servers; its URL."""
    (port,) = free_ports(1)
    flags = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
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
