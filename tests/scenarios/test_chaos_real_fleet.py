"""`pdgate chaos` on a fleet that it did not start: emulated servers behind a gateway, taken for a stranger's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines.emulator.tokenizer_files import FOLDER
from engines.types import Role
from failover.chaos import client_checks, record_file
from failover.chaos.checker import Outcome, outcome
from failover.chaos.invariants import judge
from gateway.cli import main
from tests.redis_servers import free_port
from tests.scenarios.cluster import ROOT, SPEED, GatewayProcess
from tests.warm import WarmServer

LINKS = ("gateway0>prefill0", "gateway0>decode0", "gateway0>decode1")
SCENARIO = """
about = "a"
proves = "p"
[load]
duration_s = {load_s}
rate_per_s = 12
mix = {{ stream = 3, whole = 1, completion = 1, generate = 1, sampled = 1, several = 1, leaves = 1 }}
prompt_tokens = [20, 40]
output_tokens = [100, 400]
[[faults]]
fault = "reset"
target = "gateway0>decode1"
at_s = 0.6
[[faults]]
fault = "reset"
target = "gateway0>decode0"
at_s = 2.0
[[faults]]
fault = "silent"
target = "gateway0>decode0"
at_s = 1.2
for_s = 0.5
[[faults]]
fault = "cut"
target = "client>gateway0"
at_s = 2.6
"""


def fleet_text(gateway: str, engines: tuple[str, str, str], ports: list[int]) -> str:
    allowed = [each.removeprefix("http://") for each in (gateway, *engines)]
    proxies = "".join(f'"{link}" = "127.0.0.1:{port}"\n' for link, port in zip(LINKS, ports, strict=True))
    named = f'gateways = ["{gateway}"]\nprefills = ["{engines[0]}"]\ndecodes = {list(engines[1:])}\nallow = {allowed}\n'
    bounds = "reference = true\nmax_rate_per_s = 12\nmax_output_tokens = 400\n"
    return f"{named}{bounds}[proxies]\n{proxies}"


def write_scenario(folder: Path, load_s: float) -> Path:
    file = folder / "links.toml"
    file.write_text(SCENARIO.format(load_s=load_s))
    return file


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody is given meanwhile, but on which a run may listen, now and again."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port := free_port()))
        yield port


def without_reference(file: Path) -> Path:
    """A fleet file like that one, whose load begins at once."""
    plain = file.with_name("plain.toml")
    plain.write_text(file.read_text().replace("reference = true\n", ""))
    return plain


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """Of a prefill and two decodes behind a gateway, which finds them at the proxies of a run only."""
    folder = tmp_path_factory.mktemp("fleet")
    servers = [WarmServer(role, speed=SPEED / 20) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    async with contextlib.AsyncExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in LINKS]
        for server in servers:
            stack.push_async_callback(server.stop)
            await server.launch()
        prefill, *decodes = (f"http://127.0.0.1:{port}" for port in ports)
        named = ["--prefill", prefill, str(servers[0].bootstrap_port)]
        named += [word for url in decodes for word in ("--decode", url)]
        gateway = GatewayProcess(
            (*named, "--probe-interval-secs", "0.3", "--tokenizer-path", str(FOLDER)), folder / "gateway.log"
        )
        stack.push_async_callback(gateway.stop)
        await gateway.launch()
        for server in servers:
            await server.wait_ready()
        first, second, third = (server.url for server in servers)
        (folder / "strangers.toml").write_text(fleet_text(gateway.url, (first, second, third), ports))
        yield folder / "strangers.toml"


@pytest.mark.asyncio(loop_scope="session")
async def test_the_links_of_a_strangers_fleet_are_broken(fleet_file: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "run.json.gz", tmp_path / "run.html"
    words = ["chaos", "run", str(write_scenario(tmp_path, 3)), "--fleet", str(fleet_file)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *words, "--out", str(out), "--html", str(page)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 0, told.decode()
    assert "not seen: nothing_left_on_engines: " in told.decode()
    record = record_file.read(out)
    judged = judge(record)
    assert judged.passed
    unseen = {verdict.invariant for verdict in judged.verdicts if verdict.unseen}
    assert unseen == client_checks.UNSEEN.keys()
    requests = record.history.requests
    assert len(requests) > 20
    assert len(record.references) > len(requests) / 3
    assert {each.kind for each in requests} == {*("stream", "whole", "completion", "sampled", "several", "leaves")}
    assert {outcome(each) for each in requests} >= {Outcome.WHOLE, Outcome.LEFT}, "the cut has parted some"
    # On a busy machine the load is cut off before what comes of a reset begins: what it broke is told by itself.
    broken = [run.note for plan, run in zip(record.planned, record.faults, strict=True) if plan.fault == "reset"]
    assert len(broken) == 2
    assert all(re.fullmatch("[1-9][0-9]* connections", note) for note in broken), broken
    attempts = (each for request in requests for choice in request.choices for each in choice.attempts)
    assert {each.decode for each in attempts} == {"decode0", "decode1"}
    assert any(each.ids_shown and any(event.ids for event in each.events) for each in requests)
    assert record.history.left_over
    assert str(record.scenario.name) in page.read_text()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_stop_key_ends_a_run_in_good_order(fleet_file: Path, tmp_path: Path) -> None:
    """At a terminal: faults are lifted, clients hang up, and what there is is judged."""
    out, (keyboard, terminal) = tmp_path / "run.json.gz", os.openpty()
    words = ["chaos", "run", str(write_scenario(tmp_path, 60)), "--fleet", str(without_reference(fleet_file))]
    process = await asyncio.create_subprocess_exec(
        *("setsid", "--ctty", sys.executable, "-m", "gateway", *words, "--out", str(out)),
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(terminal)
    await _until(keyboard, b"(q stops it)")
    await _until(keyboard, b"of 60 s, ")
    os.write(keyboard, b"q")
    await _until(keyboard, b"stopped: 1 scenario, 1 seed:")
    assert await asyncio.wait_for(process.wait(), 10.0) == 130
    os.close(keyboard)
    record = record_file.read(out)
    assert record.stopped
    assert record.load_s < 20
    assert all(fault.lifted_s is not None for fault in record.faults if fault.applied_s is not None)


async def _until(keyboard: int, words: bytes, within_s: float = 90.0) -> None:
    """Read what a terminal shows until it is these words."""
    loop, shown, over = asyncio.get_running_loop(), bytearray(), asyncio.Event()

    def read() -> None:
        try:
            shown.extend(os.read(keyboard, 65_536))
        except OSError:  # who was at the other end has closed it
            loop.remove_reader(keyboard)
            over.set()
        if words in shown:
            over.set()

    loop.add_reader(keyboard, read)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), within_s)
    finally:
        loop.remove_reader(keyboard)
    assert words in shown, shown.decode(errors="replace")[-3_000:]


# -- what is never done -----------------------------------------------------------------------------------------------


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    """Four servers, a gateway and three engines, that only note whether somebody comes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]


def came(listener: socket.socket) -> bool:
    listener.setblocking(False)
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def written(folder: Path, listeners: list[socket.socket], ports: list[int]) -> tuple[Path, list[str]]:
    """A fleet file that would do, and its addresses."""
    at = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    file = folder / "fleet.toml"
    file.write_text(fleet_text(f"http://{at[0]}", (f"http://{at[1]}", f"http://{at[2]}", f"http://{at[3]}"), ports))
    return file, at


@pytest.mark.parametrize("which", range(4))
def test_what_is_not_allowed_is_never_connected_to(
    listeners: list[socket.socket], tmp_path: Path, capsys: pytest.CaptureFixture[str], which: int
) -> None:
    file, at = written(tmp_path, listeners, [free_port() for _ in LINKS])
    entry = f"'{at[which]}'"
    file.write_text(file.read_text().replace(f", {entry}", "").replace(f"[{entry}, ", "["))
    assert main(["chaos", "run", str(write_scenario(tmp_path, 3)), "--fleet", str(file)]) == 2
    field = ["gateways[0]", "prefills[0]", "decodes[0]", "decodes[1]"][which]
    assert f'{field}: {at[which]} is not allowed: add "{at[which]}" to allow' in capsys.readouterr().err
    assert not any(map(came, listeners))


def test_an_impossible_scenario_is_refused_before_anything_is_sent(
    listeners: list[socket.socket], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = written(tmp_path, listeners, [free_port() for _ in LINKS])
    shipped = ROOT / "examples" / "chaos" / "kill-decode-idle.toml"
    assert main(["chaos", "run", str(shipped), "--fleet", str(file)]) == 2
    assert "kill needs processes that are ours" in capsys.readouterr().err
    assert not any(map(came, listeners))


def test_a_dry_run_connects_nowhere_and_listens_nowhere(
    listeners: list[socket.socket], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in LINKS]
        ports = [each.getsockname()[1] for each in taken]
        file, at = written(tmp_path, listeners, ports)
        assert main(["chaos", "run", str(write_scenario(tmp_path, 3)), "--fleet", str(file), "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert all(each in told for each in at)
        assert all(f"listens on 127.0.0.1:{port}" in told for port in ports), "though others have these ports"
        assert not any(map(came, (*listeners, *taken)))
