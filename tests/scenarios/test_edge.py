"""A gateway whose surroundings are odd: a log that nobody reads, closed descriptors, few of them, a lost terminal."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.emulator.process import free_ports
from tests.machine import time_limit

ROOT = Path(__file__).parents[2]
COMMAND = ("-m", "gateway", "serve", "--pd-disaggregation", "--host", "127.0.0.1", "--log-level", "debug")
STARTED_S = 20.0
SOON_S = 8.0


@asynccontextmanager
async def serving(
    stderr: int = DEVNULL, before: Callable[[], Any] | None = None
) -> AsyncIterator[tuple[Process, Callable[[], Any]]]:
    """A gateway in front of no server, and how to ask for its health; `before` runs in its process first."""
    port, prefill, decode = free_ports(3)
    fleet = ("--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *COMMAND, "--port", str(port), *fleet),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=stderr,
        cwd=ROOT,
        preexec_fn=before,
    )

    async def health() -> int:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/health") as reply:
            return reply.status

    try:
        yield process, health
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def answers(process: Process, health: Callable[[], Any]) -> None:
    """Wait until it serves."""
    async with time_limit(STARTED_S):
        while True:
            assert process.returncode is None, f"it has ended with {process.returncode}"
            try:
                assert await health() == 200
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


async def ends(process: Process, number: signal.Signals) -> int:
    process.send_signal(number)
    async with time_limit(SOON_S):
        return await process.wait()


def fill(pipe: int) -> None:
    """Write until it would block."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 1024)
    os.set_blocking(pipe, True)


async def test_a_log_that_nobody_reads_stops_nothing() -> None:
    reading, writing = os.pipe()
    fill(writing)
    try:
        async with serving(writing) as (process, health):
            await answers(process, health)
            for _ in range(20):
                assert await health() == 200
            assert await ends(process, signal.SIGTERM) == 0
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
async def test_a_closed_standard_descriptor_does_no_harm(closed: tuple[int, ...]) -> None:
    async with serving(before=lambda: [os.close(each) for each in closed]) as (process, health):
        await answers(process, health)
        for each in range(3):
            assert os.readlink(f"/proc/{process.pid}/fd/{each}") == "/dev/null"
        for _ in range(20):
            assert await health() == 200
        assert await ends(process, signal.SIGTERM) == 0


async def test_as_many_descriptors_as_may_be_had() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))) as (process, health):
        await answers(process, health)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_each_signal_to_stop_ends_it_in_order(number: signal.Signals) -> None:
    async with serving(PIPE) as (process, health):
        await answers(process, health)
        assert await ends(process, number) == 0
        assert process.stderr is not None
        assert b"stopping: no new connections" in await process.stderr.read()


async def test_under_nohup_a_lost_terminal_ends_nothing() -> None:
    async with serving(before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (process, health):
        await answers(process, health)
        process.send_signal(signal.SIGHUP)
        await asyncio.sleep(0.3)
        assert await health() == 200
