"""A chat that is asked for with token ids tells its client what the engine's own chat stream would have told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engines.emulator.tokenizer_files import FOLDER
from tests.exact_chats import CARRIED, CASES, Asker, Case, check_alike
from tests.scenarios.client import MODEL
from tests.scenarios.cluster import Cluster
from tests.scenarios.test_exact_ids import joined

pytestmark = pytest.mark.asyncio(loop_scope="session")

DRAWN = ("top_p", "min_p")
"""Cases that leave a real model one token to choose; the emulated one draws all the same."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def asker() -> AsyncIterator[Asker]:
    async with Cluster(1, 1, gateway=("--tokenizer-path", str(FOLDER)), engine=("--context-length", "4096")) as started:
        await joined(started)
        yield Asker(started.http, started.url, MODEL, biased=False, cache_report=False)


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in DRAWN], ids=lambda case: case.name)
async def test_it_is_the_engines_own(asker: Asker, case: Case) -> None:
    exact, plain = await asker.both(case)
    check_alike(exact, plain)


async def test_a_penalty_of_the_models_own_forbids_a_resume(tmp_path: Path) -> None:
    """As it would if the client had asked for it."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05}))
    async with Cluster(1, 1, gateway=("--tokenizer-path", str(folder))) as cluster:
        await joined(cluster)
        asker = Asker(cluster.http, cluster.url, MODEL, biased=False, cache_report=False)
        body = CASES[0].body(MODEL, 0)
        assert (await asker.planned(body))["on_failure"] == "error"
        assert (await asker.planned({**body, "repetition_penalty": 1.0}))["on_failure"] == "resume"


@pytest.mark.parametrize("name", CARRIED)
async def test_each_field_that_is_carried_over_has_a_case_with_it_and_one_without(name: str) -> None:
    bodies = [case.body(MODEL, 0) | (case.learn("abcdef") if case.learn is not None else {}) for case in CASES]
    present = [name in body for body in bodies]
    assert any(present)
    assert not all(present) or name in ("model", "messages", "stream")
