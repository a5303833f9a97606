"""CPU cost of the emulator beside a bare aiohttp server: per whole chat, and per streamed token.

`python benchmarks/emulator.py [--rounds N]`. Each figure is server-process CPU (from /proc) over the work of one
round, the median of the rounds; the client is a raw-socket load generator in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Awaitable, Callable

import orjson

from engines.emulator.process import EmulatedServer, free_ports
from engines.types import Role

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SPEED = 200.0
_CONNECTIONS = 32
_REQUESTS = 4000
_STREAMS = 200
_STREAM_TOKENS = 400
_PROMPT = "x" * 1024

_HELLO = """
import asyncio, sys, uvloop
from aiohttp import web
async def whole(request):
    await request.read()
    return web.Response(text="hello, world")
async def stream(request):
    await request.read()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(int(sys.argv[2])):
        await response.write(b"data: " + b"x" * 240 + b"\\n\\n")
        await asyncio.sleep(0.0005)
    return response
app = web.Application()
app.router.add_post("/whole", whole)
app.router.add_post("/stream", stream)
uvloop.install()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""


def cpu_s(pid: int) -> float:
    """CPU time of the process so far, in seconds, at the kernel's tick."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def request_bytes(path: str, body: object) -> bytes:
    data = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def whole_requests(port: int, request: bytes, count: int) -> None:
    """Send `count` requests over keep-alive connections and read each whole answer."""

    async def worker(requests: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(worker(count // _CONNECTIONS) for _ in range(_CONNECTIONS)))


async def streams(port: int, request: bytes, count: int) -> None:
    """Open `count` streams at once and read each to its end."""

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                break
            tail = (tail + data)[-8:]
        writer.close()

    await asyncio.gather(*(worker() for _ in range(count)))


async def measured(pid: int, work: Callable[[], Awaitable[None]], units: int, rounds: int) -> float:
    """Median CPU of the server per unit of work, in microseconds."""
    await work()
    costs = []
    for _ in range(rounds):
        before_s = cpu_s(pid)
        await work()
        costs.append((cpu_s(pid) - before_s) / units * 1e6)
    return statistics.median(costs)


async def run(rounds: int) -> None:
    """Measure both servers and print the ratios."""
    port = free_ports(1)[0]
    hello = await asyncio.create_subprocess_exec(sys.executable, "-c", _HELLO, str(port), str(_STREAM_TOKENS))
    chat = {"messages": [{"role": "user", "content": _PROMPT}], "temperature": 0, "ignore_eos": True}
    flags = ("--max-total-tokens", "2000000", "--profile", "tiny")
    try:
        async with EmulatedServer(Role.PLAIN, speed=_SPEED, arguments=flags) as server:
            whole = request_bytes("/v1/chat/completions", {**chat, "max_tokens": 16})
            stream = request_bytes("/v1/chat/completions", {**chat, "max_tokens": _STREAM_TOKENS, "stream": True})
            tokens = _STREAMS * _STREAM_TOKENS
            bare_whole = request_bytes("/whole", {**chat, "max_tokens": 16})
            bare_stream = request_bytes("/stream", chat)
            cases = (
                ("whole chat, 1 KB prompt, 16 tokens", _REQUESTS, whole_requests, whole, bare_whole, _REQUESTS),
                (f"streamed token, {_STREAMS} streams", tokens, streams, stream, bare_stream, _STREAMS),
            )
            for name, units, load, request, bare_request, count in cases:
                cost = await measured(
                    server.pid, lambda send=load, r=request, n=count: send(server.port, r, n), units, rounds
                )
                bare = await measured(
                    hello.pid, lambda send=load, r=bare_request, n=count: send(port, r, n), units, rounds
                )
                print(f"{name}: {cost:.1f} µs of CPU, bare aiohttp {bare:.1f} µs, ratio {cost / bare:.2f}", flush=True)
    finally:
        hello.terminate()
        await hello.wait()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
