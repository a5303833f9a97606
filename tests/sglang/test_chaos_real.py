"""`pdgate chaos` on a real pair that it did not start: pdgate's servers are at the proxies of the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from failover.chaos import record_file
from failover.chaos.checker import Outcome, outcome
from failover.chaos.history import Attempt, Request
from failover.chaos.invariants import judge
from failover.chaos.record import Record
from tests.redis_servers import free_port
from tests.scenarios.cluster import GatewayProcess
from tests.sglang.fleet import RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCENARIOS = Path(__file__).parents[2] / "examples" / "chaos-real"
RUN_S = 120.0


@pytest_asyncio.fixture(loop_scope="session")
async def fleet_file(fleet: RealFleet, tmp_path: Path) -> AsyncIterator[Path]:
    """Of the pair behind a gateway of its own, which finds its servers at two proxies only."""
    ports = [free_port(), free_port()]
    prefill, decode = fleet.prefill, fleet.decode
    named = ("--prefill", f"http://127.0.0.1:{ports[0]}", str(prefill.bootstrap_port))
    named = (*named, "--decode", f"http://127.0.0.1:{ports[1]}", "--tokenizer-path", str(fleet.launch.model_dir))
    gateway = GatewayProcess((*named, "--probe-interval-secs", "1"), tmp_path / "gateway.log")
    await gateway.launch()
    allowed = [each.url.removeprefix("http://") for each in (gateway, prefill, decode)]
    file = tmp_path / "pair.toml"
    file.write_text(
        f'gateways = ["{gateway.url}"]\nprefills = ["{prefill.url}"]\ndecodes = ["{decode.url}"]\nallow = {allowed}\n'
        f"max_prompt_words = 400\nmax_output_tokens = 1000\n[proxies]\n"
        f'"gateway0>prefill0" = "127.0.0.1:{ports[0]}"\n"gateway0>decode0" = "127.0.0.1:{ports[1]}"\n'
    )
    yield file
    await gateway.stop()


async def ran(scenario: str, fleet_file: Path) -> Record:
    """The record of a run that held."""
    out = fleet_file.parent / f"{scenario}.json.gz"
    words = ("-m", "gateway", "chaos", "run", SCENARIOS / f"{scenario}.toml", "--fleet", fleet_file, "--out", out)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await asyncio.wait_for(process.communicate(), RUN_S)
    assert process.returncode == 0, told.decode()
    record = record_file.read(out)
    assert judge(record).passed
    return record


def of(record: Record, how: Outcome) -> list[Request]:
    return [request for request in record.history.requests if outcome(request) is how]


def attempts(record: Record) -> list[Attempt]:
    return [each for request in record.history.requests for choice in request.choices for each in choice.attempts]


def check_seen(record: Record) -> None:
    """Pdgate has told what it knows, and the rest is said to be unseen."""
    assert {each.prefill for each in attempts(record)} == {"prefill0"}
    assert {each.decode for each in attempts(record)} == {"decode0"}
    assert all(choice.attempts for request in of(record, Outcome.WHOLE) for choice in request.choices)
    assert record.history.left_over
    assert not any(record.history.left_over.values())
    assert record.unseen.keys() >= {"nothing_left_on_engines", "deaths", "true_answers"}
    assert "settled" not in record.unseen


@pytest.mark.smoke
async def test_connections_to_a_decode_break_in_its_streams(fleet_file: Path) -> None:
    record = await ran("reset-mid-stream", fleet_file)
    check_seen(record)
    errors = [event.error.message for each in of(record, Outcome.BROKEN) for event in each.events if event.error]
    assert any("reset" in words for words in errors), "with one decode a stream that breaks has nowhere to go on"
    assert of(record, Outcome.WHOLE)


async def test_a_decode_falls_silent_and_speaks_again(fleet_file: Path) -> None:
    record = await ran("half-open", fleet_file)
    check_seen(record)
    [fault] = record.faults
    assert fault.applied_s is not None
    assert fault.lifted_s is not None
    across = [
        each
        for each in of(record, Outcome.WHOLE)
        if each.asked_s < fault.applied_s and max(event.at_s for event in each.events) > fault.lifted_s
    ]
    assert any(each.stream for each in across), "no stream has outlived the silence"
