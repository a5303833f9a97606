"""What a stranger types: the demo, the quickstart, explain."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.machine import time_limit
from tests.scenarios.cluster import ROOT, Cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(*arguments: str, within_s: float = 60.0) -> tuple[int, str, str]:
    """A command's exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with time_limit(within_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_demo_checks_out() -> None:
    code, out, err = await run("-m", "gateway", "demo", "--json")
    report: dict[str, Any] = json.loads(out)
    assert code == 0, err
    assert report["whole"] is True
    assert report["leaked_kv_tokens"] == 0
    assert report["second_cached_tokens"] > 0
    assert report["explain"]
    for pair in report["explain"]:
        assert pair["terms"].keys() == {
            *("wait_s", "prefill_s", "prefix_gain_s", "transfer_s", "decode_s", "capacity_s"),
        }
        assert pair["terms"]["prefix_gain_s"] <= 0
        assert pair["total_s"] == pytest.approx(sum(pair["terms"].values()))


async def test_the_quickstart_runs_and_its_request_is_explained(two_pairs: Cluster) -> None:
    code, out, err = await run("examples/quickstart.py", "--url", two_pairs.url)
    assert code == 0, err
    assert "prefilled on http://" in out
    request_id = out.split("pdgate explain ")[1].split()[0]

    code, out, err = await run("-m", "gateway", "explain", request_id, "--url", two_pairs.url)
    assert code == 0, err
    assert request_id in out
    assert "total" in out


async def test_explain_says_when_it_cannot(two_pairs: Cluster) -> None:
    code, _, err = await run("-m", "gateway", "explain", "nobody", "--url", two_pairs.url)
    assert code == 1
    assert "--explain-ring" in err
    code, _, err = await run("-m", "gateway", "explain", "--url", "http://127.0.0.1:9")
    assert code == 2
    assert "--url" in err
